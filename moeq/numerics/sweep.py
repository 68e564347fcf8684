"""The column loop of GPTQ on a CPU, compiled: blocks of columns held in the first-level cache, many rows side by side.

A row's columns must be rounded in order, but rows are independent: a strip of rows goes through the columns of one
block at once, panel by panel (panels.py), and every column's feedback to the later ones is applied inside it, four
columns at a time. What a block owes to the columns before it comes from one matrix product outside.

Letters: E experts, K inputs, B bit widths, N output rows, R = B*N, G groups, g inputs of a group, b columns of a block,
C candidate grids; arrays are contiguous.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeq.numerics.panels import VECTOR_BYTES, VECTORS, extent_strip, fetch_strip, round_strip
from moeq_kernels.cpu.kept_code import compiler, internal

BLOCK = 128  # columns that the inner loop rounds one by one
LANES = 128  # rows of a tile, what threads divide among each other
MAGIC = {torch.float32: np.float32(1.5 * 2.0**23), torch.float64: np.float64(1.5 * 2.0**52)}
compiled = compiler(fastmath={"contract"})
inside = internal(fastmath={"contract"})


@inside  # type: ignore[untyped-decorator]
def tile_at(item, widths, rows):  # type: ignore[no-untyped-def]
    """Expert, width, first row, number of rows and first lane (of all widths) of a tile of E x B x chunks of N."""
    chunks = (rows + LANES - 1) // LANES
    expert, place = divmod(item, widths * chunks)
    width, chunk = divmod(place, chunks)
    begin = chunk * LANES
    return expert, width, begin, min(LANES, rows - begin), width * rows + begin


@inside  # type: ignore[untyped-decorator]
def _strip(like):  # type: ignore[no-untyped-def]
    """Rows of a strip, S."""
    return VECTORS * VECTOR_BYTES // like.itemsize


@inside  # type: ignore[untyped-decorator]
def _store(into, tile, expert, start, offset, count):  # type: ignore[no-untyped-def]
    """Columns of a tile [b, LANES] into those of `into` [E, K, R] from (start, offset) on."""
    for k in range(tile.shape[0]):
        line = into[expert, start + k, offset : offset + count]
        source = tile[k]
        for lane in range(count):
            line[lane] = source[lane]


@inside  # type: ignore[untyped-decorator]
def _load(tile, columns, feedback, expert, start, begin, offset, count):  # type: ignore[no-untyped-def]
    """Fill a tile [b, LANES] with columns [E, K, N] from (start, begin) on and what they were given [E, b, R]."""
    for k in range(tile.shape[0]):
        source = columns[expert, start + k, begin : begin + count]
        given = feedback[expert, k, offset : offset + count]
        line = tile[k]
        for lane in range(count):
            line[lane] = source[lane] + given[lane]


@inside  # type: ignore[untyped-decorator]
def _pack(gifts, factor, expert, start):  # type: ignore[no-untyped-def]
    """What the columns of a block give to each other into gifts [b, b]: in the factor, lines of powers of two of bytes
    apart would push each other out of the cache."""
    for i in range(gifts.shape[0]):
        line = factor[expert, start + i, start : start + gifts.shape[0]]
        into = gifts[i]
        for k in range(gifts.shape[0]):
            into[k] = line[k]


@inside  # type: ignore[untyped-decorator]
def _give(into, given, factor, expert, start, column, end):  # type: ignore[no-untyped-def]
    """Add what a column gives to the later ones up to end."""
    for k in range(column + 1, end):
        weight = factor[expert, start + column, start + k]
        line = into[k]
        for lane in range(LANES):
            line[lane] += weight * given[lane]


@inside  # type: ignore[untyped-decorator]
def _owe(into, given, factor, expert, start, first, end, stop):  # type: ignore[no-untyped-def]
    """Add what four columns, first to end, give to all later ones up to stop."""
    if end - first < 4:
        return  # the last ones, with none behind them
    given1 = given[first]
    given2 = given[first + 1]
    given3 = given[first + 2]
    given4 = given[first + 3]
    for k in range(first + 4, stop):
        weight1 = factor[expert, start + first, start + k]
        weight2 = factor[expert, start + first + 1, start + k]
        weight3 = factor[expert, start + first + 2, start + k]
        weight4 = factor[expert, start + first + 3, start + k]
        line = into[k]
        for lane in range(LANES):
            line[lane] += (
                weight1 * given1[lane] + weight2 * given2[lane] + weight3 * given3[lane] + weight4 * given4[lane]
            )


@compiled  # type: ignore[untyped-decorator]
def _solve_extent(columns, feedback, factor, start, low, high, size, keep, first, last):  # type: ignore[no-untyped-def]
    """Least, largest and mean absolute weight of a group as the feedback of all earlier columns would move it.

    columns [E, K, N]; feedback [E, g, R]; factor [E, K, K], unit upper triangular; low, high, size [E, R] are filled
    for the tiles first to last of E x B x chunks of N, and keep [E, g, R] with the weights themselves where it is not
    empty. What earlier columns owe, x, solves the unit triangular system of the group's own part of the factor:
    x_k = feedback_k - sum_{i<k} M_ik x_i.
    """
    rows = columns.shape[2]
    widths = low.shape[1] // rows
    inputs = feedback.shape[1]
    gifts = np.zeros((inputs, inputs), columns.dtype)
    solved = np.zeros((inputs, _strip(columns)), columns.dtype)
    packed = -1
    for item in range(first, last):
        expert, _, tile, lanes, place = tile_at(item, widths, rows)
        if expert != packed:
            _pack(gifts, factor, expert, start)
            packed = expert
        for moved in range(0, lanes, solved.shape[1]):
            count = min(lanes - moved, solved.shape[1])
            begin, offset = tile + moved, place + moved
            least = low[expert, offset : offset + count]
            largest = high[expert, offset : offset + count]
            total = size[expert, offset : offset + count]
            least[:] = 0
            largest[:] = 0
            total[:] = 0
            extent_strip(
                columns[expert, start : start + inputs, begin : begin + count],
                feedback[expert, :, offset : offset + count],
                gifts,
                solved,
                least,
                largest,
                total,
                keep[expert, :, offset : offset + count],
                keep.shape[1] > 0,
                inputs,
                count,
            )
            for lane in range(count):
                total[lane] /= inputs


@compiled  # type: ignore[untyped-decorator]
def _round_block(  # type: ignore[no-untyped-def]
    columns,
    feedback,
    factor,
    start,
    scale,
    inverse,
    zero,
    top,
    group_of,
    magic,
    residual,
    codes,
    at_expert,
    at_row,
    first,
    last,
):
    """Round the columns of one block in order; fills residual [E, K, R] and codes [.., B, .., K] from (at) on.

    feedback [E, b, R]: from all columns before the block; scale, inverse, zero [E, G, R]; top [R]; group_of [E, K].
    """
    rows = columns.shape[2]
    widths = top.shape[0] // rows
    block = feedback.shape[1]
    gifts = np.zeros((block, block), columns.dtype)
    left = np.zeros((block, _strip(columns)), columns.dtype)
    made = np.zeros((left.shape[1], block), np.uint8)
    packed = -1
    for item in range(first, last):
        expert, width, tile, lanes, place = tile_at(item, widths, rows)
        if expert != packed:
            _pack(gifts, factor, expert, start)
            packed = expert
        for moved in range(0, lanes, left.shape[1]):
            count = min(lanes - moved, left.shape[1])
            begin, offset = tile + moved, place + moved
            lines = codes[at_expert + expert, width, at_row + begin : at_row + begin + count, start : start + block]
            fetch_strip(lines, block, count)
            round_strip(
                columns[expert, start : start + block, begin : begin + count],
                feedback[expert, :, offset : offset + count],
                gifts,
                left,
                scale[expert, :, offset : offset + count],
                inverse[expert, :, offset : offset + count],
                zero[expert, :, offset : offset + count],
                group_of[expert, start : start + block],
                top[offset : offset + count],
                residual[expert, start : start + block, offset : offset + count],
                made,
                magic,
                block,
                count,
            )
            for lane in range(count):
                line = lines[lane]
                for k in range(block):
                    line[k] = made[lane, k]


@inside  # type: ignore[untyped-decorator]
def _nearest(place, counts, least, best):  # type: ignore[no-untyped-def]
    """Into best [LANES] the code of 4 bits whose distances cost the least, into least what it costs.

    place [3, LANES]: what is wanted in codes of 2, 3 and 4 bits; counts [3]: of the squares of distances to them.
    """
    kind = place.dtype.type
    nothing, unit, half_unit = kind(0), kind(1), kind(0.5)
    two, three, four = place[0], place[1], place[2]
    for lane in range(LANES):
        least[lane] = np.inf
    for middle in range(8):  # by the 3-bit code; of the two 4-bit ones in it, the nearer
        high = kind(middle >> 1)
        half = kind(middle)
        low = kind(2 * middle)
        for lane in range(LANES):
            first_bits = high - two[lane]
            more_bits = half - three[lane]
            all_bits = low - four[lane]
            upper = unit if all_bits < -half_unit else nothing
            all_bits += upper
            cost = (
                counts[0] * (first_bits * first_bits)
                + counts[1] * (more_bits * more_bits)
                + counts[2] * (all_bits * all_bits)
            )
            better = cost < least[lane]
            least[lane] = cost if better else least[lane]
            best[lane] = low + upper if better else best[lane]


@compiled  # type: ignore[untyped-decorator]
def _round_nested(  # type: ignore[no-untyped-def]
    columns, feedback, factor, start, scale, inverse, zero, counts, residual, codes, at_expert, at_row, first, last
):
    """As _round_block for codes of 4 bits, of which those of 3 and 2 bits are the leading ones.

    columns [E, K, N]; feedback [E, b, R], widths 2, 3 and 4; scale, inverse, zero [E, R] of the block's group;
    counts [B]: what the square of a width's distance, in its own codes, counts in the choice.
    """
    rows = columns.shape[2]
    widths = counts.shape[0]
    block = feedback.shape[1]
    target = np.zeros((widths, block, LANES), columns.dtype)
    left = np.zeros((widths, block, LANES), columns.dtype)
    made = np.zeros((block, LANES), np.uint8)
    place = np.zeros((widths, LANES), columns.dtype)
    least = np.zeros(LANES, columns.dtype)
    best = np.zeros(LANES, columns.dtype)
    for item in range(first, last):
        expert, _, begin, count, _ = tile_at(item, 1, rows)
        for width in range(widths):
            _load(target[width], columns, feedback, expert, start, begin, width * rows + begin, count)
        for j in range(0, block, 4):
            end = min(j + 4, block)
            for i in range(j, end):
                for width in range(widths):
                    offset = width * rows + begin
                    inverses = inverse[expert, offset : offset + count]
                    zeros = zero[expert, offset : offset + count]
                    wanted = target[width, i]
                    into = place[width]
                    for lane in range(count):
                        into[lane] = wanted[lane] * inverses[lane] + zeros[lane]
                _nearest(place, counts, least, best)
                for lane in range(LANES):
                    made[i, lane] = np.uint8(best[lane])
                source = columns[expert, start + i, begin : begin + count]
                for width in range(widths):
                    offset = width * rows + begin
                    steps = scale[expert, offset : offset + count]
                    zeros = zero[expert, offset : offset + count]
                    shift = widths - 1 - width
                    rest = left[width, i]
                    for lane in range(count):
                        rest[lane] = source[lane] - ((made[i, lane] >> shift) - zeros[lane]) * steps[lane]
                    _give(target[width], rest, factor, expert, start, i, end)
            for width in range(widths):
                _owe(target[width], left[width], factor, expert, start, j, end, block)
        for width in range(widths):
            _store(residual, left[width], expert, start, width * rows + begin, count)
            for lane in range(count):
                line = codes[at_expert + expert, width, at_row + begin + lane, start : start + block]
                for k in range(block):
                    line[k] = made[k, lane] >> (widths - 1 - width)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="moeq-sweep")


os.register_at_fork(after_in_child=_pool.cache_clear)  # which has none of its threads


def in_threads(kernel: Callable[..., None], tiles: int, *arguments: Any) -> None:
    """Run a kernel over its tiles, in as many threads as torch has; it lets go of Python meanwhile."""
    if not all(value.is_contiguous() for value in arguments if isinstance(value, Tensor)):
        raise ValueError("arguments of a compiled loop must be contiguous")
    arguments = tuple(value.numpy() if isinstance(value, Tensor) else value for value in arguments)
    threads = min(torch.get_num_threads(), tiles)
    if threads == 1 or threading.current_thread() is not threading.main_thread():
        kernel(*arguments, 0, tiles)
        return
    bounds = [tiles * index // threads for index in range(threads + 1)]
    pool = _pool(threads)
    for ended in [pool.submit(kernel, *arguments, *pair) for pair in pairwise(bounds)]:
        ended.result()


def tiles_of(experts: int, widths: int, rows: int) -> int:
    """How many tiles `tile_at` numbers."""
    return experts * widths * -(-rows // LANES)


def extent(
    columns: Tensor, feedback: Tensor, factor: Tensor, start: int, *, keep: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Least (at most 0), largest (at least 0) and mean absolute weight of one group, [E, R] each; with `keep` also
    the weights themselves, [E, g, R] (else without elements).

    columns: [E, K, N]; feedback: [E, g, R] from all columns before `start`; factor: [E, K, K] unit upper triangular;
    all of one type, float32 or float64, contiguous, in main memory. The weights are taken as the feedback of all
    earlier columns, those of the group included, would move them.
    """
    experts, rows, lanes = len(columns), columns.shape[2], feedback.shape[2]
    low, high, size = columns.new_empty(3, experts, lanes)
    kept = columns.new_empty(experts, feedback.shape[1] if keep else 0, lanes)
    tiles = tiles_of(experts, lanes // rows, rows)
    in_threads(_solve_extent, tiles, columns, feedback, factor, start, low, high, size, kept)
    return low, high, size, kept


def round_block(
    columns: Tensor,
    feedback: Tensor,
    factor: Tensor,
    start: int,
    grids: Sequence[Tensor],
    top: Tensor,
    group_of: Tensor,
    residual: Tensor,
    codes: Tensor,
    at: tuple[int, int],
) -> None:
    """Round the columns from `start` on, as many as `feedback` [E, b, R] has; fills residual and codes.

    columns: [E, K, N]; factor: [E, K, K]; grids: scale, its inverse and zero, [E, G, R]; top: [R] largest code;
    group_of: [E, K] int64; residual: [E, K, R]; codes: uint8 [.., B, .., K] of all experts and rows, filled from
    expert and row `at` on. Floats of one type, float32 or float64; all contiguous, in main memory.
    """
    tiles = tiles_of(len(columns), codes.shape[1], columns.shape[2])
    magic = MAGIC[columns.dtype]
    in_threads(
        _round_block, tiles, columns, feedback, factor, start, *grids, top, group_of, magic, residual, codes, *at
    )


def round_nested(
    columns: Tensor,
    feedback: Tensor,
    factor: Tensor,
    start: int,
    grids: Sequence[Tensor],
    counts: Tensor,
    residual: Tensor,
    codes: Tensor,
    at: tuple[int, int],
) -> None:
    """As `round_block`, b columns for widths 2, 3 and 4 that share their codes: the narrow ones have the leading bits.

    grids: scale, its inverse and zero of the block's one group, [E, R]; counts: [B] what the square of a width's
    distance, in its own codes, counts in the choice of a code.
    """
    tiles = tiles_of(len(columns), 1, columns.shape[2])
    in_threads(_round_nested, tiles, columns, feedback, factor, start, *grids, counts, residual, codes, *at)
