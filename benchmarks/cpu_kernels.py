"""Products with packed experts on a CPU, against torch's bf16 linears of the same experts.

    python benchmarks/cpu_kernels.py [--threads 1 2] [--experts 128] [--rounds 15] [--form avx512_bf16]

Experts have the shape of Qwen3-30B-A3B (2048 x 768), groups of 128 and zero points; bf16 activations. Tables: one
matrix (2048 -> 768), also in trellis codes; the same from 1 row to thousands against unpacking it at every call; and
the layer with 8 experts a token as one call, gate and activation included, against the loop over experts that
transformers runs; and some experts with the rows of long prompts. Weights are cold but for the second: every call
takes other ones, all of them together many times the last level of cache, in huge pages for both sides. The contenders
take turns of some calls within a round, and what is shown is a ratio of the medians, so that a machine that is busy
with other work says about the same; where one round is long (torch's bf16 without AVX-512) there are fewer. The read
bandwidth is that of the same rounds, with as many threads. torch's own int4 is `_weight_int4pack_mm_for_cpu`.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: idle threads do not spin on the other's core

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TypeVar

import figures
import numpy as np
import torch
from torch import Tensor, nn

from moeq_kernels import measured
from moeq_kernels.cpu.forms import forms
from moeq_kernels.cpu.kernel import CpuKernel
from moeq_kernels.cpu.layer import PackedLayer
from moeq_kernels.cpu.reading import total
from moeq_kernels.description import DOWN, LayerOfExperts, Matrix
from moeq_kernels.packed import PackedWeight, packed_shapes
from moeq_kernels.packing import packed_row_bytes
from moeq_kernels.widths import Encoding

HIDDEN, INTERMEDIATE, GROUP, TOP_K = 2048, 768, 128, 8
SIZES = {"gate_proj": (INTERMEDIATE, HIDDEN), "up_proj": (INTERMEDIATE, HIDDEN), DOWN: (HIDDEN, INTERMEDIATE)}
COLD_BYTES = 192 << 20  # of the matrices of one contender
WIDTHS, ROWS, PREFILL = (2, 3, 4), (1, 4, 16), 512
MIXED = {3: (2, 4)}  # experts of the mixed layer have these widths in turn: as many bytes as the uniform one
BF16_GOALS = {(2, 1): 5.0, (3, 1): 3.0, (4, 1): 5.0} | dict.fromkeys([(2, 16), (3, 16), (4, 16)], 1.5)
OTHER_GOALS = {(2, 1): 4.0, (3, 1): 2.5, (4, 1): 4.0}
BANDWIDTH_GOAL, MIXED_GOAL, PREFILL_GOAL = 0.65, 1.10, 1.10
SWEEP, UNPACKING_GOAL = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096), 1.05  # rows; not slower but for noise
WALKED_WIDTHS, STATE_GOALS = (1, 2, 3, 4), {8: 2.0, 10: 1.5}  # trellis codes, by bits of a state, at one row
CALLS = 8  # of a turn with one matrix
ROW_SECONDS, FEWEST = 2.0, 3  # a row of a table ends after so long, where it has so many rounds
LONG_EXPERTS, LONG_TOP_K, LONG_ROWS = 4, 2, (128, 512, 2048)  # of an expert
Name = TypeVar("Name")


def huge(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An empty tensor in huge pages, as the packed buffers are."""
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(*shape)


def packed(rows: int, inputs: int, bits: int, random: torch.Generator, group: int = GROUP) -> PackedWeight:
    groups = inputs // group
    return PackedWeight(
        codes=torch.randint(0, 256, (rows, packed_row_bytes(inputs, bits)), generator=random, dtype=torch.uint8),
        scales=(torch.rand(rows, groups, generator=random) * 0.01 + 0.001).half(),
        zeros=torch.randint(0, 256, (rows, packed_row_bytes(groups, bits)), generator=random, dtype=torch.uint8),
        bits=bits,
        group_size=group,
        inputs=inputs,
        symmetric=False,
    )


def walked(rows: int, inputs: int, bits: int, state_bits: int, random: torch.Generator) -> PackedWeight:
    """Trellis codes of 2**L states."""
    encoding = Encoding.trellis(state_bits)
    codes, dtype = packed_shapes(rows, inputs, bits, encoding)["codes"]
    scales = (torch.rand(rows, 1, generator=random) * 0.01 + 0.001).half()
    parts = {"codes": torch.randint(0, 256, codes, generator=random, dtype=dtype), "scales": scales}
    return PackedWeight.of(parts, bits, inputs, encoding)


def gate(parts: dict[str, Tensor]) -> Tensor:
    return nn.functional.silu(parts["gate_proj"]) * parts["up_proj"]


@dataclass
class Bandwidth:
    """Reads a large buffer with all threads: bytes a second."""

    words: np.ndarray

    @classmethod
    def of(cls, size: int) -> Bandwidth:
        return cls(np.ones(size // 8, np.int64))

    def __call__(self) -> float:
        sums: list[int] = []
        rate = self.words.nbytes / seconds(lambda: sums.append(total(self.words)), 1)
        if sums != [len(self.words)]:
            raise RuntimeError(f"{sums[0]} of {len(self.words)} words were read")
        return rate


def seconds(work: Callable[[], object], calls: int) -> float:
    """Of one call; with one thread the processor's, which other work on the same cores moves less."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    for _ in range(calls):
        work()
    return (clock() - began) / calls


def rounds(contenders: dict[Name, Callable[[], object]], number: int, calls: int = 1) -> dict[Name, float]:
    """Median seconds of a call of each, of `turns`."""
    return {name: statistics.median(times) for name, times in turns(contenders, number, calls).items()}


def turns(contenders: dict[Name, Callable[[], object]], number: int, calls: int = 1) -> dict[Name, list[float]]:
    """Seconds of a call of each in every round, in which they take turns of some calls; everything has been called
    before. Where a round is long (torch's bf16 without AVX-512), FEWEST of them will do."""
    taken: dict[Name, list[float]] = {name: [] for name in contenders}
    ends = time.monotonic() + ROW_SECONDS
    for done in range(number):
        if done >= FEWEST and time.monotonic() > ends:
            break
        for name, work in contenders.items():
            taken[name].append(seconds(work, calls))
    return taken


def cycle(works: Sequence[Callable[[Tensor], object]], rows: Tensor) -> Callable[[], object]:
    """Every call takes the next of them; all have been called once."""
    for work in works:
        work(rows)
    place = count()
    return lambda: works[next(place) % len(works)](rows)


class Matrices:
    """Copies of one matrix [INTERMEDIATE, HIDDEN] for each contender, more than any cache holds."""

    def __init__(self, kernel: CpuKernel) -> None:
        random = torch.Generator().manual_seed(0)
        matrices: dict[str, Matrix] = {f"{bits} bits": packed(INTERMEDIATE, HIDDEN, bits, random) for bits in WIDTHS}
        self.works: dict[str, list[Callable[[Tensor], object]]] = {}
        for name, matrix in matrices.items():
            copies = -(-COLD_BYTES // matrix.nbytes)
            self.works[name] = [kernel.linear(matrix) for _ in range(copies)]
        dense = huge((-(-COLD_BYTES // (2 * HIDDEN * INTERMEDIATE)), INTERMEDIATE, HIDDEN), torch.bfloat16)
        dense[:] = (torch.randn(INTERMEDIATE, HIDDEN, generator=random) * 0.02).bfloat16()
        self.works["bf16"] = [lambda rows, one=one: nn.functional.linear(rows, one) for one in dense]
        codes = torch.randint(0, 16, (INTERMEDIATE, HIDDEN), generator=random, dtype=torch.int32)
        aten = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
        grids = torch.randn(HIDDEN // GROUP, INTERMEDIATE, 2, generator=random).bfloat16()
        stack = huge((-(-COLD_BYTES // aten.nbytes), *aten.shape), aten.dtype)
        stack[:] = aten
        product = torch.ops.aten._weight_int4pack_mm_for_cpu
        self.works["aten int4"] = [lambda rows, one=one: product(rows, one, GROUP, grids) for one in stack]


def one_matrix(results: figures.Figures, matrices: Matrices, goals: dict[tuple[int, int], float], threads: int) -> None:
    names = [f"{bits} bits" for bits in WIDTHS]
    results.table([f"one matrix, threads {threads}", "bf16, us", "aten int4", *names])
    for rows in ROWS:
        given = torch.randn(rows, HIDDEN).bfloat16()
        taken = rounds(
            {name: cycle(works, given) for name, works in matrices.works.items()}, 2 * results.options.rounds, CALLS
        )
        ratios = {name: taken["bf16"] / taken[name] for name in taken}
        shown = [f"{ratios[name]:.1f}x" for name in ("aten int4", *names)]
        results.row(f"m = {rows}", f"{taken['bf16'] * 1e6:.0f}", *shown)
        for bits in WIDTHS if threads == 1 else ():
            goal = {"at_least": goals[bits, rows]} if (bits, rows) in goals else {}
            results.add(f"one matrix, {bits} bits, m = {rows}, of bf16's speed", ratios[f"{bits} bits"], "x", **goal)
        if threads == 1:
            ratio = taken["aten int4"] / taken["4 bits"]
            results.add(f"one matrix, 4 bits, m = {rows}, of aten int4's speed", ratio, "x", at_least=1.0)


def trellis_codes(
    results: figures.Figures, kernel: CpuKernel, dense: list[Callable[[Tensor], object]], threads: int
) -> None:
    """One matrix of trellis codes."""
    random = torch.Generator().manual_seed(3)
    for state_bits, goal in STATE_GOALS.items():
        works: dict[str, list[Callable[[Tensor], object]]] = {"bf16": dense}
        for bits in WALKED_WIDTHS:
            matrix = walked(INTERMEDIATE, HIDDEN, bits, state_bits, random)
            works[f"{bits} bits"] = [kernel.linear(matrix) for _ in range(-(-COLD_BYTES // matrix.nbytes))]
        kind = f"trellis, 2**{state_bits} states"
        results.table([f"{kind}, threads {threads}", "bf16, us", *(f"{bits} bits" for bits in WALKED_WIDTHS)])
        for rows in ROWS:
            given = torch.randn(rows, HIDDEN).bfloat16()
            taken = rounds({name: cycle(work, given) for name, work in works.items()}, results.options.rounds, CALLS)
            ratios = {bits: taken["bf16"] / taken[f"{bits} bits"] for bits in WALKED_WIDTHS}
            results.row(f"m = {rows}", f"{taken['bf16'] * 1e6:.0f}", *(f"{ratio:.1f}x" for ratio in ratios.values()))
            for bits, ratio in ratios.items() if threads == 1 else ():
                wanted = {"at_least": goal} if rows == 1 else {}
                results.add(f"one matrix, {kind}, {bits} bits, m = {rows}, of bf16's speed", ratio, "x", **wanted)


def sweep(results: figures.Figures, form: str, threads: int, state_bits: int = 0) -> None:
    """From one row to thousands: the kernel, which unpacks from as many rows on as is measured, and one that always
    does; state_bits: of trellis codes, 0 for grids."""
    found = measured.measure(CpuKernel, (form,), state_bits)
    kind = f"trellis, 2**{state_bits} states, " if state_bits else ""
    shown = "never" if found[1] == measured.NEVER else f"from {found[1]} on"
    results.table([f"{kind}unpacks {shown}, threads {threads}", *(f"{bits} bits, us" for bits in WIDTHS),
                   *(f"{bits} bits, of unpacking's" for bits in WIDTHS)])  # fmt: skip
    ways, random = {"kernel": CpuKernel(*found), "unpacking": CpuKernel(form, 1)}, torch.Generator().manual_seed(2)
    one = partial(walked, state_bits=state_bits, random=random) if state_bits else partial(packed, random=random)
    matrices = {bits: one(INTERMEDIATE, HIDDEN, bits) for bits in WIDTHS}
    works = {(bits, name): way.linear(matrices[bits]) for bits in WIDTHS for name, way in ways.items()}
    worst = dict.fromkeys(WIDTHS, 0.0)
    for many in SWEEP:
        given = torch.randn(many, HIDDEN).bfloat16()
        taken = turns({way: cycle([work], given) for way, work in works.items()}, results.options.rounds)
        paired = {bits: zip(taken[bits, "kernel"], taken[bits, "unpacking"], strict=True) for bits in WIDTHS}
        shares = {bits: statistics.median(one / other for one, other in paired[bits]) for bits in WIDTHS}
        worst = {bits: max(worst[bits], shares[bits]) for bits in WIDTHS}
        results.row(f"m = {many}", *(f"{statistics.median(taken[bits, 'kernel']) * 1e6:.0f}" for bits in WIDTHS),
                    *(f"{share:.2f}" for share in shares.values()))  # fmt: skip
    for bits in WIDTHS:
        where = f"one matrix, {kind}threads {threads}, {bits} bits"
        what = f"{where}, slowest of m = {SWEEP[0]} to {SWEEP[-1]}, of unpacking's time"
        results.add(what, worst[bits], "x", at_most=UNPACKING_GOAL)


def packed_layer(
    kernel: CpuKernel, widths: Sequence[int], experts: int, group: int = GROUP, state_bits: int = 0
) -> PackedLayer:
    """A layer whose experts have these widths in turn, of grids or, with bits of a state, of trellis codes."""
    random = torch.Generator().manual_seed(1)
    made = partial(walked, state_bits=state_bits) if state_bits else partial(packed, group=group)
    kinds = {bits: {name: made(*size, bits, random=random) for name, size in SIZES.items()} for bits in set(widths)}
    matrices = [kinds[widths[expert % len(widths)]] for expert in range(experts)]
    return kernel.layer(LayerOfExperts(matrices=matrices, biases=[{}] * experts, gate=gate, activation="silu"))


def dense_layer(experts: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The loop over experts that transformers runs, bf16."""
    stacks = {name: huge((experts, *size), torch.bfloat16) for name, size in SIZES.items()}
    for name, size in SIZES.items():
        stacks[name][:] = (torch.randn(*size) * 0.02).bfloat16()

    def call(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for expert in index.unique().tolist():
            tokens, places = torch.where(index == expert)
            rows = hidden[tokens]
            parts = {name: nn.functional.linear(rows, stacks[name][expert]) for name in SIZES if name != DOWN}
            result = nn.functional.linear(gate(parts), stacks[DOWN][expert])
            out.index_add_(0, tokens, result * weights[tokens, places, None])
        return out

    return call


def with_routed(call: Callable[..., Tensor], tokens: int, experts: int, top_k: int = TOP_K) -> Callable[[], object]:
    """A call with tokens whose experts are others every time, and the same for all contenders."""
    made, random = [], torch.Generator().manual_seed(tokens)
    for _ in range(8):
        index = torch.stack([torch.randperm(experts, generator=random)[:top_k] for _ in range(tokens)])
        made.append((torch.randn(tokens, HIDDEN).bfloat16(), index, torch.rand(tokens, top_k).bfloat16()))
    place = count()
    return lambda: call(*made[next(place) % len(made)])


def whole_layer(results: figures.Figures, kernel: CpuKernel, threads: int) -> None:
    experts = results.options.experts
    layers = {f"{bits} bits": packed_layer(kernel, [bits], experts) for bits in WIDTHS}
    layers |= {f"mixed {bits}": packed_layer(kernel, widths, experts) for bits, widths in MIXED.items()}
    walks = {f"2 bits, 2**{states} states": packed_layer(kernel, [2], experts, 0, states) for states in STATE_GOALS}
    dense, bandwidth = dense_layer(experts), Bandwidth.of(COLD_BYTES)
    results.table([f"layer, threads {threads}", "bf16, us", *layers, *walks, "4 bits, GB/s", "read, GB/s"])
    for tokens in (*ROWS, PREFILL):
        calls: dict[str, Callable[..., Tensor]] = {"bf16": dense, **layers, **walks}
        rates: list[float] = []
        contenders = {name: with_routed(call, tokens, experts) for name, call in calls.items()}
        contenders["read"] = lambda rates=rates: rates.append(bandwidth())
        for work in contenders.values():
            work()
        number = results.options.rounds if tokens < PREFILL else max(2, results.options.rounds // 5)
        taken = rounds(contenders, number)
        rate = layers["4 bits"].nbytes / experts * TOP_K / taken["4 bits"] if tokens == 1 else float("nan")
        shown = [f"{taken['bf16'] / taken[name]:.1f}x" for name in (*layers, *walks)]
        read_rate = statistics.median(rates)
        ours = "" if rate != rate else f"{rate / 1e9:.1f}"
        results.row(f"T = {tokens}", f"{taken['bf16'] * 1e6:.0f}", *shown, ours, f"{read_rate / 1e9:.1f}")
        where = f"layer, threads {threads}, T = {tokens}"
        if tokens == 1:
            goal = {"at_least": BANDWIDTH_GOAL} if threads == 2 else {}
            results.add(f"{where}, 4 bits, of the read bandwidth", rate / read_rate, **goal)
        if tokens == PREFILL:
            worst = max(taken[name] for name in layers) / taken["bf16"]
            results.add(f"{where}, slowest width, of bf16's time", worst, "x", at_most=PREFILL_GOAL)
        for name in walks:
            results.add(f"{where}, {name}, of 4 bits' time", taken[name] / taken["4 bits"], "x")
        for bits in MIXED:
            same = taken[f"mixed {bits}"] / taken[f"{bits} bits"]
            results.add(f"{where}, mixed, of uniform's time at equal bytes", same, "x", at_most=MIXED_GOAL)


def long_prompts(results: figures.Figures, form: str, threads: int) -> None:
    """A layer of a few experts with many rows each: the kernel, which unpacks from as many rows on as is measured of an
    expert, one that always does, and bf16; and the pages that are new to a call of the first."""
    found = measured.measure(CpuKernel, (form,), layers=True)
    unpacked = "never" if found[1] == measured.NEVER else f"from {found[1]} rows on"
    where = f"experts, 4 bits, unpacked {unpacked}, threads {threads}"
    results.table([where, *(f"{one}, ms" for one in ("kernel", "unpacking", "bf16")),
                   "kernel, of unpacking's", "kernel, of bf16's", "new pages"])  # fmt: skip
    layers: dict[str, Callable[..., Tensor]] = {
        "kernel": packed_layer(CpuKernel(*found), [4], LONG_EXPERTS),
        "unpacking": packed_layer(CpuKernel(form, 1), [4], LONG_EXPERTS),
        "bf16": dense_layer(LONG_EXPERTS),
    }
    worst = 0.0
    for rows in LONG_ROWS:
        tokens = rows * LONG_EXPERTS // LONG_TOP_K
        contenders = {name: with_routed(call, tokens, LONG_EXPERTS, LONG_TOP_K) for name, call in layers.items()}
        for work in contenders.values():
            work()
        before = new_pages()
        contenders["kernel"]()
        pages = new_pages() - before
        taken = turns(contenders, results.options.rounds)
        medians = [statistics.median(times) * 1e3 for times in taken.values()]
        shares = [
            statistics.median(one / other for one, other in zip(taken["kernel"], taken[name], strict=True))
            for name in ("unpacking", "bf16")
        ]
        worst = max(worst, shares[0])
        results.row(
            f"{rows} rows an expert", *(f"{one:.1f}" for one in medians), *(f"{one:.2f}" for one in shares), str(pages)
        )
    results.add(
        f"experts, threads {threads}, 4 bits, slowest of {LONG_ROWS[0]} to {LONG_ROWS[-1]} rows, of unpacking's time",
        worst, "x", at_most=UNPACKING_GOAL,
    )  # fmt: skip


def new_pages() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def options() -> argparse.Namespace:
    return figures.arguments(__doc__, threads=([1, 2], [2]), experts=(128, 32), rounds=(15, 5), form=forms()[0])


def main() -> int:
    given = options()
    results = figures.Figures(given)
    kernel = CpuKernel(given.form)
    goals = BF16_GOALS if kernel.form.pairs else OTHER_GOALS
    matrices = Matrices(kernel)
    for threads in given.threads:
        torch.set_num_threads(threads)
        one_matrix(results, matrices, goals, threads)
        trellis_codes(results, kernel, matrices.works["bf16"], threads)
    del matrices
    for threads in given.threads:
        torch.set_num_threads(threads)
        for state_bits in (0, *STATE_GOALS):
            sweep(results, given.form, threads, state_bits)
    for threads in given.threads:
        torch.set_num_threads(threads)
        whole_layer(results, kernel, threads)
        long_prompts(results, given.form, threads)
    return results.report()


if __name__ == "__main__":
    sys.exit(main())
