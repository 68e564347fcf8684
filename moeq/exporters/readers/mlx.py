"""MLX's layout, as mlx-lm writes it: a code q stands for scale * q + bias, experts lie in stacks.

weight uint32 [N, K*b/32], a row's codes as one little-endian bit stream; scales and biases [N, G]; of experts each with
a first dimension [E], in `switch_mlp`. Biases that are whole multiples of their scales are zero points; a matrix with
others, which MLX's own quantization makes, comes as its values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moeq.bounded import shown
from moeq.errors import ArtifactError
from moeq.exporters.mlx_families import EXPERTS, STACKS
from moeq.exporters.readers.layout import FLOATS, Grid, Parts, Stored, checked_grid, expect, read_back, shape_of_words
from moeq.models.source import ModelSource, TensorHeader
from moeq_kernels.widths import WORD

if TYPE_CHECKING:
    from torch import Tensor

WIDTHS = (2, 3, 4, 5, 6, 8)
_STACK = re.compile(rf"({'|'.join(map(re.escape, STACKS))})((?:gate|up|down)_proj)\.(\w+)$")
DIMENSIONS = {"bias": 2}  # of a stack; of others 3
MOST_EXPERTS = 1 << 16


class Mlx:
    """A grid for each module by its name; another module's is the whole's."""

    anchor = "scales"
    parts: tuple[str, ...] = ("weight", "scales", "biases")

    def __init__(self, declared: Mapping[str, Any]) -> None:
        """ValueError for codes that are no integers."""
        self.whole = _grid(declared)
        own = {name: one for name, one in declared.items() if isinstance(one, Mapping)}
        self.own = {name: _grid({"mode": declared.get("mode"), **one}) for name, one in own.items()}
        self.left_out = {name for name, one in declared.items() if one is False}

    def grid(self, names: Sequence[str]) -> Grid | None:
        found = [stack for name in names for stack in stacks_of(name)]
        if any(name in self.left_out for name in found):
            return None
        return next((self.own[name] for name in found if name in self.own), self.whole)

    def shape(self, headers: Mapping[str, TensorHeader], grid: Grid) -> tuple[int, int]:
        return shape_of_words(headers, grid)

    def check(self, headers: Mapping[str, TensorHeader], grid: Grid, rows: int, inputs: int) -> None:
        if grid.bits not in WIDTHS or inputs % grid.group_size or inputs * grid.bits % WORD:
            raise ValueError(f"{inputs} inputs of {grid.bits} bits are no whole groups of {grid.group_size}")
        expect(headers, "weight", ("U32",), (rows, inputs * grid.bits // WORD))
        for part in ("scales", "biases"):
            expect(headers, part, FLOATS, (rows, inputs // grid.group_size))

    def read(self, parts: Parts, grid: Grid, rows: int, inputs: int) -> Stored:
        import torch

        from moeq.numerics.layouts import affine_values, row_stream

        zeros = _zeros(parts["scales"], parts["biases"], grid.bits)
        if zeros is None:
            return Stored(weight=None, of=affine_values(parts, grid.bits, inputs))
        codes = row_stream(parts["weight"].view(torch.int32), grid.bits, inputs)
        return read_back(codes, parts["scales"], zeros, grid, inputs, None)


def unstacked(source: ModelSource) -> tuple[ModelSource, dict[str, tuple[str, int]]]:
    """A checkpoint with a tensor for each expert instead of stacks of them, and {its key: (the stack's, its place)}.

    ArtifactError for more experts than any model has, and for one that lies beside the stack.
    """
    tensors: dict[str, TensorHeader] = {}
    places: dict[str, tuple[str, int]] = {}
    for key, header in source.tensors.items():
        parts = _STACK.search(key)
        if parts is None or len(header.shape) != DIMENSIONS.get(parts[3], 3):
            tensors[key] = header
            continue
        if not 0 < header.shape[0] <= MOST_EXPERTS:
            raise ArtifactError(f"{key} is {list(header.shape)}", where=str(header.file), do="make it again")
        for number, name in enumerate(_names(key, parts, header.shape[0])):
            if name in source.tensors:
                what = f"{name} lies beside {key}: nothing says which of the two counts"
                raise ArtifactError(what, where=str(header.file), do="remove one of them, or make it again")
            size = header.bytes // header.shape[0]
            offset = header.offset + number * size
            tensors[name] = replace(header, shape=header.shape[1:], offset=offset, bytes=size)
            places[name] = (key, number)
    return replace(source, tensors=tensors), places


def _names(key: str, parts: re.Match[str], count: int) -> Iterator[str]:
    before = key[: parts.start()]
    return (f"{before}{EXPERTS}{number}.{parts[2]}.{parts[3]}" for number in range(count))


def stacks_of(name: str) -> list[str]:
    """What MLX may call the module that an expert's matrix is part of; another's name as it is."""
    before, found, after = name.partition(EXPERTS)
    number, _, projection = after.partition(".")
    return [f"{before}{stacks}{projection}" for stacks in STACKS] if found and number.isdigit() else [name]


def _zeros(scales: Tensor, biases: Tensor, bits: int) -> Tensor | None:
    """Zero points uint8 [N, G] that stand for exactly these biases; None where there are none such."""
    import torch

    zeros = torch.where(scales == 0, 2.0 ** (bits - 1), -biases.double() / scales.double()).round()
    fits = bool(((zeros >= 0) & (zeros < 2**bits)).all())
    exact = fits and torch.equal(-zeros * scales.double(), biases.double())
    return zeros.to(torch.uint8) if exact else None


def _grid(declared: Mapping[str, Any]) -> Grid:
    if declared.get("mode", "affine") not in (None, "affine"):
        raise ValueError(f"mode {shown(declared['mode'])}")
    return checked_grid(declared["bits"], declared["group_size"], False)
