"""GGUF files with config.json beside them, such as moeq writes for llama.cpp, tensor by tensor.

Read by moeq's own code from the header and the blocks: as values, so that `moeq verify` has something to compare
loaders with, or as codes, scales and zero points, where a grid of moeq's holds them exactly.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moeq.artifacts.gguf_file import GgufFile, GgufTensor
from moeq.artifacts.reading import TensorHeader
from moeq.bounded import shown
from moeq.errors import ArtifactError, FormatError
from moeq.exporters.gguf import ERRORS, FILE
from moeq.exporters.gguf_families import (
    HEAD,
    TABLE,
    Piece,
    bias_name,
    expert_shapes,
    family_of,
    is_beside,
    made,
    parameters,
    pieces,
    restored,
    stack_name,
    stack_shapes,
)
from moeq.exporters.gguf_known import Family
from moeq.exporters.gguf_parameters import Value
from moeq.exporters.packed_source import Matrices
from moeq.exporters.readers.described import gguf_headers
from moeq.models import loading
from moeq.models.disk_names import DiskNames
from moeq.models.experts import ExpertLayer
from moeq.models.source import ModelSource
from moeq.numerics import ggml
from moeq.numerics.ggml_types import FLOATS, TYPES
from moeq_kernels.packed import PackedWeight

METHOD = "gguf"
AGAIN = "export or download it again"
PLAINER = "make it from the model with `moeq run`, or convert it to dequantized"
SCALED = "rope.scaling.type"
UNCOUNTED = {"context_length", "feed_forward_length", "vocab_size"}  # what decides nothing that is computed


@dataclass(kw_only=True)
class Gguf:
    """A PackedSource over one GGUF file. as_values: matrices come as their values in float32, and what is packed
    outside of the experts is of the rest; else they come packed, and those that no grid of moeq's holds are refused."""

    source: ModelSource
    config: dict[str, Any]
    file: GgufFile
    family: Family
    model: nn.Module
    layers: list[ExpertLayer]
    as_values: bool = True

    def expert(self, layer: ExpertLayer, expert: int) -> tuple[Matrices, dict[str, Tensor]]:
        """Matrices and biases of one expert."""
        matrices: Matrices = {}
        biases: dict[str, Tensor] = {}
        for projection in layer.projections:
            name = stack_name(layer, projection)
            stack = self.file.tensors[name]
            size = stack.bytes // stack.shape[0]
            offset = stack.offset + expert * size
            shape, what = layer.shape(projection), f"expert {expert} of {name}"
            if self.as_values:
                matrices[projection] = self._values(stack, offset, size, shape)
            elif stack.type.name in FLOATS:
                matrices[projection] = self._bytes(offset, size).view(ggml.FLOAT_DTYPES[stack.type.name]).view(shape)
            else:
                matrices[projection] = self._packed(stack, offset, size, shape, what)
            if layer.biased:
                every = self.file.tensors[bias_name(layer, projection)]
                biases[projection] = self._stored(every, every.shape)[expert]
        return matrices, biases

    def refit_error(self, layer: ExpertLayer, expert: int, projection: str) -> float | None:
        """How far the file says that an expert's matrix is from the one that was converted, relative; None where it
        says nothing, since every matrix is as it was."""
        key, count = f"{ERRORS}{stack_name(layer, projection)}", layer.num_experts
        stated = self.file.fields.get(key)
        if stated is None:
            return None
        if not isinstance(stated, array) or len(stated) != count or not all(0 <= error < math.inf for error in stated):
            raise ArtifactError(f"not the errors of {count} matrices", where=f"{self.file.path}, {key}", do=AGAIN)
        return float(stated[expert])

    @property
    def refitted(self) -> bool:
        """Whether the file says of any matrix that its scales were rounded."""
        return any(isinstance(value, array) and any(value) for key, value in self.file.fields.items() if ERRORS in key)

    def other_names(self) -> list[str]:
        """Names in memory of the packed modules outside of the experts."""
        return sorted(self._others)

    def others(self) -> Iterator[tuple[str, PackedWeight]]:
        """Packed modules outside of the experts, in the order of their rows that the checkpoint has."""
        for module in self.other_names():
            piece, *further = self._pieces[self._others[module]]
            tensor = self.file.tensors[piece.name]
            if piece.split or piece.columns is not None or further or len(tensor.shape) != 2:
                where = f"{self.file.path}, {piece.name}"
                raise FormatError(
                    f"{tensor.type.name} that is a part of {self._others[module]}", where=where, do=PLAINER
                )
            rows, inputs = tensor.shape
            weight = self._packed(tensor, tensor.offset, tensor.bytes, (rows, inputs), piece.name)
            order = piece.rows
            yield module, weight if order is None else weight.map(lambda part: part[order.argsort()])  # noqa: B023

    def rest(self) -> list[str]:
        """Keys of `source.tensors` that are neither of experts nor of packed modules."""
        return sorted(set(self._pieces) - set(self._others.values()))

    def check(self) -> None:
        """ArtifactError unless the file holds every tensor of the model, in its shape, and no other."""
        others = {piece.name: piece.shape for parts in self._pieces.values() for piece in parts}
        experts = {name: shape for layer in self.layers for name, shape in expert_shapes(layer).items()}
        config: Any = self.model.config
        added = self.family.made(config.get_text_config())
        check_tensors(self.file, experts | others | {name: tuple(tensor.shape) for name, tensor in added.items()})
        for name, wanted in added.items():
            if not torch.equal(self._stored(self.file.tensors[name], wanted.shape), wanted):
                what = f"tensor {name} is not what config.json says"
                raise ArtifactError(what, where=str(self.file.path), do=AGAIN)

    @property
    def by_transformers(self) -> bool:
        """Whether transformers loads it right: it knows the family, and gguf all types."""
        return self.family.alike and not any(tensor.type.name == "Q1_0" for tensor in self.file.tensors.values())

    def read(self, key: str) -> Tensor:
        """A tensor that is not of an expert as the checkpoint has it."""
        parts = [self._stored(self.file.tensors[piece.name], piece.shape) for piece in self._pieces[key]]
        return restored(self._pieces[key], parts, self.source.tensors[key].shape)

    def is_changed(self, key: str) -> bool:
        """Whether the file holds something computed of a tensor, from which it comes back but for rounding."""
        return any(piece.change for piece in self._pieces[key])

    def holds(self, key: str, tensor: Tensor) -> bool:
        """Whether the file holds what is written of this tensor."""
        config = self.model.config
        pairs = ((self._stored(self.file.tensors[one.name], one.shape), one) for one in self._pieces[key])
        return all(torch.equal(stored.float(), made(config, one, tensor).float()) for stored, one in pairs)

    @property
    def absent(self) -> list[str]:
        """Names in memory of what is beside the language model, which the file does not hold."""
        return [name for name in self.model.state_dict() if is_beside(self.model.config, name)]

    @cached_property
    def _others(self) -> dict[str, str]:
        """{module in memory: key} of what is packed outside of the experts; none where all comes as values."""
        if self.as_values:
            return {}
        names = DiskNames(self.model)
        types = {key: self.file.tensors[parts[0].name].type.name for key, parts in self._pieces.items()}
        packed = [key for key, name in types.items() if name not in FLOATS]
        return {names.in_memory(key).removesuffix(".weight"): key for key in packed}

    @cached_property
    def _pieces(self) -> dict[str, list[Piece]]:
        """{key of the checkpoint: what the file holds of it} of all tensors that are not of routed experts."""
        names, config = DiskNames(self.model), self.model.config
        experts = {f"{layer.name}.{part}" for layer in self.layers for part in layer.parameters}
        kept = {
            names.renamed(name): tuple(tensor.shape)
            for name, tensor in self.model.state_dict().items()
            if name not in experts and not is_beside(config, name)
        }
        every = {key: pieces(config, self.family, key, shape, tied=self._is_tied) for key, shape in kept.items()}
        return {key: parts for key, parts in every.items() if parts}

    @property
    def _is_tied(self) -> bool:
        """Whether the head is the embeddings: not where the file has one of its own, whatever config.json says."""
        config: Any = self.model.config
        head, table = (self.file.tensors.get(name) for name in (HEAD, TABLE))
        if not config.tie_word_embeddings or head is None or table is None:
            return bool(config.tie_word_embeddings)
        alike = self.family.own_head and (head.type, head.shape) == (table.type, table.shape)
        return alike and torch.equal(*(self._bytes(one.offset, one.bytes) for one in (head, table)))

    def _stored(self, tensor: GgufTensor, shape: tuple[int, ...]) -> Tensor:
        """A tensor as it is stored: in its own type where that is a floating-point one, else its values."""
        if tensor.type.name not in FLOATS:
            rows = tensor.bytes // tensor.type.row_bytes(tensor.shape[-1])
            return self._values(tensor, tensor.offset, tensor.bytes, (rows, tensor.shape[-1])).view(shape)
        dtype = ggml.FLOAT_DTYPES[tensor.type.name]
        return self._bytes(tensor.offset, tensor.bytes).view(dtype).view(shape)

    def _values(self, tensor: GgufTensor, offset: int, size: int, shape: tuple[int, int]) -> Tensor:
        data = self._bytes(offset, size).view(shape[0], -1)
        values = ggml.decode(tensor.type.name, data, shape[1])
        if not bool(torch.isfinite(values).all()):
            raise ArtifactError("a value that is not finite", where=f"{self.file.path}, byte {offset}", do=AGAIN)
        return values

    def _packed(self, tensor: GgufTensor, offset: int, size: int, shape: tuple[int, int], what: str) -> PackedWeight:
        """A matrix as codes; FormatError naming it where no grid of moeq's holds its blocks."""
        try:
            return ggml.packed(tensor.type.name, self._bytes(offset, size).view(shape[0], -1), shape[1])
        except ValueError as error:
            where = f"{self.file.path}, {what}"
            raise FormatError(f"{tensor.type.name} with {error}", where=where, do=PLAINER) from None

    def _bytes(self, offset: int, size: int) -> Tensor:
        with self.file.path.open("rb") as stream:
            stream.seek(offset)
            data = bytearray(stream.read(size))
        if len(data) != size:
            raise ArtifactError("cut off", where=str(self.file.path), do=AGAIN)
        return torch.frombuffer(data, dtype=torch.uint8)


def check_tensors(file: GgufFile, wanted: dict[str, tuple[int, ...]]) -> None:
    """ArtifactError unless a file holds exactly these tensors {name: shape}."""
    where = str(file.path)
    for name, shape in wanted.items():
        if name not in file.tensors:
            raise ArtifactError(f"tensor {name} is missing", where=where, do=AGAIN)
        if file.tensors[name].shape != shape:
            what = f"tensor {name} is {list(file.tensors[name].shape)}, not {list(shape)}"
            raise ArtifactError(what, where=where, do=AGAIN)
    for name in file.tensors:
        if name not in wanted:
            raise ArtifactError(f"tensor {name} is no part of the model", where=where, do=AGAIN)


def check_parameters(file: GgufFile, config: Any, family: Family) -> None:
    """ArtifactError where the file says something else than config.json of what llama.cpp computes: moeq goes by that.

    Keys that a file leaves out are not compared, but for how rotary embeddings are scaled, which is then not at all.
    """
    wanted = parameters(config, family)
    named = {key: file.fields.get(f"{family.arch}.{key}") for key in {SCALED, *wanted} - UNCOUNTED}
    for key, stated in sorted(named.items()):
        said: Value | None = wanted.get(key)
        if key == SCALED:
            same = (stated or "none") == (said or "none")
        else:
            listed = stated is None or isinstance(stated, range | array)  # by layer, and not kept
            number = isinstance(stated, int | float)  # what else stands there, no runtime takes
            same = listed or (number and math.isclose(stated, said, rel_tol=1e-6))  # type: ignore[arg-type]
        if not same:
            what = f"{family.arch}.{key} is {shown(stated)}, config.json says {shown(said)}"
            raise ArtifactError(what, where=str(file.path), do="take the config.json of the model that it was made of")


def open_gguf(path: Path, trust_remote_code: bool = False, *, as_values: bool = True) -> Gguf:
    """Open a directory with model.gguf and config.json; as_values: see `Gguf`.

    Raises ArtifactError for a damaged file, FormatError for a family that moeq does not know in GGUF, ModelError.
    """
    where = path / FILE
    file, config, headers = gguf_headers(path)
    bare = ModelSource(name=path.resolve().name, path=path, revision=None, config=config, tensors=headers)
    model, layers = loading.describe(bare, trust_remote_code)
    family = family_of(model.config)
    if file.fields.get("general.architecture") != family.arch:
        arch = str(file.fields.get("general.architecture"))[:60]
        raise ArtifactError(f"architecture {arch!r}, config.json says {family.arch}", where=str(where), do=AGAIN)
    opened = Gguf(source=bare, config=config, file=file, family=family, model=model, layers=layers, as_values=as_values)
    return _with_tensors(opened)


def _with_tensors(opened: Gguf) -> Gguf:
    """The source with the checkpoint's keys beside the stacks', and with how they are read."""
    opened.check()
    check_parameters(opened.file, opened.model.config, opened.family)
    tensors = {name: opened.source.tensors[name] for name in stack_shapes(opened.layers)}
    shapes = {DiskNames(opened.model).renamed(name): part.shape for name, part in opened.model.state_dict().items()}
    for key in opened._pieces:
        parts = [opened.file.tensors[piece.name] for piece in opened._pieces[key]]
        shape, whole = tuple(shapes[key]), parts[0].type.name in FLOATS
        kind = parts[0].type.name if whole else "F32"
        size = math.prod(shape) * TYPES[kind].bytes  # as it is read
        tensors[key] = TensorHeader(file=opened.file.path, dtype=kind, shape=shape, offset=parts[0].offset, bytes=size)
    config = opened.config | {"quantization_config": {"quant_method": METHOD}}
    opened.source = replace(opened.source, config=config, tensors=tensors, read=opened.read)
    return opened


def opened(path: Path, trust_remote_code: bool, as_values: bool) -> Gguf:
    """As `open_gguf`."""
    return open_gguf(path, trust_remote_code, as_values=as_values)
