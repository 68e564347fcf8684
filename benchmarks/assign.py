"""How long assignment takes: PREFIXSPLIT for one sequence, as a runtime would call it, and the proven optimum.

    python benchmarks/assign.py [--rounds 21] [--growth]

Random tables whose losses fall with the bits as GPTQ's do; bytes of packed experts of the sizes named, group 128.
Seconds are of the processor (one thread: on a machine that others use, the clock shows more); medians, of the slowest
average. --growth: also layers of up to 1,024 experts. Goals: prefix-split under 20 ms (of 94 layers of 128 experts),
optimal under 5 s (of 94 x 128 and 61 x 256).
"""

from __future__ import annotations

import sys
from fractions import Fraction
from functools import partial

import figures
import numpy as np

from moeq.assigners.online import decide
from moeq.numerics.knapsack import solve
from moeq_kernels.packed import packed_bytes
from moeq_kernels.widths import Encoding

SPLIT_GOAL, OPTIMAL_GOAL = 0.020, 5.0
AVERAGES = ("3/2", "2", "5/2", "3", "7/2")
BITS = (1, 2, 3, 4, 8)
FALL = np.array([0.55, 0.17, 0.045, 0.011, 4e-5])  # typical relative losses at these bits
SIZES = {"94 x 128": (94, 128, 4096, 1536), "61 x 256": (61, 256, 7168, 2048)}
GROWTH = {f"48 x {experts}": (48, experts, 2048, 512) for experts in (128, 256, 512, 1024)}


def main() -> int:
    options = figures.arguments(__doc__, rounds=(21, 10), growth=False)
    results = figures.Figures(options)
    results.table(["layers x experts", "prefix-split", "optimal, proven"])
    taken = {}
    for name, size in (SIZES | (GROWTH if options.growth else {})).items():
        taken[name] = split, optimal = measure(*size, options.rounds)
        results.row(name, f"{1000 * split:.1f} ms", f"{optimal:.1f} s")
    results.add("prefix-split, 94 x 128", 1000 * taken["94 x 128"][0], "ms", at_most=1000 * SPLIT_GOAL, digits=1)
    results.add("optimal, proven", max(taken[name][1] for name in SIZES), "s", at_most=OPTIMAL_GOAL, digits=1)
    return results.report()


def measure(layers: int, experts: int, hidden: int, intermediate: int, rounds: int) -> tuple[float, float]:
    """Median seconds of the slowest average, of prefix-split and of optimal."""
    rng = np.random.default_rng(0)
    scale = rng.lognormal(0, 1.5, (layers, 1)) * rng.lognormal(0, 2, (layers, experts))
    losses = scale[..., None] * FALL * np.exp(rng.normal(0, 0.2, (layers, experts, len(BITS))))
    counts = rng.poisson(40 * scale / scale.mean(1, keepdims=True)).astype(float)
    shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    cost = np.array(
        [
            sum(packed_bytes(*shape, bits, Encoding(group_size=128, symmetric=False)) for shape in shapes)
            for bits in BITS
        ]
    )
    values, costs = losses.reshape(-1, len(BITS)), np.tile(cost, (layers * experts, 1))
    split, optimal = [], []
    for average in AVERAGES:
        limit = int(layers * experts * cost[3] * float(Fraction(average)) / 4)
        deciding = partial(decide, counts, counts, losses[..., :4], average)
        split.append(figures.processor_seconds(deciding, rounds))
        optimal.append(figures.processor_seconds(partial(proven, values, costs, limit), max(1, rounds // 10)))
    return max(split), max(optimal)


def proven(values: np.ndarray, costs: np.ndarray, limit: int) -> None:
    if not solve(values, costs, limit).proven:
        raise SystemExit("the optimum was not proven")


if __name__ == "__main__":
    sys.exit(main())
