"""The work of one call, compiled: tokens sorted by expert, cut into items, and done by all threads that take part.

A call has one or two stages, each of the same two steps: rows of activations are laid out as the blocks read them, with
their sums by group; then blocks of 16 output rows are multiplied with them, C matrices of an expert side by side (gate
and up). Items are claimed with an atomic counter, so that cores are busy to the end whatever widths the experts have,
and a thread that comes late or never costs nothing: a step ends when its items are done, not when threads arrive.

What comes out does not depend on the number of threads: every number is computed by one thread, experts in order.

Letters: T tokens, k experts a token, P = T*k rows, E experts, A experts with rows, S tiles (rows of one expert that one
pass multiplies), C matrices of an expert, N output rows, K inputs.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, types

from moeq_kernels.cpu.compiled import call_block
from moeq_kernels.cpu.memory import add_at, bits_of, float_of

LANES = 16
MOST_ROWS = 16  # of a tile
# columns of a table of matrices [E, C, COLUMNS]
(BITS, OFFSET, STRIDE, ROWS, SLOT, SCALES_AT, ZEROS_AT, ZERO_STRIDE, GROUPS, GROUP, LAST, UNITS, LAST_UNITS, UNIT,
 BIAS, FILLED, ALIKE) = range(17)  # fmt: skip
COLUMNS = 17
# columns of tiles [S, 5]; size: the number of rows that is compiled, `PLACE` its place among those
EXPERT, FIRST, COUNT, SIZE, PLACE = range(5)
# what is done with the products
PRODUCTS, WEIGHTED, SILU, GELU, GELU_TANH, RELU = range(6)
ACTIVATIONS = {"silu": SILU, "swish": SILU, "gelu": GELU, "gelu_pytorch_tanh": GELU_TANH, "gelu_new": GELU_TANH,
               "relu": RELU}  # fmt: skip
PATIENCE = 1000  # looks at a counter before the core is given to another thread
LINE = 8  # int64 of a cache line: every counter has its own

_give_way = types.ExternalFunction("sched_yield", types.int32())
_compile = njit(nogil=True, cache=True, error_model="numpy")
_sums = njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "nsz", "contract"})


@_compile  # type: ignore[untyped-decorator]
def route(index, starts, sizes, whole, order, tiles):  # type: ignore[no-untyped-def]
    """Sort rows by expert; the number of tiles.

    index: [P] experts of rows, E and more for none; starts [E + 1] is filled with the first row of each expert in
    order [P], which is filled too; sizes: rows that are compiled, ascending; experts with `whole` rows and more get no
    tiles [P, 5].
    """
    experts = starts.shape[0] - 1
    starts[:] = 0
    for row in range(index.shape[0]):
        if 0 <= index[row] < experts:
            starts[index[row] + 1] += 1
    for expert in range(experts):
        starts[expert + 1] += starts[expert]
    at = starts[:experts].copy()
    for row in range(index.shape[0]):
        expert = index[row]
        if 0 <= expert < experts:
            order[at[expert]] = row
            at[expert] += 1
    most, number = sizes[-1], 0
    for expert in range(experts):
        first, stop = starts[expert], starts[expert + 1]
        while first < stop and stop - starts[expert] < whole:
            count = min(most, stop - first)
            place = 0
            while sizes[place] < count:
                place += 1
            tiles[number, EXPERT] = expert
            tiles[number, FIRST] = first
            tiles[number, COUNT] = count
            tiles[number, SIZE] = sizes[place]
            tiles[number, PLACE] = place
            first += count
            number += 1
    return number


@_compile  # type: ignore[untyped-decorator]
def plan(tiles, table, functions, pairs, by_block, item_bytes):  # type: ignore[no-untyped-def]
    """How a stage goes: starts [S, C, 2] of each tile in layout and sums, the lengths of these, items [I, 4] of `work`,
    bytes of matrices that are read, and whether all functions that are needed are there.

    An item is some blocks, about item_bytes of matrices: of one expert, or, by block, of all experts.
    """
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
            if how[ALIKE]:
                starts[tile, which] = starts[tile, 0]
            else:
                starts[tile, which, 0], starts[tile, which, 1] = layout, sums
                layout += how[FILLED] * size // (2 if pairs else 1)
                sums += how[GROUPS] * size
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
        cuts[span, 3] = max(1, cuts[span, 3])
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
def _bf16(value):  # type: ignore[no-untyped-def]
    """The bits of a float32 rounded to bf16, to nearest, halves to even."""
    bits = bits_of(value)
    if value != value:
        return np.uint32(0x7FC0)
    return (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


@_sums  # type: ignore[untyped-decorator]
def _lay_out(source, into, pairs, how, sums, size, row):  # type: ignore[no-untyped-def]
    """One row of activations [K] as words, one an input or, in bf16, one a pair of them, and its sums by group among
    those of `size` rows, [G, size]; into: uint32, 0 where groups are filled up."""
    at = 0
    for group in range(how[GROUPS]):
        last = group == how[GROUPS] - 1
        first, count = group * how[GROUP], how[LAST] if last else how[GROUP]
        filled = (how[LAST_UNITS] if last else how[UNITS]) * how[UNIT]
        given = source[first : first + count]
        total = np.float32(0)
        if pairs:
            own = into[at : at + filled // 2]
            for pair in range(count >> 1):
                low, high = _bf16(given[2 * pair]), _bf16(given[2 * pair + 1])
                total += float_of(low << np.uint32(16)) + float_of(high << np.uint32(16))
                own[pair] = low | high << np.uint32(16)
            if count & 1:
                own[count >> 1] = _bf16(given[count - 1])
                total += float_of(own[count >> 1] << np.uint32(16))
        else:
            own = into[at : at + filled]
            for k in range(count):
                total += given[k]
                own[k] = bits_of(given[k])
        sums[group * size + row] = total
        at += own.shape[0]


@_compile  # type: ignore[untyped-decorator]
def _lay_out_tile(stage, tile, which, source, layout, sums):  # type: ignore[no-untyped-def]
    """All rows of a tile for one of its matrices, side by side: [words of a row, size]."""
    table, tiles, order, starts, per_row, pairs, _ = stage
    how = table[tiles[tile, EXPERT], which]
    size, first, count = tiles[tile, SIZE], tiles[tile, FIRST], tiles[tile, COUNT]
    words = how[FILLED] // 2 if pairs else how[FILLED]
    begin = starts[tile, which, 0]
    into, own = layout[begin : begin + words * size], sums[starts[tile, which, 1] :]
    rows = into if size == 1 else np.zeros(words * count, np.uint32)
    for row in range(count):
        given = source[order[first + row] // per_row if per_row else first + row]
        _lay_out(given, rows[row * words : row * words + words], pairs, how, own, size, row)
    if size > 1:
        for word in range(words):
            side = into[word * size : word * size + count]
            for row in range(count):
                side[row] = rows[row * words + word]


@_compile  # type: ignore[untyped-decorator]
def _exp(value):  # type: ignore[no-untyped-def]
    """e to the power of a float32, to 2e-7 of it, in operations that vectors have; Cephes' polynomial."""
    held = min(max(value, np.float32(-87.0)), np.float32(88.0))
    whole = np.floor(held * np.float32(1.44269504) + np.float32(0.5))
    rest = held - whole * np.float32(0.693359375) + whole * np.float32(2.12194440e-4)
    power = np.float32(1.9875691500e-4)
    power = power * rest + np.float32(1.3981999507e-3)
    power = power * rest + np.float32(8.3334519073e-3)
    power = power * rest + np.float32(4.1665795894e-2)
    power = power * rest + np.float32(1.6666665459e-1)
    power = power * rest + np.float32(5.0000001201e-1)
    power = power * rest * rest + rest + np.float32(1)
    return power * float_of(np.uint32(np.int32(whole) + np.int32(127)) << np.uint32(23))


@_compile  # type: ignore[untyped-decorator]
def _activate(kind, values):  # type: ignore[no-untyped-def]
    """The activation function of some float32 in their place."""
    one, half = np.float32(1), np.float32(0.5)
    if kind == SILU:
        for k in range(values.shape[0]):
            values[k] = values[k] / (one + _exp(-values[k]))
    elif kind == GELU_TANH:
        factor, cubed = np.float32(2 * math.sqrt(2 / math.pi)), np.float32(0.044715)
        for k in range(values.shape[0]):
            value = values[k]
            values[k] = value / (one + _exp(-factor * (value + cubed * value * value * value)))
    elif kind == GELU:
        for k in range(values.shape[0]):
            values[k] = half * values[k] * (one + np.float32(math.erf(values[k] * np.float32(math.sqrt(0.5)))))
    else:
        for k in range(values.shape[0]):
            values[k] = max(values[k], np.float32(0))


@_compile  # type: ignore[untyped-decorator]
def _finish(end, products, tile, block, stage, weights, per_token, out, biased):  # type: ignore[no-untyped-def]
    """What is done with the products [C, size, 16] of a tile and a block."""
    table, tiles, order = stage[:3]
    expert, first, rows = tiles[tile, EXPERT], tiles[tile, FIRST], tiles[tile, COUNT]
    begin, matrices = block * LANES, table.shape[1]
    for which in range(matrices):
        count, bias = min(LANES, table[expert, which, ROWS] - begin), table[expert, which, BIAS]
        if bias >= 0:
            added = biased[bias + begin : bias + begin + count]
            for row in range(rows):
                values = products[which, row * LANES : row * LANES + count]
                for lane in range(count):
                    values[lane] += added[lane]
        if end == PRODUCTS:
            for row in range(rows):
                into = out[which, first + row, begin : begin + count]
                values = products[which, row * LANES : row * LANES + count]
                for lane in range(count):
                    into[lane] = values[lane]
    count = min(LANES, table[expert, 0, ROWS] - begin)
    if end == WEIGHTED:
        for row in range(rows):
            place = order[first + row]
            weight, into = weights[place], out[0, place // per_token, begin : begin + count]
            values = products[0, row * LANES : row * LANES + count]
            for lane in range(count):
                into[lane] += weight * values[lane]
    elif end > WEIGHTED:
        _activate(end, products[0, : rows * LANES])
        for row in range(rows):
            into = out[0, first + row, begin : begin + count]
            values = products[0, row * LANES : row * LANES + count]
            others = products[matrices - 1, row * LANES : row * LANES + count]
            for lane in range(count):
                into[lane] = values[lane] * others[lane] if matrices > 1 else values[lane]


@_compile  # type: ignore[untyped-decorator]
def _multiply(stage, item, functions, grids, layout, sums, products, end, weights, per_token, out, biased):  # type: ignore[no-untyped-def]
    """One item: tiles from item[0] to item[1], blocks from item[2] to item[3]."""
    table, tiles, _, starts, _, _, base = stage
    begin = item[0]
    while begin < item[1]:
        expert = tiles[begin, EXPERT]
        stop = begin + 1
        while stop < item[1] and tiles[stop, EXPERT] == expert:
            stop += 1
        for block in range(item[2], item[3]):
            for tile in range(begin, stop):
                for which in range(table.shape[1]):
                    how, grid = table[expert, which], grids[expert, which]
                    if block * LANES >= how[ROWS]:
                        continue
                    at = base + how[OFFSET] + block * how[STRIDE]
                    zeros = at + how[ZEROS_AT] if how[ZERO_STRIDE] else base
                    call_block(
                        functions[how[SLOT], tiles[tile, PLACE]],
                        (
                            at, at + how[SCALES_AT], zeros, how[ZERO_STRIDE], how[GROUPS], how[UNITS], how[LAST_UNITS],
                            how[GROUP], layout.ctypes.data + starts[tile, which, 0] * 4,
                            sums.ctypes.data + starts[tile, which, 1] * 4, products.ctypes.data + which * 1024,
                            0, grid[0], grid[1], grid[2],
                        ),
                    )  # fmt: skip
                _finish(end, products, tile, block, stage, weights, per_token, out, biased)
        begin = stop


@_compile  # type: ignore[untyped-decorator]
def _wait(counter, wanted):  # type: ignore[no-untyped-def]
    """Until a counter is as high as wanted; other programs' threads come first after a while."""
    times = 0
    while add_at(counter, 0) < wanted:
        times += 1
        if times > PATIENCE:
            _give_way()


@_compile  # type: ignore[untyped-decorator]
def work(stage, counters, source, layout, sums, items, functions, grids, end, weights, per_token, out, biased):  # type: ignore[no-untyped-def]
    """One thread's part of a stage; it returns when all items are done, by whomever.

    stage: (table [E, C, COLUMNS], tiles [S, 5], order [P], starts [S, C, 2] of each tile in layout and sums, rows of
    order for one of source or 0 where source is in order, whether rows are pairs of bf16, address of the buffer);
    counters: int64, 0, four of them each on a line of its own; source: [R, K] float32; layout: uint32; items [I, 4];
    functions: addresses [slots, sizes]; grids: [E, C, 3]; end: what is done with the products; weights [P] float32 of T
    tokens, per_token each; out: [C, R, N].
    """
    tiles, matrices = stage[1].shape[0], stage[0].shape[1]
    first = counters.ctypes.data
    steps = tiles * matrices
    while True:
        step = add_at(first, 1)
        if step >= steps:
            break
        tile, which = divmod(step, matrices)
        if not stage[0][stage[1][tile, EXPERT], which, ALIKE]:
            _lay_out_tile(stage, tile, which, source, layout, sums)
        add_at(first + 64, 1)
    _wait(first + 64, steps)
    products = np.empty((matrices, MOST_ROWS * LANES), np.float32)
    while True:
        item = add_at(first + 128, 1)
        if item >= items.shape[0]:
            break
        _multiply(stage, items[item], functions, grids, layout, sums, products, end, weights, per_token, out, biased)
        add_at(first + 192, 1)
    _wait(first + 192, items.shape[0])


@_compile  # type: ignore[untyped-decorator]
def work_two(one, two):  # type: ignore[no-untyped-def]
    """Two stages, the second reads what the first wrote; arguments of `work`, each a tuple."""
    work(*one)
    work(*two)


@_compile  # type: ignore[untyped-decorator]
def alone(source, place, size, pairs, base, table, functions, grids, biased, out):  # type: ignore[no-untyped-def]
    """What `work` does for one matrix and a single tile, in one thread and without what that costs to prepare: source
    [R, K] and out [1, R, N] float32, size >= R rows that are compiled, `place` its place among those."""
    tiles = np.zeros((1, 5), np.int64)
    tiles[0, COUNT], tiles[0, SIZE], tiles[0, PLACE] = source.shape[0], size, place
    how = table[0, 0]
    layout = np.zeros(how[FILLED] * size // (2 if pairs else 1), np.uint32)
    sums, products = np.zeros(how[GROUPS] * size, np.float32), np.empty((1, MOST_ROWS * LANES), np.float32)
    stage = (table, tiles, tiles[0], np.zeros((1, 1, 2), np.int64), 0, pairs, base)
    _lay_out_tile(stage, 0, 0, source, layout, sums)
    item = np.array((0, 1, 0, (how[ROWS] + LANES - 1) // LANES))
    _multiply(stage, item, functions, grids, layout, sums, products, PRODUCTS, sums, 1, out, biased)


@_compile  # type: ignore[untyped-decorator]
def unpack(counter, how, grid, base, function, first, last, out):  # type: ignore[no-untyped-def]
    """One thread's part of unpacking the blocks from first to last of a matrix, a row of its table, to out [K, n]."""
    at_counter = counter.ctypes.data
    while True:
        block = first + add_at(at_counter, 1)
        if block >= last:
            break
        at = base + how[OFFSET] + block * how[STRIDE]
        zeros = at + how[ZEROS_AT] if how[ZERO_STRIDE] else base
        to = out.ctypes.data + (block - first) * LANES * out.itemsize
        call_block(
            function,
            (
                at, at + how[SCALES_AT], zeros, how[ZERO_STRIDE], how[GROUPS], how[UNITS], how[LAST_UNITS],
                how[GROUP], 0, 0, to, out.shape[1] * out.itemsize, grid[0], grid[1], grid[2],
            ),
        )  # fmt: skip
        add_at(at_counter + 64, 1)
    _wait(at_counter + 64, last - first)
