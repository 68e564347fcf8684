"""The column loop of GPTQ on a CPU, compiled: blocks of columns held in the first-level cache, many rows side by side.

A row's columns must be rounded in order, but rows are independent: a tile of LANES rows and the columns of one block
is loaded once, and every column's feedback to the later ones is applied inside it, four columns at a time. What a block
owes to the columns before it comes from one matrix product outside.

Letters: E experts, K inputs, B bit widths, N output rows, R = B*N, G groups; arrays are contiguous.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

LANES = 128  # rows of a tile: with 128 columns in float32, 64 KiB of targets and as much of residuals
_MAGIC = {torch.float32: np.float32(1.5 * 2.0**23), torch.float64: np.float64(1.5 * 2.0**52)}
_compile = njit(nogil=True, cache=True, fastmath={"contract"}, error_model="numpy")


@_compile  # type: ignore[untyped-decorator]
def _solve_extent(columns, feedback, factor, start, low, high, size, first, last):  # type: ignore[no-untyped-def]
    """Least, largest and mean absolute weight of a group as the feedback of all earlier columns would move it.

    columns [E, K, N]; feedback [E, g, R]; factor [E, K, K], unit upper triangular; low, high, size [E, R] are filled
    for the tiles first to last of E x B x chunks of N. What earlier columns owe, x, solves the unit triangular system
    of the group's own part of the factor: x_k = feedback_k - sum_{i<k} M_ik x_i.
    """
    rows = columns.shape[2]
    widths = low.shape[1] // rows
    chunks = (rows + LANES - 1) // LANES
    inputs = feedback.shape[1]
    tile = np.zeros((inputs, LANES), columns.dtype)
    for item in range(first, last):
        expert, rest = divmod(item, widths * chunks)
        width, chunk = divmod(rest, chunks)
        begin = chunk * LANES
        count = min(LANES, rows - begin)
        offset = width * rows + begin
        for k in range(inputs):
            source = feedback[expert, k]
            for lane in range(count):
                tile[k, lane] = source[offset + lane]
        for i in range(inputs):
            head = tile[i]
            for k in range(i + 1, inputs):
                weight = factor[expert, start + i, start + k]
                into = tile[k]
                for lane in range(LANES):
                    into[lane] -= weight * head[lane]
        least, largest, total = low[expert], high[expert], size[expert]
        for lane in range(count):
            least[offset + lane] = 0
            largest[offset + lane] = 0
            total[offset + lane] = 0
        for k in range(inputs):
            source = columns[expert, start + k]
            moved = tile[k]
            for lane in range(count):
                value = source[begin + lane] + moved[lane]
                least[offset + lane] = min(least[offset + lane], value)
                largest[offset + lane] = max(largest[offset + lane], value)
                total[offset + lane] += abs(value)
        for lane in range(count):
            total[offset + lane] /= inputs


@_compile  # type: ignore[untyped-decorator]
def _round_block(  # type: ignore[no-untyped-def]
    columns, feedback, factor, start, scale, inverse, zero, top, group_of, magic, residual, codes, first, last
):
    """Round the columns of one block in order; fills residual [E, K, R] and codes [E, B, N, K].

    feedback [E, b, R]: from all columns before the block; scale, inverse, zero [E, G, R]; top [R]; group_of [E, K].
    """
    rows = columns.shape[2]
    widths = top.shape[0] // rows
    chunks = (rows + LANES - 1) // LANES
    block = feedback.shape[1]
    target = np.zeros((block, LANES), columns.dtype)
    left = np.zeros((block, LANES), columns.dtype)
    made = np.zeros((block, LANES), np.uint8)
    for item in range(first, last):
        expert, rest = divmod(item, widths * chunks)
        width, chunk = divmod(rest, chunks)
        begin = chunk * LANES
        count = min(LANES, rows - begin)
        offset = width * rows + begin
        highest = top[offset : offset + count]
        for k in range(block):
            source = columns[expert, start + k]
            given = feedback[expert, k]
            into = target[k]
            for lane in range(count):
                into[lane] = source[begin + lane] + given[offset + lane]
        for low in range(0, block, 4):
            high = min(low + 4, block)
            for j in range(low, high):
                group = group_of[expert, start + j]
                steps = scale[expert, group, offset : offset + count]
                inverses = inverse[expert, group, offset : offset + count]
                zeros = zero[expert, group, offset : offset + count]
                source = columns[expert, start + j, begin : begin + count]
                wanted, rest_of, code_of = target[j], left[j], made[j]
                for lane in range(count):
                    code = (wanted[lane] * inverses[lane] + zeros[lane] + magic) - magic
                    code = min(max(code, 0 * magic), highest[lane])
                    code_of[lane] = np.uint8(code)
                    rest_of[lane] = source[lane] - (code - zeros[lane]) * steps[lane]
                for k in range(j + 1, high):
                    weight = factor[expert, start + j, start + k]
                    into = target[k]
                    for lane in range(LANES):
                        into[lane] += weight * rest_of[lane]
            if high - low == 4:
                one, two, three, four = left[low], left[low + 1], left[low + 2], left[low + 3]
                for k in range(high, block):
                    first_weight = factor[expert, start + low, start + k]
                    second_weight = factor[expert, start + low + 1, start + k]
                    third_weight = factor[expert, start + low + 2, start + k]
                    fourth_weight = factor[expert, start + low + 3, start + k]
                    into = target[k]
                    for lane in range(LANES):
                        into[lane] += (
                            first_weight * one[lane]
                            + second_weight * two[lane]
                            + third_weight * three[lane]
                            + fourth_weight * four[lane]
                        )
        for k in range(block):
            into = residual[expert, start + k]
            rest_of = left[k]
            for lane in range(count):
                into[offset + lane] = rest_of[lane]
        for lane in range(count):
            into_codes = codes[expert, width, begin + lane]
            for k in range(block):
                into_codes[start + k] = made[k, lane]


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="moeq-sweep")


def _in_threads(kernel: Callable[..., None], items: int, *arguments: Any) -> None:
    """Run a kernel over its tiles, in as many threads as torch has; it lets go of Python meanwhile."""
    threads = min(torch.get_num_threads(), items)
    if threads == 1 or threading.current_thread() is not threading.main_thread():
        kernel(*arguments, 0, items)
        return
    bounds = [items * index // threads for index in range(threads + 1)]
    pool = _pool(threads)
    done = [pool.submit(kernel, *arguments, *pair) for pair in pairwise(bounds)]
    for one in done:
        one.result()


def _tiles(experts: int, widths: int, rows: int) -> int:
    return experts * widths * -(-rows // LANES)


def extent(columns: Tensor, feedback: Tensor, factor: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """Least (at most 0), largest (at least 0) and mean absolute weight of one group, [E, R] each.

    columns: [E, K, N]; feedback: [E, g, R] from all columns before `start`; factor: [E, K, K] unit upper triangular.
    The weights are taken as the feedback of all earlier columns, those of the group included, would move them.
    """
    experts, rows = columns.shape[0], columns.shape[2]
    found = [torch.empty(experts, feedback.shape[2], dtype=columns.dtype) for _ in range(3)]
    tiles = _tiles(experts, feedback.shape[2] // rows, rows)
    arrays = [tensor.numpy() for tensor in (columns, feedback, factor)]
    _in_threads(_solve_extent, tiles, *arrays, start, *(tensor.numpy() for tensor in found))
    return found[0], found[1], found[2]


def round_block(
    columns: Tensor,
    feedback: Tensor,
    factor: Tensor,
    start: int,
    grids: tuple[Tensor, Tensor, Tensor],
    top: Tensor,
    group_of: Tensor,
    residual: Tensor,
    codes: Tensor,
) -> None:
    """Round the columns from `start` on, as many as `feedback` [E, b, R] has; fills residual and codes.

    columns: [E, K, N]; factor: [E, K, K]; grids: scale, its inverse and zero, [E, G, R]; top: [R] largest code;
    group_of: [E, K] int64; residual: [E, K, R]; codes: [E, B, N, K] uint8. All contiguous, in main memory.
    """
    tiles = _tiles(codes.shape[0], codes.shape[1], codes.shape[2])
    arrays = [tensor.numpy() for tensor in (columns, feedback, factor)]
    more = [tensor.numpy() for tensor in (*grids, top, group_of)]
    magic = _MAGIC[columns.dtype]
    _in_threads(_round_block, tiles, *arrays, start, *more, magic, residual.numpy(), codes.numpy())
