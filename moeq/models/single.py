"""Reading one expert's weights without the rest of its layer.

Letters: E experts, of which one is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ErnieFuseAndSplitTextVisionExperts

from moeq.artifacts.reading import TensorHeader
from moeq.errors import ModelError
from moeq.models.experts import ExpertLayer, find_expert_layers
from moeq.models.kinds.base import Matrices
from moeq.models.loading import tied
from moeq.models.messages import damaged
from moeq.models.remote_source import prefetch
from moeq.models.source import ModelSource
from moeq.models.weights import Origin, WeightReader

EXPERTS_AHEAD = 32  # that are fetched from an object store before they are read, at most


class _OneExpert:
    """The model as a family's converter sees it while one expert is converted: stacked parameters hold one."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def get_parameter(self, name: str) -> Tensor:
        stacked = self._model.get_parameter(name)
        return torch.empty(1, *stacked.shape[1:], dtype=stacked.dtype, device="meta")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class ExpertReader:
    """Reads experts one by one; `bytes_read` counts what was asked of the disk.

    Of a parameter that stacks experts, tensors that hold one expert are read whole, and of stacked ones only the
    expert's part. What a family's converter does to a layer (rename, transpose, fuse, interleave, dequantize) is done
    to the one expert.
    """

    def __init__(self, source: ModelSource, model: Any) -> None:
        """model: the structure, such as `loading.skeleton` gives; what is read has the dtype of its parameters."""
        self.source, self.model = source, model
        self.bytes_read = 0
        self._tied = tied(model)
        self._remote = source.is_remote
        self._leaves: list[str] = []  # names of parameters, of which experts were read
        self._index = WeightReader(source, model, torch.float32, torch.device("cpu"))

    def read_expert(self, name: str, expert: int) -> Tensor:
        """`model.get_parameter(name)[expert]` of the loaded model, in its dtype.

        name: a parameter whose first dimension is E, such as `model.layers.0.mlp.experts.down_proj`. Raises ModelError
        when there is no such expert, or when the tensors on disk do not make it.
        """
        parameter = self.model.get_parameter(name)
        name = self._stored(name)
        origins = self._index.origins[name]
        if not 0 <= expert < parameter.shape[0]:
            raise self._error(f"{name} has {parameter.shape[0]} experts, no number {expert}")
        self._prefetch(name, expert)
        tensors: dict[str, list[Tensor]] = {}
        for origin, rows in self._parts(name, expert):
            tensors.setdefault(origin.pattern or "", []).append(self._read(origin.key, rows))
        plain = origins[0].pattern is None
        value = tensors[""][0][0] if plain else self._convert(name, origins[0], tensors)
        if value.shape != parameter.shape[1:]:
            shapes = f"{list(value.shape)}, {list(parameter.shape[1:])} is wanted"
            raise self._error(f"{name}: expert {expert} is {shapes}")
        return value.to(parameter.dtype)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """`model.get_parameter(name)[start:stop]` of a parameter that is on disk as it is in memory.

        For families that stack experts along rows, or keep one parameter an expert. Raises ModelError for others.
        """
        origin = self._index.origins[self._stored(name)][0]
        if origin.pattern is not None:
            raise self._error(f"{name} is not on disk as it is in memory")
        return self._read(origin.key, slice(start, stop)).to(self.model.get_parameter(name).dtype)

    def read(self, layer: ExpertLayer, expert: int) -> tuple[Matrices, Matrices]:
        """Matrices {projection: [rows, inputs]} and biases {projection: [rows]} of one expert of a layer."""
        return layer.kind.alone(self.model.get_submodule(layer.name), layer.name, expert, self)

    def bytes_of(self, name: str, expert: int) -> int:
        """Bytes on disk of one expert's part of a parameter, its scales included."""
        return sum(self._bytes(origin.key, rows) for origin, rows in self._parts(self._stored(name), expert))

    def _prefetch(self, name: str, expert: int) -> None:
        """Begin to fetch this expert and those after it, of the next layers too, from an object store: of all
        parameters that were read of experts before."""
        if not self._remote:
            return
        module, _, leaf = name.rpartition(".")
        if leaf not in self._leaves:
            self._leaves.append(leaf)
        elif leaf == self._leaves[0]:
            following = islice(self._following(module, expert), EXPERTS_AHEAD)
            names = ((f"{path}.{leaf}", number) for path, number in following for leaf in self._leaves)
            there = [place for place in names if place[0] in self._index.origins]
            prefetch(self._header(*part) for place in there for part in self._parts(*place))

    def _following(self, module: str, expert: int) -> Iterator[tuple[str, int]]:
        """An expert and those after it, as (module, number)."""
        names = [layer.name for layer in self._layers]
        start = names.index(module) if module in names else len(names)
        for layer in self._layers[start:]:
            yield from ((layer.name, number) for number in range(expert, layer.num_experts))
            expert = 0

    @cached_property
    def _layers(self) -> list[ExpertLayer]:
        return find_expert_layers(self.model, needed=False)

    def _header(self, origin: Origin, rows: slice | None) -> TensorHeader:
        """Where a tensor, or some of its rows, lies."""
        header = self.source.tensors[origin.key]
        if rows is None:
            return header
        row = header.bytes // header.shape[0]
        return replace(header, offset=header.offset + rows.start * row, bytes=(rows.stop - rows.start) * row)

    def _stored(self, name: str) -> str:
        """The parameter itself, or the one on disk that it is tied to."""
        for other in (name, *self._tied.get(name, ())):
            if other in self._index.origins:
                return str(other)
        raise self._error(f"{name} is not on disk")

    def _parts(self, name: str, expert: int) -> Iterator[tuple[Origin, slice | None]]:
        """What is to be read for one expert: a tensor, and its rows (None: all of it)."""
        by_pattern: dict[str | None, list[Origin]] = {}
        for origin in self._index.origins[name]:
            by_pattern.setdefault(origin.pattern, []).append(origin)
        stacked = self.model.get_parameter(name).shape[0]
        for pattern, origins in by_pattern.items():
            if pattern is None or "*" not in pattern:
                yield origins[0], slice(expert, expert + 1)
                continue
            targets = origins[0].targets  # several share the list, in turn
            if len(origins) != stacked * len(targets):
                raise self._error(f"{name}: {len(origins)} experts on disk, {stacked * len(targets)} are wanted")
            yield origins[targets.index(name) * stacked + expert], None

    def _convert(self, name: str, origin: Origin, tensors: dict[str, list[Tensor]]) -> Tensor:
        """The operations of the family's converter on this expert's tensors alone."""
        converter = self._index.converter(str(origin.pattern))
        targets = list(converter.target_patterns)
        wanted = targets[origin.targets.index(name)]
        if any(isinstance(operation, ErnieFuseAndSplitTextVisionExperts) for operation in converter.operations):
            targets = [wanted]  # it deals a list of experts out to its targets; here it has those of one
        converted: dict[str, Any] = dict(tensors)
        for operation in converter.operations:
            converted = operation.convert(
                converted,
                source_patterns=converter.source_patterns,
                target_patterns=targets,
                full_layer_name=name,
                model=_OneExpert(self.model),
                config=self.model.config,
                missing_keys=None,
            )
        value = converted[wanted] if wanted in converted else next(iter(converted.values()))
        stack: Tensor = value[0] if isinstance(value, list) else value
        return stack[0]

    def _bytes(self, key: str, rows: slice | None) -> int:
        headers = [self.source.tensors[name] for name in (key, self._index.scales.get(key)) if name is not None]
        return sum(
            header.bytes if rows is None else header.bytes // header.shape[0] * (rows.stop - rows.start)
            for header in headers
        )

    def _read(self, key: str, rows: slice | None) -> Tensor:
        self.bytes_read += self._bytes(key, rows)
        part: Tensor = self._index.handle(key)[... if rows is None else rows]
        return part

    def _error(self, problem: str) -> ModelError:
        return damaged(self.source.path, problem)
