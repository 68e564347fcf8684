"""Reading the native format: experts and packed modules where placement.json says that they lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from moeq.artifacts.assignment import DROPPED, FULL, MIXED, width_of
from moeq.artifacts.digests import digest_of_chunks
from moeq.artifacts.manifest import REMEDY, PlacedLayer, PlacedModule, Replica, read_manifest
from moeq.artifacts.sums import check_sums
from moeq.artifacts.tensor_files import tensor_bytes
from moeq.errors import ArtifactError
from moeq.exporters.packed_source import Matrices
from moeq.models.configuration import TOP_K
from moeq.models.experts import ExpertLayer
from moeq.models.loading import describe
from moeq.models.source import ModelSource, TensorHeader, open_source, read_header
from moeq.models.stored_experts import stated
from moeq.runtime.hook import unhooked
from moeq.runtime.packed_experts import guard_shapes
from moeq.runtime.packed_modules import guard_name
from moeq_kernels.packed import PackedWeight, packed_shapes
from moeq_kernels.widths import PARTS, Encoding

ALL_REPLICAS = "export with quantize.replicas: all"


class NativeReader:
    """A PackedSource over a checkpoint that moeq exported; files stay open, nothing is kept of an expert."""

    source: ModelSource
    config: dict[str, Any]
    layers: list[ExpertLayer]

    def __init__(self, path: Path, trust_remote_code: bool = False) -> None:
        """Raises ArtifactError when config.json, the manifest and the model's structure differ, or a file that is not
        checked expert by expert has changed since SHA256SUMS was written."""
        self.path = path
        self.manifest = read_manifest(path)
        checked_as_read = self.manifest.files()
        check_sums(path, only=lambda name: name not in checked_as_read, cached=True)
        self.source = open_source(str(path))
        config = {name: value for name, value in self.source.config.items() if name != "quantization_config"}
        self.config = unhooked(config)
        self.layers = describe(replace(self.source, config=self.config), trust_remote_code)[1]
        self._placed = {layer.name: layer for layer in self.manifest.layers}
        self._files: dict[str, Any] = {}
        self._headers: dict[str, dict[str, TensorHeader]] = {}
        for layer in self.layers:
            placed = self._placed.get(layer.name)
            if placed is None or _structure(placed, len(placed.experts)) != _structure(layer, layer.num_experts):
                raise ArtifactError("config.json and the manifest differ", where=f"{path}, {layer.name}", do=REMEDY)
            top_k = layer.kind.top_k or stated(self.config, TOP_K)
            if top_k not in (None, placed.top_k):
                what = f"the manifest says that a token chooses {placed.top_k} experts, config.json {top_k}"
                raise ArtifactError(what, where=f"{path}, {layer.name}", do=REMEDY)

    def expert(self, layer: ExpertLayer, expert: int) -> tuple[Matrices, dict[str, Tensor]]:
        """Matrices and biases of one expert as it is placed; of one that is dropped all are zero."""
        return self.replica(layer, expert, MIXED)

    def replicas(self, layer: ExpertLayer, expert: int) -> dict[int, Replica]:
        """The replicas of an expert by their width; the placed one, if it is not dropped, also under MIXED."""
        there = self._placed[layer.name].experts[expert].replicas
        placed = [(MIXED, replica) for replica in there if replica.placed]
        return dict(placed) | {replica.bits: replica for replica in there if replica.projections is None}

    def is_dropped(self, layer: ExpertLayer, expert: int) -> bool:
        """Whether nothing of an expert is placed."""
        return self._placed[layer.name].experts[expert].bits == DROPPED

    def replica(self, layer: ExpertLayer, expert: int, key: int) -> tuple[Matrices, dict[str, Tensor]]:
        """Matrices and biases of one of an expert's replicas; ArtifactError when the checkpoint has it not."""
        if key == MIXED and self.is_dropped(layer, expert):
            return self._dropped(layer)
        replica = self.replicas(layer, expert).get(key)
        if replica is None:
            raise ArtifactError(
                f"no replica of {key} bits", where=self._where(f"{layer.name}, expert {expert}"), do=ALL_REPLICAS
            )
        self._check(replica, f"{layer.name}, expert {expert}")
        wide = replica.leading_bits_of
        stored = replica if wide is None else replica.model_copy(update={"bits": wide})
        matrices = {
            projection: self._matrix(stored, layer, projection, f"{layer.name}, expert {expert}, {projection}")
            for projection in layer.projections
        }
        if wide is not None:
            packed = {name: weight for name, weight in matrices.items() if isinstance(weight, PackedWeight)}
            matrices = {name: weight.leading(replica.bits) for name, weight in packed.items()}
        biases = {}
        if layer.biased:
            for projection in layer.projections:
                key_of = f"{replica.key_prefix}{projection}.bias"
                biases[projection] = self._tensor(replica.file, key_of, f"{layer.name}, expert {expert}, {projection}")
        return matrices, biases

    def _dropped(self, layer: ExpertLayer) -> tuple[Matrices, dict[str, Tensor]]:
        """What stands for an expert that is dropped: whatever goes through these comes out as zeros."""
        encoding = self.manifest.encoding
        return {name: PackedWeight.dropped(*layer.shape(name), encoding) for name in layer.projections}, {}

    def other_names(self) -> list[str]:
        """Names of the packed modules outside of the experts."""
        return [module.name for module in self.manifest.others]

    def others(self) -> Iterator[tuple[str, PackedWeight]]:
        """Packed modules outside of the experts."""
        for module in self.manifest.others:
            self._check(module, module.name)
            shape = (module.rows, module.inputs)
            packed = self._packed(module, module.key_prefix, shape, module.bits, module.encoding, module.name)
            yield module.name, packed

    def rest(self) -> list[str]:
        """Keys of tensors that are neither of experts nor of packed modules, nor guards."""
        experts = {f"{layer.name}." for layer in self.layers}
        gone = {f"{layer.name}.{part}" for layer in self.layers for part in guard_shapes(layer)}
        for module in self.manifest.others:
            gone |= {guard_name(module.name), *(f"{module.key_prefix}{part}" for part in PARTS)}
        return [key for key in sorted(set(self.source.tensors) - gone) if not _below(key, experts)]

    def _matrix(self, replica: Replica, layer: ExpertLayer, projection: str, what: str) -> PackedWeight | Tensor:
        prefix = f"{replica.key_prefix}{projection}."
        bits = width_of(replica.widths, projection)
        shape = layer.shape(projection)
        if bits == FULL:
            tensor = self._tensor(replica.file, f"{prefix}dense", what)
            if tuple(tensor.shape) != shape:
                raise ArtifactError(f"is {list(tensor.shape)}, not {list(shape)}", where=self._where(what), do=REMEDY)
            return tensor
        return self._packed(replica, prefix, shape, bits, self.manifest.encoding, what)

    def _check(self, place: Replica | PlacedModule, what: str) -> None:
        """ArtifactError unless the tensors of an expert or a module hold what the manifest says."""
        tensors = (self._tensor(place.file, f"{place.key_prefix}{stamp.name}", what) for stamp in place.tensors)
        if digest_of_chunks(map(tensor_bytes, tensors)) != place.sha256:
            raise ArtifactError(
                "SHA-256 differs from the manifest", where=self._where(f"{place.file}: {what}"), do=REMEDY
            )

    def _packed(
        self,
        place: Replica | PlacedModule,
        prefix: str,
        shape: tuple[int, int],
        bits: int,
        encoding: Encoding,
        what: str,
    ) -> PackedWeight:
        parts = {}
        for name, (size, dtype) in packed_shapes(*shape, bits, encoding).items():
            parts[name] = self._tensor(place.file, f"{prefix}{name}", what)
            if (tuple(parts[name].shape), parts[name].dtype) != (size, dtype):
                why = f"{name} is {parts[name].dtype} {list(parts[name].shape)}, not {dtype} {list(size)}"
                raise ArtifactError(why, where=self._where(what), do=REMEDY)
        return PackedWeight.of(parts, bits, shape[1], encoding)

    def _tensor(self, file: str, key: str, what: str) -> Tensor:
        if file not in self._files:
            path = self.path / file
            if not path.is_file():
                raise ArtifactError(f"file {file} is missing", where=self._where(what), do=REMEDY)
            self._headers[file] = read_header(path)
            self._files[file] = safe_open(path, "pt")
        if key not in self._headers[file]:
            raise ArtifactError(f"tensor {key} is not in {file}", where=self._where(what), do=REMEDY)
        tensor: Tensor = self._files[file].get_tensor(key)
        return tensor

    def _where(self, what: str) -> str:
        return f"{self.path}: {what}"


def _structure(layer: PlacedLayer | ExpertLayer, experts: int) -> tuple[object, ...]:
    """What a layer of the manifest and one of the model must have in common."""
    return experts, layer.hidden_size, layer.intermediate_size, (*layer.projections,), layer.biased


def opened(path: Path, trust_remote_code: bool, as_values: bool) -> NativeReader:
    """A checkpoint as exporters are asked for it."""
    return NativeReader(path, trust_remote_code)


def _below(key: str, experts: set[str]) -> bool:
    """Whether a tensor belongs to a numbered expert below one of these modules."""
    return any(key.startswith(prefix) and key[len(prefix) :].split(".")[0].isdigit() for prefix in experts)
