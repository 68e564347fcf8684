"""PREFIXSPLIT over 94 layers of 128 experts: the decision alone, as a runtime would make it for one sequence.

    python benchmarks/assign.py [--rounds 21]

Goal (DESIGN.md): under 20 ms.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from fractions import Fraction

import numpy as np

from moeq.assigners.prefix_split import increments, split

GOAL_SECONDS = 0.020
LAYERS, EXPERTS = 94, 128


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    rounds = parser.parse_args().rounds
    losses = np.sort(np.random.default_rng(0).random((LAYERS, EXPERTS, 4)), -1)[:, :, ::-1]
    counts = np.full(LAYERS, EXPERTS)
    worst = 0.0
    for average in ("3/2", "2", "5/2", "3", "7/2"):
        taken = []
        for _ in range(rounds):
            started = time.perf_counter()
            split(losses, counts, np.array(increments(counts.tolist(), Fraction(average))))
            taken.append(time.perf_counter() - started)
        median = statistics.median(taken)
        worst = max(worst, median)
        print(f"average {average:>4} bits  {1000 * median:7.2f} ms")
    print(f"worst median {1000 * worst:.2f} ms, goal {1000 * GOAL_SECONDS:.0f} ms")
    return 0 if worst <= GOAL_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
