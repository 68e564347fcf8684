"""The launches of a layer: products of one or two matrices an expert, and matrices unpacked (`sums`: what comes before
and after).

Nothing here goes through the host: the number of programs follows from shapes alone, and each finds its expert, its
rows and its matrix's width in tables on the device. So a layer can be captured in a CUDA graph, whatever the routing.

Imported only where Triton is installed. Letters: E experts, T tokens, k experts a token, P = T*k rows, N rows and K
inputs of a matrix, S projections, B rows of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moeq_kernels.gpu.codes import activated, inputs_at, inputs_of, part_of, tile, uneven, weights_of, words_of
from moeq_kernels.gpu.grid import only, scale_of
from moeq_kernels.gpu.parts import nothing, summed
from moeq_kernels.gpu.strips import FIRST_KIND
from moeq_kernels.gpu.sums import expert_of
from moeq_kernels.gpu.swizzle import TILE
from moeq_kernels.gpu.walks import KINDS, LAST_KIND, bits_of, values_for, walked, walked_product
from moeq_kernels.gpu.work import chosen, owners, stretch


@triton.jit  # type: ignore[untyped-decorator]
def dense_product(  # type: ignore[no-untyped-def]
    total, dense, x, token, exists, n, rows, inputs, first, last, base, DTYPE: tl.constexpr
):
    """A total plus the product of the tiles from first to last of a matrix that is not packed."""
    for number in range(first, last):
        k = 128 * number + tl.arange(0, 128)
        there = (n < rows)[:, None] & (k < inputs)[None, :]
        value = tl.load(dense + base + n.to(tl.int64)[:, None] * inputs + k[None, :], mask=there, other=0.0)
        some = inputs_of(x, k, k < inputs, token, exists, DTYPE)
        total += tl.dot(value.to(DTYPE), some, input_precision="ieee")
    return total


@triton.jit  # type: ignore[untyped-decorator]
def groups_of(group, inputs, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Groups in a step of inputs, float32: one in a matrix has no end (`codes.group_at`)."""
    return 1.0 / tl.where(group < inputs, group // STEP, 1 << 20).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def one_of(begin, more, end, exists, TILES: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """One of the tiles, or the first of PARTS, of a step from `begin` on, and its inputs: of one past the end, none of
    those of the last."""
    number = begin + more * PARTS
    if TILES == 1:
        return number, exists
    else:
        return tl.minimum(number, end - PARTS), only(exists, number < end)


@triton.jit  # type: ignore[untyped-decorator]
def grid_product(  # type: ignore[no-untyped-def]
    words, shorts, halves, x, token, exists, start, rows, inputs, first, last, base, scales, zeros, zero_bits, group,
    factor, zero_factor, zero_shift, BITS: tl.constexpr, STEP: tl.constexpr, TAIL: tl.constexpr,
    NESTED: tl.constexpr, FRAGMENTS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr, TILES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The product of the tiles from first to last of a matrix with a grid, float32 [N, M]."""
    full = inputs // 128 if STEP > 0 else 0  # whole tiles, whose groups are whole steps
    total = nothing(BLOCK_N, BLOCK_M, PARTS)
    if STEP > 0:
        groups = groups_of(group, inputs, STEP)
        end = tl.minimum(last, full)
        for begin in range(first, end, TILES * PARTS):
            for more in tl.static_range(TILES):
                number, there = one_of(begin, more, end, exists, TILES, PARTS)
                total += tile(
                    words, shorts, x, token, there, start, rows, inputs, number, None, base, scales, zeros, zero_bits,
                    groups, factor, zero_factor, zero_shift, BITS, STEP, DTYPE, NESTED, ASM, BLOCK_N, BLOCK_M,
                    PARTS,
                )  # fmt: skip
    total = summed(total, PARTS)
    if TAIL or STEP == 0:  # of the last tile alone nothing is brought ahead
        n = start + tl.arange(0, BLOCK_N)
        for number in tl.range(tl.maximum(first, full), last, num_stages=None if STEP == 0 else 1):
            total += uneven(
                words, shorts, halves, x, token, exists, n, rows, inputs, number, base, scales, zeros, zero_bits, group,
                factor, zero_factor, zero_shift, BITS, DTYPE, NESTED, ASM, FRAGMENTS,
            )  # fmt: skip
    return total


@triton.jit  # type: ignore[untyped-decorator]
def trellis_product(  # type: ignore[no-untyped-def]
    words, shorts, halves, x, token, exists, start, rows, inputs, first, last, base, scales, values, state_bits, factor,
    BITS: tl.constexpr, TAIL: tl.constexpr, VALUES: tl.constexpr, AHEAD: tl.constexpr, DTYPE: tl.constexpr,
    ASM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The same of a matrix of trellis codes, whose scales act on the whole total."""
    full = inputs // 128
    values = values_for(shorts, values, state_bits, VALUES, BITS, DTYPE)
    total = nothing(BLOCK_N, BLOCK_M, PARTS)
    for number in range(first, tl.minimum(last, full), PARTS):
        total += walked_product(
            words, shorts, x, token, exists, start, rows, inputs, number, base, values, state_bits, BITS, VALUES, AHEAD,
            True, DTYPE, ASM, BLOCK_N, PARTS,
        )  # fmt: skip
    total = summed(total, PARTS)
    if TAIL:
        for number in tl.range(tl.maximum(first, full), last, num_stages=1):
            total += walked_product(
                words, shorts, x, token, exists, start, rows, inputs, number, base, values, state_bits, BITS, VALUES,
                AHEAD, False, DTYPE, ASM, BLOCK_N, 1,
            )  # fmt: skip
    n = start + tl.arange(0, BLOCK_N)
    return total * scale_of(halves, n, n < rows, 0, rows, scales, factor, False)[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def product(  # type: ignore[no-untyped-def]
    words, shorts, halves, dense, singles, row, grid, x, token, exists, start, rows, inputs, first, last,
    WIDTHS: tl.constexpr, STEP: tl.constexpr, TAIL: tl.constexpr, NESTED: tl.constexpr, VALUES: tl.constexpr,
    AHEAD: tl.constexpr, FRAGMENTS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr, TILES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A matrix's rows from `start` on times tokens, float32 [N, M]; the bias is added by the part of K that begins it.

    row, grid: the matrix's row of the table; first, last: tiles of K. Of the branches by width only those that the
    layer has (WIDTHS) are compiled, and a program takes one. STEP: as in `tile`, 0 for tiles that go through `uneven`;
    VALUES: as in `walks.number`.
    """
    width = tl.load(row)
    base = tl.multiple_of(tl.load(row + 1), 4)  # parts begin at 16 bytes (`stored.ALIGNMENT`)
    scales = tl.load(row + 2)
    zeros = tl.load(row + 3)
    zero_bits = tl.load(row + 4).to(tl.int32)
    group = tl.load(row + 5).to(tl.int32)
    bias = tl.load(row + 6)
    factor, zero_factor, zero_shift = tl.load(grid), tl.load(grid + 1), tl.load(grid + 2)
    n = start + tl.arange(0, BLOCK_N)
    total = nothing(BLOCK_N, BLOCK_M, 1)
    for BITS in tl.static_range(1, 9):
        if (WIDTHS >> BITS) & 1:  # noqa: SIM102  the compiler decides this one, the program the next
            if width == BITS:
                total = grid_product(
                    words, shorts, halves, x, token, exists, start, rows, inputs, first, last, base, scales, zeros,
                    zero_bits, group, factor, zero_factor, zero_shift, BITS, STEP, TAIL, NESTED, FRAGMENTS,
                    DTYPE, ASM, TILES, BLOCK_N, BLOCK_M, PARTS,
                )  # fmt: skip
    for KIND in tl.static_range(KINDS, LAST_KIND):
        if (WIDTHS >> KIND) & 1:  # noqa: SIM102
            if width == KIND:  # of trellis codes: in place of zero points the values, in place of their bits nothing
                total = trellis_product(
                    words, shorts, halves, x, token, exists, start, rows, inputs, first, last, base, scales, zeros,
                    tl.load(row + 7).to(tl.int32), factor, bits_of(KIND), TAIL, VALUES, AHEAD, DTYPE, ASM,
                    BLOCK_N, BLOCK_M, PARTS,
                )  # fmt: skip
    if WIDTHS >= 1 << 16:  # noqa: SIM102
        if width >= 16:
            total = dense_product(total, dense, x, token, exists, n, rows, inputs, first, last, base, DTYPE)
    if (bias >= 0) & (first == 0):
        total += tl.load(singles + bias + n, mask=n < rows, other=0.0)[:, None]
    return total


@triton.jit  # type: ignore[untyped-decorator]
def both_at_once(  # type: ignore[no-untyped-def]
    words, shorts, singles, row, grid, row2, grid2, x, token, exists, start, rows, inputs, first, last,
    ACTIVATION: tl.constexpr, WIDTHS: tl.constexpr, STEP: tl.constexpr, NESTED: tl.constexpr, DTYPE: tl.constexpr,
    ASM: tl.constexpr, TILES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """act(first) * second of two matrices of one width in one loop, float32 [N, M]: as `apart` where inputs are whole
    tiles, each of which is loaded once for both."""
    width = tl.load(row)
    base, base2 = tl.multiple_of(tl.load(row + 1), 4), tl.multiple_of(tl.load(row2 + 1), 4)
    scales, scales2 = tl.load(row + 2), tl.load(row2 + 2)
    zeros, zeros2 = tl.load(row + 3), tl.load(row2 + 3)
    zero_bits, zero_bits2 = tl.load(row + 4).to(tl.int32), tl.load(row2 + 4).to(tl.int32)
    bias, bias2 = tl.load(row + 6), tl.load(row2 + 6)
    factor, zero_factor, zero_shift = tl.load(grid), tl.load(grid + 1), tl.load(grid + 2)
    factor2, zero_factor2, zero_shift2 = tl.load(grid2), tl.load(grid2 + 1), tl.load(grid2 + 2)
    groups = groups_of(tl.load(row + 5).to(tl.int32), inputs, STEP)
    groups2 = groups_of(tl.load(row2 + 5).to(tl.int32), inputs, STEP)
    total, total2 = nothing(BLOCK_N, BLOCK_M, PARTS), nothing(BLOCK_N, BLOCK_M, PARTS)
    for BITS in tl.static_range(1, 9):
        if (WIDTHS >> BITS) & 1:  # noqa: SIM102  the compiler decides this one, the program the next
            if width == BITS:
                for begin in range(first, last, TILES * PARTS):
                    for more in tl.static_range(TILES):
                        number, there = one_of(begin, more, last, exists, TILES, PARTS)
                        given = inputs_at(x, token, there, 128 * number, STEP, DTYPE, PARTS)
                        total += tile(
                            words, shorts, x, token, there, start, rows, inputs, number, given, base, scales, zeros,
                            zero_bits, groups, factor, zero_factor, zero_shift, BITS, STEP, DTYPE, NESTED, ASM, BLOCK_N,
                            BLOCK_M, PARTS,
                        )  # fmt: skip
                        total2 += tile(
                            words, shorts, x, token, there, start, rows, inputs, number, given, base2, scales2, zeros2,
                            zero_bits2, groups2, factor2, zero_factor2, zero_shift2, BITS, STEP, DTYPE, NESTED, ASM,
                            BLOCK_N, BLOCK_M, PARTS,
                        )  # fmt: skip
    total, total2 = summed(total, PARTS), summed(total2, PARTS)
    n = start + tl.arange(0, BLOCK_N)
    if (bias >= 0) & (first == 0):
        total += tl.load(singles + bias + n, mask=n < rows, other=0.0)[:, None]
    if (bias2 >= 0) & (first == 0):
        total2 += tl.load(singles + bias2 + n, mask=n < rows, other=0.0)[:, None]
    return activated(total, ACTIVATION) * total2


@triton.jit  # type: ignore[untyped-decorator]
def apart(  # type: ignore[no-untyped-def]
    words, shorts, halves, dense, singles, row, grid, row2, grid2, x, token, exists, start, rows, inputs, first, last,
    SECOND: tl.constexpr, ACTIVATION: tl.constexpr, WIDTHS: tl.constexpr, STEP: tl.constexpr, TAIL: tl.constexpr,
    NESTED: tl.constexpr, VALUES: tl.constexpr, AHEAD: tl.constexpr, FRAGMENTS: tl.constexpr, DTYPE: tl.constexpr,
    ASM: tl.constexpr, TILES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """act(first) of one matrix or, where there are two, times second, float32 [N, M]."""
    result = product(
        words, shorts, halves, dense, singles, row, grid, x, token, exists, start, rows, inputs, first, last, WIDTHS,
        STEP, TAIL, NESTED, VALUES, AHEAD, FRAGMENTS, DTYPE, ASM, TILES, BLOCK_N, BLOCK_M, PARTS,
    )  # fmt: skip
    result = activated(result, ACTIVATION)
    if SECOND >= 0:
        result *= product(
            words, shorts, halves, dense, singles, row2, grid2, x, token, exists, start, rows, inputs, first, last,
            WIDTHS, STEP, TAIL, NESTED, VALUES, AHEAD, FRAGMENTS, DTYPE, ASM, TILES, BLOCK_N, BLOCK_M, PARTS,
        )  # fmt: skip
    return result


@triton.constexpr_function  # type: ignore[untyped-decorator]
def are_together(second: int, widths: int, step: int, tail: bool) -> bool:
    """Whether the two matrices of each expert have one loop (`both_at_once`): all are packed in one width, with groups
    of whole tiles."""
    return second >= 0 and step == TILE and not tail and widths < 1 << FIRST_KIND and widths & (widths - 1) == 0


@triton.constexpr_function  # type: ignore[untyped-decorator]
def may_be_together(second: int, widths: int, step: int, tail: bool) -> bool:
    """Whether those of some experts may have, where both are packed in one of several widths: of no more than three,
    since both ways are compiled then."""
    grids = bin(widths & ((1 << FIRST_KIND) - 1)).count("1")
    return second >= 0 and step == TILE and not tail and 0 < grids <= 3 and widths & (widths - 1) != 0


@triton.jit  # type: ignore[untyped-decorator]
def one_item(  # type: ignore[no-untyped-def]
    words, shorts, halves, dense, singles, table, grids, x, out, pairs, slots, rows, inputs, x_step, each,
    splits, expert, pair, exists, block, split, FIRST: tl.constexpr, SECOND: tl.constexpr, ACTIVATION: tl.constexpr,
    WIDTHS: tl.constexpr, STEP: tl.constexpr, TAIL: tl.constexpr, NESTED: tl.constexpr, VALUES: tl.constexpr,
    AHEAD: tl.constexpr, FRAGMENTS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr, TILES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One block of N of one expert for one block of rows, over one of the splits of K."""
    token = (pair // each).to(tl.int64) * x_step
    tiles = (inputs + 127) // 128
    share = (tiles + splits - 1) // splits
    first = split * share
    last = tl.minimum(first + share, tiles)
    start = block * BLOCK_N
    at = (expert * slots).to(tl.int64)
    row, grid = table + (at + FIRST) * 8, grids + (at + FIRST) * 3
    row2, grid2 = table + (at + SECOND) * 8, grids + (at + SECOND) * 3
    ALWAYS: tl.constexpr = are_together(SECOND, WIDTHS, STEP, TAIL)
    SOMETIMES: tl.constexpr = may_be_together(SECOND, WIDTHS, STEP, TAIL)
    if ALWAYS:
        result = both_at_once(
            words, shorts, singles, row, grid, row2, grid2, x, token, exists, start, rows, inputs, first, last,
            ACTIVATION, WIDTHS, STEP, NESTED, DTYPE, ASM, TILES, BLOCK_N, BLOCK_M, PARTS,
        )  # fmt: skip
    elif SOMETIMES:
        width = tl.load(row)
        if (width == tl.load(row2)) & (width < KINDS):
            result = both_at_once(
                words, shorts, singles, row, grid, row2, grid2, x, token, exists, start, rows, inputs, first, last,
                ACTIVATION, WIDTHS, STEP, NESTED, DTYPE, ASM, TILES, BLOCK_N, BLOCK_M, PARTS,
            )  # fmt: skip
        else:
            result = apart(
                words, shorts, halves, dense, singles, row, grid, row2, grid2, x, token, exists, start, rows, inputs,
                first, last, SECOND, ACTIVATION, WIDTHS, STEP, TAIL, NESTED, VALUES, AHEAD, FRAGMENTS, DTYPE, ASM,
                TILES, BLOCK_N, BLOCK_M, PARTS,
            )  # fmt: skip
    else:
        result = apart(
            words, shorts, halves, dense, singles, row, grid, row2, grid2, x, token, exists, start, rows, inputs, first,
            last, SECOND, ACTIVATION, WIDTHS, STEP, TAIL, NESTED, VALUES, AHEAD, FRAGMENTS, DTYPE, ASM, TILES,
            BLOCK_N, BLOCK_M, PARTS,
        )  # fmt: skip
    n = start + tl.arange(0, BLOCK_N)
    place = (split * pairs + pair).to(tl.int64) * rows
    kept = (n < rows)[:, None] & exists[None, :]
    tl.store(out + place[None, :] + n[:, None], result.to(out.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["pairs", "experts", "splits"])  # type: ignore[untyped-decorator]
def grouped(  # type: ignore[no-untyped-def]
    words, shorts, halves, dense, singles, table, grids, x, index, order, starts, costs, out, pairs, experts,
    slots, rows, inputs, x_step, each, splits, FIRST: tl.constexpr, SECOND: tl.constexpr, ACTIVATION: tl.constexpr,
    ROUTING: tl.constexpr, OWNERS: tl.constexpr, WIDTHS: tl.constexpr, STEP: tl.constexpr, TAIL: tl.constexpr,
    NESTED: tl.constexpr, VALUES: tl.constexpr, AHEAD: tl.constexpr, FRAGMENTS: tl.constexpr, DTYPE: tl.constexpr,
    ASM: tl.constexpr, TILES: tl.constexpr, PERSISTENT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Products of rows with their experts' matrices, [splits, P, N]; of two, act(first) * second.

    An item of work is a block of N of an expert for a block of its rows over one split of K. Owners of items are
    experts (ROUTING "sorted": rows by order and starts), rows (at most OWNERS: each finds its expert in index [P]) or
    the one matrix ("one"). A program an item: blocks of N, blocks of rows, splits of K. PERSISTENT: any number of
    programs; all items in a row, owner after owner, are cut into as many stretches of equally many bytes, `costs` [E]
    being the bytes that an item of an expert reads, and a program takes those that begin in its stretch. Which program
    takes an item changes nothing in what it stores.

    FIRST and SECOND: slots of projections, SECOND -1 where one is asked for. each: rows of `order` that share a row of
    x, whose rows are x_step apart.
    """
    if ROUTING == "rows" and not PERSISTENT:
        pair = tl.program_id(1) + tl.arange(0, BLOCK_M)
        exists = tl.arange(0, BLOCK_M) == 0
        expert = expert_of(tl.load(index + tl.program_id(1)), experts)
        first, last = 0, (expert < experts).to(tl.int32)
    else:
        its_expert, begin, count = owners(index, starts, pairs, experts, ROUTING, OWNERS)
        owner = tl.arange(0, OWNERS)
        items = (count + BLOCK_M - 1) // BLOCK_M  # blocks of rows
        blocks = items
        first = tl.program_id(1)
        last = tl.minimum(first + 1, tl.sum(blocks, 0))
        if PERSISTENT:
            items = blocks * ((rows + BLOCK_N - 1) // BLOCK_N) * splits
            cost = tl.load(costs + its_expert, mask=blocks > 0, other=1).to(tl.int64)
            first, last = stretch(items, cost, tl.program_id(0), tl.num_programs(0))
        ends = tl.cumsum(items, 0)
    for item in range(first, last):
        block = tl.program_id(0)
        split = tl.program_id(2)
        if ROUTING != "rows" or PERSISTENT:
            mine = owner == tl.sum((ends <= item).to(tl.int32), 0)
            number = item - chosen(mine, ends - items)
            if PERSISTENT:  # blocks of rows that share a block of N come one after the other
                its_blocks = chosen(mine, blocks)
                block = number // its_blocks % ((rows + BLOCK_N - 1) // BLOCK_N)
                split = number // its_blocks // ((rows + BLOCK_N - 1) // BLOCK_N)
                number = number % its_blocks
            at = chosen(mine, begin) + number * BLOCK_M + tl.arange(0, BLOCK_M)
            exists = at < chosen(mine, begin + count)
            pair = tl.load(order + at, mask=exists, other=0) if ROUTING == "sorted" else at
            expert = chosen(mine, its_expert)
        one_item(
            words, shorts, halves, dense, singles, table, grids, x, out, pairs, slots, rows, inputs, x_step, each,
            splits, expert, pair, exists, block, split, FIRST, SECOND, ACTIVATION, WIDTHS, STEP, TAIL, NESTED,
            VALUES, AHEAD, FRAGMENTS, DTYPE, ASM, TILES, BLOCK_N, BLOCK_M, PARTS,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def unpack(  # type: ignore[no-untyped-def]
    words, shorts, halves, dense, table, grids, which, out, slots, rows, inputs, SLOT: tl.constexpr,
    WIDTHS: tl.constexpr, STEP: tl.constexpr, TAIL: tl.constexpr, NESTED: tl.constexpr, VALUES: tl.constexpr,
    FRAGMENTS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One projection of some experts, which [e], as dense matrices: out [e, N, K].

    Programs: blocks of N, TILES tiles of K each, e. TAIL: K is no multiple of tiles; what goes through `weights_of` is
    compiled only where there is such a tile, since it takes all registers.
    """
    at = tl.load(which + tl.program_id(2)).to(tl.int64) * slots + SLOT
    row = table + at * 8
    width = tl.load(row)
    base = tl.multiple_of(tl.load(row + 1), 4)
    scales, zeros, zero_bits = tl.load(row + 2), tl.load(row + 3), tl.load(row + 4).to(tl.int32)
    group = tl.load(row + 5).to(tl.int32)
    grid = grids + at * 3
    factor, zero_factor, zero_shift = tl.load(grid), tl.load(grid + 1), tl.load(grid + 2)
    start = tl.program_id(0) * BLOCK_N
    n = start + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * TILES
    last = tl.minimum(first + TILES, (inputs + 127) // 128)
    full = inputs // 128 if STEP > 0 else 0  # whole tiles, whose groups are whole steps
    place = out + (tl.program_id(2).to(tl.int64) * rows + n)[:, None] * inputs
    for BITS in tl.static_range(1, 9):
        if (WIDTHS >> BITS) & 1:  # noqa: SIM102  the compiler decides this one, the program the next
            if width == BITS:
                if STEP > 0:
                    groups = groups_of(group, inputs, STEP)
                    for number in range(first, tl.minimum(last, full)):
                        loads = words_of(words, shorts, start, rows, inputs, number, base, BITS, BLOCK_N, 1)
                        for part in tl.static_range(128 // STEP):
                            k = 128 * number + STEP * part + tl.arange(0, STEP)
                            weight = part_of(
                                words, loads, start, rows, number, scales, zeros, zero_bits, groups, factor,
                                zero_factor, zero_shift, part, BITS, STEP, DTYPE, NESTED, ASM, BLOCK_N,
                            )  # fmt: skip
                            tl.store(place + k[None, :], weight.to(out.dtype.element_ty), mask=(n < rows)[:, None])
                if TAIL or STEP == 0:
                    for number in range(tl.maximum(first, full), last):
                        weight, k, inside = weights_of(
                            words, shorts, halves, n, rows, inputs, number, base, scales, zeros, zero_bits, group,
                            factor, zero_factor, zero_shift, BITS, DTYPE, NESTED, ASM, FRAGMENTS,
                        )  # fmt: skip
                        there = (n < rows)[:, None] & inside[None, :]
                        tl.store(place + k[None, :], weight.to(out.dtype.element_ty), mask=there)
    for KIND in tl.static_range(KINDS, LAST_KIND):
        if (WIDTHS >> KIND) & 1:  # noqa: SIM102
            if width == KIND:
                scale = scale_of(halves, n, n < rows, 0, rows, scales, factor, False)
                state_bits = tl.load(row + 7).to(tl.int32)
                values = values_for(shorts, zeros, state_bits, VALUES, bits_of(KIND), DTYPE)
                for number in range(first, last):
                    weight = walked(
                        words, shorts, start, rows, inputs, number, base, values, state_bits, bits_of(KIND), VALUES,
                        False, False, DTYPE, ASM, BLOCK_N, 1,
                    )  # fmt: skip
                    weight = (weight.to(tl.float32) * scale[:, None]).to(DTYPE)
                    k = 128 * number + tl.arange(0, 128)
                    there = (n < rows)[:, None] & (k < inputs)[None, :]
                    tl.store(place + k[None, :], weight.to(out.dtype.element_ty), mask=there)
    if WIDTHS >= 1 << 16:  # noqa: SIM102
        if width >= 16:
            for number in range(first, last):
                k = 128 * number + tl.arange(0, 128)
                there = (n < rows)[:, None] & (k < inputs)[None, :]
                value = tl.load(dense + base + n.to(tl.int64)[:, None] * inputs + k[None, :], mask=there, other=0.0)
                tl.store(place + k[None, :], value.to(out.dtype.element_ty), mask=there)
