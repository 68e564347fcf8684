"""The launches of a layer: sorting rows by expert, products of one or two matrices an expert, the weighted sum.

Nothing here goes through the host: the number of programs follows from shapes alone, and each finds its expert, its
rows and its matrix's width in tables on the device. So a layer can be captured in a CUDA graph, whatever the routing.

Imported only where Triton is installed. Letters: E experts, T tokens, k experts a token, P = T*k rows, N rows and K
inputs of a matrix, S projections, B rows of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moeq_kernels.gpu.codes import multiplied, tile


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def sort_rows(index, order, starts, rows, experts, BLOCK: tl.constexpr, EVERY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows by expert, those of one expert in their order: order int32 [P]; starts int32 [E + 1].

    A row's place is the number of rows before it, counted by comparing with all of them. Programs: P / BLOCK for the
    rows, then (E + 1) / BLOCK for the experts' starts.
    """
    program = tl.program_id(0)
    blocks = (rows + BLOCK - 1) // BLOCK
    mine = tl.arange(0, BLOCK) + BLOCK * tl.where(program < blocks, program, program - blocks)
    if program < blocks:
        key = tl.minimum(tl.load(index + mine, mask=mine < rows, other=0).to(tl.int32), experts)
    else:
        key = mine
    place = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, rows, EVERY):
        other = first + tl.arange(0, EVERY)
        keys = tl.minimum(tl.load(index + other, mask=other < rows, other=0).to(tl.int32), experts)
        less = (keys[None, :] < key[:, None]) & (other < rows)[None, :]
        if program < blocks:
            same = (keys[None, :] == key[:, None]) & (other[None, :] < mine[:, None])
            less = less | same
        place += tl.sum(less.to(tl.int32), 1)
    if program < blocks:
        tl.store(order + place, mine, mask=mine < rows)
    else:
        tl.store(starts + mine, place, mask=mine <= experts)


@triton.jit  # type: ignore[untyped-decorator]
def dense_product(  # type: ignore[no-untyped-def]
    total, dense, x, token, exists, n, rows, inputs, first, last, base, DTYPE: tl.constexpr, DOT: tl.constexpr
):
    """A total plus the product of the tiles from first to last of a matrix that is not packed."""
    for number in range(first, last):
        k = 128 * number + tl.arange(0, 128)
        there = (n < rows)[:, None] & (k < inputs)[None, :]
        value = tl.load(dense + base + n.to(tl.int64)[:, None] * inputs + k[None, :], mask=there, other=0.0)
        made, _ = multiplied(value, x, k, k < inputs, token, exists, DTYPE, DOT)
        total += made
    return total


@triton.jit  # type: ignore[untyped-decorator]
def product(  # type: ignore[no-untyped-def]
    words,
    shorts,
    halves,
    octets,
    dense,
    singles,
    row,
    grid,
    x,
    token,
    exists,
    n,
    rows,
    inputs,
    first,
    last,
    WIDTHS: tl.constexpr,
    FINE: tl.constexpr,
    TAIL: tl.constexpr,
    DTYPE: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """A matrix's rows n times tokens, float32 [N, M]; the bias is added by the part of K that begins it.

    row, grid: the matrix's row of the table; first, last: tiles of K. Of the branches by width only those that the
    layer has (WIDTHS) are compiled, and a program takes one.
    """
    width = tl.load(row)
    base = tl.load(row + 1)
    scales = tl.load(row + 2)
    zeros = tl.load(row + 3)
    zero_bits = tl.load(row + 4).to(tl.int32)
    group = tl.load(row + 5).to(tl.int32)
    bias = tl.load(row + 6)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    full = inputs // 128
    for BITS in tl.static_range(1, 9):
        if (WIDTHS >> BITS) & 1:  # noqa: SIM102  the compiler decides this one, the program the next
            if width == BITS:
                for number in range(first, tl.minimum(last, full)):
                    total += tile(
                        words, shorts, halves, octets, x, token, exists, n, rows, inputs, number, 8,
                        base, scales, zeros, zero_bits, group, grid, BITS, True, FINE, DTYPE, DOT,
                    )  # fmt: skip
                if TAIL:
                    for number in range(tl.maximum(first, full), last):
                        total += tile(
                            words, shorts, halves, octets, x, token, exists, n, rows, inputs, number,
                            (inputs + 15) // 16 - 8 * number,
                            base, scales, zeros, zero_bits, group, grid, BITS, False, FINE, DTYPE, DOT,
                        )  # fmt: skip
    if WIDTHS >= 1 << 16:  # noqa: SIM102
        if width >= 16:
            total = dense_product(total, dense, x, token, exists, n, rows, inputs, first, last, base, DTYPE, DOT)
    if (bias >= 0) & (first == 0):
        total += tl.load(singles + bias + n, mask=n < rows, other=0.0)[:, None]
    return total


@triton.jit  # type: ignore[untyped-decorator]
def activated(value, NAME: tl.constexpr):  # type: ignore[no-untyped-def]
    """An activation by its name in transformers, of float32."""
    if NAME == "silu":
        return value * tl.sigmoid(value)
    elif NAME == "gelu":
        return 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    elif NAME == "gelu_tanh":
        return value * tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
    elif NAME == "quick_gelu":
        return value * tl.sigmoid(1.702 * value)
    elif NAME == "relu2":
        return tl.maximum(value, 0.0) * tl.maximum(value, 0.0)
    else:
        tl.static_assert(NAME == "relu")
        return tl.maximum(value, 0.0)


@triton.jit(do_not_specialize=["pairs"])  # type: ignore[untyped-decorator]
def grouped(  # type: ignore[no-untyped-def]
    words,
    shorts,
    halves,
    octets,
    dense,
    singles,
    table,
    grids,
    x,
    index,
    order,
    starts,
    out,
    pairs,
    experts,
    slots,
    rows,
    inputs,
    x_step,
    each,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROUTING: tl.constexpr,
    EXPERTS: tl.constexpr,
    WIDTHS: tl.constexpr,
    FINE: tl.constexpr,
    TAIL: tl.constexpr,
    DTYPE: tl.constexpr,
    DOT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Products of sorted rows with their experts' matrices, [splits, P, N]; of two, act(first) * second.

    Programs: blocks of N, blocks of rows, splits of K. FIRST and SECOND: slots of projections, SECOND -1 where one is
    asked for. ROUTING: "sorted", by order and starts; "rows", a program a row, which finds its expert in index [P]; or
    "one", all rows are expert 0's. each: rows of `order` that share a row of x, whose rows are x_step apart.
    """
    block = tl.program_id(1)
    if ROUTING == "sorted":
        one = tl.arange(0, EXPERTS)
        begin = tl.load(starts + one, mask=one < experts, other=0)
        count = tl.load(starts + one + 1, mask=one < experts, other=0) - begin
        blocks = (count + BLOCK_M - 1) // BLOCK_M
        ends = tl.cumsum(blocks, 0)
        expert = tl.sum(((ends <= block) & (one < experts)).to(tl.int32), 0)
        mine = one == expert
        at = tl.sum(tl.where(mine, begin + (block - ends + blocks) * BLOCK_M, 0), 0) + tl.arange(0, BLOCK_M)
        exists = at < tl.sum(tl.where(mine, begin + count, 0), 0)
        pair = tl.load(order + at, mask=exists, other=0)
    elif ROUTING == "rows":
        pair = block + tl.arange(0, BLOCK_M)
        exists = tl.arange(0, BLOCK_M) == 0
        expert = tl.load(index + block).to(tl.int32)
    else:
        pair = block * BLOCK_M + tl.arange(0, BLOCK_M)
        exists = pair < pairs
        expert = block * 0
    if expert < experts:
        token = (pair // each).to(tl.int64) * x_step
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        tiles = (inputs + 127) // 128
        share = (tiles + SPLITS - 1) // SPLITS
        split = tl.program_id(2)
        first = split * share
        last = tl.minimum(first + share, tiles)
        at_table = (expert * slots).to(tl.int64)
        result = product(
            words, shorts, halves, octets, dense, singles, table + (at_table + FIRST) * 8,
            grids + (at_table + FIRST) * 3, x, token, exists, n, rows, inputs, first, last,
            WIDTHS, FINE, TAIL, DTYPE, DOT, BLOCK_N, BLOCK_M,
        )  # fmt: skip
        if ACTIVATION != "":
            result = activated(result, ACTIVATION)
        if SECOND >= 0:
            result *= product(
                words, shorts, halves, octets, dense, singles, table + (at_table + SECOND) * 8,
                grids + (at_table + SECOND) * 3, x, token, exists, n, rows, inputs, first, last,
                WIDTHS, FINE, TAIL, DTYPE, DOT, BLOCK_N, BLOCK_M,
            )  # fmt: skip
        place = (split * pairs + pair).to(tl.int64) * rows
        kept = (n < rows)[:, None] & exists[None, :]
        tl.store(out + place[None, :] + n[:, None], result.to(out.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["pairs"])  # type: ignore[untyped-decorator]
def weighted_sum(  # type: ignore[no-untyped-def]
    rows, index, weights, out, pairs, experts, each, width, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Rows [splits, P, H] summed over splits and over each token's experts, times their weights [P]: out [T, H].

    Rows without an expert are not read. The order of the sum is that of the experts: always the same.
    """
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for number in range(each):
        pair = token * each + number
        there = (column < width) & (tl.load(index + pair) < experts)
        one = tl.zeros((BLOCK,), tl.float32)
        for split in tl.static_range(SPLITS):
            at = (split * pairs + pair).to(tl.int64) * width
            one += tl.load(rows + at + column, mask=there, other=0.0).to(tl.float32)
        total += one * tl.load(weights + pair).to(tl.float32)
    tl.store(out + token.to(tl.int64) * width + column, total.to(out.dtype.element_ty), mask=column < width)
