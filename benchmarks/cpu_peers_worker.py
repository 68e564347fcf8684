"""One contender of benchmarks/cpu_peers.py: reads jobs as lines of JSON, answers each with {seconds, bits}.

    python cpu_peers_worker.py exact|int8|auto-round-lib|llama.cpp THREADS

Runs in the contender's own environment. A job is one turn of some calls, after as many that are not timed: {shape:
matrix or layer, bits, kind: of libggml's weights, rows, calls, hidden, intermediate, group, experts, top_k,
cold_bytes}; weights are made when one of these but rows changes. seconds: of a call; bits: of a weight, with its share
of scales and zero points. A peer's results are checked before they are timed: one that is not the product of its
weights ends with a message.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np

NAME, THREADS = sys.argv[1], int(sys.argv[2])
Turn = Callable[[], None]


def routes(job: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Hidden [calls, T, H], experts [calls, T, k] and weights, the same for all contenders."""
    random, tokens, calls = np.random.default_rng(job["rows"]), job["rows"], job["calls"]
    index = [[random.permutation(job["experts"])[: job["top_k"]] for _ in range(tokens)] for _ in range(calls)]
    hidden = random.standard_normal((calls, tokens, job["hidden"]), np.float32)
    return hidden, np.array(index, np.int32), random.random((calls, tokens, job["top_k"]), np.float32)


def rows_of(job: dict[str, Any]) -> Any:
    return np.random.default_rng(job["rows"]).standard_normal((job["rows"], job["hidden"]), np.float32)


def in_turn(works: list[Callable[[], object]], calls: int) -> Turn:
    """So many of them a turn; all are called once before."""
    for work in works:
        work()
    place = count()

    def turn() -> None:
        for _ in range(calls):
            works[next(place) % len(works)]()

    return turn


def ours(job: dict[str, Any]) -> tuple[float, Callable[[dict[str, Any]], Turn]]:
    import cpu_kernels
    import torch

    from moeq_kernels.cpu.forms import forms
    from moeq_kernels.cpu.kernel import CpuKernel

    torch.set_num_threads(THREADS)
    kernel = CpuKernel(forms(int8=NAME == "int8")[0])
    random = torch.Generator().manual_seed(0)
    if job["shape"] == "matrix":
        matrix = cpu_kernels.packed(job["intermediate"], job["hidden"], job["bits"], random, job["group"])
        linears = [kernel.linear(matrix) for _ in range(-(-job["cold_bytes"] // matrix.nbytes))]

        def of_matrix(job: dict[str, Any]) -> Turn:
            rows = torch.from_numpy(rows_of(job)).bfloat16()
            return in_turn([lambda one=one: one(rows) for one in linears], job["calls"])  # type: ignore[misc]

        return 8 * linears[0].nbytes / job["intermediate"] / job["hidden"], of_matrix
    layer = cpu_kernels.packed_layer(kernel, [job["bits"]], job["experts"], job["group"])

    def of_layer(job: dict[str, Any]) -> Turn:
        hidden, index, weights = map(torch.from_numpy, routes(job))
        given = zip(hidden.bfloat16(), index.long(), weights.bfloat16(), strict=True)
        return in_turn([lambda one=one: layer(*one) for one in given], job["calls"])  # type: ignore[misc]

    return 8 * layer.nbytes / (3 * job["experts"] * job["intermediate"] * job["hidden"]), of_layer


class AutoRoundMatrix:
    """Copies of a matrix [N, K] with zero points in auto-round-lib's layout; its kernel chooses the arithmetic."""

    def __init__(self, rows: int, inputs: int, bits: int, group: int, copies: int) -> None:
        import auto_round_kernel
        import torch

        random, half = torch.Generator().manual_seed(0), 1 << bits - 1
        codes, zeros = (
            torch.randint(-half, half, (size, rows), generator=random, dtype=torch.int8)
            for size in (inputs, inputs // group)
        )
        scales = torch.rand(inputs // group, rows, generator=random) * 0.01 + 0.001
        how = "auto", f"int{bits}", "fp32", True
        packed = auto_round_kernel.repack_quantized_weight(codes, scales, zeros, group, *how)
        self.copies, no_bias = [packed.clone() for _ in range(copies)], torch.empty(0)
        self.bits = 8 * packed.nbytes / rows / inputs

        def product(given: Any, packed: Any) -> Any:
            """bf16 rows, which it takes as float32."""
            found = auto_round_kernel.woqgemm(given.float(), packed, no_bias, rows, inputs, group, *how)
            return found.to(given.dtype)

        self.product = product
        given = torch.randn(4, inputs, generator=random).bfloat16()
        weights = (codes.float() - zeros.float().repeat_interleave(group, 0)) * scales.repeat_interleave(group, 0)
        wanted = given.float() @ weights
        error = float((product(given, packed).float() - wanted).norm() / wanted.norm())
        if not error < 0.02:
            raise SystemExit(f"{bits} bits: relative error {error:.3f}")


def auto_round_lib(job: dict[str, Any]) -> tuple[float, Callable[[dict[str, Any]], Turn]]:
    """A layer is the loop over experts that a model runs: the library has no product of several on a CPU."""
    import torch

    torch.set_num_threads(THREADS)
    hidden_size, inner_size, bits, group = (job[name] for name in ("hidden", "intermediate", "bits", "group"))
    if job["shape"] == "matrix":
        copies = -(-job["cold_bytes"] * 8 // (hidden_size * inner_size * bits))
        matrix = AutoRoundMatrix(inner_size, hidden_size, bits, group, copies)

        def of_matrix(job: dict[str, Any]) -> Turn:
            rows = torch.from_numpy(rows_of(job)).bfloat16()
            works = [lambda one=one: matrix.product(rows, one) for one in matrix.copies]  # type: ignore[misc]
            return in_turn(works, job["calls"])

        return matrix.bits, of_matrix
    wide = AutoRoundMatrix(inner_size, hidden_size, bits, group, 2 * job["experts"])
    down = AutoRoundMatrix(hidden_size, inner_size, bits, group, job["experts"])

    def layer(hidden: Any, index: Any, weights: Any) -> Any:
        out = torch.zeros_like(hidden)
        for expert in index.unique().tolist():
            tokens, places = torch.where(index == expert)
            rows = hidden[tokens]
            gate, up = (wide.product(rows, wide.copies[2 * expert + which]) for which in (0, 1))
            result = down.product(torch.nn.functional.silu(gate) * up, down.copies[expert])
            out.index_add_(0, tokens, result * weights[tokens, places, None])
        return out

    def of_layer(job: dict[str, Any]) -> Turn:
        hidden, index, weights = map(torch.from_numpy, routes(job))
        given = zip(hidden.bfloat16(), index.long(), weights.bfloat16(), strict=True)
        return in_turn([lambda one=one: layer(*one) for one in given], job["calls"])  # type: ignore[misc]

    return (2 * wide.bits + down.bits) / 3, of_layer


def llama_cpp(job: dict[str, Any]) -> tuple[float, Callable[[dict[str, Any]], Turn]]:
    from ggml_products import LayerOfGgml, MatrixOfGgml

    random = np.random.default_rng(0)

    def weights(rows: int, inputs: int) -> Any:
        return random.standard_normal((rows, inputs), np.float32) * np.float32(inputs**-0.5)

    hidden, inner = job["hidden"], job["intermediate"]
    if job["shape"] == "matrix":
        matrix = MatrixOfGgml(job["kind"], weights(inner, hidden), job["cold_bytes"], THREADS)
        return matrix.bits, lambda job: matrix.turns(rows_of(job), job["calls"])
    parts = weights(inner, hidden), weights(inner, hidden), weights(hidden, inner)
    layer = LayerOfGgml(job["kind"], *parts, job["experts"], THREADS)
    return layer.bits, lambda job: layer.turns(*routes(job))


MAKERS = {"exact": ours, "int8": ours, "auto-round-lib": auto_round_lib, "llama.cpp": llama_cpp}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what contenders print must not be taken for an answer
    clock = time.thread_time if THREADS == 1 else time.perf_counter
    made: dict[str, tuple[float, Callable[[dict[str, Any]], Turn]]] = {}
    turns: dict[str, Turn] = {}
    for line in sys.stdin:
        job = json.loads(line)
        weights = json.dumps({name: value for name, value in job.items() if name != "rows"})
        if weights not in made:
            made.clear()
            turns.clear()
            made[weights] = MAKERS[NAME](job)
        bits, turn_of = made[weights]
        if line not in turns:
            turns[line] = turn_of(job)
        turns[line]()  # what the others have put out of the caches comes back
        began = clock()
        turns[line]()
        print(json.dumps({"seconds": (clock() - began) / job["calls"], "bits": bits}), file=answers, flush=True)


if __name__ == "__main__":
    main()
