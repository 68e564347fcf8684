"""The work of one call, compiled: tokens sorted by expert, cut into items, and done by all threads that take part.

A call has one or two stages, each of the same two steps: rows of activations are laid out as the blocks read them, see
`activations`; then blocks of 16 output rows are multiplied with them, C matrices of an expert side by side (gate and
up). Items are claimed with an atomic counter, so that cores are busy to the end whatever widths the experts have,
and a thread that comes late or never costs nothing: a step ends when its items are done, not when threads arrive.

What comes out does not depend on the number of threads: every number is computed by one thread, experts in
the order of `routing.by_code`.

Letters: T tokens, k experts a token, P = T*k rows, E experts, A experts with rows, S tiles (rows of one expert that one
pass multiplies), C matrices of an expert, N output rows, K inputs.
"""

from __future__ import annotations

import numpy as np
from numba import types

from moeq_kernels.cpu.activations import WORDS, from_short, is_whole, lay_out_tile, shared, to_short
from moeq_kernels.cpu.columns import (
    COLUMNS,
    COUNT,
    EXPERT,
    FILLED,
    GROUP,
    GROUPS,
    LANES,
    LAST_UNITS,
    OFFSET,
    PLACE,
    ROWS,
    SCALES_AT,
    SIZE,
    SLOT,
    STRIDE,
    UNITS,
    WORK,
    ZERO_STRIDE,
    ZEROS_AT,
)  # fmt: skip
from moeq_kernels.cpu.compiled import call_block
from moeq_kernels.cpu.emit import AHEAD, LINE_BYTES, TOGETHER
from moeq_kernels.cpu.finish import PRODUCTS, finish
from moeq_kernels.cpu.kept_code import internal
from moeq_kernels.cpu.memory import (
    add_at,
    address_of,
    ask_for,
    float32s,
    int64s,
    look_at,
    new_float32s,
    new_int64s,
    uint16s,
    uint32s,
    zero_float32s,
    zero_int64s,
    zero_uint32s,
)

MOST_ROWS = 32  # of a tile
MOST_TOGETHER = max(TOGETHER.values())  # blocks
MOST_BLOCKS = 16  # of an item, whose products stay in the first level of cache
ITEMS = 4  # of a thread, at least
ROWS_AS_BYTES = 4  # rows that take as long to multiply as the matrix to read
# numbers of a form: address of its rows, see `Form.rows`; rows from which on an expert is unpacked, and from which on
# tiles multiply; blocks that items are a multiple of; work of matrices, and as much again for four rows, from which on
# threads are woken, and from which on one matrix is shared out where they are awake; the compiled code that threads do;
# and what is done with the products of the first stage
(HOW_SIZES, HOW_WHOLE, HOW_TILES, HOW_MULTIPLE, HOW_WAKING, HOW_DIVIDED, HOW_WORK, HOW_END) = range(8)
HOW = 8
PATIENCE = 1000  # looks at a counter before the core is given to another thread
LINE = 8  # int64 of a cache line: every counter has its own
ZERO = np.int64(0)  # for arguments: a plain number is a type of its own, for which all that takes it is compiled again

_give_way = types.ExternalFunction("sched_yield", types.int32())
_compile = internal()


@_compile  # type: ignore[untyped-decorator]
def plan(tiles, table, functions, layouts, by_block, pieces, multiple):  # type: ignore[no-untyped-def]
    """How a stage goes: starts [S, C, 2] of each tile in layout and sums, the lengths of these, items [I, 4] of work,
    how much that is, see `columns`, and whether all functions that are needed are there. layouts: [slots, sizes]
    how activations are laid out, see `Form.layout`.

    An item is some blocks of one expert, or, by block, of all experts: about one of so many pieces of all the work, but
    a multiple of some blocks where there are as many, and not more than MOST_BLOCKS. Code comes into the cache with
    every change of an expert's width or number of rows, so that few large items are fast: by block 16 at a time took
    .83 of what one at a time did.
    """
    matrices = table.shape[1]
    starts = new_int64s((tiles.shape[0], matrices, 2))
    layout, sums, much, spans, blocks, all_work = 0, 0, 0, 0, 0, 0
    complete = True
    cuts = zero_int64s((tiles.shape[0], 4))  # first and last tile, blocks, and work of a block or blocks of an item
    for tile in range(tiles.shape[0]):
        expert, size = tiles[tile, EXPERT], tiles[tile, SIZE]
        of_expert, reading, high = 0, 0, 0
        for which in range(matrices):
            how = table[expert, which]
            layout_of = layouts[how[SLOT], tiles[tile, PLACE]]
            if shared(table, tiles[tile], which, layouts):
                starts[tile, which, 0], starts[tile, which, 1] = starts[tile, 0, 0], starts[tile, 0, 1]
            else:
                starts[tile, which, 0], starts[tile, which, 1] = layout, sums
                layout += how[FILLED] // 2 * size * (layout_of & WORDS) // 2
                sums += how[GROUPS] * size * (1 + is_whole(layout_of))
            of_expert += how[STRIDE]
            reading += how[WORK]
            high = max(high, (how[ROWS] + LANES - 1) // LANES)
            complete = complete and functions[how[SLOT], tiles[tile, PLACE]] != 0
        work = of_expert * (ROWS_AS_BYTES + tiles[tile, COUNT])
        all_work += work * high
        if tile == 0 or tiles[tile - 1, EXPERT] != expert:
            blocks, much, spans = max(blocks, high), much + reading * high, spans + 1
            cuts[spans - 1, 0], cuts[spans - 1, 2] = tile, high
        cuts[spans - 1, 1] = tile + 1
        cuts[spans - 1, 3] += work
    if by_block and spans:
        cuts[0, 1], cuts[0, 2], cuts[0, 3] = tiles.shape[0], blocks, all_work // blocks
        spans = 1
    count = 0
    for span in range(spans):
        step = all_work // pieces // cuts[span, 3] // multiple
        cuts[span, 3] = min(max(1, step), MOST_BLOCKS // multiple) * multiple
        count += -(-cuts[span, 2] // cuts[span, 3])
    items = new_int64s((count, 4))
    number = 0
    for span in range(spans):
        first, last, high, step = cuts[span]
        for block in range(0, high, step):
            items[number, 0], items[number, 1] = first, last
            items[number, 2], items[number, 3] = block, min(block + step, high)
            number += 1
    return starts, layout, sums, items, much, complete


@_compile  # type: ignore[untyped-decorator]
def _place(stage, tile, which, block):  # type: ignore[no-untyped-def]
    """Where a block of a matrix of a tile's expert lies."""
    table, expert = stage[0], stage[1][tile, EXPERT]
    return stage[6] + table[expert, which, OFFSET] + block * table[expert, which, STRIDE]


@_compile  # type: ignore[untyped-decorator]
def _ask_for_first(stage, item):  # type: ignore[no-untyped-def]
    """What blocks do not ask for ahead, the first lines of the first of them."""
    for block in range(item[2], min(item[2] + MOST_TOGETHER, item[3])):
        at = _place(stage, item[0], ZERO, block)
        for line in range(0, AHEAD // MOST_TOGETHER, LINE_BYTES):
            ask_for(at + line)


@_compile  # type: ignore[untyped-decorator]
def _multiply(stage, item, following, functions, grids, layout, sums, products, end, weights, per_token, out, biased):  # type: ignore[no-untyped-def]
    """One item: tiles from item[0] to item[1], blocks from item[2] to item[3]; following: address of what is read
    after it; products: [C, size * 16 * blocks and more]."""
    table, tiles, _, starts, _, _, base = stage
    begin, first, matrices = item[0], item[2], table.shape[1]
    width = (item[3] - first) * LANES
    while begin < item[1]:
        expert = tiles[begin, EXPERT]
        stop = begin + 1
        while stop < item[1] and tiles[stop, EXPERT] == expert:
            stop += 1
        for tile in range(begin, stop):
            for which in range(matrices):
                how, grid = table[expert, which], grids[expert, which]
                count = min(item[3], (how[ROWS] + LANES - 1) // LANES) - first
                if count <= 0:
                    continue
                at = base + how[OFFSET] + first * how[STRIDE]
                zeros = at + how[ZEROS_AT] if how[ZERO_STRIDE] else base
                after = following
                if which + 1 < matrices:
                    after = _place(stage, tile, which + 1, first)
                elif tile + 1 < item[1]:
                    after = _place(stage, tile + 1, ZERO, first)
                call_block(
                    functions[how[SLOT], tiles[tile, PLACE]],
                    (
                        at, at + how[SCALES_AT], zeros, how[ZERO_STRIDE], count, how[STRIDE], after, how[GROUPS],
                        how[UNITS], how[LAST_UNITS], how[GROUP], address_of(layout) + starts[tile, which, 0] * 4,
                        address_of(sums) + starts[tile, which, 1] * 4, address_of(products[which]), width * 4,
                        grid[0], grid[1], grid[2],
                    ),
                )  # fmt: skip
            finish(end, products, tile, first, width, stage, weights, per_token, out, biased)
        begin = stop


@_compile  # type: ignore[untyped-decorator]
def _wait(counter, wanted):  # type: ignore[no-untyped-def]
    """Until a counter is as high as wanted; other programs' threads come first after a while."""
    times = 0
    while look_at(counter) < wanted:
        times += 1
        if times > PATIENCE:
            _give_way()


NUMBERS, UNPACKING = 24, 25  # that describe a stage, and the unpacking of a matrix
NEXT = 23  # of those of a stage: where those of the one after it lie, or 0
BOUND = 13  # those of a stage's matrices and a form, which do not change from call to call, and some of them
BOUND_EXPERTS, BOUND_MATRICES, BOUND_SIZES, BOUND_INPUTS, BOUND_ROWS = 1, 2, 5, 11, 12


@_compile  # type: ignore[untyped-decorator]
def bound(address):  # type: ignore[no-untyped-def]
    """What the numbers of `Matrices.bound` at an address say: table, functions, layouts, grids, biases, address of the
    buffer, inputs, and rows of the matrices."""
    n = int64s(address, BOUND)
    return (
        int64s(n[0], (n[1], n[2], COLUMNS)), int64s(n[3], (n[4], n[5])),
        int64s(n[6], (n[4], n[5])), float32s(n[7], (n[1], n[2], 3)), float32s(n[8], n[9]),
        n[10], n[11], n[12],
    )  # fmt: skip


@_compile  # type: ignore[untyped-decorator]
def describe(  # type: ignore[no-untyped-def]
    address,
    tiles,
    order,
    starts,
    per_row,
    counters,
    source,
    layout,
    sums,
    items,
    end,
    weights,
    per_token,
    out,
    following,
    into,
):
    """What `_work` reads of a stage as numbers into [NUMBERS], addresses and shapes; arrays need to stay.

    address: of the numbers of `Matrices.bound`; following: where the next stage's numbers lie, or 0."""
    into[0], into[1], into[2] = address, address_of(tiles), tiles.shape[0]
    into[3], into[4], into[5], into[6] = address_of(order), order.shape[0], address_of(starts), per_row
    into[7], into[8], into[9] = address_of(counters), address_of(source), source.shape[0]
    into[10], into[11], into[12], into[13] = address_of(layout), layout.shape[0], address_of(sums), sums.shape[0]
    into[14], into[15], into[16] = address_of(items), items.shape[0], end
    into[17], into[18], into[19] = address_of(weights), weights.shape[0], per_token
    into[20], into[21], into[22], into[NEXT] = address_of(out), out.shape[1], out.shape[2], following


@_compile  # type: ignore[untyped-decorator]
def _work(address):  # type: ignore[no-untyped-def]
    """One thread's part of the stage that numbers at an address describe, see `describe`; it returns when all items are
    done, by whomever.

    stage: (table [E, C, COLUMNS], tiles [S, 5], order [P], starts [S, C, 2] of each tile in layout and sums, rows of
    order for one of source or 0 where source is in order, layouts as in `plan`, address of the buffer);
    counters: int64, 0, four of them each on a line of its own; source: [R, K] float32; layout: uint32; items [I, 4];
    functions: addresses [slots, sizes]; grids: [E, C, 3]; end: what is done with the products; weights [P] float32 of T
    tokens, per_token each; out: [C, R, N].
    """
    n = int64s(address, NUMBERS)
    table, functions, layouts, grids, biased, base, inputs, _ = bound(n[0])
    tiles, matrices = n[2], table.shape[1]
    stage = (
        table, int64s(n[1], (tiles, 5)), int64s(n[3], n[4]), int64s(n[5], (tiles, matrices, 2)), n[6],
        layouts, base,
    )  # fmt: skip
    first, source, layout, sums = n[7], float32s(n[8], (n[9], inputs)), uint32s(n[10], n[11]), float32s(n[12], n[13])
    items, end, weights, per_token = int64s(n[14], (n[15], 4)), n[16], float32s(n[17], n[18]), n[19]
    out = float32s(n[20], (matrices, n[21], n[22]))
    steps, most = tiles * matrices, items.shape[0]
    item = add_at(first + 128, 1)
    if item < most:
        _ask_for_first(stage, items[item])
    while True:
        step = add_at(first, 1)
        if step >= steps:
            break
        tile, which = divmod(step, matrices)
        if not which or not shared(stage[0], stage[1][tile], which, stage[5]):
            lay_out_tile(stage, tile, which, source, layout, sums)
        add_at(first + 64, 1)
    _wait(first + 64, steps)
    products = new_float32s((matrices, MOST_BLOCKS * MOST_ROWS * LANES))
    while item < most:
        own = items[item]
        item = add_at(first + 128, 1)
        following = _place(stage, items[item, 0], ZERO, items[item, 2]) if item < most else base
        _multiply(
            stage, own, following, functions, grids, layout, sums, products, end, weights, per_token, out, biased
        )  # fmt: skip
        add_at(first + 192, 1)
    _wait(first + 192, most)


def stages(address):  # type: ignore[no-untyped-def]
    """One thread's part of one stage after the other, of which the second reads what the first writes; for
    `compiled.entry`."""
    while address:
        _work(address)
        address = int64s(address, NUMBERS)[NEXT]


@_compile  # type: ignore[untyped-decorator]
def floats_at(address, rows, columns, short):  # type: ignore[no-untyped-def]
    """float32 [R, N] of what lies at an address, bf16 or float32."""
    made = new_float32s((rows, columns))
    for row in range(rows):
        own, at = made[row], row * columns
        if short:
            from_short(uint16s(address + 2 * at, columns), own)
        else:
            given = float32s(address + 4 * at, columns)
            for column in range(columns):
                own[column] = given[column]
    return made


@_compile  # type: ignore[untyped-decorator]
def put(made, short, into, first, end):  # type: ignore[no-untyped-def]
    """Columns from first to end of products [R, N] to an address, where [R, N] of bf16 or float32 lie."""
    for row in range(made.shape[0]):
        own, at = made[row, first:end], row * made.shape[1] + first
        if short:
            to_short(own, uint16s(into + 2 * at, end - first))
        else:
            to = float32s(into + 4 * at, end - first)
            for column in range(end - first):
                to[column] = own[column]


ALONE_NUMBERS = LINE + 8  # of a call that threads share: a counter on a line of its own, and what `alone` takes


def alone(address):  # type: ignore[no-untyped-def]
    """One thread's part of what `_work` does for one matrix and a single tile, without what that costs to prepare; for
    `compiled.entry`. The rows every thread lays out for itself. The numbers: a counter on a line of its own, which
    hands out blocks of the matrix, how many at a time, address of those of `Matrices.bound`, place and size of the rows
    that are compiled, whether rows [count, K] at an address and [count, N] at another one are bf16, 0 for float32,
    both addresses, and the count."""
    n = int64s(address, ALONE_NUMBERS)
    step, place, size, short, source, into, count = (
        n[LINE], n[LINE + 2], n[LINE + 3], n[LINE + 4], n[LINE + 5], n[LINE + 6], n[LINE + 7]
    )  # fmt: skip
    table, functions, layouts, grids, biased, base, inputs, outputs = bound(n[LINE + 1])
    how = table[0, 0]
    high = (how[ROWS] + LANES - 1) // LANES
    first = add_at(address, step)
    if first >= high:
        return
    tiles = zero_int64s((1, 5))
    tiles[0, COUNT], tiles[0, SIZE], tiles[0, PLACE] = count, size, place
    starts, item = zero_int64s((1, 1, 2)), new_int64s(4)
    stage = (table, tiles, tiles[0], starts, ZERO, layouts, base)
    item[0], item[1], item[2], item[3] = 0, 1, first, min(first + step, high)
    _ask_for_first(stage, item)
    given = floats_at(source, count, inputs, short)
    out = new_float32s((1, count, outputs))
    layout = zero_uint32s(how[FILLED] // 2 * size * (layouts[0, place] & WORDS) // 2)
    sums = zero_float32s(2 * how[GROUPS] * size)
    products = new_float32s((1, MOST_BLOCKS * size * LANES))
    lay_out_tile(stage, ZERO, ZERO, given, layout, sums)
    while first < high:
        item[2], item[3] = first, min(first + step, high)
        after = add_at(address, step)
        following = _place(stage, ZERO, ZERO, after) if after < high else base
        _multiply(
            stage, item, following, functions, grids, layout, sums, products, ZERO + PRODUCTS, sums, ZERO + 1, out,
            biased,
        )  # fmt: skip
        put(out[0], short, into, first * LANES, min(item[3] * LANES, outputs))
        first = after


def unpack(address):  # type: ignore[no-untyped-def]
    """One thread's part of unpacking some blocks of a matrix; for `compiled.entry`. The numbers: two counters, each on
    a line of its own, then addresses of the matrix' row of its table, of its grid, of the buffer and of compiled code,
    first and last block, where values go to, and bytes from one input's values to the next one's and of a value."""
    n = int64s(address, UNPACKING)
    how, grid, base, function = int64s(n[16], COLUMNS), float32s(n[17], 3), n[18], n[19]
    first, last = n[20], n[21]
    while True:
        block = first + add_at(address, 1)
        if block >= last:
            break
        at = base + how[OFFSET] + block * how[STRIDE]
        zeros = at + how[ZEROS_AT] if how[ZERO_STRIDE] else base
        to = n[22] + (block - first) * LANES * n[24]
        call_block(
            function,
            (
                at, at + how[SCALES_AT], zeros, how[ZERO_STRIDE], 1, how[STRIDE], at, how[GROUPS], how[UNITS],
                how[LAST_UNITS], how[GROUP], 0, 0, to, n[23], grid[0], grid[1], grid[2],
            ),
        )  # fmt: skip
        add_at(address + 64, 1)
    _wait(address + 64, last - first)
