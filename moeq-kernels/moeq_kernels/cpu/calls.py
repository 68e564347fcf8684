"""A call of a layer or of a matrix, all of it compiled: sorted, planned, shared out with threads, and done.

After a layer's matrices have gone through the caches nothing of what Python needs is there any more, so that each of
its steps takes several times as long as it seems to: in Python what is done here took a quarter of a layer's time.

Functions are for `compiled.call`; they return INCOMPLETE, and have done nothing, where a block is not compiled yet.
`static`: address of the numbers of `layer.PackedLayer`, of a form [HOW] and then of each stage [BOUND]; team: see
`threads.divide`. Other letters as in `schedule`.
"""

from __future__ import annotations

from moeq_kernels.cpu.columns import LANES
from moeq_kernels.cpu.finish import PRODUCTS, WEIGHTED
from moeq_kernels.cpu.kept_code import internal
from moeq_kernels.cpu.memory import (
    address_of,
    float32s,
    int64s,
    new_float32s,
    new_int64s,
    zero_float32s,
    zero_int64s,
    zero_uint32s,
)
from moeq_kernels.cpu.routing import by_code, route
from moeq_kernels.cpu.schedule import (
    ALONE_NUMBERS,
    BOUND,
    BOUND_EXPERTS,
    BOUND_INPUTS,
    BOUND_MATRICES,
    BOUND_ROWS,
    BOUND_SIZES,
    HOW,
    HOW_DIVIDED,
    HOW_END,
    HOW_MULTIPLE,
    HOW_SIZES,
    HOW_TILES,
    HOW_WAKING,
    HOW_WHOLE,
    HOW_WORK,
    ITEMS,
    LINE,
    MOST_BLOCKS,
    MOST_TOGETHER,
    NUMBERS,
    ZERO,
    bound,
    describe,
    floats_at,
    plan,
    put,
)
from moeq_kernels.cpu.threads import ALONE, ALWAYS, WHERE_AWAKE, divide, threads_of
from moeq_kernels.cpu.tiles import SIDE

DONE, INCOMPLETE = 0, 1
SHORT_HIDDEN, SHORT_WEIGHTS, SHORT_OUT = 1, 2, 4  # what is bf16, float32 else
WORD = 8  # bytes of a number

_compile = internal()


@_compile  # type: ignore[untyped-decorator]
def _routed(static, index, rows, last):  # type: ignore[no-untyped-def]
    """Rows sorted by expert: order [P], tiles [S, 5] sorted by the last stage's code, and how many experts these are
    of; index: address of experts [P]."""
    how, of_stage = int64s(static, HOW), int64s(static + WORD * HOW, BOUND)
    order, starts = new_int64s(rows), new_int64s(of_stage[BOUND_EXPERTS] + 1)
    tiles, sizes = new_int64s((rows, 5)), int64s(how[HOW_SIZES], of_stage[BOUND_SIZES])
    count, tiled = route(int64s(index, rows), starts, sizes, how[HOW_WHOLE], order, tiles)
    return order, by_code(tiles[:count], bound(static + WORD * (HOW + last * BOUND))[0]), tiled


@_compile  # type: ignore[untyped-decorator]
def _planned(static, which, order, tiles, tiled, threads):  # type: ignore[no-untyped-def]
    """A stage's plan, see `schedule.plan`, after which space for its layout and sums, and its counters."""
    table, functions, layouts = bound(static + WORD * (HOW + which * BOUND))[:3]
    how, pieces = int64s(static, HOW), ITEMS * threads if threads > 1 else 1
    in_tiles = 0 < how[HOW_TILES] * max(1, tiled) <= order.shape[0]
    multiple = SIDE if in_tiles else how[HOW_MULTIPLE]
    starts, words, sums, items, much, complete = plan(tiles, table, functions, layouts, which > 0, pieces, multiple)
    space = zero_uint32s(words), zero_float32s(sums), zero_int64s(4 * LINE)
    return starts, items, much, complete, space


@_compile  # type: ignore[untyped-decorator]
def _by(how, much, rows, tiled):  # type: ignore[no-untyped-def]
    """How to divide so much work with matrices, see `columns`: not what is done before another thread is awake."""
    return ALONE if much * (1 + rows / max(1, tiled) / 4) < how[HOW_WAKING] else ALWAYS


def experts(static, hidden, tokens, index, top_k, weights, out, short, team):  # type: ignore[no-untyped-def]
    """The weighted sum over each token's experts: hidden [T, K], index int64 [T, k], weights [T, k] and out [T, N] lie
    at addresses; short: which of them are bf16, SHORT_*. Experts that are to be unpacked add nothing."""
    how, rows, threads = int64s(static, HOW), tokens * top_k, threads_of(team)
    order, tiles, tiled = _routed(static, index, rows, ZERO + 1)
    starts, items, much, complete, space = _planned(static, ZERO, order, tiles, tiled, threads)
    starts_down, items_down, more, complete_down, space_down = _planned(static, ZERO + 1, order, tiles, tiled, threads)
    if not (complete and complete_down):
        return INCOMPLETE
    first, second = static + WORD * HOW, static + WORD * (HOW + BOUND)
    sizes = int64s(first, BOUND), int64s(second, BOUND)
    source = floats_at(hidden, tokens, sizes[0][BOUND_INPUTS], short & SHORT_HIDDEN)
    shares = floats_at(weights, ZERO + 1, rows, short & SHORT_WEIGHTS)[0]
    inner = new_float32s((1, rows, sizes[0][BOUND_ROWS]))
    result = zero_float32s((1, tokens, sizes[1][BOUND_ROWS]))
    numbers = new_int64s(2 * NUMBERS)
    describe(
        first, tiles, order, starts, top_k, space[2], source, space[0], space[1], items, how[HOW_END], shares,
        ZERO + 1, inner, address_of(numbers) + WORD * NUMBERS, numbers[:NUMBERS],
    )  # fmt: skip
    describe(
        second, tiles, order, starts_down, ZERO, space_down[2], inner[0], space_down[0], space_down[1], items_down,
        ZERO + WEIGHTED, shares, top_k, result, ZERO, numbers[NUMBERS:],
    )  # fmt: skip
    if tiles.shape[0]:
        divide(team, _by(how, much + more, rows, tiled), how[HOW_WORK], address_of(numbers))
    put(result[0], short & SHORT_OUT, out, ZERO, result.shape[2])
    # what threads were given the addresses of is kept until here
    kept = order.size + tiles.size + starts.size + items.size + starts_down.size + items_down.size + numbers.size
    kept += source.size + shares.size + inner.size + space[0].size + space[1].size + space[2].size
    return DONE * (kept + space_down[0].size + space_down[1].size + space_down[2].size)


def products(static, source, count, index, rows, per_row, out, team):  # type: ignore[no-untyped-def]
    """Products [C, P, N] of float32 rows [R, K] with the matrices of a stage, sorted by expert; per_row: rows of index
    for one of source, 0 where source is sorted. What no tile has is left as it is."""
    of_stage = int64s(static + WORD * HOW, BOUND)
    given = float32s(source, (count, of_stage[BOUND_INPUTS]))
    into = float32s(out, (of_stage[BOUND_MATRICES], rows, of_stage[BOUND_ROWS]))
    return _multiplied(static, given, index, rows, per_row, into, team)


def many(static, source, count, short, index, out, team):  # type: ignore[no-untyped-def]
    """Rows [count, K] at an address times the only matrix, [count, N] to another; short: whether both are bf16, float32
    else; index: zeros [count]."""
    of_stage = int64s(static + WORD * HOW, BOUND)
    given = floats_at(source, count, of_stage[BOUND_INPUTS], short)
    into = new_float32s((1, count, of_stage[BOUND_ROWS]))
    answer = _multiplied(static, given, index, count, ZERO + 1, into, team)
    put(into[0], short, out, ZERO, into.shape[2])
    return answer


@_compile  # type: ignore[untyped-decorator]
def _multiplied(static, given, index, rows, per_row, into, team):  # type: ignore[no-untyped-def]
    """As `products`, of arrays."""
    how, first = int64s(static, HOW), static + WORD * HOW
    order, tiles, tiled = _routed(static, index, rows, ZERO)
    starts, items, much, complete, space = _planned(static, ZERO, order, tiles, tiled, threads_of(team))
    if not complete:
        return INCOMPLETE
    numbers, none = new_int64s(NUMBERS), new_float32s(0)
    describe(
        first, tiles, order, starts, per_row, space[2], given, space[0], space[1], items, ZERO + PRODUCTS, none,
        ZERO + 1, into, ZERO, numbers,
    )  # fmt: skip
    if tiles.shape[0]:
        divide(team, _by(how, much, rows, tiled), how[HOW_WORK], address_of(numbers))
    kept = order.size + tiles.size + starts.size + items.size + numbers.size + none.size
    return DONE * (kept + space[0].size + space[1].size + space[2].size)


def matrix(known, source, into, team):  # type: ignore[no-untyped-def]
    """Rows [count, K] at an address times the only matrix, [count, N] to another. known: address of `static`, the place
    of the rows that are compiled and how many these are, whether rows are bf16, float32 else, their count, and the
    matrix' work, see `columns`."""
    n = int64s(known, 6)
    static, place, size, short, count, work = n[0], n[1], n[2], n[3], n[4], n[5]
    how, first, threads = int64s(static, HOW), static + WORD * HOW, threads_of(team)
    blocks = (int64s(first, BOUND)[BOUND_ROWS] + LANES - 1) // LANES
    step, by, much = MOST_BLOCKS, ALONE, work * (1 + count / 4)
    if threads > 1 and much >= min(how[HOW_WAKING], how[HOW_DIVIDED]):
        by = ALWAYS if much >= how[HOW_WAKING] else WHERE_AWAKE
        most = blocks // (ITEMS * threads) // MOST_TOGETHER
        step = min(max(1, most), MOST_BLOCKS // MOST_TOGETHER) * MOST_TOGETHER
    numbers = zero_int64s(ALONE_NUMBERS)
    given = step, first, place, size, short, source, into, count
    for which in range(len(given)):
        numbers[LINE + which] = given[which]
    divide(team, by, how[HOW_WORK], address_of(numbers))
    return DONE * numbers.size
