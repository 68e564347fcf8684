"""GPTQ of whole experts at 1-4 bits against the time that its floating-point operations take as plain matrix products.

    python benchmarks/gptq.py [--experts 4] [--hidden 2048] [--intermediate 768] [--group 128] [--rounds 5]

One expert is gate and up (sharing a Hessian) and down. The limit is measured in the same interleaved run: a product of
[1024, 1024] matrices repeated until it has done as many operations. Goal (DESIGN.md): within twice that time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import moeq  # noqa: F401  sets OMP_WAIT_POLICY before torch is imported

import torch  # isort: skip

from moeq.numerics import gptq  # isort: skip

BITS = (1, 2, 3, 4)
GOAL = 2.0


def operations(hidden: int, intermediate: int) -> float:
    """Floating-point operations of one expert: two Cholesky factors, and K^2 multiply-adds / 2 a row and width."""
    total = 0.0
    for inputs, rows in ((hidden, 2 * intermediate), (intermediate, hidden)):
        total += inputs**3 / 3 + len(BITS) * rows * inputs**2
    return total


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("experts", 4), ("hidden", 2048), ("intermediate", 768), ("group", 128), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)

    def problem(inputs: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.randn(options.experts, 2 * inputs, inputs, generator=generator)
        hidden = hidden + 0.5 * hidden.roll(1, -1)
        weight = 0.02 * torch.randn(options.experts, rows, inputs, generator=generator)
        return weight, hidden.mT @ hidden / hidden.shape[1]

    problems = [
        problem(options.hidden, 2 * options.intermediate),
        problem(options.intermediate, options.hidden),
    ]
    square = torch.randn(1024, 1024, generator=generator)
    repeats = max(1, round(options.experts * operations(options.hidden, options.intermediate) / (2 * 1024**3)))

    def replicas() -> None:
        for weight, hessian in problems:
            factor = gptq.factorize(hessian)
            gptq.quantize(weight, factor.unit_upper, bits=BITS, group_size=options.group)

    def products() -> None:
        for _ in range(repeats):
            square @ square

    replicas()
    products()
    pairs = [(seconds(replicas), seconds(products)) for _ in range(options.rounds)]
    ours, limit = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    shape = f"{options.experts} experts {options.hidden}x{options.intermediate}"
    print(f"{shape}, bits {BITS}, {torch.get_num_threads()} threads")
    print(f"replicas         {ours / options.experts:8.3f} s an expert")
    print(f"matrix products  {limit / options.experts:8.3f} s an expert")
    print(f"ratio {ratio:.2f} (median of {options.rounds} pairs), goal {GOAL}")
    return 0 if ratio <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
