"""The replicas of an exported checkpoint, for a runtime that places by context, and what they lose."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from moeq.artifacts.assignment import MIXED
from moeq.exporters.native_reader import NativeReader
from moeq.models.experts import ExpertLayer
from moeq_kernels.packed import PackedWeight


class CheckpointReplicas:
    """A ReplicaSource over a checkpoint; files stay open, nothing is kept of an expert."""

    def __init__(self, reader: NativeReader) -> None:
        self.reader = reader

    def widths(self) -> frozenset[int]:
        """The widths that every expert has a replica of."""
        return self.reader.manifest.widths_there

    def expert(
        self, layer: ExpertLayer, expert: int, key: int
    ) -> tuple[dict[str, PackedWeight | Tensor], dict[str, Tensor]]:
        """Matrices and biases of one replica; MIXED: the placed one."""
        return self.reader.replica(layer, expert, key)

    def placed(self) -> list[np.ndarray]:
        """The placed replica of every expert, [E] a layer: MIXED."""
        return [np.full(layer.num_experts, MIXED) for layer in self.reader.layers]

    def losses(self, widths: Sequence[int]) -> np.ndarray | None:
        """[L, E, W] as the manifest has them, None when it lacks one."""
        losses = [
            [
                [None if width not in replicas else replicas[width].loss for width in widths]
                for replicas in (self.reader.replicas(layer, expert) for expert in range(layer.num_experts))
            ]
            for layer in self.reader.layers
        ]
        if any(loss is None for experts in losses for replicas in experts for loss in replicas):
            return None
        return np.array(losses, float)
