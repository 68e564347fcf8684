"""Two sign planes, w ~ +-s1 +-s2, against the affine 2-bit grid, both with GPTQ's feedback.

    python benchmarks/planes.py [--model bundled:tiny-mixtral]

Planes have four levels that need not be evenly spaced and two float16 scales a group, 32 bits where the affine grid has
18: it is compared in smaller groups, too. What is printed is the squared error of the experts' outputs on held-out
tokens, relative to the exact ones, in the mean over all experts that see enough of them. Exits 1 when planes win: they
would then be worth a format of their own.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import figures
import torch
from torch import Tensor

from moeq.models.experts import DOWN, ExpertLayer, ExpertMath, expert_math, first_products, stacked_weights
from moeq.models.walk import LayerInputs
from moeq.numerics import gptq, nested
from moeq.numerics.factor import Factor, factorize
from moeq_kernels.grids import decode
from moeq_kernels.widths import group_count

MIN_TOKENS = 64
PLANES, AFFINE = "two planes", "affine, clipped, finer"
LLOYD_STEPS = 8


def fit_planes(weight: Tensor, importance: Tensor) -> tuple[Tensor, Tensor]:
    """The two magnitudes [E, N] of one group [E, g, N] with the least weighted squared error, rounded to float16."""
    size, counts = weight.abs(), importance.unsqueeze(2)
    first = (counts * size).sum(1) / counts.sum(1)
    second = (counts * (size - first.unsqueeze(1)).abs()).sum(1) / counts.sum(1)
    low, high = first - second, first + second
    for _ in range(LLOYD_STEPS):
        upper = (size > ((low + high) / 2).unsqueeze(1)).to(size)
        low, high = (
            torch.where((counts * chosen).sum(1) > 0, (counts * chosen * size).sum(1) / (counts * chosen).sum(1), old)
            for chosen, old in ((1 - upper, low), (upper, high))
        )
    first, second = ((high + low) / 2).half().float(), ((high - low) / 2).half().float()
    return first - second, first + second


def planes(weight: Tensor, factor: Factor, group: int) -> Tensor:
    """GPTQ of [E, N, K] onto four levels +-s1 +-s2 a group, fitted when the loop arrives at it."""
    columns, unit = weight.transpose(1, 2).contiguous(), factor.unit_upper
    residual, values = torch.zeros_like(columns), torch.zeros_like(columns)
    for start in range(0, columns.shape[1], group):
        stop = min(start + group, columns.shape[1])
        feedback = torch.bmm(unit[:, :start, start:stop].mT, residual[:, :start])
        own = unit[:, start:stop, start:stop]
        given = torch.linalg.solve_triangular(own.mT, feedback, upper=False, unitriangular=True)
        low, high = fit_planes(columns[:, start:stop] + given, factor.pivots[:, start:stop])
        target = columns[:, start:stop] + feedback
        for column in range(stop - start):
            wanted = target[:, column]
            level = torch.where(wanted.abs() > (low + high) / 2, high, low)
            values[:, start + column] = torch.where(wanted >= 0, level, -level)
            left = columns[:, start + column] - values[:, start + column]
            residual[:, start + column] = left
            target[:, column + 1 :] += own[:, column, column + 1 :].unsqueeze(2) * left.unsqueeze(1)
    return values.transpose(1, 2)


def affine(weight: Tensor, factor: Factor, group: int, clip: bool) -> Tensor:
    importance = factor.pivots if clip else None
    made = gptq.quantize(weight, factor.unit_upper, bits=[2], group_size=group, importance=importance)
    return decode(made.codes[:, 0], made.scale[:, 0], made.zero[:, 0], group)


def leading(weight: Tensor, factor: Factor, group: int) -> Tensor:
    made = nested.quantize(weight, factor.unit_upper, group_size=group, importance=factor.pivots)
    return decode(made.codes[:, 0], made.scale[:, 0], made.zero[:, 0], group)


METHODS: dict[str, tuple[int, float, Callable[[Tensor, Factor], Tensor]]] = {  # group, bits of a group's grid
    "affine, min-max": (64, 18, lambda weight, factor: affine(weight, factor, 64, False)),
    "affine, clipped": (64, 18, lambda weight, factor: affine(weight, factor, 64, True)),
    "nested in 4 bits, clipped": (64, 20, lambda weight, factor: leading(weight, factor, 64)),
    PLANES: (64, 32, lambda weight, factor: planes(weight, factor, 64)),
    AFFINE: (43, 18, lambda weight, factor: affine(weight, factor, 43, True)),
}


def losses(inputs: LayerInputs, weights: dict[str, Tensor], math: ExpertMath) -> dict[str, list[float]]:
    """Relative errors of the outputs of every expert of a layer that sees enough tokens, by method."""
    heldout = inputs.sequence % 4 == 3
    errors: dict[str, list[float]] = {name: [] for name in METHODS}
    for expert in range(inputs.layer.num_experts):
        routed = (inputs.experts == expert).any(1)
        rows, others = inputs.hidden[routed & ~heldout].float(), inputs.hidden[routed & heldout].float()
        if min(len(rows), len(others)) < MIN_TOKENS:
            continue
        exact = {name: stack[expert].float() for name, stack in weights.items()}
        inner = math.intermediate(rows, exact, {})
        first, second = (factorize((seen.T @ seen / len(seen))[None]) for seen in (rows, inner))
        target = output(math, others, exact)
        for name, (_, _, quantize) in METHODS.items():
            values = {p: quantize(matrix[None], second if p == DOWN else first)[0] for p, matrix in exact.items()}
            error = output(math, others, values) - target
            errors[name].append(float(error.square().mean() / target.square().mean()))
    return errors


def output(math: ExpertMath, rows: Tensor, weights: dict[str, Tensor]) -> Tensor:
    return math.output(math.gate(first_products(rows, weights, {})), weights[DOWN], None)


@torch.no_grad()
def main() -> int:
    options = figures.arguments(__doc__, model="bundled:tiny-mixtral", sequences=(128, 64))
    overrides = [f"corpus.sequences={options.sequences}", "corpus.sequence_length=256"]
    with tempfile.TemporaryDirectory() as out:
        context = figures.context(options.model, Path(out), overrides)
        batches = context.text.grown_calibration.batches(context.recipe.corpus.batch_size)
        errors: dict[str, list[float]] = {name: [] for name in METHODS}
        for inputs in context.model.walk(batches):
            weights = stacked_weights(context.model.module, inputs.layer, slice(None))
            for name, values in losses(inputs, weights, expert_math(context.model.module, inputs.layer)).items():
                errors[name] += values
        layer = context.model.layers[0]
    means = {name: sum(values) / len(values) for name, values in errors.items()}
    sizes = {name: bits_a_weight(layer, group, extra) for name, (group, extra, _) in METHODS.items()}
    figure = figures.Figures(options)
    figure.table(["", "bits a weight", "relative error"])
    for name in METHODS:
        figure.row(name, f"{sizes[name]:.2f}", f"{means[name]:.4f}")
    error, size = means[AFFINE] / means[PLANES], sizes[AFFINE] / sizes[PLANES]
    figure.add("finer affine grid's error, of the planes'", error, at_most=1, digits=3)
    figure.add("its bits a weight, of theirs", size, at_most=1, digits=3)
    return figure.report()


def bits_a_weight(layer: ExpertLayer, group: int, extra: float) -> float:
    """Two bits, and what the grids of an expert's groups take."""
    shapes = [layer.shape(name) for name in layer.projections]
    groups = sum(rows * group_count(inputs, group) for rows, inputs in shapes)
    return 2 + extra * groups / sum(rows * inputs for rows, inputs in shapes)


if __name__ == "__main__":
    sys.exit(main())
