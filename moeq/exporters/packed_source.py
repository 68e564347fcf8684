"""What every exporter and converter reads: a checkpoint whose experts are packed, matrix by matrix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from moeq.models.experts import ExpertLayer
from moeq.models.source import ModelSource
from moeq_kernels.packed import PackedWeight

Matrices = dict[str, PackedWeight | Tensor]  # {projection: a matrix, packed or (16 bits) in the checkpoint's type}


class PackedSource(Protocol):
    """A packed checkpoint: its files, its MoE layers, and every expert as it is placed.

    config: the model's configuration without `quantization_config`. Readers never hold more than one expert.
    """

    source: ModelSource
    config: dict[str, Any]
    layers: list[ExpertLayer]

    def expert(self, layer: ExpertLayer, expert: int) -> tuple[Matrices, dict[str, Tensor]]:
        """Matrices and biases of one expert; ArtifactError naming layer and expert when they cannot be read."""

    def other_names(self) -> list[str]:
        """Names of the modules that `others` gives; none of them is read."""

    def others(self) -> Iterator[tuple[str, PackedWeight]]:
        """Packed modules outside of the experts, by the names of their modules."""

    def rest(self) -> list[str]:
        """Keys of `source.tensors` that are neither of experts nor of packed modules."""


@runtime_checkable
class Checkable(Protocol):
    """A checkpoint whose headers can be compared with what its configuration says."""

    def check(self) -> None:
        """ArtifactError at the first that differs."""
