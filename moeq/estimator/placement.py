"""Where the experts of a model live and at how many bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moeq.artifacts.assignment import DROPPED, Assignment, Width, matrix_widths
from moeq.errors import EstimateError
from moeq.estimator.geometry import ModelGeometry, codebook_of, equal_bits


@dataclass(frozen=True, kw_only=True)
class Placement:
    """bits[L', E] (1-16, where 16 is FP16; 0: dropped) and hot[L', E] (True on the GPU) of the L' MoE layers of an
    assignment.

    An expert whose matrices differ in width has a fraction, see `equal_bits`.
    Raises EstimateError for shapes that do not match or bits out of range.
    """

    name: str
    bits: NDArray[np.float64]
    hot: NDArray[np.bool_]

    def __init__(self, *, name: str, bits: ArrayLike, hot: ArrayLike) -> None:
        widths, places = np.array(bits, dtype=np.float64), np.array(hot, dtype=np.bool_)
        where = f"placement {name}"
        if widths.ndim != 2 or widths.shape != places.shape or widths.size == 0:
            text = f"bits have shape {widths.shape}, hot has {places.shape}"
            raise EstimateError(text, where=where, do="give [layers, experts]")
        wrong = np.argwhere(~((widths == DROPPED) | ((widths >= 1) & (widths <= 16))))
        if len(wrong):
            layer, expert = wrong[0]
            text = f"{widths[layer, expert]:g} bits at layer {layer}, expert {expert}"
            raise EstimateError(text, where=where, do="give 1 to 16 bits, or 0")
        vars(self).update(name=name, bits=widths, hot=places)

    def repeated(self, num_layers: int) -> Placement:
        """The same placement for each of a model's layers, repeated evenly as `layer_of_assignment` does."""
        rows = layer_of_assignment(num_layers, len(self.bits))
        return Placement(name=self.name, bits=self.bits[rows], hot=self.hot[rows])


def uniform_placement(
    geometry: ModelGeometry, *, bits: float, hot_experts: int, name: str | None = None, hot_bits: float = 16
) -> Placement:
    """One layer for all: the first `hot_experts` on the GPU at `hot_bits`, the others on the NDP at `bits`.

    Raises EstimateError where a layer has fewer than `hot_experts`.
    """
    if not 0 <= hot_experts <= geometry.num_experts:
        text = f"{hot_experts} hot experts of {geometry.num_experts}"
        raise EstimateError(text, where=geometry.name, do="give 0 to all of them")
    hot = np.arange(geometry.num_experts)[None, :] < hot_experts
    return Placement(name=name or f"uniform, {bits:g} code bits", bits=np.where(hot, hot_bits, bits), hot=hot)


def layer_of_assignment(num_layers: int, assigned_layers: int) -> NDArray[np.int64]:
    """The assignment's layer for each of a model's: its own, or evenly repeated ones, floor(i * L' / L).

    Raises EstimateError for an assignment with more layers than the model.
    """
    if assigned_layers > num_layers:
        text = f"the placement has {assigned_layers} layers, the model {num_layers}"
        raise EstimateError(text, do="give a placement of this model")
    return np.arange(num_layers) * assigned_layers // num_layers


def weights_of_a_scale(group_size: int, geometry: ModelGeometry) -> int:
    """The group size as the estimator counts it: -1 (one group a row) is a row of what an expert is given."""
    return geometry.expert_inputs if group_size == -1 else group_size


def assignment_placement(assignment: Assignment, group_size: int) -> Placement:
    """Where an assignment's experts live and at how many bits."""
    return placement_of(
        assignment.name,
        assignment.expert_widths(),
        assignment.hot(),
        group_size,
        symmetric=assignment.symmetric,
        codebook=codebook_of(assignment.encoding),
    )


def placement_of(
    name: str,
    widths: Sequence[Sequence[Width]],
    hot: Sequence[ArrayLike],
    group_size: int,
    *,
    symmetric: bool,
    codebook: str,
) -> Placement:
    """Widths and places [layers, experts]; experts whose matrices differ count with the width of as many bytes."""
    bits = [
        [equal_bits(matrix_widths(width), group_size, not symmetric, codebook) for width in layer] for layer in widths
    ]
    return Placement(name=name, bits=bits, hot=np.stack([np.asarray(layer) for layer in hot]))
