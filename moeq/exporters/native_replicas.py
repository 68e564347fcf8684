"""The replicas of an exported checkpoint, for a runtime that places by context, and what they lose."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moeq.artifacts.assignment import MIXED
from moeq.artifacts.manifest import REMEDY
from moeq.artifacts.storage import storage_errors
from moeq.errors import ArtifactError
from moeq.exporters.native_reader import NativeReader
from moeq.exporters.packed_source import Matrices
from moeq.models.experts import ExpertLayer
from moeq.models.source import TensorHeader, read_header
from moeq_kernels.packed import PackedWeight

STORED = {"U8": torch.uint8, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "I16": torch.int16}


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


class CopyingReader(NativeReader):
    """A NativeReader for a process that goes on when files change or vanish: it maps no file, whose pages would end
    the process where a file has become shorter, but reads what it is asked for, once. Of several threads one reads."""

    def __init__(self, path: Path, trust_remote_code: bool = False) -> None:
        super().__init__(path, trust_remote_code)
        self._reading = threading.Lock()
        self._read: dict[tuple[str, str], Tensor] = {}
        self._known: dict[str, dict[str, TensorHeader]] = {}

    def replica(self, layer: ExpertLayer, expert: int, key: int) -> tuple[Matrices, dict[str, Tensor]]:
        """As a NativeReader; StorageError where a file is gone or cannot be read, ArtifactError where it is shorter."""
        with self._reading:
            try:
                return super().replica(layer, expert, key)
            finally:
                self._read = {}

    def _tensor(self, file: str, key: str, what: str) -> Tensor:
        if (file, key) not in self._read:
            self._read[file, key] = self._copied(file, key, what)
        return self._read[file, key]

    def _copied(self, file: str, key: str, what: str) -> Tensor:
        path = self.path / file
        with storage_errors(path, "read"), path.open("rb", buffering=0) as stream:
            if file not in self._known:
                self._known[file] = read_header(path)
            header = self._known[file].get(key)
            if header is None:
                raise ArtifactError(f"tensor {key} is not in {file}", where=self._where(what), do=REMEDY)
            held = bytearray(header.bytes)
            room, count = memoryview(held), 0
            stream.seek(header.offset)
            while count < len(held) and (got := stream.readinto(room[count:])):
                count += got
        if count < len(held):
            raise ArtifactError(f"{file} ends within tensor {key}", where=self._where(what), do=REMEDY)
        return torch.frombuffer(held, dtype=STORED[header.dtype]).reshape(header.shape)
