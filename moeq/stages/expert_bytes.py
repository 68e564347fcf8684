"""Stored bytes of experts at the widths that an assignment gives them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction

from moeq.artifacts.assignment import DROPPED, FULL, Assignment, Tier, Width, width_of
from moeq.artifacts.targets import grids_of, target_of
from moeq.exporters.exporter import more_bytes
from moeq.models.experts import ExpertLayer
from moeq.models.loading import source_dtype
from moeq.recipe import AssignSection
from moeq.stages.context import Context
from moeq_kernels.packed import packed_bytes
from moeq_kernels.widths import Encoding


def expert_bytes(layer: ExpertLayer, widths: Width, encoding: Encoding, full_bytes_per_weight: int) -> int:
    """Stored bytes of one expert at a width, or its matrices at theirs."""
    return sum(
        matrix_bytes(layer, name, width_of(widths, name), encoding, full_bytes_per_weight) for name in layer.projections
    )


def matrix_bytes(layer: ExpertLayer, projection: str, bits: int, encoding: Encoding, full_bytes_per_weight: int) -> int:
    """Stored bytes of one matrix of an expert: codes, scales and zero points, or the checkpoint's own weights at 16.

    Its bias stays in the checkpoint's type at every width.
    """
    rows, inputs = layer.shape(projection)
    bias = rows * full_bytes_per_weight if layer.biased else 0
    if bits == FULL:
        return rows * inputs * full_bytes_per_weight + bias
    return packed_bytes(rows, inputs, bits, encoding) + bias


def loaded_bytes(context: Context, section: AssignSection, layer: ExpertLayer, projection: str, bits: int) -> int:
    """What a section's budget counts of one matrix of an expert: what its target stores of it, whose blocks may be
    larger than codes, scales and zero points; else `matrix_bytes`."""
    encoding, full = context.recipe.losses.encoding, source_dtype(context.model.source).itemsize
    own = matrix_bytes(layer, projection, bits, encoding, full)
    if section.target is None or bits in (DROPPED, FULL):
        return own
    target, widen = target_of(section.target), context.recipe.export.widen
    (grid,) = grids_of(layer, projection, [bits], **vars(encoding))
    return own + more_bytes(target, grid, widen=widen)


def store_bytes(layer: ExpertLayer, widths: Sequence[int], encoding: Encoding) -> int:
    """Bytes of the packed replicas of one layer by one method: all experts at some widths, without their biases."""
    return layer.num_experts * sum(expert_bytes(layer, bits, encoding, 0) for bits in widths)


def total_bytes(context: Context, assignment: Assignment) -> int:
    """Bytes of all experts at their placed widths."""
    return sum(size for size, _ in _sizes(context, assignment))


def total_loaded_bytes(context: Context, section: AssignSection, assignment: Assignment) -> int:
    """Bytes of all experts at their placed widths, as a section's budget counts them (`loaded_bytes`)."""
    return sum(
        loaded_bytes(context, section, layer, name, width_of(choice.widths, name))
        for layer, placed in zip(context.model.layers, assignment.layers, strict=True)
        for choice in placed.experts
        for name in layer.projections
    )


def room(context: Context) -> Fraction | None:
    """Bits a weight of the experts that the recipe's budget of bytes leaves, 2 % less for what files say of them; None
    where it is in other units, or the model's own weights are packed."""
    section, source = context.recipe.assign, context.model.source
    weights = expert_weights(context.model.layers)
    if section.expert_bytes is not None and weights:
        return Fraction(8 * section.expert_bytes, weights)
    if section.size is None or source.is_remote or not weights:
        return None
    rest = source.weights_bytes() - weights * source_dtype(source).itemsize
    return Fraction(8 * 98 * (section.size - rest), 100 * weights) if rest >= 0 else None


def expert_weights(layers: Iterable[ExpertLayer]) -> int:
    """Weights of all experts, biases among them."""
    return sum(layer.num_experts * layer.weights_per_expert for layer in layers)


def bits_per_weight(context: Context, assignment: Assignment, tier: Tier | None = None) -> float | None:
    """Bits that are stored for a weight of the experts of a tier, or of all; None where there are none."""
    stored, weights = map(sum, zip((0, 0), *_sizes(context, assignment, tier), strict=True))
    return 8 * stored / weights if weights else None


def _sizes(context: Context, assignment: Assignment, tier: Tier | None = None) -> Iterator[tuple[int, int]]:
    """Stored bytes and weights of every expert of a tier, or of all."""
    full = source_dtype(context.model.source).itemsize
    for layer, placed in zip(context.model.layers, assignment.layers, strict=True):
        for choice in placed.experts:
            if tier in (None, choice.tier):
                yield expert_bytes(layer, choice.widths, assignment.encoding, full), layer.weights_per_expert
