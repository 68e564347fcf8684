"""Grids of groups on a CPU, compiled: what grids.py has for any device, bit for bit, and the error of rounding to them.

Letters: E experts, g inputs of a group, B bit widths, N output rows, R = B*N, C candidate grids; arrays are contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moeq.numerics.sweep import MAGIC, compiled, in_threads, tile_at, tiles_of
from moeq_kernels.cpu.kept_code import compiler, internal
from moeq_kernels.grids import LEAST_SCALE, SCALE_DTYPE, SIGN_ZERO, Symmetry, max_codes

LARGEST_SCALE = torch.finfo(SCALE_DTYPE).max
_exactly = compiler()  # no product is fused with a sum, as in torch
_inside = internal()


@_inside  # type: ignore[untyped-decorator]
def _storable(scale):  # type: ignore[no-untyped-def]
    """One scale as `grids.storable` has it, in float32."""
    single = np.float32(min(scale, LARGEST_SCALE))
    bits = single.view(np.uint32)
    odd = (bits >> np.uint32(13)) & np.uint32(1)
    half = np.uint32((bits + np.uint32(0xFFF) + odd) & np.uint32(0xFFFFE000)).view(np.float32)  # 11 binary digits
    fixed = (single + np.float32(0.75)) - np.float32(0.75)  # multiples of 2^-24, what float16 has below 2^-14
    half = fixed if np.float32(0) < single < np.float32(2.0**-14) else half
    half = single if single != single else half
    return np.float32(LEAST_SCALE) if half == 0 and scale > 0 else half


@_exactly  # type: ignore[untyped-decorator]
def _grids_between(  # type: ignore[no-untyped-def]
    low, high, size, shrinks, top, symmetric, more, scale, inverse, zero, first, last
):
    """`grids.grid_between` of shrinks [C] times the range: low, high and size [E, R]; scale, inverse, zero [C, E, R].

    top: [B] largest codes; more: codes above them that a symmetric range is divided by.
    """
    rows = low.shape[1] // top.shape[0]
    kind = low.dtype.type
    nothing, tiny, middle = kind(0), kind(1e-12), kind(SIGN_ZERO)
    for item in range(first, last):
        expert, width, _, count, offset = tile_at(item, top.shape[0], rows)
        lows = low[expert, offset : offset + count]
        highs = high[expert, offset : offset + count]
        sizes = size[expert, offset : offset + count]
        highest = top[width]
        for grid in range(shrinks.shape[0]):
            shrink = shrinks[grid]
            steps = scale[grid, expert, offset : offset + count]
            inverses = inverse[grid, expert, offset : offset + count]
            zeros = zero[grid, expert, offset : offset + count]
            if highest == 1:
                for lane in range(count):
                    steps[lane] = _storable(kind(2) * sizes[lane])
                    zeros[lane] = middle
            elif symmetric:
                for lane in range(count):
                    below = -(lows[lane] * shrink)
                    above = highs[lane] * shrink
                    steps[lane] = _storable((above if above > below else below) * kind(2) / (highest + more))
                    zeros[lane] = (highest + kind(1)) / kind(2)
            else:
                for lane in range(count):
                    steps[lane] = _storable((highs[lane] * shrink - lows[lane] * shrink) / highest)
                for lane in range(count):
                    place = np.rint(-(lows[lane] * shrink) / max(steps[lane], tiny))
                    place = min(max(place, nothing), highest)
                    zeros[lane] = place if steps[lane] > nothing else nothing
            for lane in range(count):
                inverses[lane] = kind(1) / max(steps[lane], tiny) if steps[lane] > nothing else nothing


@compiled  # type: ignore[untyped-decorator]
def _grid_errors(  # type: ignore[no-untyped-def]
    weights, importance, scale, inverse, zero, top, magic, errors, first, last
):
    """Weighted sum of cubed errors of rounding to each of C grids, into errors [C, E, R]; 0 at 1 bit.

    weights [E, g, N], the same at all widths, or [E, g, R]; importance [E, g]; scale, inverse, zero [C, E, R]; top [B].
    """
    widths = top.shape[0]
    rows = errors.shape[2] // widths
    shared = weights.shape[2] == rows
    lowest = magic - magic
    for item in range(first, last):
        expert, width, begin, count, offset = tile_at(item, widths, rows)
        highest = top[width]
        if not shared:
            begin = offset
        for grid in range(scale.shape[0]):
            steps = scale[grid, expert, offset : offset + count]
            inverses = inverse[grid, expert, offset : offset + count]
            zeros = zero[grid, expert, offset : offset + count]
            total = errors[grid, expert, offset : offset + count]
            for lane in range(count):
                total[lane] = 0
            if highest == 1:
                continue
            for k in range(weights.shape[1]):
                source = weights[expert, k, begin : begin + count]
                counts = importance[expert, k]
                for lane in range(count):
                    rounded = (source[lane] * inverses[lane] + zeros[lane] + magic) - magic
                    rest = source[lane] - (min(max(rounded, lowest), highest) - zeros[lane]) * steps[lane]
                    total[lane] += counts * (rest * rest * abs(rest))


def grids_between(
    low: Tensor, high: Tensor, size: Tensor, bits: Sequence[int], symmetric: Symmetry, shrinks: Sequence[float] = (1.0,)
) -> tuple[Tensor, Tensor, Tensor]:
    """`grids.grid_between` of shrinks times a group's range, with the inverse: scale, `inverse_scale`, zero
    [C, E, B, N].

    low, high, size: [E, B, N], a group's `grids.extent`, float32 or float64, in main memory.
    """
    experts, widths, rows = low.shape
    ends = [end.flatten(1).contiguous() for end in (low, high, size)]
    factors = torch.tensor(shrinks, dtype=low.dtype)
    top = max_codes(bits, low).flatten()
    more = {"narrow": -1, "full": 1}.get(str(symmetric), 0)
    found = tuple(low.new_empty(len(shrinks), experts, widths * rows) for _ in range(3))
    tiles = tiles_of(experts, widths, rows)
    in_threads(_grids_between, tiles, *ends, factors, top, bool(symmetric), top.numpy().dtype.type(more), *found)
    return tuple(part.unflatten(2, (widths, rows)) for part in found)  # type: ignore[return-value]


def grid_errors(
    weights: Tensor, importance: Tensor, scale: Tensor, inverse: Tensor, zero: Tensor, top: Tensor
) -> Tensor:
    """Weighted sum of cubed errors of rounding each row of a group to each of C grids, [C, E, R]; 0 at 1 bit.

    weights: [E, g, N], the same at all widths, or [E, g, R]; importance: [E, g]; scale, inverse, zero: [C, E, R]; top:
    [B] largest codes. All of one type, float32 or float64, contiguous, in main memory.
    """
    errors = torch.empty_like(scale)
    tiles = tiles_of(scale.shape[1], len(top), scale.shape[2] // len(top))
    magic = MAGIC[weights.dtype]
    in_threads(_grid_errors, tiles, weights, importance, scale, inverse, zero, top, magic, errors)
    return errors
