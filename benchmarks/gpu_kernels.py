"""Packed experts on a GPU: paper 002's Table 1, decode shapes of two models, 2 against 4 bits, mixed against uniform.

    python benchmarks/gpu_kernels.py [--batches 1 4 16 64] [--models mixtral qwen3] [--tune] [--interpret] [--ahead 12]

Everything runs in CUDA graphs whose calls go to other copies of the weights in turn, so that none finds them in the L2
cache; times are the median of replays. Table 1: throughput over the faster of torch's grouped product of bfloat16 and
a loop of matrix products of float16, 32 experts of 1024 x 4096, 40 tokens; int4 and int8 symmetric, a scale a row.
Decode: whole expert layers, random routing, group 128 with zero points; the share of the rate at which this GPU copies
memory (bytes read and written, measured in the same run, the faster of a copy and a kernel) counts each active expert
once. Mixed: half of the experts with 2 bits and half with 4 beside all with 3: bytes a second over those of the uniform
layer.

Trellis codes: the same layers at 2, 3 and 4 bits with 2^8 states, at 2 bits with 2^10 (values from a table) and 2^12
(computed), and of 2 and 4 bits mixed: beside their share of the copy's rate, how many times faster they are than this
rate reads the same experts in 16 bits, which no product of 16 bits can beat.

Prefill: many rows an expert, fused, unpacked first, and 16 bits throughout.

--ahead: so many processes compile the layers' programs first, beside each other; nothing of it is timed. With --tune
they compile what is tried, too, in half of --tune-seconds at most.

--tune first writes moeq_kernels/gpu/tuned/DEVICE.json: what was fastest for these shapes, in --tune-seconds, and the
rows an expert from which on unpacking pays. Figures are written to --json after every part. --interpret
runs every part once with tiny shapes in Triton's interpreter, without goals: that it works, not how fast.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import figures
from gpu_layers import MODELS, TINY, Bench, Model, copies_of  # first: before torch and Triton
from gpu_tuning import Launch, rows_to_unpack, share, tune

import torch  # isort: skip
from torch import Tensor  # isort: skip

from moeq_kernels.gpu.kernel import Stack, TritonLayer, sort_by_expert  # isort: skip
from moeq_kernels.gpu.settings import Settings, write  # isort: skip
from moeq_kernels.gpu.stored import Stored  # isort: skip
from moeq_kernels.gpu.unpacked import grouped_product  # isort: skip
from moeq_kernels.widths import Encoding

ACTIVE = (1, 4, 8, 16, 24, 32)
TABLE1 = {4: 1.56, 8: 1.35}  # geometric means of paper 002
SHARE, CLEARLY, MIXED = 0.60, 1.25, 0.90
TRELLIS = 1.5  # times as fast as 16 bits are read, with 2^8 states and one token
WALKS = (([2], 8), ([3], 8), ([4], 8), ([2], 10), ([2], 12), ([2, 4], 8))  # widths in turn, bits of a state
GRIDS = ([2], [3], [4], [2, 4])
PEERS = ("gemlite", "humming")


def layer_seconds(bench: Bench, layers: Sequence[TritonLayer], model: Model, tokens: int) -> tuple[float, float]:
    """Time of a whole layer and bytes of the experts that it reads, each once."""
    calls, sizes = [], []
    for layer in layers:
        index = bench.routing(model, tokens)
        hidden = torch.randn(tokens, model.hidden, device=bench.device, dtype=torch.bfloat16)
        weights = torch.rand(tokens, model.each, device=bench.device)
        calls.append(lambda layer=layer, given=(hidden, index, weights): layer(*given))
        experts = index.unique().tolist()
        sizes.append(sum(place.nbytes for one in experts for place in layer.stack.stored.places[one]))
    return bench.seconds(calls), statistics.mean(sizes)


def decode(bench: Bench, results: figures.Figures, models: Sequence[Model], batches: Sequence[int]) -> None:
    """Whole layers at 2, 3 and 4 bits and mixed, by batch."""
    rate = bench.copy_rate()
    goals = not bench.interpreted
    results.add("memory copied, read and written", rate / 1e12, "TB/s")
    results.table(["layer", *(f"batch {tokens}, us (share)" for tokens in batches)])
    for model in models:
        speed: dict[tuple[str, int], tuple[float, float]] = {}
        for bits in GRIDS:
            name = " and ".join(map(str, bits))
            layers = copies_of(bench, bench.layer(model, bits), model)
            for tokens in batches:
                speed[name, tokens] = layer_seconds(bench, layers, model, tokens)
            taken = [speed[name, tokens] for tokens in batches]
            shares = [size / seconds / rate for seconds, size in taken]
            cells = [f"{1e6 * one[0]:.1f} ({100 * share:.0f} %)" for one, share in zip(taken, shares, strict=True)]
            results.row(f"{model.name}, {name} bits", *cells)
            if name in "234":
                goal = {"at_least": SHARE} if goals else {}
                results.add(f"{model.name}, {name} bits: share of the copy's rate, batch 1", shares[0], **goal)
        least = min(batches)
        goal = {"at_least": CLEARLY} if goals else {}
        faster = speed["4", least][0] / speed["2", least][0]
        results.add(f"{model.name}: time at 4 bits over 2 bits, batch {least}", faster, **goal)
        rates = {key: size / seconds for key, (seconds, size) in speed.items()}
        worst = min(rates["2 and 4", tokens] / rates["3", tokens] for tokens in batches)
        goal = {"at_least": MIXED} if goals else {}
        results.add(f"{model.name}: mixed over uniform, bytes a second, worst batch", worst, **goal)


def trellis(bench: Bench, results: figures.Figures, models: Sequence[Model], batches: Sequence[int]) -> None:
    """Whole layers of trellis codes, by batch."""
    rate = bench.copy_rate()
    results.table(["trellis codes", *(f"batch {tokens}, us (share)" for tokens in batches)])
    for model in models:
        for bits, state_bits in WALKS:
            layers = copies_of(bench, bench.layer(model, bits, state_bits), model)
            taken = [layer_seconds(bench, layers, model, tokens) for tokens in batches]
            name = f"{model.name}, {' and '.join(map(str, bits))} bits, 2^{state_bits} states"
            results.row(name, *(f"{1e6 * one:.1f} ({100 * size / one / rate:.0f} %)" for one, size in taken))
            seconds, size = taken[0]
            goal = {} if bench.interpreted or state_bits > 8 else {"at_least": TRELLIS}
            times = 16 * len(bits) / sum(bits) * size / rate / seconds
            results.add(f"{name}: times as fast as 16 bits are read, batch {batches[0]}", times, **goal)


def groups(pairs: int, active: int, device: torch.device) -> Tensor:
    """Experts of the rows, as even as can be."""
    return torch.arange(pairs, device=device) % active


def full_precision(
    bench: Bench, x: Tensor, weights: Tensor, narrow: tuple[Tensor, Tensor], index: Tensor, shift: int
) -> list[Callable[[], object]]:
    """Ways to multiply sorted rows x [P, K] with 16-bit matrices [E, K, N] of their experts, `shift` further on;
    narrow: both in bfloat16, the matrices as the transposed of [E, N, K]."""
    experts = len(weights)
    counts = torch.bincount(index, minlength=experts).roll(shift).tolist()
    ends = torch.tensor(counts, device=x.device).cumsum(0).to(torch.int32)

    def loop() -> None:
        start = 0
        for expert, count in enumerate(counts):
            if count:
                x[start : start + count] @ weights[expert]
                start += count

    ways: list[Callable[[], object]] = [loop]
    product = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if product is not None and not bench.interpreted:  # of bfloat16 alone
        ways.append(lambda: product(narrow[0], narrow[1], offs=ends))
    return ways


def table1(bench: Bench, results: figures.Figures, experts: int, inputs: int, rows: int, pairs: int) -> None:
    """Throughput of int4 and int8 over 16 bits by the number of active experts."""
    dtype = torch.float32 if bench.interpreted else torch.float16
    active = [one for one in ACTIVE if one <= experts]
    results.table(["paper 002, Table 1", *(f"{count} active" for count in active)])
    weights = torch.randn(experts, inputs, rows, device=bench.device).to(dtype)
    x = torch.randn(pairs, inputs, device=bench.device).to(dtype)
    narrow = x.bfloat16(), weights.bfloat16().transpose(1, 2).contiguous().transpose(1, 2)
    usual_seconds = []
    for count in active:
        index = groups(pairs, count, bench.device)
        shifts = range(0, experts, count) if experts // count > 1 else range(2)
        fastest = math.inf
        for way in range(len(full_precision(bench, x, weights, narrow, index, 0))):
            try:
                calls = [full_precision(bench, x, weights, narrow, index, shift)[way] for shift in shifts]
                fastest = min(fastest, bench.seconds(calls))
            except RuntimeError as error:
                results.left_out(f"16 bits, way {way}", str(error).splitlines()[0])
        usual_seconds.append(fastest)
    results.row("16 bits, us", *(f"{1e6 * one:.1f}" for one in usual_seconds))
    for bits, stated in TABLE1.items():
        matrices = [[bench.matrix(rows, inputs, bits, Encoding(group_size=-1, symmetric=True))] for _ in range(experts)]
        first = Stack(Stored(matrices, [[None]] * experts))
        taken = []
        for count in active:
            stacks = [
                first,
                *(first.elsewhere() for _ in range(bench.copies(first.stored.nbytes * count / experts) - 1)),
            ]
            index = groups(pairs, count, bench.device)
            how = ("sorted", index, *sort_by_expert(index, experts))
            chosen = first.settings((0,), pairs)
            chosen = replace(chosen, sort=True)
            calls = [
                lambda one=one, how=how, chosen=chosen: one.product(x, (0,), pairs, 1, how, chosen, dtype=dtype)
                for one in stacks
            ]
            taken.append(bench.seconds(calls))
        ratios = [before / after for before, after in zip(usual_seconds, taken, strict=True)]
        results.row(f"int{bits}, over 16 bits", *(f"{one:.2f}" for one in ratios))
        goal = {} if bench.interpreted else {"at_least": stated}
        results.add(f"Table 1, int{bits} over 16 bits, geometric mean", statistics.geometric_mean(ratios), **goal)


def launches(bench: Bench, models: Sequence[Model], batches: Sequence[int]) -> list[Launch]:
    """Both launches of a layer by batch, model and width, and the time of the layer with settings for that one."""

    @lru_cache(1)
    def made(model: Model, bits: tuple[int, ...], state_bits: int) -> list[TritonLayer]:
        return copies_of(bench, bench.layer(model, bits, state_bits), model)

    def seconds(kind: tuple[Model, tuple[int, ...], int], tokens: int, last: bool, one: Settings) -> float:
        return with_settings(bench, made(*kind), kind[0], tokens, (None, one) if last else (one, None))

    kinds = [(tuple(bits), state_bits) for bits, state_bits in (*((bits, 0) for bits in GRIDS), *WALKS[:3])]
    stacks = {
        (model, *kind): bench.layer(replace(model, experts=len(kind[0])), *kind).stack
        for model in models
        for kind in kinds
    }
    found: list[Launch] = []
    for tokens, (kind, stack), last in itertools.product(batches, stacks.items(), (False, True)):
        shape = stack.shape((2,) if last else (0, 1), tokens * kind[0].each)
        shape = replace(shape, experts=kind[0].experts)
        found.append((shape, partial(seconds, kind, tokens, last)))
    return found


def with_settings(
    bench: Bench, layers: Sequence[TritonLayer], model: Model, tokens: int,
    settings: tuple[Settings | None, Settings | None],
) -> float:  # fmt: skip
    """Time of a layer whose launches have these settings."""
    for layer in layers:
        layer.settings = settings
    try:
        return layer_seconds(bench, layers, model, tokens)[0]
    finally:
        for layer in layers:
            layer.settings = (None, None)


def prefill(bench: Bench, results: figures.Figures, models: Sequence[Model], tune: bool) -> None:
    """Many rows an expert: fused, unpacked, and 16 bits throughout; from which number of rows on unpacking pays."""
    model = replace(models[0], experts=min(8, models[0].experts))
    layer, walked = bench.layer(model, [4]), bench.layer(model, [4], 8)
    dense = [
        layer.stack.unpacked(slot, torch.arange(model.experts, dtype=torch.int32, device=bench.device), torch.bfloat16)
        for slot in range(3)
    ]
    numbers = (2,) if bench.interpreted else (1024, 512, 256, 128, 64)
    results.table(["prefill, ms", *(f"{rows} rows an expert" for rows in numbers)])

    def timed(rows: int, unpack_rows: int, layer: TritonLayer = layer) -> float:
        layer.unpack_rows = unpack_rows
        hidden = torch.randn(rows * model.experts, model.hidden, device=bench.device, dtype=torch.bfloat16)
        index = groups(rows * model.experts, model.experts, bench.device).view(-1, 1)
        return bench.eager_seconds(lambda: layer(hidden, index, torch.ones_like(index, dtype=torch.float32)))

    def in_16_bits(rows: int) -> float:
        x = torch.randn(rows * model.experts, model.hidden, device=bench.device, dtype=torch.bfloat16)
        counts = [rows] * model.experts

        def whole() -> Tensor:
            gate, up = (grouped_product(x, one, counts) for one in dense[:2])
            return grouped_product(torch.nn.functional.silu(gate) * up, dense[2], counts)

        return bench.eager_seconds(whole)

    never = 1 << 30
    for name, time_of in (
        ("4 bits, fused", lambda rows: timed(rows, never)), ("4 bits, unpacked", lambda rows: timed(rows, 1)),
        ("4 bits, 2^8 states, fused", lambda rows: timed(rows, never, walked)),
        ("4 bits, 2^8 states, unpacked", lambda rows: timed(rows, 1, walked)), ("16 bits", in_16_bits),
    ):  # fmt: skip
        results.row(name, *(f"{1e3 * time_of(rows):.3f}" for rows in numbers))
    if tune and not bench.interpreted:
        found = rows_to_unpack(lambda rows: timed(rows, never), lambda rows: timed(rows, 1))
        write(torch.cuda.get_device_name(bench.device), {}, found)
        results.add("rows an expert from which on unpacking is faster", found or math.nan, digits=0)


def compile_share(bench: Bench, models: Sequence[Model], batches: Sequence[int], number: int, of: int) -> None:
    """Call one of so many parts of the layers of decode once."""
    layers = itertools.product(models, [*((bits, 0) for bits in GRIDS), *WALKS])
    for model, (bits, state_bits) in itertools.islice(layers, number, None, of):
        layer = bench.layer(model, bits, state_bits)
        for tokens in batches:
            hidden = torch.zeros(tokens, model.hidden, device=bench.device, dtype=torch.bfloat16)
            layer(hidden, bench.routing(model, tokens), torch.ones(tokens, model.each, device=bench.device))
    torch.cuda.synchronize()


def compile_ahead(what: str, processes: int) -> None:
    """Processes that do a share each; what one cannot do is found again where it is timed."""
    given = [sys.executable, *sys.argv, "--share"]
    running = [subprocess.Popen([*given, f"{what}/{one}/{processes}"]) for one in range(processes)]
    for one in running:
        one.wait()


def peers(results: figures.Figures) -> None:
    """Other libraries' kernels: named where they are not installed."""
    for name in PEERS:
        why = "it is not installed" if importlib.util.find_spec(name) is None else "this benchmark cannot call it yet"
        results.left_out(name, why)


def main() -> int:
    options = figures.arguments(
        __doc__,
        batches=[1, 4, 16, 64],
        models=["mixtral", "qwen3"],
        tune=False,
        tune_seconds=240.0,
        interpret=False,
        ahead=0,
        share="",
    )
    if not options.interpret and not torch.cuda.is_available():
        return figures.skipped(options, "there is no CUDA device")
    device = torch.device("cpu" if options.interpret else f"cuda:{torch.cuda.current_device()}")
    bench = Bench(device=device, generator=torch.Generator(device).manual_seed(0))
    models = [TINY] if options.interpret else [MODELS[name] for name in options.models]
    batches = [1, 2] if options.interpret else options.batches
    if options.share:
        what, number, of = options.share.split("/")
        if what == "tuned":
            share(launches(bench, models, batches), int(number), int(of), options.tune_seconds / 2)
        else:
            compile_share(bench, models, batches, int(number), int(of))
        return 0
    ahead = 0 if options.interpret else options.ahead  # nothing is compiled there
    if options.tune:
        began = time.monotonic()
        compile_ahead("tuned", ahead)
        name = None if options.interpret else torch.cuda.get_device_name(device)
        tune(name, launches(bench, models, batches), options.tune_seconds - (time.monotonic() - began))
    compile_ahead("measured", ahead)
    results = figures.Figures(options)
    if options.interpret:
        results.left_out("every goal", "shapes are tiny and Triton's interpreter says nothing of speed")
        table1(bench, results, experts=4, inputs=128, rows=128, pairs=8)
    else:
        table1(bench, results, experts=32, inputs=1024, rows=4096, pairs=40)
    results.keep()
    decode(bench, results, models, batches)
    results.keep()
    trellis(bench, results, models, batches)
    results.keep()
    prefill(bench, results, models, options.tune)
    peers(results)
    return results.report()


if __name__ == "__main__":
    sys.exit(main())
