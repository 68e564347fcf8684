"""How long assignment takes: PREFIXSPLIT for one sequence, as a runtime would call it, and the proven optimum.

    python benchmarks/assign.py [--rounds 21] [--growth]

Random tables whose losses fall with the bits as GPTQ's do; bytes of packed experts of the sizes named, group 128.
Seconds are of the processor (one thread: on a machine that others use, the clock shows more); medians, of the slowest
average. --growth: also layers of up to 1,024 experts. Goals: prefix-split under 20 ms (of 94 layers of 128 experts),
optimal under 5 s (of 94 x 128 and 61 x 256).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from moeq.assigners.online import decide
from moeq.numerics.knapsack import solve
from moeq.numerics.packed import packed_bytes

SPLIT_GOAL, OPTIMAL_GOAL = 0.020, 5.0
AVERAGES = ("3/2", "2", "5/2", "3", "7/2")
BITS = (1, 2, 3, 4, 8)
FALL = np.array([0.55, 0.17, 0.045, 0.011, 4e-5])  # typical relative losses at these bits
SIZES = {"94 x 128": (94, 128, 4096, 1536), "61 x 256": (61, 256, 7168, 2048)}
GROWTH = {f"48 x {experts}": (48, experts, 2048, 512) for experts in (128, 256, 512, 1024)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--growth", action="store_true")
    options = parser.parse_args()
    print(f"{'layers x experts':17} {'prefix-split':>13} {'optimal':>9}  averages of {', '.join(AVERAGES)} bits")
    goals = {name: measure(name, *size, options.rounds) for name, size in SIZES.items()}
    if options.growth:
        for name, size in GROWTH.items():
            measure(name, *size, options.rounds)
    split = goals["94 x 128"][0]
    best = max(taken[1] for taken in goals.values())
    print(
        f"prefix-split {1000 * split:.1f} ms, goal {1000 * SPLIT_GOAL:.0f} ms; "
        f"optimal {best:.2f} s, goal {OPTIMAL_GOAL:.0f} s"
    )
    return 0 if split <= SPLIT_GOAL and best <= OPTIMAL_GOAL else 1


def measure(name: str, layers: int, experts: int, hidden: int, intermediate: int, rounds: int) -> tuple[float, float]:
    """Median seconds of the slowest average, of prefix-split and of optimal; prints them."""
    rng = np.random.default_rng(0)
    scale = rng.lognormal(0, 1.5, (layers, 1)) * rng.lognormal(0, 2, (layers, experts))
    losses = scale[..., None] * FALL * np.exp(rng.normal(0, 0.2, (layers, experts, len(BITS))))
    counts = rng.poisson(40 * scale / scale.mean(1, keepdims=True)).astype(float)
    shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    cost = np.array([sum(packed_bytes(*shape, bits, 128, False) for shape in shapes) for bits in BITS])
    values, costs = losses.reshape(-1, len(BITS)), np.tile(cost, (layers * experts, 1))
    split, optimal = [], []
    for average in AVERAGES:
        whole, _, part = average.partition("/")
        limit = int(layers * experts * cost[3] * int(whole) / int(part or 1) / 4)
        split.append(median(lambda average=average: decide(counts, counts, losses[..., :4], average), rounds))
        optimal.append(median(lambda limit=limit: proven(values, costs, limit), max(1, rounds // 10)))
    print(f"{name:17} {1000 * max(split):10.2f} ms {max(optimal):7.2f} s", flush=True)
    return max(split), max(optimal)


def proven(values: np.ndarray, costs: np.ndarray, limit: int) -> None:
    if not solve(values, costs, limit).proven:
        raise SystemExit("the optimum was not proven")


def median(run: Callable[[], object], rounds: int) -> float:
    taken = []
    for _ in range(rounds):
        started = time.process_time()
        run()
        taken.append(time.process_time() - started)
    return statistics.median(taken)


if __name__ == "__main__":
    sys.exit(main())
