"""What quantize made, beside the model that it was made of: what a checkpoint is to hold, before it is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from safetensors import safe_open
from torch import Tensor

from moeq.artifacts.assignment import DROPPED, FULL, Assignment, width_of
from moeq.errors import ArtifactError
from moeq.exporters.native_writer import layer_name
from moeq.exporters.packed_source import Matrices
from moeq.models.declared import scale_keys, scales_of
from moeq.models.experts import ExpertLayer
from moeq.stages import non_experts as others
from moeq.stages.context import Context
from moeq_kernels.packed import PackedWeight
from moeq_kernels.widths import PARTS, Encoding

REMEDY = "run `moeq quantize` again"


class AsQuantized:
    """A PackedSource over what quantize wrote and the weights of the model; nothing of an expert is kept."""

    def __init__(self, context: Context, assignment: Assignment) -> None:
        self.source, self.config, self.layers = context.model.source, context.model.source.config, context.model.layers
        self._assignment = assignment
        self._directory = context.directory("quantize")
        table = others.table(context)
        self._modules = {} if table is None else {row.module: row for row in table.modules}
        gone = context.model.expert_keys | scale_keys(context.model.source)
        kept = set(context.model.source.tensors) - gone - set(others.replaced_keys(context))
        self._kept = kept | scales_of(context.model.source, kept)  # with which the rest is dequantized
        self._files: dict[str, tuple[Any, set[str]]] = {}

    def expert(self, layer: ExpertLayer, expert: int) -> tuple[Matrices, dict[str, Tensor]]:
        """Matrices and biases of one expert as it is placed; ArtifactError for what quantize did not write."""
        widths = self._assignment.layers[self.layers.index(layer)].experts[expert].widths
        name = layer_name(layer.index)
        prefixes = {projection: f"{layer.name}.{expert}.{projection}" for projection in layer.projections}
        matrices: Matrices = {}
        for projection, prefix in prefixes.items():
            bits = width_of(widths, projection)
            if bits == DROPPED:
                matrices[projection] = PackedWeight.dropped(*layer.shape(projection), self._assignment.encoding)
            elif bits == FULL:
                matrices[projection] = self._tensor(name, f"{prefix}.dense")
            else:
                inputs = layer.shape(projection)[1]
                matrices[projection] = self._packed(name, prefix, bits, inputs, self._assignment.encoding)
        biases = {p: self._tensor(name, f"{prefix}.bias") for p, prefix in prefixes.items()} if layer.biased else {}
        return matrices, biases

    def other_names(self) -> list[str]:
        """Names of the packed modules outside of the experts."""
        return list(self._modules)

    def others(self) -> Iterator[tuple[str, PackedWeight]]:
        """Packed modules outside of the experts."""
        files = sorted(path.name for path in self._directory.glob("others-*.safetensors"))
        for name, row in self._modules.items():
            file = next((file for file in files if f"{name}.codes" in self._open(file)[1]), None)
            if file is None:
                raise ArtifactError(f"no file holds {name}", where=str(self._directory), do=REMEDY)
            yield name, self._packed(file, name, row.bits, row.inputs, row.encoding)

    def rest(self) -> list[str]:
        """Keys of the model's tensors that stay as they are, and their scales."""
        return sorted(self._kept)

    def _packed(self, file: str, prefix: str, bits: int, inputs: int, encoding: Encoding) -> PackedWeight:
        handle, keys = self._open(file)
        parts = {part: handle.get_tensor(f"{prefix}.{part}") for part in PARTS if f"{prefix}.{part}" in keys}
        if not {"codes", "scales"} <= parts.keys():
            raise ArtifactError(f"no codes and scales of {prefix}", where=str(self._directory / file), do=REMEDY)
        return PackedWeight.of(parts, bits, inputs, encoding)

    def _tensor(self, file: str, key: str) -> Tensor:
        handle, keys = self._open(file)
        if key not in keys:
            raise ArtifactError(f"no tensor {key}", where=str(self._directory / file), do=REMEDY)
        tensor: Tensor = handle.get_tensor(key)
        return tensor

    def _open(self, file: str) -> tuple[Any, set[str]]:
        """One of the stage's files, and the names of its tensors."""
        path = self._directory / file
        if file not in self._files:
            if not path.is_file():
                raise ArtifactError("file is missing", where=str(path), do=REMEDY)
            handle = safe_open(path, "pt")
            self._files[file] = handle, set(handle.keys())
        return self._files[file]
