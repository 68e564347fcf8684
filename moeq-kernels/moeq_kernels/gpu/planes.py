"""Blocks of nested experts on a GPU taken apart and put together: 4-bit codes are the 2-bit ones and two bits below.

Both widths have the same scales and zero points, so that what a 4-bit block has beside a 2-bit one is one plane of two
bits, in words like those of a width of 2 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from moeq_kernels.description import Matrix
from moeq_kernels.gpu.stored import Place
from moeq_kernels.gpu.swizzle import COLUMNS, TILE, columns_of, swizzle
from moeq_kernels.gpu.versions import Block
from moeq_kernels.packed import PackedWeight
from moeq_kernels.packing import unpack

NARROW, WIDE = 2, 4  # bits
WORDS = 1024  # of a program


def are_nested(narrow: Place, wide: Place) -> bool:
    """Whether matrices of the one are those of the other without its two low bits."""
    one, two = narrow.like, wide.like
    if not isinstance(one, PackedWeight) or not isinstance(two, PackedWeight):
        return False
    grids = [
        (place.rows, place.inputs, like.group_size, like.symmetric, like.state_bits)
        for place, like in ((narrow, one), (wide, two))
    ]
    return grids[0] == grids[1] and one.nested and two.nested and (one.bits, two.bits) == (NARROW, WIDE)


def plane_bytes(block: Block) -> int:
    """Of the planes of all matrices of a narrow block, one after the other."""
    return sum(place.code_bytes for place in block.places)


def write_planes(block: Block, matrices: Mapping[str, Matrix], into: Tensor) -> None:
    """The two low bits of the codes of an expert's 4-bit matrices; block: of the narrow version."""
    at = 0
    for name, place in block.shapes.items():
        matrix = matrices[name]
        assert isinstance(matrix, PackedWeight)
        plane = swizzle(unpack(matrix.codes, WIDE, matrix.inputs) & 3, NARROW)
        into[at : at + place.code_bytes] = plane
        at += place.code_bytes


def widen(narrow: Block, wide: Block, old: Tensor, planes: Tensor, into: Tensor) -> None:
    """A 4-bit block of the 2-bit one and what it lacks, all on the device; in the order of the current stream."""
    from moeq_kernels.gpu.version_programs import join_planes

    at = 0
    for small, large in zip(narrow.places, wide.places, strict=True):
        for first, count, each in _runs(small):
            high, low = _words(old, small.codes + 4 * first), _words(planes, at + 4 * first)
            join_planes[_grid(count)](high, low, _words(into, large.codes + 8 * first), count, each, BLOCK=WORDS)
        at += small.code_bytes
        _copy_grid(small, old, large, into)


def narrow(wide: Block, narrow: Block, old: Tensor, into: Tensor) -> None:
    """A 2-bit block of the 4-bit one."""
    from moeq_kernels.gpu.version_programs import part_planes

    for large, small in zip(wide.places, narrow.places, strict=True):
        for first, count, each in _runs(small):
            given, high = _words(old, large.codes + 8 * first), _words(into, small.codes + 4 * first)
            part_planes[_grid(count)](given, high, count, each, BLOCK=WORDS)
        _copy_grid(large, old, small, into)


def _runs(place: Place) -> Iterator[tuple[int, int, int]]:
    """Of tiles of one shape, the first word of 2 bits, their number, and how many a tile has."""
    full = place.inputs // TILE
    if full:
        yield 0, full * place.rows * COLUMNS, place.rows * COLUMNS
    if left := place.inputs % TILE:
        each = place.rows * columns_of(left)
        yield full * place.rows * COLUMNS, each, each


def _words(held: Tensor, at: int) -> Tensor:
    return held[at : held.numel() // 4 * 4].view(torch.int32)


def _grid(count: int) -> tuple[int]:
    return (-(-count // WORDS),)


def _copy_grid(given: Place, old: Tensor, place: Place, into: Tensor) -> None:
    """Scales and zero points, as they lie behind each other."""
    assert given.scales is not None
    assert place.scales is not None
    assert isinstance(given.like, PackedWeight)
    groups = given.like.scales.shape[-1]
    spans = [(given.scales, place.scales, 2 * groups * given.rows)]
    if given.zeros is not None and place.zeros is not None:
        spans.append((given.zeros, place.zeros, groups * given.zero_row_bytes))
    for start, to, length in spans:
        into[to : to + length].copy_(old[start : start + length], non_blocking=True)
