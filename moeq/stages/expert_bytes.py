"""Stored bytes of experts at the widths that an assignment gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from moeq.artifacts.assignment import FULL, Assignment, Width, width_of
from moeq.models.experts import ExpertLayer
from moeq.models.loading import source_dtype
from moeq.numerics.packed import packed_bytes
from moeq.stages.context import Context


class PackedGrid(Protocol):
    """What beside the width decides the size of packed weights: the recipe's section `losses`, or an assignment."""

    @property
    def group_size(self) -> int: ...
    @property
    def symmetric(self) -> bool: ...
    @property
    def nested(self) -> bool: ...


def expert_bytes(layer: ExpertLayer, widths: Width, grid: PackedGrid, full_bytes_per_weight: int) -> int:
    """Stored bytes of one expert at a width, or its matrices at theirs."""
    return sum(
        matrix_bytes(layer, name, width_of(widths, name), grid, full_bytes_per_weight) for name in layer.projections
    )


def matrix_bytes(layer: ExpertLayer, projection: str, bits: int, grid: PackedGrid, full_bytes_per_weight: int) -> int:
    """Stored bytes of one matrix of an expert: codes, scales and zero points, or the checkpoint's own weights at 16.

    Its bias stays in the checkpoint's type at every width.
    """
    rows, inputs = layer.shape(projection)
    bias = rows * full_bytes_per_weight if layer.biased else 0
    if bits == FULL:
        return rows * inputs * full_bytes_per_weight + bias
    return packed_bytes(rows, inputs, bits, grid.group_size, grid.symmetric, grid.nested) + bias


def store_bytes(layer: ExpertLayer, widths: Sequence[int], grid: PackedGrid) -> int:
    """Bytes of the packed replicas of one layer by one method: all experts at some widths, without their biases."""
    return layer.num_experts * sum(expert_bytes(layer, bits, grid, 0) for bits in widths)


def total_bytes(context: Context, assignment: Assignment) -> int:
    """Bytes of all experts at their placed widths."""
    full = source_dtype(context.model.source).itemsize
    return sum(
        expert_bytes(layer, width, assignment, full)
        for layer, widths in zip(context.model.layers, assignment.expert_widths(), strict=True)
        for width in widths
    )
