"""An eight of i-quants in LANES rows at once: its entries, their values, and what its error costs; compiled.

What an entry costs is a sum over its weights, each of one of a few levels. So the costs of all halves of entries are
sums of what their levels cost, and of a first half's entries none can cost less than it and the cheapest second half
together: only those first halves are looked into where that is less than the best in any of the rows, which begins with
the entry nearest to the levels that would be best by themselves. The entry found is the best of all.

Letters: D weights of an entry, H halves; functions take addresses.
"""

from __future__ import annotations

import numpy as np

from moeq.numerics import vectors
from moeq.numerics.iq_blocks import SHIFTED
from moeq.numerics.iq_book import DIGITS, FIRSTS, HALVES, LENGTH, LEVELS, NEAREST, SECONDS, STARTS, TABLE
from moeq.numerics.iq_columns import BYTES, FAR, NONE
from moeq.numerics.sweep import inside
from moeq.numerics.vectors import LANES

AGAIN = 1  # how often an entry is looked for again, from where the rest of A moves the weights
FREE, EVEN, SHIFT = 0, 1, 2
LONGEST = 32  # weights of a run
UP, DOWN = np.float32(1 / SHIFTED), np.float32(-1 / SHIFTED)

# Room of one thread, in vectors: what halves cost, first and second ones; then what is told apart below
_MOST_HALVES = 81
_PAIRS = 2 * _MOST_HALVES  # of four pairs of levels
_LEVELS = _PAIRS + 4 * 9  # of two weights
_LANE = _LEVELS + 2 * 8  # one vector, lane by lane, and another
_SPARE = _LANE + 2
TARGET, MOVED, VALUES, TRIED, ACROSS, _ERRORS = (_SPARE + 8 * part for part in range(6))
ENTRIES, OTHERS = _SPARE + 48, _SPARE + 50
OWN = _SPARE + 52
COUNTS = OWN + LONGEST  # numbers, not vectors
KEPT = COUNTS + LONGEST // LANES + 1
FOUND = KEPT + LONGEST
NEGATIVE = FOUND + LONGEST // 4
TAKEN = NEGATIVE + LONGEST // 8


@inside  # type: ignore[untyped-decorator]
def place_of(room, place):  # type: ignore[no-untyped-def]
    """The address of a vector of the room."""
    return room + BYTES * LANES * place


@inside  # type: ignore[untyped-decorator]
def _half_costs(book, counts, target, signs, shift, room):  # type: ignore[no-untyped-def]
    """What every half costs, beside what a value of 0 does, into the room; the number of the levels that each cost
    least by themselves. counts: numbers; target [D]."""
    length, levels = vectors.word_at(book, LENGTH), vectors.word_at(book, LEVELS)
    number, long = vectors.words(0), length == 8
    for pair in range(length // 2):
        for two in range(2):
            at = 2 * pair + two
            wanted = vectors.floats_at(target, at * LANES)
            wanted = vectors.sub(wanted, shift) if signs == SHIFT else vectors.size_of(wanted)
            twice, count = vectors.add(wanted, wanted), vectors.number_at(counts, at)
            least, digit = vectors.floats(FAR), vectors.words(0)
            for place in range(levels):
                level = vectors.number_at(book, DIGITS + place)
                cost = vectors.mul(vectors.floats(count * level), vectors.sub(vectors.floats(level), twice))
                vectors.put_floats(room, (_LEVELS + 8 * two + place) * LANES, cost)
                closer = vectors.less(cost, least)
                least = vectors.pick(closer, cost, least)
                digit = vectors.pick(closer, vectors.words(place), digit)
            number = vectors.add(vectors.mul(number, vectors.words(levels)), digit)
        into = _PAIRS + 9 * pair if long else pair * levels * levels
        for one in range(levels):
            cost = vectors.floats_at(room, (_LEVELS + one) * LANES)
            for other in range(levels):
                both = vectors.add(cost, vectors.floats_at(room, (_LEVELS + 8 + other) * LANES))
                vectors.put_floats(room, (into + one * levels + other) * LANES, both)
    if long:
        pairs = levels * levels
        for side in range(2):
            for one in range(pairs):
                cost = vectors.floats_at(room, (_PAIRS + 18 * side + one) * LANES)
                for other in range(pairs):
                    both = vectors.add(cost, vectors.floats_at(room, (_PAIRS + 18 * side + 9 + other) * LANES))
                    vectors.put_floats(room, ((side * pairs + one) * pairs + other) * LANES, both)
    return number


@inside  # type: ignore[untyped-decorator]
def _nearest(book, number, room):  # type: ignore[no-untyped-def]
    """The entry that costs least, given what halves cost and the number of the best levels."""
    halves, starts, seconds = (
        vectors.word_at(book, HALVES),
        vectors.word_at(book, STARTS),
        vectors.word_at(book, SECONDS),
    )
    nearest, firsts = vectors.word_at(book, NEAREST), vectors.word_at(book, FIRSTS)
    vectors.put_words(room, _LANE * LANES, number)
    for lane in range(LANES):
        entry = vectors.word_at(book, nearest + vectors.word_at(room, _LANE * LANES + lane))
        vectors.put_word(room, _LANE * LANES + lane, np.int32(entry))
        first, second = vectors.word_at(book, firsts + entry), vectors.word_at(book, seconds + entry)
        cost = vectors.number_at(room, first + lane) + vectors.number_at(room, second + lane)
        vectors.put_number(room, (_LANE + 1) * LANES + lane, cost)
    found, best = vectors.words_at(room, _LANE * LANES), vectors.floats_at(room, (_LANE + 1) * LANES)
    least = vectors.floats_at(room, halves * LANES)
    for half in range(halves + 1, 2 * halves):
        cost = vectors.floats_at(room, half * LANES)
        least = vectors.pick(vectors.less(cost, least), cost, least)
    for half in range(halves):
        cost = vectors.floats_at(room, half * LANES)
        if vectors.somewhere(vectors.less(vectors.add(cost, least), best)):
            for entry in range(vectors.word_at(book, starts + half), vectors.word_at(book, starts + half + 1)):
                total = vectors.add(cost, vectors.floats_at(room, vectors.word_at(book, seconds + entry)))
                closer = vectors.less(total, best)
                best = vectors.pick(closer, total, best)
                found = vectors.pick(closer, vectors.words(np.int32(entry)), found)
    return found


@inside  # type: ignore[untyped-decorator]
def choose(book, counts, signs, shift, room):  # type: ignore[no-untyped-def]
    """The entries of the room's moved target, in units of the scale, into its others, words [8 / D]; their values with
    signs or shift into those tried, [8]."""
    length, table = vectors.word_at(book, LENGTH), vectors.word_at(book, TABLE)
    target, values = place_of(room, MOVED), place_of(room, TRIED)
    for part in range(8 // length):
        first, place = part * length, (OTHERS + part) * LANES
        number = _half_costs(book, counts + BYTES * first, place_of(target, first), signs, shift, room)
        vectors.put_words(room, place, _nearest(book, number, room))
        for lane in range(LANES):
            entry = table + vectors.word_at(room, place + lane) * length
            for at in range(length):
                vectors.put_number(values, (first + at) * LANES + lane, vectors.number_at(book, entry + at))
    if signs == SHIFT:
        for at in range(8):
            vectors.put_floats(values, at * LANES, vectors.add(vectors.floats_at(values, at * LANES), shift))
        return
    zero = vectors.floats(NONE)
    odd = vectors.less(zero, zero)
    least, turned = vectors.floats(FAR), vectors.words(0)
    for at in range(8):
        value, wanted = vectors.floats_at(values, at * LANES), vectors.floats_at(target, at * LANES)
        below = vectors.less(wanted, zero)
        odd = vectors.differ(odd, below)
        vectors.put_floats(values, at * LANES, vectors.pick(below, vectors.negated(value), value))
        count = vectors.floats(vectors.number_at(counts, at))
        cost = vectors.mul(count, vectors.mul(vectors.size_of(wanted), value))
        cheaper = vectors.less(cost, least)
        least = vectors.pick(cheaper, cost, least)
        turned = vectors.pick(cheaper, vectors.words(at), turned)
    if signs == EVEN:
        for at in range(8):
            value = vectors.floats_at(values, at * LANES)
            turn = vectors.both(odd, vectors.equal(turned, vectors.words(at)))
            vectors.put_floats(values, at * LANES, vectors.pick(turn, vectors.negated(value), value))


@inside  # type: ignore[untyped-decorator]
def _cost(target, values, metric, across, room):  # type: ignore[no-untyped-def]
    """What the error of an eight costs; into across [8] what the errors of the others do to each; metric: numbers
    [8, 8]."""
    errors = place_of(room, _ERRORS)
    for at in range(8):
        error = vectors.sub(vectors.floats_at(target, at * LANES), vectors.floats_at(values, at * LANES))
        vectors.put_floats(errors, at * LANES, error)
    total = vectors.floats(NONE)
    for at in range(8):
        row = vectors.floats(NONE)
        for other in range(8):
            if other != at:
                factor = vectors.floats(vectors.number_at(metric, at * 8 + other))
                row = vectors.fused(factor, vectors.floats_at(errors, other * LANES), row)
        error = vectors.floats_at(errors, at * LANES)
        vectors.put_floats(across, at * LANES, row)
        whole = vectors.fused(vectors.floats(vectors.number_at(metric, at * 9)), error, row)
        total = vectors.fused(whole, error, total)
    return total


@inside  # type: ignore[untyped-decorator]
def eight_of(book, counts, signs, shift, metric, attempts, room):  # type: ignore[no-untyped-def]
    """What the eight of the room's target costs, its entries and values into the room: those looked for first, or again
    from where the errors of the other weights would move each, whichever cost less."""
    best = vectors.floats(FAR)
    for attempt in range(attempts):
        for at in range(8):
            moved = vectors.floats_at(room, (TARGET + at) * LANES)
            if attempt > 0:
                count = vectors.floats(vectors.number_at(counts, at))
                moved = vectors.add(moved, vectors.ratio(vectors.floats_at(room, (ACROSS + at) * LANES), count))
            vectors.put_floats(room, (MOVED + at) * LANES, moved)
        choose(book, counts, signs, shift, room)
        cost = _cost(place_of(room, TARGET), place_of(room, TRIED), metric, place_of(room, ACROSS), room)
        better = vectors.less(cost, best)
        best = vectors.pick(better, cost, best)
        for at in range(8):
            value, tried = vectors.floats_at(room, (VALUES + at) * LANES), vectors.floats_at(room, (TRIED + at) * LANES)
            vectors.put_floats(room, (VALUES + at) * LANES, vectors.pick(better, tried, value))
        for part in range(2):
            entry = vectors.words_at(room, (ENTRIES + part) * LANES)
            other = vectors.words_at(room, (OTHERS + part) * LANES)
            vectors.put_words(room, (ENTRIES + part) * LANES, vectors.pick(better, other, entry))
    return best
