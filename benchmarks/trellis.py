"""Trellis codes: their error on normal weights, the time of their walks, and LDLQ with them beside GPTQ.

    python benchmarks/trellis.py [--tiles 512] [--states 8 10 12] [--threads 2] [--train]

Errors are of normal weights of standard deviation 1, times 4^k for k bits (1 is the bound of rate and distortion), best
of a few scales; a scalar quantizer has 1.45, 1.88, 2.21 and 2.43 (Lloyd-Max). Times are the processor's of a walk, its
seam included.
Then one expert of the shape of Qwen3-30B-A3B (gate and up share a Hessian) at 2, 3 and 4 bits with 2^10 states, beside
GPTQ in groups of 128 at the same widths. --train makes the tables of moeq_kernels/trellis_tables.py again and tells
their errors instead (minutes).
"""

from __future__ import annotations

import argparse
import base64
import sys
import time
from collections.abc import Callable, Sequence

import figures
import torch
from torch import Tensor

from moeq.numerics import gptq, trellis, trellis_ldlq
from moeq.numerics.factor import factorize
from moeq_kernels.trellis import UNIT, WALKED, states, values
from moeq_kernels.trellis_tables import NORMAL

SCALAR = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}  # Max, IRE Trans. Inf. Theory 6 (1960), table I
SCALES = 0.87, 0.91, 0.94, 0.97, 1.0  # of the values
ORDERS, ROUNDS, TRAINING_TILES = {8: 6, 10: 2}, {8: 60, 10: 36}, 4096
SPEED_GOAL, WIDTHS, SPEED_STATES = 30.0, (2, 3, 4), 10


def normal(tiles: int, seed: int) -> Tensor:
    """Tiles [T, 256] of normal weights."""
    return torch.randn(tiles, trellis.STEPS, generator=torch.Generator().manual_seed(seed))


def error(wanted: Tensor, value: Tensor, bits: int) -> float:
    """Mean squared error of tiles [T, 256] with values [2**L], times 4**k."""
    return float((wanted - trellis.walks(wanted, value, bits)[1]).square().mean()) * 4**bits


def trained(bits: int, state_bits: int, seed: int) -> Tensor:
    """Integer values [2**L] by Lloyd's algorithm, from quantiles of the normal distribution in random order."""
    size = 1 << state_bits
    value = torch.erfinv(2 * (torch.arange(size) + 0.5) / size - 1)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    value = (value / value.square().mean().sqrt())[order] * trellis_ldlq.SHRINK[bits]
    every, rounds = normal(TRAINING_TILES, 9), ROUNDS[state_bits]
    for index in range(rounds):
        tiles = every if index > rounds // 2 else every[: TRAINING_TILES // 4]
        found = states(trellis.walks(tiles, value, bits)[0], bits, state_bits).flatten()
        counts = torch.bincount(found, minlength=size)
        sums = torch.bincount(found, tiles.flatten().double(), minlength=size)
        value = torch.where(counts > 0, sums / counts.clamp(min=1), value.double()).float()
    return (value * NORMAL).round().clamp(-127, 127)


def train() -> int:
    """Print every table and its error."""
    held = normal(2048, 77)
    for state_bits, orders in ORDERS.items():
        for bits in WALKED:
            made = [trained(bits, state_bits, seed) for seed in range(orders)]
            errors = [error(held, one / NORMAL, bits) for one in made]
            best = min(range(orders), key=errors.__getitem__)
            text = base64.b64encode(made[best].to(torch.int8).numpy().tobytes()).decode()
            print(
                f"({bits}, {state_bits}): {errors[best]:.4f} of {[round(one, 4) for one in errors]}\n{text}", flush=True
            )
    return 0


def codes(options: argparse.Namespace, results: figures.Figures) -> None:
    """Error and time of every code."""
    results.table(["states", "bits", "error x 4^k", "scalar", "ns a weight, one thread"])
    wanted = normal(options.tiles, 5)
    for state_bits in options.states:
        for bits in WALKED:
            value = values(bits, state_bits) / (UNIT * NORMAL)
            trellis.walks(wanted[:16], value, bits)
            found = [error(wanted, value * scale, bits) for scale in SCALES]
            taken = figures.processor_seconds(lambda value=value, bits=bits: trellis.walks(wanted, value, bits), 3)
            each = taken / wanted.numel() * 1e9
            scalar = f"{SCALAR[bits] * 4**bits:.3f}"
            results.row(f"2^{state_bits}", str(bits), f"{min(found):.3f}", scalar, f"{each:.0f}")
            if state_bits == options.states[0]:
                results.add(f"error at {bits} bits, of a scalar's", min(found) / (SCALAR[bits] * 4**bits), at_most=0.8)


def expert(device: str = "cpu") -> list[tuple[Tensor, Tensor]]:
    """One expert's gate and up, and down: weights [1, N, K] and Hessians [1, K, K]."""
    generator = torch.Generator().manual_seed(0)
    problems = []
    for rows, inputs in ((1536, 2048), (2048, 768)):
        seen = torch.randn(inputs + 64, inputs, generator=generator)
        weight = torch.randn(1, rows, inputs, generator=generator) * 0.02
        problems.append((weight.to(device), (seen.T @ seen / len(seen))[None].to(device)))
    return problems


def scalar(weight: Tensor, hessian: Tensor, bits: Sequence[int], _states: int) -> object:
    """GPTQ in groups of 128."""
    factor = factorize(hessian)
    return gptq.quantize(weight, factor.unit_upper, bits=bits, group_size=128, symmetric=False)


def walked(weight: Tensor, hessian: Tensor, bits: Sequence[int], states: int) -> object:
    """LDLQ with trellis codes of 2**states states."""
    return trellis_ldlq.quantize(weight, factorize(hessian), hessian, bits, states)


WORK = {"gptq": scalar, "trellis": walked}  # benchmarks/gptq.py times them, too


def seconds(work: Callable[[Tensor, Tensor, Sequence[int], int], object]) -> float:
    """Best of two rounds over one expert."""
    problems, taken = expert(), []
    for _ in range(2):
        start = time.perf_counter()
        for problem in problems:
            work(*problem, WIDTHS, SPEED_STATES)
        taken.append(time.perf_counter() - start)
    return min(taken)


def main() -> int:
    made = figures.parser(__doc__, tiles=(512, 64), states=([8, 10, 12], [8, 10]), threads=2)
    made.add_argument("--train", action="store_true", help="make the tables again")
    options = figures.parsed(made)
    torch.set_num_threads(options.threads)
    if options.train:
        return train()
    results = figures.Figures(options)
    torch.set_num_threads(1)  # threads that wait for each other would be counted
    codes(options, results)
    torch.set_num_threads(options.threads)
    grids = seconds(scalar)
    results.add("GPTQ of an expert at 2, 3, 4 bits", grids, "s")
    ratio = seconds(walked) / grids
    results.add(f"trellis of 2^{SPEED_STATES} states, of GPTQ's time", ratio, at_most=SPEED_GOAL, digits=1)
    return results.report()


if __name__ == "__main__":
    sys.exit(main())
