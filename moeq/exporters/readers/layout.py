"""What a reader must know of one on-disk layout of packed matrices.

N output rows, K inputs, G groups of inputs, b bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moeq.models.source import TensorHeader
from moeq.numerics import grids
from moeq.numerics.packed import PackedWeight
from moeq.numerics.packing import unpack

Parts = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What config.json declares of one module."""

    bits: int
    group_size: int
    symmetric: bool


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A matrix as it was read; groups: the group of every input [K], None where they are consecutive."""

    weight: PackedWeight
    groups: Tensor | None = None

    def values(self) -> Tensor:
        """Values float32 [N, K]."""
        if self.groups is None:
            return self.weight.dequantize()
        packed, spread = self.weight, self.groups.long()
        zero: Tensor | float = 2.0 ** (packed.bits - 1)
        if packed.zeros is not None:
            zero = unpack(packed.zeros, packed.bits, packed.scales.shape[-1]).float()[:, spread]
        codes = unpack(packed.codes, packed.bits, packed.inputs).float()
        return (codes - zero) * packed.scales.float()[:, spread]


class Layout(Protocol):
    """One layout. name: as moeq calls it; anchor: the tensor that every packed module has; parts: all it may have."""

    name: str
    anchor: str
    parts: tuple[str, ...]

    def grid(self, names: Sequence[str]) -> Grid | None:
        """What config.json declares of a module, by its names in memory and on disk; None: not packed."""

    def check(self, headers: Mapping[str, TensorHeader], grid: Grid, rows: int, inputs: int) -> None:
        """ValueError when a part of a matrix [rows, inputs] is absent, or of another type or shape than its grid's."""

    def read(self, parts: Parts, grid: Grid, rows: int, inputs: int) -> Stored:
        """The matrix from its parts; ValueError saying what is wrong with them."""


def expect(headers: Mapping[str, TensorHeader], part: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    """ValueError when a part is absent, or of another type or shape."""
    if part not in headers:
        raise ValueError(f"{part} is missing")
    found = headers[part]
    if found.dtype not in dtypes or found.shape != shape:
        wanted = f"{' or '.join(dtypes)} {list(shape)}"
        raise ValueError(f"{part} is {found.dtype} {list(found.shape)}, not {wanted} as config.json has it")


def kept_scales(scales: Tensor) -> Tensor:
    """Scales as float16 where each has exactly that value, else in their own type."""
    half = scales.to(grids.SCALE_DTYPE)
    return half if torch.equal(half.double(), scales.double()) else scales


def group_length(grid: Grid, inputs: int) -> int:
    """Group size as `PackedWeight` takes it: -1 where one group is the whole row."""
    return -1 if grid.group_size <= 0 or grid.group_size >= inputs else grid.group_size
