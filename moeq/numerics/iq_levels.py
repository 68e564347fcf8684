"""i-quants of single levels, IQ4_XS: GPTQ's columns on 16 levels that are not equally far apart, compiled.

A run of weights that share a step is made with several steps, and the cheapest is kept, as in iq_search.py, of LANES
rows at once. Letters: E experts, K inputs, N output rows, a multiple of LANES, W columns of a block, R runs of one.
"""

from __future__ import annotations

import numpy as np

from moeq.numerics import vectors
from moeq.numerics.iq_columns import BYTES, FAR, NONE, ONE, factor_of, give, inverse_of, nearest_step, targets
from moeq.numerics.sweep import compiled, inside
from moeq.numerics.vectors import LANES
from moeq_kernels.cpu.memory import address_of, new_float32s

FIRST = 8  # scales that are tried first, of either sign
HALF = np.float32(0.5)


@inside  # type: ignore[untyped-decorator]
def _level(levels, count, wanted):  # type: ignore[no-untyped-def]
    """The nearest level and its place, of levels in order: how many middles between two lie below."""
    place, value = vectors.words(0), vectors.floats(vectors.number_at(levels, 0))
    for at in range(1, count):
        lower, upper = vectors.number_at(levels, at - 1), vectors.number_at(levels, at)
        above = vectors.less(vectors.floats(HALF * (lower + upper)), wanted)
        place = vectors.pick(above, vectors.words(at), place)
        value = vectors.pick(above, vectors.floats(upper), value)
    return value, place


@compiled  # type: ignore[untyped-decorator]
def fit_levels(columns, given, start, inverse, metric, levels, run, ideal, first, last):  # type: ignore[no-untyped-def]
    """Into ideal [E, R, N] the scale of every run with the least error, weighted by the diagonal of metric alone."""
    inputs, rows, width, book = columns.shape[1], columns.shape[2], given.shape[1], address_of(levels)
    room = new_float32s(2 * run * LANES)
    own, target = address_of(room), address_of(room) + BYTES * run * LANES
    chunks = rows // LANES
    for item in range(first, last):
        expert, begin = item // chunks, item % chunks * LANES
        whole = address_of(columns) + BYTES * ((expert * inputs + start) * rows + begin)
        gifts = address_of(given) + BYTES * (expert * width * rows + begin)
        for place in range(width // run):
            eights = (expert * width + place * run) * 8  # numbers of the eights before
            most = vectors.floats(NONE)
            for at in range(run):
                vectors.put_floats(own, at * LANES, vectors.floats_at(gifts, (place * run + at) * rows))
            for eight in range(run // 8):
                moved = BYTES * eight * 8 * LANES
                targets(whole + BYTES * (place * run + eight * 8) * rows, rows, own + moved,
                        address_of(inverse) + BYTES * (eights + eight * 64), vectors.floats(ONE),
                        target + moved)  # fmt: skip
            for at in range(run):
                size = vectors.size_of(vectors.floats_at(target, at * LANES))
                most = vectors.pick(vectors.less(most, size), size, most)
            best, found = vectors.floats(NONE), vectors.floats(NONE)
            for attempt in range(2 * FIRST):
                factor = np.float32((1 - 2 * (attempt // FIRST)) * (90 + 8 * (attempt % FIRST)))
                inverted = vectors.ratio(vectors.floats(factor), most)
                along, across = vectors.floats(NONE), vectors.floats(NONE)
                for at in range(run):
                    wanted = vectors.floats_at(target, at * LANES)
                    value, _ = _level(book, levels.shape[0], vectors.mul(wanted, inverted))
                    counts = vectors.number_at(address_of(metric), eights + at // 8 * 64 + at % 8 * 9)
                    value_counts = vectors.mul(value, vectors.floats(counts))
                    along = vectors.fused(wanted, value_counts, along)
                    across = vectors.fused(value, value_counts, across)
                better = vectors.less(vectors.mul(best, across), vectors.mul(along, along))
                scale = vectors.ratio(along, across)
                best = vectors.pick(better, vectors.mul(along, scale), best)
                found = vectors.pick(better, scale, found)
            empty = vectors.equal(most, vectors.floats(NONE))
            found = vectors.pick(empty, vectors.floats(NONE), found)
            vectors.put_floats(address_of(ideal), (expert * (width // run) + place) * rows + begin, found)
    room[0] = 0  # kept until here: numba frees what is used no more, and its address is no use


@inside  # type: ignore[untyped-decorator]
def _tried(levels, count, weights, stride, ahead, inputs, run, pivots, size, taken, own):  # type: ignore[no-untyped-def]
    """What a run costs at one scale; behind its own part of what is given to each, own [run], its errors and levels.

    weights: the run's, `stride` numbers from one to the next; ahead: its own part of the factor; pivots: its numbers;
    taken: what is given to each by the runs before.
    """
    inverted = inverse_of(size)
    cost = vectors.floats(NONE)
    for at in range(run):
        vectors.put_floats(own, at * LANES, vectors.floats_at(taken, at * LANES))
    for at in range(run):
        weight, moved = vectors.floats_at(weights, at * stride), vectors.floats_at(own, at * LANES)
        value, entry = _level(levels, count, vectors.mul(vectors.add(weight, moved), inverted))
        error = vectors.sub(weight, vectors.mul(size, value))
        off, pivot = vectors.add(error, moved), vectors.floats(vectors.number_at(pivots, at))
        cost = vectors.fused(vectors.mul(pivot, off), off, cost)
        vectors.put_floats(own, (run + at) * LANES, error)
        vectors.put_words(own, (2 * run + at) * LANES, entry)
        for later in range(at + 1, run):
            factor = vectors.floats(vectors.number_at(ahead, at * inputs + later))
            vectors.put_floats(own, later * LANES, vectors.fused(factor, error, vectors.floats_at(own, later * LANES)))
    return cost


@compiled  # type: ignore[untyped-decorator]
def round_levels(  # type: ignore[no-untyped-def]
    columns, given, upper, start, pivots, levels, least, each, count, run, near,
    scale, ideal, steps, entries, residual, first, last,
):  # fmt: skip
    """Into steps [E, R, N], entries [E, W, N] and residual [E, K, N] the codes of a block of given scales [E, N];
    least, each, count: of the steps' factors; near: steps on each side of the one nearest to the ideal scale that are
    tried."""
    inputs, rows, width, book = columns.shape[1], columns.shape[2], given.shape[1], address_of(levels)
    room = new_float32s((width + 5 * run) * LANES)
    taken = address_of(room)
    own = taken + BYTES * width * LANES
    kept, found, errors, best_found = (own + BYTES * run * LANES * 1, own + BYTES * run * LANES * 2,
                                       own + BYTES * run * LANES * 3, own + BYTES * run * LANES * 4)  # fmt: skip
    chunks = rows // LANES
    for item in range(first, last):
        expert, begin = item // chunks, item % chunks * LANES
        block = (expert * inputs + start) * rows + begin
        factor = address_of(upper) + BYTES * ((expert * inputs + start) * inputs + start)
        for at in range(width):
            taken_now = vectors.floats_at(address_of(given), (expert * width + at) * rows + begin)
            vectors.put_floats(taken, at * LANES, taken_now)
        unit = vectors.floats_at(address_of(scale), expert * rows + begin)
        for place in range(width // run):
            runs = (expert * (width // run) + place) * rows + begin
            middle = nearest_step(unit, least, each, count, vectors.floats_at(address_of(ideal), runs))
            best, step = vectors.floats(FAR), middle
            for away in range(-near, near + 1):
                tried = vectors.add(middle, vectors.words(away))
                outside = vectors.less(tried, vectors.words(0))
                beyond = vectors.less(vectors.words(count - 1), tried)
                size = vectors.mul(unit, factor_of(tried, least, each))
                cost = _tried(book, levels.shape[0], address_of(columns) + BYTES * (block + place * run * rows), rows,
                              factor + BYTES * place * run * (inputs + 1), inputs, run,
                              address_of(pivots) + BYTES * (expert * inputs + start + place * run), size,
                              taken + BYTES * place * run * LANES, own)  # fmt: skip
                cost = vectors.pick(outside, vectors.floats(FAR), vectors.pick(beyond, vectors.floats(FAR), cost))
                better = vectors.less(cost, best)
                best, step = vectors.pick(better, cost, best), vectors.pick(better, tried, step)
                if vectors.somewhere(better):
                    for at in range(run):
                        some = at * LANES
                        chosen = vectors.pick(better, vectors.floats_at(kept, some), vectors.floats_at(errors, some))
                        vectors.put_floats(errors, some, chosen)
                        place_of = vectors.pick(
                            better, vectors.words_at(found, some), vectors.words_at(best_found, some)
                        )
                        vectors.put_words(best_found, some, place_of)
            vectors.put_words(address_of(steps), runs, step)
            for at in range(run):
                column = place * run + at
                vectors.put_floats(address_of(residual), block + column * rows, vectors.floats_at(errors, at * LANES))
                vectors.put_words(address_of(entries), (expert * width + column) * rows + begin,
                                    vectors.words_at(best_found, at * LANES))  # fmt: skip
            give(factor, inputs, place * run, run, width, errors, taken)
    room[0] = 0  # kept until here
