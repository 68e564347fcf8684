"""The work of one call, compiled: tokens sorted by expert, cut into items, and done by all threads that take part.

A call has one or two stages, each of the same two steps: rows of activations are laid out as the blocks read them, see
`activations`; then blocks of 16 output rows are multiplied with them, C matrices of an expert side by side (gate and
up). Items are claimed with an atomic counter, so that cores are busy to the end whatever widths the experts have,
and a thread that comes late or never costs nothing: a step ends when its items are done, not when threads arrive.

What comes out does not depend on the number of threads: every number is computed by one thread, experts in order.

Letters: T tokens, k experts a token, P = T*k rows, E experts, A experts with rows, S tiles (rows of one expert that one
pass multiplies), C matrices of an expert, N output rows, K inputs.
"""

from __future__ import annotations

import numpy as np
from numba import carray, types

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
    ZERO_STRIDE,
    ZEROS_AT,
)  # fmt: skip
from moeq_kernels.cpu.compiled import call_block
from moeq_kernels.cpu.emit import LINE_BYTES, TOGETHER
from moeq_kernels.cpu.finish import PRODUCTS, finish
from moeq_kernels.cpu.kept_code import compiler
from moeq_kernels.cpu.memory import add_at, ask_for, float32s, int64s, look_at, uint16s, uint32s
from moeq_kernels.cpu.tiles import SIDE

MOST_ROWS = 32  # of a tile
MOST_TOGETHER = max(TOGETHER.values())  # blocks
MOST_BLOCKS = 16  # of an item, whose products stay in the first level of cache
ITEMS = 4  # of a thread, at least, where there are many rows
BF16_BYTES = 2
# numbers of a form: address of its rows, see `Form.rows`; rows from which on an expert is unpacked, and from which on
# tiles multiply; blocks that items are a multiple of, and about how many bytes they have; bytes of matrices, and as
# many again for four rows, from which on threads are woken, and from which on one matrix is shared out where they are
# awake; the compiled code that threads do; and what is done with the products of the first stage
(HOW_SIZES, HOW_WHOLE, HOW_TILES, HOW_MULTIPLE, HOW_ITEM_BYTES, HOW_WAKING, HOW_DIVIDED, HOW_WORK, HOW_END) = range(9)
HOW = 9
PATIENCE = 1000  # looks at a counter before the core is given to another thread
LINE = 8  # int64 of a cache line: every counter has its own

_give_way = types.ExternalFunction("sched_yield", types.int32())
_compile = compiler()


@_compile  # type: ignore[untyped-decorator]
def item_of(by_block, rows, experts, threads, inputs, outputs, how):  # type: ignore[no-untyped-def]
    """About how many bytes of matrices an item has, what its blocks are a multiple of, and at most how many.

    Tiles are as fast as bytes come, so that items need not be smaller for many rows; all blocks of an item share the
    activations, and every thread has some items. how: [HOW] as `layer` makes it."""
    each = rows / max(1, experts)  # rows of an expert that has some, in the mean, at most
    if how[HOW_TILES] == 0 or each < how[HOW_TILES]:
        return int(how[HOW_ITEM_BYTES] / max(1.0, each / 4)), how[HOW_MULTIPLE], MOST_BLOCKS
    given = rows * inputs * BF16_BYTES if by_block else 0
    blocks = outputs // LANES * (1 if by_block else experts)
    most = blocks // (ITEMS * threads) if threads > 1 else MOST_BLOCKS
    return max(how[HOW_ITEM_BYTES], given), SIDE, min(max(SIDE, most), MOST_BLOCKS)


@_compile  # type: ignore[untyped-decorator]
def plan(tiles, table, functions, layouts, by_block, item):  # type: ignore[no-untyped-def]
    """How a stage goes: starts [S, C, 2] of each tile in layout and sums, the lengths of these, items [I, 4] of work,
    bytes of matrices that are read, and whether all functions that are needed are there. layouts: [slots, sizes]
    how activations are laid out, see `Form.layout`.

    An item is some blocks, about so many bytes of matrices but not more than so many blocks, and a multiple of some
    where there are as many, as `item` says: of one expert, or, by block, of all experts.
    """
    item_bytes, multiple, most_blocks = item
    matrices = table.shape[1]
    starts = np.empty((tiles.shape[0], matrices, 2), np.int64)
    layout, sums, nbytes, spans, blocks, block_bytes = 0, 0, 0, 0, 0, 0
    complete = True
    cuts = np.empty((tiles.shape[0], 4), np.int64)  # first and last tile, blocks, blocks of an item
    for tile in range(tiles.shape[0]):
        expert, size = tiles[tile, EXPERT], tiles[tile, SIZE]
        of_expert, high = 0, 0
        for which in range(matrices):
            how = table[expert, which]
            layout_of = layouts[how[SLOT], tiles[tile, PLACE]]
            if shared(table, tiles[tile], which, layouts):
                starts[tile, which] = starts[tile, 0]
            else:
                starts[tile, which, 0], starts[tile, which, 1] = layout, sums
                layout += how[FILLED] // 2 * size * (layout_of & WORDS) // 2
                sums += how[GROUPS] * size * (1 + is_whole(layout_of))
            of_expert += how[STRIDE]
            high = max(high, (how[ROWS] + LANES - 1) // LANES)
            complete = complete and functions[how[SLOT], tiles[tile, PLACE]] != 0
        if tile and tiles[tile - 1, EXPERT] == expert:
            cuts[spans - 1, 1] = tile + 1
            continue
        blocks, block_bytes, nbytes = max(blocks, high), block_bytes + of_expert, nbytes + of_expert * high
        cuts[spans, 0], cuts[spans, 1], cuts[spans, 2], cuts[spans, 3] = tile, tile + 1, high, item_bytes // of_expert
        spans += 1
    if by_block and spans:
        cuts[0, 1], cuts[0, 2], cuts[0, 3] = tiles.shape[0], blocks, item_bytes // block_bytes
        spans = 1
    count = 0
    for span in range(spans):
        cuts[span, 3] = min(max(1, cuts[span, 3] // multiple), most_blocks // multiple) * multiple
        count += -(-cuts[span, 2] // cuts[span, 3])
    items = np.empty((count, 4), np.int64)
    number = 0
    for span in range(spans):
        first, last, high, step = cuts[span]
        for block in range(0, high, step):
            items[number, 0], items[number, 1] = first, last
            items[number, 2], items[number, 3] = block, min(block + step, high)
            number += 1
    return starts, layout, sums, items, nbytes, complete


@_compile  # type: ignore[untyped-decorator]
def _place(stage, tile, which, block):  # type: ignore[no-untyped-def]
    """Where a block of a matrix of a tile's expert lies."""
    table, expert = stage[0], stage[1][tile, EXPERT]
    return stage[6] + table[expert, which, OFFSET] + block * table[expert, which, STRIDE]


@_compile  # type: ignore[untyped-decorator]
def _ask_for_first(stage, item):  # type: ignore[no-untyped-def]
    """What blocks do not ask for ahead, the first lines of the first of them."""
    for block in range(item[2], min(item[2] + MOST_TOGETHER, item[3])):
        at = _place(stage, item[0], 0, block)
        for line in range(0, stage[7] // MOST_TOGETHER, LINE_BYTES):
            ask_for(at + line)


@_compile  # type: ignore[untyped-decorator]
def _multiply(stage, item, following, functions, grids, layout, sums, products, end, weights, per_token, out, biased):  # type: ignore[no-untyped-def]
    """One item: tiles from item[0] to item[1], blocks from item[2] to item[3]; following: address of what is read
    after it; products: [C, size * 16 * blocks and more]."""
    table, tiles, _, starts, _, _, base, ahead = stage
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
                    after = _place(stage, tile + 1, 0, first)
                call_block(
                    functions[how[SLOT], tiles[tile, PLACE]],
                    (
                        at, at + how[SCALES_AT], zeros, how[ZERO_STRIDE], count, how[STRIDE], after, how[GROUPS],
                        how[UNITS], how[LAST_UNITS], how[GROUP], layout.ctypes.data + starts[tile, which, 0] * 4,
                        sums.ctypes.data + starts[tile, which, 1] * 4, products[which].ctypes.data, width * 4, ahead,
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


@_compile  # type: ignore[untyped-decorator]
def _work(stage, counters, source, layout, sums, items, functions, grids, end, weights, per_token, out, biased):  # type: ignore[no-untyped-def]
    """One thread's part of a stage; it returns when all items are done, by whomever.

    stage: (table [E, C, COLUMNS], tiles [S, 5], order [P], starts [S, C, 2] of each tile in layout and sums, rows of
    order for one of source or 0 where source is in order, layouts as in `plan`, address of the buffer, bytes that are
    asked for ahead);
    counters: int64, 0, four of them each on a line of its own; source: [R, K] float32; layout: uint32; items [I, 4];
    functions: addresses [slots, sizes]; grids: [E, C, 3]; end: what is done with the products; weights [P] float32 of T
    tokens, per_token each; out: [C, R, N].
    """
    tiles, matrices = stage[1].shape[0], stage[0].shape[1]
    first = counters.ctypes.data
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
    products = np.empty((matrices, MOST_BLOCKS * MOST_ROWS * LANES), np.float32)
    while item < most:
        own = items[item]
        item = add_at(first + 128, 1)
        following = _place(stage, items[item, 0], 0, items[item, 2]) if item < most else stage[6]
        _multiply(
            stage, own, following, functions, grids, layout, sums, products, end, weights, per_token, out, biased
        )  # fmt: skip
        add_at(first + 192, 1)
    _wait(first + 192, most)


NUMBERS, UNPACKING = 23, 25  # that describe a stage, and the unpacking of a matrix
BOUND = 14  # those of a stage's matrices and a form, which do not change from call to call, and some of them
BOUND_EXPERTS, BOUND_MATRICES, BOUND_SIZES, BOUND_INPUTS, BOUND_ROWS = 1, 2, 5, 12, 13


@_compile  # type: ignore[untyped-decorator]
def bound(address):  # type: ignore[no-untyped-def]
    """What the numbers of `Matrices.bound` at an address say: table, functions, layouts, grids, biases, address of the
    buffer, bytes that are asked for ahead, inputs, and rows of the matrices."""
    n = carray(int64s(address), BOUND)
    return (
        carray(int64s(n[0]), (n[1], n[2], COLUMNS)), carray(int64s(n[3]), (n[4], n[5])),
        carray(int64s(n[6]), (n[4], n[5])), carray(float32s(n[7]), (n[1], n[2], 3)), carray(float32s(n[8]), n[9]),
        n[10], n[11], n[12], n[13],
    )  # fmt: skip


@_compile  # type: ignore[untyped-decorator]
def describe(  # type: ignore[no-untyped-def]
    address, tiles, order, starts, per_row, counters, source, layout, sums, items, end, weights, per_token, out, into
):
    """The arguments of a stage's `_work` as numbers into [NUMBERS], addresses and shapes; whose arrays need to stay.
    address: of the numbers of `Matrices.bound`."""
    into[0], into[1], into[2] = address, tiles.ctypes.data, tiles.shape[0]
    into[3], into[4], into[5], into[6] = order.ctypes.data, order.shape[0], starts.ctypes.data, per_row
    into[7], into[8], into[9] = counters.ctypes.data, source.ctypes.data, source.shape[0]
    into[10], into[11], into[12], into[13] = layout.ctypes.data, layout.shape[0], sums.ctypes.data, sums.shape[0]
    into[14], into[15], into[16] = items.ctypes.data, items.shape[0], end
    into[17], into[18], into[19] = weights.ctypes.data, weights.shape[0], per_token
    into[20], into[21], into[22] = out.ctypes.data, out.shape[1], out.shape[2]


@_compile  # type: ignore[untyped-decorator]
def _described(address):  # type: ignore[no-untyped-def]
    """One thread's part of the stage that numbers at an address describe."""
    n = carray(int64s(address), NUMBERS)
    table, functions, layouts, grids, biased, base, ahead, inputs, _ = bound(n[0])
    matrices = table.shape[1]
    stage = (
        table, carray(int64s(n[1]), (n[2], 5)), carray(int64s(n[3]), n[4]), carray(int64s(n[5]), (n[2], matrices, 2)),
        n[6], layouts, base, ahead,
    )  # fmt: skip
    _work(
        stage, carray(int64s(n[7]), 4 * LINE), carray(float32s(n[8]), (n[9], inputs)), carray(uint32s(n[10]), n[11]),
        carray(float32s(n[12]), n[13]), carray(int64s(n[14]), (n[15], 4)), functions, grids, n[16],
        carray(float32s(n[17]), n[18]), n[19], carray(float32s(n[20]), (matrices, n[21], n[22])), biased,
    )  # fmt: skip


def one_stage(address):  # type: ignore[no-untyped-def]
    """One thread's part of a stage, see `describe`; for `compiled.entry`."""
    _described(address)


def two_stages(address):  # type: ignore[no-untyped-def]
    """Of two, the second of which reads what the first writes."""
    _described(address)
    _described(address + 8 * NUMBERS)


@_compile  # type: ignore[untyped-decorator]
def floats_at(address, count, short):  # type: ignore[no-untyped-def]
    """float32 [n] of what lies at an address, bf16 or float32."""
    made = np.empty(count, np.float32)
    if short:
        from_short(carray(uint16s(address), count), made)
    else:
        made[:] = carray(float32s(address), count)
    return made


@_compile  # type: ignore[untyped-decorator]
def put(made, short, into, first):  # type: ignore[no-untyped-def]
    """Some columns of products [R, n] into [R, N] at an address, `first` the place of the first: bf16 or float32."""
    count, outputs = made.shape[0], into[1]
    for row in range(count):
        at = row * outputs + first
        if short:
            to_short(made[row], carray(uint16s(into[0] + 2 * at), made.shape[1]))
        else:
            to = carray(float32s(into[0] + 4 * at), made.shape[1])
            to[:] = made[row]


@_compile  # type: ignore[untyped-decorator]
def work_alone(counter, step, address, place, size, short, source, into, count):  # type: ignore[no-untyped-def]
    """One thread's part of what `_work` does for one matrix and a single tile, without what that costs to prepare:
    `step` blocks of the matrix at a time, as the counter at an address hands them out. The rows every thread lays out
    for itself. address: of the numbers of `Matrices.bound`; size: of the rows that are compiled, and
    their place; short: whether rows
    [count, K] at `source`, and [count, N] at `into`, are bf16, 0 for float32."""
    table, functions, layouts, grids, biased, base, ahead, inputs, outputs = bound(address)
    how = table[0, 0]
    high = (how[ROWS] + LANES - 1) // LANES
    first = add_at(counter, step)
    if first >= high:
        return
    tiles = np.zeros((1, 5), np.int64)
    tiles[0, COUNT], tiles[0, SIZE], tiles[0, PLACE] = count, size, place
    stage = (table, tiles, tiles[0], np.zeros((1, 1, 2), np.int64), 0, layouts, base, ahead)
    item = np.array((0, 1, first, min(first + step, high)))
    _ask_for_first(stage, item)
    given = floats_at(source, count * inputs, short).reshape(count, inputs)
    out = np.empty((1, count, outputs), np.float32)
    layout = np.zeros(how[FILLED] // 2 * size * (layouts[0, place] & WORDS) // 2, np.uint32)
    sums, products = np.zeros(2 * how[GROUPS] * size, np.float32), np.empty((1, MOST_BLOCKS * size * LANES), np.float32)
    lay_out_tile(stage, 0, 0, given, layout, sums)
    while first < high:
        item[2], item[3] = first, min(first + step, high)
        after = add_at(counter, step)
        following = _place(stage, 0, 0, after) if after < high else base
        _multiply(
            stage, item, following, functions, grids, layout, sums, products, PRODUCTS, sums, 1, out, biased
        )  # fmt: skip
        begin, end = first * LANES, min(item[3] * LANES, outputs)
        put(out[0, :, begin:end], short, (into, outputs), begin)
        first = after


def unpack(address):  # type: ignore[no-untyped-def]
    """One thread's part of unpacking some blocks of a matrix; for `compiled.entry`. The numbers: two counters, each on
    a line of its own, then addresses of the matrix' row of its table, of its grid, of the buffer and of compiled code,
    first and last block, where values go to, and bytes from one input's values to the next one's and of a value."""
    n = carray(int64s(address), UNPACKING)
    how, grid, base, function = carray(int64s(n[16]), COLUMNS), carray(float32s(n[17]), 3), n[18], n[19]
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
                how[LAST_UNITS], how[GROUP], 0, 0, to, n[23], 0, grid[0], grid[1], grid[2],
            ),
        )  # fmt: skip
        add_at(address + 64, 1)
    _wait(address + 64, last - first)
