"""Refining one layer: packed replicas in, packed replicas out, and how the layer's experts move its output.

Letters: T tokens, t some of them, H hidden size, E experts, N output rows, K inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moeq.models.experts import ExpertMath
from moeq.models.walk import LayerInputs
from moeq.numerics import storing
from moeq.numerics.gptq import Quantized
from moeq.quantizers.layer_training import (
    Layer,
    LayerTokens,
    WidthCodes,
    Widths,
    quantized_widths,
    train_layer,
)
from moeq.quantizers.learned_codes import LearnedCodes, LearnedScales
from moeq.quantizers.memory import working_memory
from moeq.quantizers.signround_expert import Training
from moeq.quantizers.stored import stored_as
from moeq.quantizers.trained_grid import join
from moeq.quantizers.tune import units_of
from moeq.recipe import RefineSection
from moeq_kernels.grids import SCALE_DTYPE
from moeq_kernels.packed import PackedWeight

BATCH_ROWS = 256  # of an expert in a step, on average
MISFIT = 0.1  # of the energy of what has moved, that a link may leave unexplained
MEASURED_TOKENS = 2048  # by which a link is measured
Packed = Mapping[str, PackedWeight]


@dataclass(frozen=True, kw_only=True)
class LayerJob:
    """One layer: what its experts are given, and what they are.

    behind: [T, H] what its output should be more than exact experts make it (None: nothing); weights: {projection: [E,
    N, K]} and biases {projection: [E, N]}, exact; bits: of every expert, or of each of its matrices, 16 for
    one that stays as it is, 0 for one that is dropped.
    """

    inputs: LayerInputs
    behind: Tensor | None
    weights: dict[str, Tensor]
    biases: dict[str, Tensor]
    math: ExpertMath
    bits: tuple[Widths, ...]
    group_size: int
    symmetric: bool

    def layer(self) -> Layer:
        """What training leaves as it is."""
        tokens = LayerTokens(
            hidden=self.inputs.hidden.float(),
            experts=self.inputs.experts,
            weights=self.inputs.weights,
            correction=self.behind,
            scales_inputs=self.inputs.layer.kind.scales_inputs,
        )
        biases = {name: stack.float() for name, stack in self.biases.items()}
        return Layer(tokens=tokens, weights=self.weights, biases=biases, math=self.math)


@torch.no_grad()
def refine_layer(
    job: LayerJob, start: Mapping[int, Packed], section: RefineSection, *, scales_alone: bool = False, seed: int = 0
) -> dict[int, dict[str, PackedWeight]]:
    """The experts of `start`, {expert: {projection: matrix}}, as the layer's training leaves them.

    start: all experts below 16 bits; scales_alone: codes and zero points stay, as those of trellis codes always do;
    seed: of what is drawn. Matrices come back on the CPU, in the order of the experts.
    """
    fixed = scales_alone or any(packed.encoding.codes != "grid" for own in start.values() for packed in own.values())
    device = job.inputs.hidden.device
    memory = working_memory(section.working_memory, device)
    trained = train_layer(
        job.layer(),
        bits=job.bits,
        group_size=job.group_size,
        symmetric=job.symmetric,
        training=Training(iterations=section.iterations, batch_rows=BATCH_ROWS, seed=seed, working_memory=memory),
        start=[_codes(start, job.bits, width, device, fixed) for width in quantized_widths(job.bits)],
        learned=LearnedScales if fixed else LearnedCodes,
    )
    if fixed:
        return _with_scales(start, trained)
    packed: dict[int, dict[str, PackedWeight]] = {}
    for part in trained:
        stacks = {}
        for name, codes in part.matrices.items():
            places = [f"{job.inputs.layer.name}, expert {expert}, {name}" for expert in part.experts]
            with stored_as("refine", places.__getitem__):
                stacks[name] = storing.packed_of(codes, codes.bits[0], job.symmetric)
        for place, expert in enumerate(part.experts):
            packed[expert] = {
                name: stack.map(lambda part: part[place].cpu().clone())  # noqa: B023
                for name, stack in stacks.items()
            }
    return dict(sorted(packed.items()))


def _with_scales(start: Mapping[int, Packed], trained: list[WidthCodes]) -> dict[int, dict[str, PackedWeight]]:
    """The experts of `start` with the scales that were trained."""
    packed = {}
    for part in trained:
        for place, expert in enumerate(part.experts):
            packed[expert] = {
                name: replace(matrix, scales=part.matrices[name].scale[place, 0].to(SCALE_DTYPE).cpu())
                for name, matrix in start[expert].items()
            }
    return dict(sorted(packed.items()))


def _fixed(weight: PackedWeight) -> Quantized:
    """A stack [E, N, K] as what its codes stand for at scale 1, and its scales, as if its zero points were 0."""
    scale = weight.scales.float().unsqueeze(1)
    units = units_of(weight).float().unsqueeze(1)
    return Quantized(
        codes=units, scale=scale, zero=torch.zeros_like(scale), bits=(weight.bits,), group_size=weight.group_size
    )


def _codes(
    start: Mapping[int, Packed], bits: tuple[Widths, ...], width: Widths, device: torch.device, fixed: bool
) -> WidthCodes:
    """The experts of one width, or of the same widths, unpacked and stacked."""
    experts = tuple(expert for expert, own in enumerate(bits) if own == width)
    names = start[experts[0]]

    def stacked(name: str) -> Quantized:
        alone = (start[expert][name].map(lambda part: part.unsqueeze(0).to(device)) for expert in experts)
        return join([_fixed(weight) if fixed else storing.unpacked(weight) for weight in alone])

    return WidthCodes(bits=width, experts=experts, matrices={name: stacked(name) for name in names})


class Change:
    """What new matrices change of the sum of a layer's experts' outputs at the layer's first tokens, [t, H]."""

    def __init__(self, job: LayerJob) -> None:
        rows = slice(0, MEASURED_TOKENS)
        inputs = replace(
            job.inputs,
            hidden=job.inputs.hidden[rows],
            experts=job.inputs.experts[rows],
            weights=job.inputs.weights[rows],
        )
        self._layer = replace(job, inputs=inputs, behind=None).layer()
        self.total = torch.zeros_like(self._layer.tokens.hidden)

    @torch.no_grad()
    def add(self, expert: int, new: Mapping[str, Tensor]) -> None:
        """Count one expert's new matrices {projection: [N, K]}; the job still has the exact ones."""
        old = {name: stack[expert] for name, stack in self._layer.weights.items()}
        for matrices, factor in ((new, 1), (old, -1)):
            there = {name: matrix.to(self.total) for name, matrix in matrices.items()}
            self._layer.add_output(expert, there, self.total, factor)


def link_of(moved: Tensor, changed: Tensor) -> float | None:
    """By how much a decoder layer's output moves when the sum of its experts' outputs changes by 1.

    moved, changed: [t, H]; the shorter decides. None when the two are not proportional (a norm lies between them, or
    the computing type's rounding hides the change).
    """
    count = min(len(moved), len(changed))
    moved, changed = moved[:count].double(), changed[:count].double()
    energy = float(changed.square().sum())
    if moved.shape != changed.shape or energy == 0:
        return None
    link = float((moved * changed).sum()) / energy
    unexplained = float((moved - link * changed).square().sum())
    return link if link > 0 and unexplained <= MISFIT * float(moved.square().sum()) else None
