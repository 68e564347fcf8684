"""Placements of assignments and of packed checkpoints, as the estimator counts them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from moeq.artifacts.assignment import Assignment, Width, matrix_widths
from moeq.estimator.geometry import ModelGeometry, equal_bits
from moeq.estimator.placement import Placement


def weights_of_a_scale(group_size: int, geometry: ModelGeometry) -> int:
    """The group size as the estimator counts it: -1 (one group a row) is a row of the hidden size."""
    return geometry.hidden_size if group_size == -1 else group_size


def assignment_placement(assignment: Assignment, group_size: int) -> Placement:
    """Where an assignment's experts live and at how many bits."""
    widths = assignment.expert_widths()
    return placement_of(assignment.name, widths, assignment.hot(), group_size, symmetric=assignment.symmetric)


def placement_of(
    name: str, widths: Sequence[Sequence[Width]], hot: Sequence[ArrayLike], group_size: int, *, symmetric: bool
) -> Placement:
    """Widths and places [layers, experts]; experts whose matrices differ count with the width of as many bytes."""
    bits = [[equal_bits(matrix_widths(width), group_size, not symmetric) for width in layer] for layer in widths]
    return Placement(name=name, bits=bits, hot=np.stack([np.asarray(layer) for layer in hot]))
