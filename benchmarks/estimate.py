"""One full sweep of paper 000's Figures 5 and 6: two models, two widths, six grid points, all policies.

    python benchmarks/estimate.py [--rounds 5]

Goal (DESIGN.md): under 1 s.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

from moeq.estimator import Grid, estimate, load_geometry, load_hardware, uniform_placement

GOAL_SECONDS = 1.0
CASES = (("mixtral-8x7b", 4), ("mixtral-8x22b", 2))


def sweep() -> None:
    hardware = load_hardware("paper-ctxmoe")
    for name, hot in CASES:
        geometry = load_geometry(name)
        for bits in (3, 2):
            placement = uniform_placement(geometry, bits=bits, hot_experts=hot)
            estimate(geometry, hardware, placement, grid=Grid(batches=(1, 4, 16)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    taken = []
    for _ in range(parser.parse_args().rounds):
        started = time.perf_counter()
        sweep()
        taken.append(time.perf_counter() - started)
    median = statistics.median(taken)
    print(f"2 models x 2 widths x 6 grid points x 3 batches, all policies: {median:.3f} s")
    print(f"median {median:.3f} s, goal {GOAL_SECONDS:.0f} s")
    return 0 if median <= GOAL_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
