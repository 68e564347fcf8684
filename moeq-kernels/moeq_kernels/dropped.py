"""A layer some of whose experts are dropped: a kernel has the others, and what is routed to these adds nothing.

Letters as in `description`; R experts that are left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from moeq_kernels.description import LayerOfExperts, Matrix, PreparedLayer
from moeq_kernels.packed import PackedWeight
from moeq_kernels.widths import DROPPED


class WithoutDropped:
    """A prepared layer of the experts that are left, called with the numbers of all.

    kept: the number [R] of each of them among all E; prepared: None where none is left.
    """

    def __init__(self, prepared: PreparedLayer | None, experts: int, kept: list[int], device: torch.device) -> None:
        self.prepared = prepared
        self._place = {expert: place for place, expert in enumerate(kept)}
        places = torch.full((experts + 1,), len(kept))  # R, no expert, of those dropped and of E and beyond
        places[kept] = torch.arange(len(kept))
        self._places = places.to(device)

    @property
    def nbytes(self) -> int:
        return 0 if self.prepared is None else self.prepared.nbytes

    def matrix(self, expert: int, projection: str) -> Matrix:
        """One matrix of an expert that is left; KeyError for one that is dropped."""
        if self.prepared is None:
            raise KeyError(expert)
        return self.prepared.matrix(self._place[expert], projection)

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """As `PreparedLayer`; nothing of it goes through the host."""
        if self.prepared is None:
            return torch.zeros_like(hidden)
        none = len(self._places) - 1
        index = index.long()
        return self.prepared(hidden, self._places[index.where(index >= 0, none).clamp(max=none)], weights)


def is_stored(matrix: Matrix) -> bool:
    """Whether it is of an expert that is left."""
    return not isinstance(matrix, PackedWeight) or matrix.bits != DROPPED


def without_dropped(
    layer: LayerOfExperts,
    device: torch.device,
    prepare: Callable[[LayerOfExperts], tuple[PreparedLayer | None, str | None]],
) -> tuple[PreparedLayer | None, str | None]:
    """What `prepare` makes of the experts of a layer that are left, or None and its reason.

    An expert of which no matrix is stored is dropped; a layer that has none such is prepared as it is.
    """
    kept = [expert for expert, matrices in enumerate(layer.matrices) if any(map(is_stored, matrices.values()))]
    if len(kept) == len(layer.matrices):
        return prepare(layer)
    prepared = why = None
    if kept:
        biases = [layer.biases[expert] for expert in kept] if layer.biases else []
        prepared, why = prepare(replace(layer, matrices=[layer.matrices[expert] for expert in kept], biases=biases))
    return (None, why) if why is not None else (WithoutDropped(prepared, len(layer.matrices), kept, device), None)
