"""Checkpoints that other tools wrote, and plain ones, matrix by matrix: from config.json and the headers alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from moeq.artifacts.tensor_files import torch_dtype
from moeq.errors import ArtifactError
from moeq.exporters.mlx_families import FAMILIES
from moeq.exporters.packed_source import Matrices, PackedSource
from moeq.exporters.readers.layout import Grid, Layout, packed_modules
from moeq.exporters.readers.mlx import Mlx, unstacked
from moeq.exporters.readers.names import WEIGHT, Names, sort_names
from moeq.models import loading
from moeq.models.experts import ExpertLayer
from moeq.models.single import ExpertReader
from moeq.models.source import ModelSource, TensorHeader
from moeq.numerics.layouts import affine_parts, affine_values
from moeq_kernels.packed import PackedWeight

AGAIN = "make or download the checkpoint again"
BIAS = ".bias"
OF_ACTIVATIONS = re.compile(r"\.(?:input|output|[qkv])_(?:global_scale|scale|zero_point)$")  # compressed-tensors' names


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """A matrix: its key on disk (`MODULE.weight`), where it is, its shape and its module's name in memory."""

    key: str
    where: str
    shape: tuple[int, int]
    name: str

    @property
    def module(self) -> str:
        return self.key.removesuffix(WEIGHT)


@dataclass(kw_only=True)
class Foreign:
    """A PackedSource over gptq, awq, auto-round, compressed-tensors or plain tensors.

    as_values: matrices that PackedWeight cannot hold (groups that are not consecutive inputs) come as their values in
    float32; without it they are refused. of_activations: keys of how a runtime rounds activations or the key-value
    cache, which is no part of the weights; they are not among the source's tensors. places: where in which stack a
    tensor lies that has no key of its own on the disk.
    """

    source: ModelSource
    config: dict[str, Any]
    layout: Layout | None
    model: nn.Module
    layers: list[ExpertLayer]
    as_values: bool = False
    of_activations: tuple[str, ...] = ()
    places: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    _handles: dict[Path, Any] = field(default_factory=dict)

    def expert(self, layer: ExpertLayer, expert: int) -> tuple[Matrices, dict[str, Tensor]]:
        """Matrices and biases of one expert; ArtifactError naming layer, expert and tensor when one is wrong."""
        if layer.index in self._names.stacked:
            values, biases = self._stacks(layer).read(layer, expert)
            return dict(values), biases
        keys = {name: self._names.biases.get((layer.index, expert, name)) for name in layer.projections}
        biases = {name: self._tensor(key) for name, key in keys.items() if key is not None}
        return {name: self._matrix(self._of_expert(layer, expert, name)) for name in layer.projections}, biases

    def others(self) -> Iterator[tuple[str, PackedWeight]]:
        """Packed modules outside of the experts, by their names in memory."""
        for module in sorted(self._names.others):
            weight = self.other(module)
            if not isinstance(weight, PackedWeight):
                raise ArtifactError("its groups are not consecutive inputs", where=module, do=_ORDERED)
            yield module, weight

    def other_names(self) -> list[str]:
        """Names in memory of the packed modules outside of the experts."""
        return sorted(self._names.others)

    def other(self, module: str) -> PackedWeight | Tensor:
        """One packed module outside of the experts."""
        return self._matrix(self._of_module(module))

    def rest(self) -> list[str]:
        """Keys of `source.tensors` that are neither of experts nor of packed modules."""
        stacks = (key for keys in self._names.stacked.values() for key in keys)
        experts = {*self._names.experts.values(), *self._names.biases.values(), *stacks}
        return sorted(set(self.source.tensors) - experts - self._parts - self._no_biases)

    def stacked(self, layer: ExpertLayer) -> list[str]:
        """Keys of a layer whose experts are stored in stacks, none of them packed; empty for other layers."""
        return self._names.stacked.get(layer.index, [])

    def file_of(self, layer: ExpertLayer, expert: int) -> str:
        """Name of the file that holds an expert's first matrix."""
        if layer.index in self._names.stacked:
            return self.source.tensors[self.stacked(layer)[0]].file.name
        return self._file(self._of_expert(layer, expert, layer.projections[0])).name

    @cached_property
    def rounds(self) -> torch.dtype | None:
        """The type that scales and zero points were rounded to when it was written, in a layout that has one."""
        if not isinstance(self.layout, Mlx):
            return None
        scales = (header.dtype for key, header in self.source.tensors.items() if key.endswith(f".{self.layout.anchor}"))
        dtype: torch.dtype = torch_dtype(next(scales, "BF16"))
        return dtype

    @property
    def one_more(self) -> tuple[str, ...]:
        """Ends of the names of vectors that its runtime adds 1 to and rounds."""
        family = FAMILIES.get(self.config.get("model_type", "")) if isinstance(self.layout, Mlx) else None
        return () if family is None else family.one_more

    def written(self, matrix: PackedWeight | Tensor) -> PackedWeight | Tensor:
        """What a matrix is in such a checkpoint: its values [N, K] where these are rounded, else itself."""
        if self.rounds is None or not isinstance(matrix, PackedWeight):
            return matrix
        return affine_values(affine_parts(matrix, self.rounds), matrix.bits, matrix.inputs)

    def check(self) -> None:
        """Compare every packed matrix's headers with the configuration; ArtifactError at the first that differs.

        Also ArtifactError for an expert's matrix that is missing, and ModelError for what `Names.check` finds.
        """
        self._names.check(self.source.path, self._no_biases)
        for layer in self.layers:
            for expert in range(layer.num_experts) if layer.index not in self._names.stacked else ():
                for projection in layer.projections:
                    self._grid_of(self._of_expert(layer, expert, projection))
        for module in self._names.others:
            self._grid_of(self._of_module(module))

    @cached_property
    def _parts_of(self) -> dict[str, dict[str, TensorHeader]]:
        return packed_modules(self.source, self.layout)

    @cached_property
    def _parts(self) -> set[str]:
        return {f"{module}.{part}" for module, parts in self._parts_of.items() for part in parts}

    @cached_property
    def _no_biases(self) -> set[str]:
        """Biases that AutoGPTQ writes for packed modules that have none in the model: all of them are zero."""
        beside = [key for key in self._names.reader.unexpected if key.removesuffix(BIAS) in self._parts_of]
        return {key for key in beside if key.endswith(BIAS) and not bool(self._tensor(key).any())}

    @cached_property
    def _names(self) -> Names:
        names = sort_names(self.source, self._parts_of, self._parts, self.model, self.layers)
        for layer in self.layers:
            if layer.index in names.stacked:
                continue
            for expert in range(layer.num_experts):
                for projection in layer.projections:
                    if (layer.index, expert, projection) not in names.experts:
                        where = f"{self.source.path}, {layer.name}, expert {expert}, {projection}"
                        raise ArtifactError(self._missing(), where=where, do=AGAIN)
                    if layer.biased:
                        self._check_bias(names, layer, expert, projection)
        return names

    def _check_bias(self, names: Names, layer: ExpertLayer, expert: int, projection: str) -> None:
        """ArtifactError unless an expert that was packed on its own has its bias beside it."""
        key, rows = names.biases.get((layer.index, expert, projection)), layer.shape(projection)[0]
        shape = None if key is None else self.source.tensors[key].shape
        if shape != (rows,):
            what = "its bias is missing" if shape is None else f"its bias is {list(shape)}, not {[rows]}"
            raise ArtifactError(
                what, where=f"{self.source.path}, {layer.name}, expert {expert}, {projection}", do=AGAIN
            )

    def _missing(self) -> str:
        anchor = "weight" if self.layout is None else f"{self.layout.anchor} and no weight"
        return f"the matrix is missing: no {anchor}"

    def _of_expert(self, layer: ExpertLayer, expert: int, projection: str) -> _Wanted:
        return _Wanted(
            key=self._names.experts[layer.index, expert, projection],
            where=f"{layer.name}, expert {expert}, {projection}",
            shape=layer.shape(projection),
            name=f"{layer.name}.{expert}.{projection}",
        )

    def _of_module(self, module: str) -> _Wanted:
        rows, inputs = self.model.get_parameter(f"{module}{WEIGHT}").shape
        return _Wanted(key=self._names.others[module], where=module, shape=(rows, inputs), name=module)

    def _grid_of(self, wanted: _Wanted) -> tuple[Grid, dict[str, TensorHeader]] | None:
        """The grid of a packed matrix and its checked headers; None of one that is not packed."""
        headers = self._parts_of.get(wanted.module)
        if headers is None or self.layout is None:
            shape = self.source.tensors[wanted.key].shape
            if shape != wanted.shape:
                raise self._wrong(f"is {list(shape)}, not {list(wanted.shape)}", wanted)
            return None
        grid = self.layout.grid((wanted.name, wanted.module))
        if grid is None:
            raise self._wrong("is packed, config.json leaves it as it is", wanted)
        try:
            self.layout.check(headers, grid, *wanted.shape)
        except ValueError as error:
            declared = f" ({grid.bits} bits, groups of {grid.group_size})" if grid.bits else ""
            raise self._wrong(f"{error}{declared}", wanted) from None
        return grid, headers

    def _matrix(self, wanted: _Wanted) -> PackedWeight | Tensor:
        packed = self._grid_of(wanted)
        if packed is None or self.layout is None:
            return self._tensor(wanted.key)
        grid, headers = packed
        try:
            parts = {part: self._tensor(f"{wanted.module}.{part}") for part in headers}
            stored = self.layout.read(parts, grid, *wanted.shape)
        except ValueError as error:
            raise self._wrong(str(error), wanted) from None
        weight = stored.weight
        if weight is not None and not weight.are_numbers():
            raise self._wrong("has scales that are not finite", wanted)
        if weight is not None and stored.groups is None:
            return weight
        if not self.as_values:
            where = f"{self.source.path}, {wanted.where}"
            if weight is None:
                raise ArtifactError("moeq packs no such codes", where=where, do="convert it to dequantized")
            raise ArtifactError("its groups are not consecutive inputs", where=where, do=_ORDERED)
        return stored.values()

    def _tensor(self, key: str) -> Tensor:
        file = self.source.tensors[key].file
        if file not in self._handles:
            self._handles[file] = safe_open(file, "pt")
        tensor: Tensor
        if key in self.places:
            stack, number = self.places[key]
            tensor = self._handles[file].get_slice(stack)[number]
        else:
            tensor = self._handles[file].get_tensor(key)
        return tensor

    def _stacks(self, layer: ExpertLayer) -> ExpertReader:
        stacks = {key: self.source.tensors[key] for key in self.stacked(layer)}
        dtype = torch_dtype(next(iter(stacks.values())).dtype)
        return ExpertReader(replace(self.source, tensors=stacks), self.model.to(dtype))

    def _file(self, wanted: _Wanted) -> Path:
        headers = self._parts_of.get(wanted.module)
        return (next(iter(headers.values())) if headers else self.source.tensors[wanted.key]).file

    def _wrong(self, what: str, wanted: _Wanted) -> ArtifactError:
        return ArtifactError(f"{wanted.module}: {what}", where=f"{self._file(wanted)}, {wanted.where}", do=AGAIN)


def packed_others(packed: PackedSource) -> dict[str, Callable[[], PackedWeight | Tensor]]:
    """How each packed module outside of the experts is read, by its name in memory."""
    if isinstance(packed, Foreign):
        return {name: lambda name=name: packed.other(name) for name in packed.other_names()}  # type: ignore[misc]
    return {name: lambda weight=weight: weight for name, weight in packed.others()}  # type: ignore[misc]


_ORDERED = "quantize it again without act order (desc_act), or convert it to dequantized"


QUANTIZATION = ("quantization_config", "compression_config", "quantization")  # keys of config.json


def plain_config(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration without its quantization."""
    text = {
        name: plain_config(part) if isinstance(part, dict) and re.search("_config$", name) else part
        for name, part in config.items()
    }
    return {name: part for name, part in text.items() if name not in QUANTIZATION}


def open_foreign(source: ModelSource, layout: Layout | None, trust_remote_code: bool, as_values: bool) -> Foreign:
    """Open a checkpoint whose layout is known; ModelError when transformers does not know its family."""
    config = plain_config(source.config)
    source, places = unstacked(source) if isinstance(layout, Mlx) else (source, {})
    left = [] if layout is None else [key for key in source.tensors if OF_ACTIVATIONS.search(key)]
    kept = source.tensors.keys() - left
    source = replace(source, tensors={key: header for key, header in source.tensors.items() if key in kept})
    model, layers = loading.describe(replace(source, config=config), trust_remote_code)
    return Foreign(
        source=source,
        config=config,
        layout=layout,
        model=model,
        layers=layers,
        as_values=as_values,
        of_activations=tuple(left),
        places=places,
    )
