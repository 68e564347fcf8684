"""What quantize made, beside the model that it was made of: what a checkpoint is to hold, before it is written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from moeq.artifacts.assignment import FULL, Assignment, width_of
from moeq.errors import ArtifactError
from moeq.exporters.native_writer import layer_name
from moeq.exporters.packed_source import Matrices
from moeq.models.experts import ExpertLayer
from moeq.models.loading import expert_keys
from moeq.models.weights import scale_keys, scales_of
from moeq.numerics.packed import PARTS, PackedWeight
from moeq.numerics.widths import NESTED_BITS
from moeq.stages import non_experts as others
from moeq.stages.context import Context

REMEDY = "run `moeq quantize` again"


class AsQuantized:
    """A PackedSource over what quantize wrote and the weights of the model; nothing of an expert is kept."""

    def __init__(self, context: Context, assignment: Assignment) -> None:
        self.source, self.config, self.layers = context.source, context.source.config, context.layers
        self._assignment = assignment
        self._directory = context.directory("quantize")
        self._modules = {} if (table := others.table(context)) is None else {one.module: one for one in table.modules}
        gone = expert_keys(context.source, *context.described) | scale_keys(context.source)
        kept = set(context.source.tensors) - gone - set(others.replaced_keys(context))
        self._kept = kept | scales_of(context.source, kept)  # with which the rest is dequantized
        self._open: dict[str, Any] = {}
        self._names: dict[str, set[str]] = {}

    def expert(self, layer: ExpertLayer, expert: int) -> tuple[Matrices, dict[str, Tensor]]:
        """Matrices and biases of one expert as it is placed; ArtifactError for what quantize did not write."""
        widths = self._assignment.layers[self.layers.index(layer)].experts[expert].widths
        name = layer_name(layer.index)
        prefixes = {projection: f"{layer.name}.{expert}.{projection}" for projection in layer.projections}
        found: Matrices = {}
        for projection, prefix in prefixes.items():
            bits = width_of(widths, projection)
            if bits == FULL:
                found[projection] = self._tensor(name, f"{prefix}.dense")
            else:
                grid = self._assignment
                nested = grid.nested and bits in NESTED_BITS
                settings = (bits, grid.group_size, layer.shape(projection)[1], grid.symmetric, nested)
                found[projection] = self._packed(name, prefix, *settings)
        biases = {p: self._tensor(name, f"{prefix}.bias") for p, prefix in prefixes.items()} if layer.biased else {}
        return found, biases

    def other_names(self) -> list[str]:
        """Names of the packed modules outside of the experts."""
        return list(self._modules)

    def others(self) -> Iterator[tuple[str, PackedWeight]]:
        """Packed modules outside of the experts."""
        files = sorted(path.name for path in self._directory.glob("others-*.safetensors"))
        for name, row in self._modules.items():
            file = next((file for file in files if f"{name}.codes" in self._keys(file)), None)
            if file is None:
                raise ArtifactError(f"no file holds {name}", where=str(self._directory), do=REMEDY)
            yield name, self._packed(file, name, row.bits, row.group_size, row.inputs, row.symmetric, False)

    def rest(self) -> list[str]:
        """Keys of the model's tensors that stay as they are, and their scales."""
        return sorted(self._kept)

    def _packed(
        self, file: str, prefix: str, bits: int, group_size: int, inputs: int, symmetric: bool, nested: bool
    ) -> PackedWeight:
        parts = {part: self._tensor(file, f"{prefix}.{part}") for part in PARTS if self._has(file, f"{prefix}.{part}")}
        if not {"codes", "scales"} <= parts.keys():
            raise ArtifactError(f"no codes and scales of {prefix}", where=str(self._directory / file), do=REMEDY)
        grid: dict[str, Any] = {"bits": bits, "group_size": group_size, "symmetric": symmetric, "nested": nested}
        return PackedWeight(
            codes=parts["codes"], scales=parts["scales"], zeros=parts.get("zeros"), inputs=inputs, **grid
        )

    def _tensor(self, file: str, key: str) -> Tensor:
        if not self._has(file, key):
            raise ArtifactError(f"no tensor {key}", where=str(self._directory / file), do=REMEDY)
        tensor: Tensor = self._file(file).get_tensor(key)
        return tensor

    def _has(self, file: str, key: str) -> bool:
        return key in self._keys(file)

    def _keys(self, file: str) -> set[str]:
        if file not in self._names:
            self._names[file] = set(self._file(file).keys())
        return self._names[file]

    def _file(self, file: str) -> Any:
        path: Path = self._directory / file
        if file not in self._open:
            if not path.is_file():
                raise ArtifactError("file is missing", where=str(path), do=REMEDY)
            self._open[file] = safe_open(path, "pt")
        return self._open[file]
