"""Time to quantize all experts of a model of Qwen3-30B-A3B's shape at four widths, from a few layers.

    python benchmarks/gptq_model.py [--device cuda] [--layers 4] [--of-layers 48] [--experts 128] [--batch 0]

Weights and Hessians are synthetic: 128 experts a layer, 2048 x 768, gate and up sharing a Hessian, group 128, 1 to 4
bits; Hessians are factored, every matrix is quantized, codes stay on the device. Goal: under 3 minutes on one H200.
--batch: experts at once; 0 takes what half of the GPU's free memory holds, or 4 on a CPU.
"""

from __future__ import annotations

import statistics
import sys
import time

import moeq  # noqa: F401  sets OMP_WAIT_POLICY before torch is imported

import figures  # isort: skip
import torch  # isort: skip

from moeq.numerics import gptq  # isort: skip
from moeq.numerics.factor import factorize  # isort: skip

BITS = (1, 2, 3, 4)
HIDDEN, INTERMEDIATE = 2048, 768
GOAL = 180.0


def experts_at_once(device: torch.device) -> int:
    """Experts whose Hessians, factors, residuals and codes take half of the free memory."""
    if device.type == "cpu":
        return 4
    lanes = len(BITS) * 2 * INTERMEDIATE
    each = 4 * (3 * HIDDEN**2 + 2 * HIDDEN * lanes) + 2 * HIDDEN * lanes
    return max(1, torch.cuda.mem_get_info(device)[0] // 2 // each)


def problem(experts: int, inputs: int, rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [E, rows, inputs] and one Hessian that is every expert's, [E, inputs, inputs]."""
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(2 * inputs, inputs, generator=generator, device=device)
    hidden = hidden + 0.5 * hidden.roll(1, -1)
    weight = 0.02 * torch.randn(experts, rows, inputs, generator=generator, device=device)
    return weight, (hidden.T @ hidden / len(hidden)).expand(experts, -1, -1).contiguous()


def layer_seconds(problems: list[tuple[torch.Tensor, torch.Tensor]], experts: int, batch: int) -> float:
    """One layer, its experts batch by batch (the same problem for each batch)."""
    cuda = problems[0][0].is_cuda
    if cuda:
        torch.cuda.synchronize()
    started = time.perf_counter()
    for first in range(0, experts, batch):
        count = min(batch, experts - first)
        for weight, hessian in problems:
            factor = factorize(hessian[:count])
            gptq.quantize(weight[:count], factor.unit_upper, bits=BITS, group_size=128)
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> int:
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    options = figures.arguments(__doc__, device=usual, layers=(4, 1), of_layers=48, experts=128, batch=0)
    if options.device == "cpu" and options.quick:
        return figures.skipped(options, "there is no GPU, for which its goal is")
    device = torch.device(options.device)
    batch = min(options.experts, options.batch or experts_at_once(device))
    problems = [problem(batch, HIDDEN, 2 * INTERMEDIATE, device), problem(batch, INTERMEDIATE, HIDDEN, device)]
    layer_seconds(problems, batch, batch)  # compiles and warms
    taken = [layer_seconds(problems, options.experts, batch) for _ in range(options.layers)]
    whole = statistics.median(taken) * options.of_layers
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"{name}: {options.experts} experts a layer, {batch} at once, bits {BITS}")
    results = figures.Figures(options)
    results.add("a layer", statistics.median(taken), "s")
    goal = {"at_most": GOAL} if device.type == "cuda" else {}
    results.add(f"{options.of_layers} layers", whole, "s", digits=0, **goal)
    if device.type == "cuda":
        results.add("peak of the GPU's memory", torch.cuda.max_memory_allocated(device) / 1e9, "GB", digits=1)
    return results.report()


if __name__ == "__main__":
    sys.exit(main())
