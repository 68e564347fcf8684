"""The order of trellis codes in the words that the GPU's kernels read, and the way back.

A strip is the tiles of 16 rows (`moeq_kernels.trellis`), side by side along the inputs. A row of a tile has 16*b bits,
b/2 pieces of 32 bits and, of 1 and 3 bits, one of 16, the last. Of a piece they lie as [strip, block, row, tile]: 8
tiles in a block, fewer in the last; so a thread loads the pieces of a row of four tiles at once, and a program's rows
are one stretch of memory in every block. Not a bit is added. A state reaches up to 15 bits back, into the row before
it, the first row's into the last one: the piece that a kernel loads beside.

Letters: R strips, C tiles of a strip, b bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moeq_kernels.trellis import STEPS, TILE, tiles_along
from moeq_kernels.widths import TRELLIS_BITS

BLOCK = 8  # tiles: as many inputs as a tile of `swizzle` has
FIRST_KIND = 9  # in the table: kinds of trellis codes come after the widths of grids


def kind_of(bits: int) -> int:
    """What stands in the table instead of a grid's width."""
    return FIRST_KIND + TRELLIS_BITS.index(bits)


def name_of(kind: int) -> str:
    """A width of the table as it is written: t2 for trellis codes of 2 bits."""
    walked = range(FIRST_KIND, FIRST_KIND + len(TRELLIS_BITS))
    return f"t{TRELLIS_BITS[kind - FIRST_KIND]}" if kind in walked else str(kind)


def strip_bytes(inputs: int, bits: int) -> int:
    """Bytes of the codes of 16 rows."""
    return tiles_along(inputs) * STEPS // 8 * bits


def _pieces(bits: int) -> Iterator[tuple[int, int]]:
    """First and last byte in a row of a tile."""
    for first in range(0, 2 * bits, 4):
        yield first, min(first + 4, 2 * bits)


def arrange(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [R, C*32*b] as the bytes that the kernels read, flat."""
    rows = codes.reshape(len(codes), -1, TILE, 2 * bits)
    full = rows.shape[1] // BLOCK * BLOCK
    made = []
    for first, last in _pieces(bits):
        piece = rows[..., first:last]
        whole = piece[:, :full].unflatten(1, (full // BLOCK, BLOCK)).transpose(2, 3)
        made.append(torch.cat([whole.flatten(1), piece[:, full:].transpose(1, 2).flatten(1)], 1).flatten())
    return torch.cat(made)


def undo(stored: Tensor, inputs: int, bits: int, some: Tensor | None = None) -> Tensor:
    """Invert `arrange`: uint8 [R, C*32*b]; some: only these strips [r], in any order."""
    along = tiles_along(inputs)
    strips, full = len(stored) // strip_bytes(inputs, bits), along // BLOCK * BLOCK
    rows, at = [], 0
    for first, last in _pieces(bits):
        size = along * TILE * (last - first)
        piece = stored[at : at + strips * size].view(strips, size)
        at += strips * size
        piece = piece if some is None else piece.index_select(0, some)
        cut = full * TILE * (last - first)
        whole = piece[:, :cut].view(len(piece), full // BLOCK, TILE, BLOCK, last - first).transpose(2, 3)
        rest = piece[:, cut:].reshape(len(piece), TILE, along - full, last - first).transpose(1, 2)
        rows.append(torch.cat([whole.flatten(1, 2), rest], 1))
    return torch.cat(rows, -1).flatten(1)
