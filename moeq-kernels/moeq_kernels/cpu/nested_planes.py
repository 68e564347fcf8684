"""Blocks of nested experts taken apart and put together: 4-bit codes are the 2-bit replica's and two bits below.

Both widths have the same scales and zero points, so that what a 4-bit block has beside a 2-bit one is one plane of two
bits. A word of a plane of 2 bits holds in every byte four codes, of which the low half byte belongs to one word of 4
bits and the high one to the next (see `codes`).
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from moeq_kernels.cpu.arrangement import Shape
from moeq_kernels.cpu.codes import LANES, UNIT
from moeq_kernels.cpu.kept_code import compiler

NARROW, WIDE = 2, 4  # bits
_compile = compiler()
_LOW, _NEXT = np.uint32(0x03030303), np.uint32(0x0C0C0C0C)  # codes of the low half of every byte
_FOUR, _TWO = np.uint32(4), np.uint32(2)


def are_nested(narrow: Shape, wide: Shape) -> bool:
    """Whether blocks of the one are those of the other without its two low bits."""
    same = (narrow.rows, narrow.inputs, narrow.group_size, narrow.symmetric) == (
        wide.rows, wide.inputs, wide.group_size, wide.symmetric
    )  # fmt: skip
    units = narrow.unit == wide.unit == UNIT
    return same and units and narrow.nested and wide.nested and (narrow.codes, wide.codes) == (str(NARROW), str(WIDE))


def plane_bytes(narrow: Shape) -> int:
    """Bytes of the plane that a promotion brings."""
    return narrow.blocks * narrow.scales_at


@_compile  # type: ignore[untyped-decorator]
def _spread(word):  # type: ignore[no-untyped-def]
    """The codes of the low half of every byte, each at the beginning of a half byte."""
    return (word & _LOW) | ((word & _NEXT) << _TWO)


@_compile  # type: ignore[untyped-decorator]
def _gathered(word):  # type: ignore[no-untyped-def]
    """The inverse."""
    return (word & _LOW) | ((word >> _TWO) & _NEXT)


@_compile  # type: ignore[untyped-decorator]
def _join(high, low, out, lines):  # type: ignore[no-untyped-def]
    """Words [B, lines * 16] of both planes as words [B, 2 * lines * 16] of 4 bits."""
    for block in range(high.shape[0]):
        for line in range(lines):
            for lane in range(16):
                one, two = high[block, line * 16 + lane], low[block, line * 16 + lane]
                at = line * 32 + lane
                out[block, at] = (_spread(one) << _TWO) | _spread(two)
                out[block, at + 16] = (_spread(one >> _FOUR) << _TWO) | _spread(two >> _FOUR)


@_compile  # type: ignore[untyped-decorator]
def _part(words, out, lines, shift):  # type: ignore[no-untyped-def]
    """One plane [B, lines * 16] of words [B, 2 * lines * 16] of 4 bits: the high one for a shift of 2."""
    for block in range(words.shape[0]):
        for line in range(lines):
            for lane in range(16):
                at = line * 32 + lane
                first, second = words[block, at] >> shift, words[block, at + 16] >> shift
                out[block, line * 16 + lane] = _gathered(first) | (_gathered(second) << _FOUR)


@_compile  # type: ignore[untyped-decorator]
def _copy_grid(given, first, out, at, count):  # type: ignore[no-untyped-def]
    """`count` bytes of each block, from one place on, into those of another [B, stride], from `at` on; zeros behind."""
    for block in range(given.shape[0]):
        for byte in range(count):
            out[block, at + byte] = given[block, first + byte]
        for byte in range(at + count, out.shape[1]):
            out[block, byte] = 0


def low_plane(wide: Tensor, shape: Shape, narrow: Shape, into: Tensor) -> None:
    """The two low bits of the codes of a matrix's bytes at 4 bits into [plane_bytes]."""
    out = into.view(narrow.blocks, narrow.scales_at).numpy().view(np.uint32)
    _part(_words(wide, shape), out, narrow.words, np.uint32(0))


def widened(narrow_bytes: Tensor, plane: Tensor, narrow: Shape, wide: Shape, into: Tensor) -> None:
    """A matrix's bytes at 4 bits, of those at 2 bits and what they lack."""
    low = plane.view(narrow.blocks, narrow.scales_at).numpy().view(np.uint32)
    _join(_words(narrow_bytes, narrow), low, _words(into, wide), narrow.words)
    _put_grid(narrow_bytes, narrow, into, wide)


def narrowed(wide_bytes: Tensor, wide: Shape, narrow: Shape, into: Tensor) -> None:
    """A matrix's bytes at 2 bits, of those at 4 bits."""
    _part(_words(wide_bytes, wide), _words(into, narrow), narrow.words, _TWO)
    _put_grid(wide_bytes, wide, into, narrow)


def _words(held: Tensor, shape: Shape) -> np.ndarray:  # type: ignore[type-arg]
    """[blocks, words * 16], a view."""
    blocks = held.numpy().view(np.uint32).reshape(shape.blocks, shape.stride // 4)
    return blocks[:, : shape.words * LANES]


def _put_grid(source: Tensor, of: Shape, into: Tensor, to: Shape) -> None:
    """Scales and zero points, and what fills up the last cache line."""
    given, out = source.numpy().reshape(of.blocks, of.stride), into.numpy().reshape(to.blocks, to.stride)
    _copy_grid(given, of.scales_at, out, to.scales_at, (2 + to.has_zeros) * LANES * to.groups)
