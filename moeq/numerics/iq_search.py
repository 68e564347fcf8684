"""Entries, signs and steps of i-quants for some columns of many rows, errors made up for by later columns: compiled.

Weights go in eights. What an error e of an eight costs, once all later columns have made up for it as well as they can,
is e^T A e, and what earlier columns give to it moves its target; both come from the Hessian's factor
(`iq_ldlq.eights`). The entry is looked for with A's diagonal alone, then again from where the rest of A would move each
weight, as long as that lowers the cost. Every run of weights that share a step is made with several steps, and the
cheapest is kept.

Letters: E experts, K inputs, N output rows, a multiple of LANES, W columns of a block, R runs of one, D weights of an
entry; b eights; arrays are contiguous, those of many rows column after column; functions take addresses.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moeq.numerics import iq_eights, vectors
from moeq.numerics.iq_blocks import KINDS, SHIFTED, Kind, table
from moeq.numerics.iq_book import LENGTH, book, order
from moeq.numerics.iq_columns import BYTES, FAR, NONE, ONE, factor_of, give, nearest_step, targets
from moeq.numerics.iq_eights import DOWN, EVEN, FREE, SHIFT, UP, choose, eight_of, place_of
from moeq.numerics.iq_levels import fit_levels, round_levels
from moeq.numerics.sweep import in_threads
from moeq.numerics.vectors import LANES
from moeq_kernels.cpu.kept_code import compiler, internal
from moeq_kernels.cpu.memory import address_of, new_float32s

ROUNDS = 2  # of fitting a run's scale to its entries, and these to the scale
_compiled = compiler()
_inside = internal()
_SIGNS = {"free": FREE, "even": EVEN, "shifted": SHIFT}


@_inside  # type: ignore[untyped-decorator]
def _run(  # type: ignore[no-untyped-def]
    book, weights, stride, first, ahead, inputs, run, inverse, metric, signs, size, shift, limit, last, room,
):  # fmt: skip
    """What a run costs at one scale, or more than the limit in every row.

    weights: the run's; first: its column in the block, of which the room has what is given to each; ahead: the run's
    own part of the factor; inverse, metric: numbers [b, 8, 8] of it. With `last`, entries are looked for again, and
    the room has the run's errors, entries and signs.
    """
    total, own, counts = vectors.floats(NONE), place_of(room, iq_eights.OWN), place_of(room, iq_eights.COUNTS)
    length = vectors.word_at(book, LENGTH)
    for at in range(run):
        vectors.put_floats(own, at * LANES, vectors.floats_at(room, (iq_eights.TAKEN + first + at) * LANES))
    for eight in range(run // 8):
        local, square = 8 * eight, BYTES * 64 * eight
        seen = counts + BYTES * local
        targets(
            weights + BYTES * local * stride,
            stride,
            place_of(own, local),
            inverse + square,
            size,
            place_of(room, iq_eights.TARGET),
        )
        cost = eight_of(book, seen, signs, shift, metric + square, 1 + iq_eights.AGAIN if last else 1, room)
        total = vectors.fused(vectors.mul(size, size), cost, total)
        if not last and not vectors.somewhere(vectors.less(total, limit)):
            break
        for at in range(8):
            value = vectors.mul(size, vectors.floats_at(room, (iq_eights.VALUES + at) * LANES))
            error = vectors.sub(vectors.floats_at(weights, (local + at) * stride), value)
            vectors.put_floats(room, (iq_eights.KEPT + local + at) * LANES, error)
        for later in range(local + 8, run):
            moved = vectors.floats_at(own, later * LANES)
            for at in range(8):
                factor = vectors.floats(vectors.number_at(ahead, (local + at) * inputs + later))
                moved = vectors.fused(factor, vectors.floats_at(room, (iq_eights.KEPT + local + at) * LANES), moved)
            vectors.put_floats(own, later * LANES, moved)
        if last:
            mask = vectors.words(0)
            for at in range(8):
                below = vectors.less(vectors.floats_at(room, (iq_eights.VALUES + at) * LANES), vectors.floats(NONE))
                mask = vectors.pick(below, vectors.add(mask, vectors.words(1 << at)), mask)
            vectors.put_words(room, (iq_eights.NEGATIVE + eight) * LANES, mask)
            for part in range(8 // length):
                entry = vectors.words_at(room, (iq_eights.ENTRIES + part) * LANES)
                vectors.put_words(room, (iq_eights.FOUND + eight * (8 // length) + part) * LANES, entry)
    return total


@_compiled  # type: ignore[untyped-decorator]
def _fit(columns, given, start, inverse, metric, tables, run, signs, usual, ideal, first, last):  # type: ignore[no-untyped-def]
    """Into ideal [E, R, N] the scale of every run with the least error, weighted by A's diagonal alone."""
    inputs, rows, width = columns.shape[1], columns.shape[2], given.shape[1]
    space = new_float32s((iq_eights.TAKEN + iq_eights.LONGEST) * LANES)
    room, book, chunks = address_of(space), address_of(tables), rows // LANES
    target, counts, zero = place_of(room, iq_eights.TAKEN), place_of(room, iq_eights.COUNTS), vectors.floats(NONE)
    for item in range(first, last):
        expert, begin = item // chunks, item % chunks * LANES
        whole = address_of(columns) + BYTES * ((expert * inputs + start) * rows + begin)
        gifts = address_of(given) + BYTES * (expert * width * rows + begin)
        for place in range(width // run):
            eights = (expert * width + place * run) * 8  # numbers of the eights before
            size = zero
            for at in range(run):
                vectors.put_floats(
                    room, (iq_eights.OWN + at) * LANES, vectors.floats_at(gifts, (place * run + at) * rows)
                )
                seen = vectors.number_at(address_of(metric), eights + at // 8 * 64 + at % 8 * 9)
                vectors.put_number(counts, at, seen)
            for eight in range(run // 8):
                own = place_of(room, iq_eights.OWN + eight * 8)
                targets(whole + BYTES * (place * run + eight * 8) * rows, rows, own,
                        address_of(inverse) + BYTES * (eights + eight * 64), vectors.floats(ONE),
                        place_of(target, eight * 8))  # fmt: skip
            for at in range(run):
                wanted = vectors.floats_at(target, at * LANES)
                size = vectors.fused(wanted, wanted, size)
            guess = vectors.mul(vectors.root(size), vectors.floats(usual))
            best, found = zero, zero
            for turn in range(2 if signs == SHIFT else 1):
                shift, tried = vectors.floats(DOWN if turn else UP), guess
                alive = vectors.less(zero, guess)
                for _ in range(ROUNDS):
                    inverted = vectors.pick(alive, vectors.ratio(vectors.floats(ONE), tried), zero)
                    along, across = zero, zero
                    for eight in range(run // 8):
                        for at in range(8):
                            scaled = vectors.mul(vectors.floats_at(target, (eight * 8 + at) * LANES), inverted)
                            vectors.put_floats(room, (iq_eights.MOVED + at) * LANES, scaled)
                        seen = counts + BYTES * 8 * eight
                        choose(book, seen, signs, shift, room)
                        for at in range(8):
                            value = vectors.floats_at(room, (iq_eights.TRIED + at) * LANES)
                            counted = vectors.mul(value, vectors.floats(vectors.number_at(seen, at)))
                            wanted = vectors.floats_at(target, (eight * 8 + at) * LANES)
                            along = vectors.fused(wanted, counted, along)
                            across = vectors.fused(value, counted, across)
                    alive = vectors.both(alive, vectors.less(zero, along))
                    scale = vectors.ratio(along, across)
                    tried, gain = vectors.pick(alive, scale, tried), vectors.mul(along, scale)
                    better = vectors.both(alive, vectors.less(best, gain))
                    best, found = vectors.pick(better, gain, best), vectors.pick(better, scale, found)
            vectors.put_floats(address_of(ideal), (expert * (width // run) + place) * rows + begin, found)
    space[0] = 0  # kept until here: numba frees what is used no more, and its address is no use


@_inside  # type: ignore[untyped-decorator]
def _further(away, way, middle, step):  # type: ignore[no-untyped-def]
    """Which way the next step to be tried lies from the best: up, down where that was no better, and on where it was;
    0: neither."""
    none = vectors.words(0)
    if away < 2:
        return vectors.words(1)
    moved = vectors.sub(step, middle)
    back = vectors.words(-1) if away == 2 else none
    on = vectors.pick(vectors.less(none, vectors.mul(moved, way)), way, none)
    return vectors.pick(vectors.equal(moved, none), back, on)


@_compiled  # type: ignore[untyped-decorator]
def _sweep(  # type: ignore[no-untyped-def]
    columns, given, upper, start, inverse, metric, tables, least, each, count, run, signs, near,
    scale, ideal, steps, entries, negative, residual, first, last,
):  # fmt: skip
    """Into steps [E, R, N], entries [E, W/D, N], negative [E, W/8, N] and residual [E, K, N] the codes of a block whose
    scales [E, N] are given; least, each, count: of the steps' factors; near: steps on each side of the one nearest to
    the ideal scale that are tried, the nearest first."""
    inputs, rows, width = columns.shape[1], columns.shape[2], given.shape[1]
    space = new_float32s((iq_eights.TAKEN + width) * LANES)
    room, book, chunks = address_of(space), address_of(tables), rows // LANES
    length, turns = vectors.word_at(book, LENGTH), 2 if signs == SHIFT else 1
    for item in range(first, last):
        expert, begin = item // chunks, item % chunks * LANES
        block = (expert * inputs + start) * rows + begin
        factor = address_of(upper) + BYTES * ((expert * inputs + start) * inputs + start)
        for at in range(width):
            gift = vectors.floats_at(address_of(given), (expert * width + at) * rows + begin)
            vectors.put_floats(room, (iq_eights.TAKEN + at) * LANES, gift)
        unit = vectors.floats_at(address_of(scale), expert * rows + begin)
        for place in range(width // run):
            column, runs = place * run, (expert * (width // run) + place) * rows + begin
            square = BYTES * (expert * width + column) * 8
            own = address_of(columns) + BYTES * (block + column * rows)
            ahead = factor + BYTES * column * (inputs + 1)
            for at in range(run):
                seen = vectors.number_at(address_of(metric) + square, at // 8 * 64 + at % 8 * 9)
                vectors.put_number(place_of(room, iq_eights.COUNTS), at, seen)
            middle = nearest_step(unit, least, each, count, vectors.floats_at(address_of(ideal), runs))
            limit, step, way, tried = vectors.floats(FAR), middle, vectors.words(0), middle
            shift_found, attempts = vectors.floats(UP), (2 * near + 1) * turns
            for attempt in range(attempts + 1):
                away, side, final = attempt // turns, attempt % turns, attempt == attempts
                if side == 0 and away > 0 and not final:
                    if length == 8:
                        way = _further(away, way, middle, step)
                        tried = vectors.add(step, way)
                    else:  # fours have more levels, and several scales that suit them
                        way = vectors.words((away + 1) // 2 * (1 if away % 2 else -1))
                        tried = vectors.add(middle, way)
                usable = vectors.both(vectors.less(vectors.words(-1), tried), vectors.less(tried, vectors.words(count)))
                if away > 0:
                    usable = vectors.both(usable, vectors.unlike(way, vectors.words(0)))
                shift = vectors.floats(DOWN if side else UP)
                if final:  # the best one, once more
                    tried, shift = step, shift_found
                if final or vectors.somewhere(usable):
                    size = vectors.mul(unit, factor_of(tried, least, each))
                    cost = _run(book, own, rows, column, ahead, inputs, run, address_of(inverse) + square,
                                address_of(metric) + square, signs, size, shift, limit, final, room)  # fmt: skip
                    better = vectors.both(usable, vectors.less(cost, limit))
                    if not final:
                        limit, step = vectors.pick(better, cost, limit), vectors.pick(better, tried, step)
                        shift_found = vectors.pick(better, shift, shift_found)
            down = vectors.less(shift_found, vectors.floats(NONE))
            step = vectors.pick(down, vectors.add(step, vectors.words(SHIFTED)), step)
            vectors.put_words(address_of(steps), runs, step)
            for at in range(run // length):
                entry = vectors.words_at(room, (iq_eights.FOUND + at) * LANES)
                vectors.put_words(address_of(entries), (expert * width + column) // length * rows + at * rows + begin,
                                    entry)  # fmt: skip
            for at in range(run // 8):
                mask = vectors.words_at(room, (iq_eights.NEGATIVE + at) * LANES)
                vectors.put_words(address_of(negative), (expert * width + column) // 8 * rows + at * rows + begin,
                                    mask)  # fmt: skip
            for at in range(run):
                error = vectors.floats_at(room, (iq_eights.KEPT + at) * LANES)
                vectors.put_floats(address_of(residual), block + (column + at) * rows, error)
            give(factor, inputs, column, run, width, place_of(room, iq_eights.KEPT), place_of(room, iq_eights.TAKEN))
    space[0] = 0  # kept until here


def _tiles(columns: Tensor) -> int:
    if columns.shape[2] % LANES:
        raise ValueError(f"{columns.shape[2]} rows are no multiple of {LANES}")
    return len(columns) * columns.shape[2] // LANES


def fitted(name: str, columns: Tensor, given: Tensor, start: int, inverse: Tensor, metric: Tensor) -> Tensor:
    """The scales that a type's runs would have, each for itself: [E, R, N].

    columns: [E, K, N]; given: [E, W, N], what the columns before `start` give to those from it on; inverse, metric:
    [E, W/8, 8, 8] of the block's eights.
    """
    kind = KINDS[name]
    experts, _, rows = columns.shape
    ideal = torch.zeros(experts, given.shape[1] // kind.run, rows)
    tiles, given_to_all = _tiles(columns), (columns, given, start, inverse, metric)
    if kind.signs == "levels":
        in_threads(fit_levels, tiles, *given_to_all, table(name)[0].contiguous(), kind.run, ideal)
    else:
        usual = kind.usual / float(table(name).square().mean().sqrt()) / kind.run**0.5
        in_threads(_fit, tiles, *given_to_all, book(name), kind.run, _SIGNS[kind.signs], np.float32(usual), ideal)
    return ideal


def swept(
    name: str,
    columns: Tensor,
    given: Tensor,
    upper: Tensor,
    start: int,
    parts: tuple[Tensor, Tensor, Tensor],
    scale: Tensor,
    ideal: Tensor,
    residual: Tensor,
    near: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Entries [E, N, W/D], signs [E, N, W/8] and steps [E, N, R] of a block, residual [E, K, N] filled.

    upper: [E, K, K] unit upper triangular; parts: inverse and metric as `fitted` takes them, and pivots [E, K]; scale:
    [E, N] as it is stored; ideal: of `fitted`.
    """
    kind = KINDS[name]
    experts, _, rows = columns.shape
    width, tiles = given.shape[1], _tiles(columns)
    steps, entries, negative = (
        torch.zeros(experts, width // each, rows, dtype=torch.int32) for each in (kind.run, kind.length, 8)
    )
    inverse, metric, pivots = parts
    factors = np.float32(kind.least), np.float32(kind.each), kind.steps
    if kind.signs == "levels":
        in_threads(
            round_levels, tiles, columns, given, upper, start, pivots, table(name)[0].contiguous(), *factors, kind.run,
            near, scale, ideal, steps, entries, residual,
        )  # fmt: skip
    else:
        in_threads(
            _sweep, tiles, columns, given, upper, start, inverse, metric, book(name), *factors, kind.run,
            _SIGNS[kind.signs], near, scale, ideal, steps, entries, negative, residual,
        )  # fmt: skip
        entries = order(name)[entries.long()]
    return entries.mT, negative.mT, steps.mT


def last_factor(kind: Kind) -> float:
    """The factor of the step that the largest scale of a block would take."""
    return float(kind.factors[0] if kind.signs == "levels" else kind.factors[-1])
