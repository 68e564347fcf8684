"""Entries, signs and steps of i-quants for some columns of many rows, errors made up for by later columns: compiled.

Weights go in eights. What an error e of an eight costs, once all later columns have made up for it as well as they can,
is e^T A e, and what earlier columns give to it moves its target; both come from the Hessian's factor
(`iq_ldlq.Blocks`). The entry is looked for with A's diagonal alone, then again from where the rest of A would move each
weight, as long as that lowers the cost. Every run of weights that share a step is made with several steps, and the
cheapest is kept.

Letters: E experts, K inputs, N output rows, W columns of a block, R runs of one, D weights of an entry; b eights;
arrays are contiguous, float32 but for codes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moeq.numerics.iq_blocks import KINDS, SHIFTED, Kind, book, table
from moeq.numerics.iq_columns import ROWS, give, moved_eight, nearest_step
from moeq.numerics.iq_levels import fit_levels, round_levels
from moeq.numerics.sweep import in_threads
from moeq_kernels.cpu.kept_code import compiler, internal

AGAIN = 1  # how often an entry is looked for again, from where the rest of A moves the weights
ROUNDS = 2  # of fitting a run's scale to its entries, and these to the scale
FREE, EVEN, SHIFT = 0, 1, 2
_SIGNS = {"free": FREE, "even": EVEN, "shifted": SHIFT}
_FAR = np.float32(3e38)
_ANY = np.float32(-1)
_FLAGS = {"contract", "nnan", "ninf", "nsz", "reassoc"}  # minima and sums side by side
_compiled, _inside = compiler(fastmath=_FLAGS), internal(fastmath=_FLAGS, inline="always")


@_inside  # type: ignore[untyped-decorator]
def _bases(counts, halves, into):  # type: ignore[no-untyped-def]
    """What the halves of entries of eights cost at a target of 0, into [b, 8/D, 2, halves]; counts [b, 8]; halves: the
    values of first and second ones [2, D/2, halves]."""
    length = halves.shape[1]
    for eight in range(into.shape[0]):
        for part in range(into.shape[1]):
            for side in range(2):
                for half in range(into.shape[3]):
                    cost = np.float32(0)
                    for at in range(length):
                        value = halves[side, at, half]
                        cost += counts[eight, (2 * part + side) * length + at] * value * value
                    into[eight, part, side, half] = cost


@_inside  # type: ignore[untyped-decorator]
def _costs(base, eight, part, side, linear, halves, into):  # type: ignore[no-untyped-def]
    """What every half of a side costs, into [2, halves]."""
    first = side * halves.shape[1]
    one, two = linear[first], linear[first + 1]
    if halves.shape[1] == 4:
        three, four = linear[first + 2], linear[first + 3]
        for half in range(into.shape[1]):
            cost = base[eight, part, side, half] - one * halves[side, 0, half] - two * halves[side, 1, half]
            into[side, half] = cost - three * halves[side, 2, half] - four * halves[side, 3, half]
    else:
        for half in range(into.shape[1]):
            into[side, half] = base[eight, part, side, half] - one * halves[side, 0, half] - two * halves[side, 1, half]


@_inside  # type: ignore[untyped-decorator]
def _nearest(base, eight, part, linear, halves, starts, others, costs):  # type: ignore[no-untyped-def]
    """The place of the entry that costs least, among those in the order of their first halves.

    base [b, 8/D, 2, halves]; linear [D]; halves: values of first and second ones, [2, D/2, halves]; starts: where the
    entries of a first half begin, [halves + 1]; others: their second halves; costs [2, halves]: room. A first half is
    looked into only where it could lead to less than what was found.
    """
    _costs(base, eight, part, 0, linear, halves, costs)
    _costs(base, eight, part, 1, linear, halves, costs)
    least, lowest = _FAR, _FAR
    for half in range(costs.shape[1]):
        lowest = min(lowest, costs[0, half])
        least = min(least, costs[1, half])
    place = 0
    while costs[0, place] != lowest:
        place += 1
    best, found = _FAR, 0
    for entry in range(starts[place], starts[place + 1]):
        cost = lowest + costs[1, others[entry]]
        if cost < best:
            best, found = cost, entry
    for half in range(costs.shape[1]):
        cost = costs[0, half]
        if cost + least < best and half != place:
            for entry in range(starts[half], starts[half + 1]):
                if cost + costs[1, others[entry]] < best:
                    best, found = cost + costs[1, others[entry]], entry
    return found


@_inside  # type: ignore[untyped-decorator]
def _choose(target, counts, base, eight, halves, starts, others, table, signs, shift, linear, costs, entries, values):  # type: ignore[no-untyped-def]
    """The entries of an eight, into its row of entries [b, 2], and their values with signs or shift, into values [8];
    target in units of the scale."""
    length = table.shape[0]
    for part in range(8 // length):
        for at in range(length):
            wanted = target[part * length + at]
            wanted = wanted - shift if signs == SHIFT else abs(wanted)
            linear[at] = 2 * counts[eight, part * length + at] * wanted
        best = _nearest(base, eight, part, linear, halves, starts, others, costs)
        entries[eight, part] = best
        for at in range(length):
            values[part * length + at] = table[at, best]
    if signs == SHIFT:
        for at in range(8):
            values[at] += shift
        return
    odd = 0
    for at in range(8):
        if target[at] < 0:
            values[at] = -values[at]
            odd ^= 1
    if signs == EVEN and odd:
        least, turned = _FAR, 0
        for at in range(8):
            cost = counts[eight, at] * abs(target[at] * values[at])
            if cost < least:
                least, turned = cost, at
        values[turned] = -values[turned]


@_inside  # type: ignore[untyped-decorator]
def _cost(target, values, metric, expert, number, across):  # type: ignore[no-untyped-def]
    """What the error of an eight costs; into across [8] what the errors of the others do to each."""
    total = np.float32(0)
    for at in range(8):
        row = np.float32(0)
        for other in range(8):
            row += metric[expert, number, at, other] * (target[other] - values[other])
        error = target[at] - values[at]
        total += row * error
        across[at] = row - metric[expert, number, at, at] * error
    return total


@_inside  # type: ignore[untyped-decorator]
def _run(  # type: ignore[no-untyped-def]
    weights, taken, row, first, ahead, inverse, metric, expert, counts, base, halves, starts, others, table, signs,
    size, shift, limit, linear, costs, own, target, values, across, moved, tried, rest, other, kept, found,
):  # fmt: skip
    """What a run costs at one scale, or more than the limit; its errors into kept [run], its entries into found [b, 2].

    weights [run]; taken: what is given to each row from its column `first` on; ahead: the run's own part of the factor,
    [run, run]; inverse, metric [E, b, 8, 8]; limit: below 0 there is none, and entries are looked for again from where
    the errors of the other weights of an eight would move each; the rest is room.
    """
    inverted = 1 / size if size != 0 else np.float32(0)
    total = np.float32(0)
    for at in range(own.shape[0]):
        own[at] = taken[row, first + at]
    for eight in range(own.shape[0] // 8):
        local, number = eight * 8, first // 8 + eight
        for at in range(8):
            sum_of = weights[local + at]
            for place in range(8):
                sum_of += inverse[expert, number, at, place] * own[local + place]
            target[at] = sum_of * inverted
        cost = _FAR
        for attempt in range(1 + AGAIN if limit < 0 else 1):
            for at in range(8):
                moved[at] = target[at] + (across[at] / counts[eight, at] if attempt > 0 else np.float32(0))
            _choose(
                moved, counts, base, eight, halves, starts, others, table, signs, shift, linear, costs, other, tried
            )
            less = _cost(target, tried, metric, expert, number, rest)
            if less >= cost:
                break
            cost = less
            for at in range(8):
                values[at], across[at] = tried[at], rest[at]
            found[eight, 0], found[eight, 1] = other[eight, 0], other[eight, 1]
        total += size * size * cost
        if 0 <= limit <= total:
            break
        for at in range(8):
            error = weights[local + at] - size * values[at]
            kept[local + at] = error
            for later in range(local + 8, own.shape[0]):
                own[later] += error * ahead[local + at, later]
    return total


@_compiled  # type: ignore[untyped-decorator]
def _fit(columns, given, start, inverse, metric, halves, starts, others, table, run, signs, usual, ideal, first, last):  # type: ignore[no-untyped-def]
    """Into ideal [E, N, R] the scale of every run with the least error, weighted by A's diagonal alone."""
    rows, width, eights = columns.shape[2], given.shape[1], run // 8
    counts = np.empty((eights, 8), np.float32)
    base = np.empty((eights, 8 // table.shape[0], 2, halves.shape[2]), np.float32)
    linear, costs = np.empty(8, np.float32), np.empty((2, halves.shape[2]), np.float32)
    target, scaled = np.empty((eights, 8), np.float32), np.empty(8, np.float32)
    own, values, entries = np.empty(run, np.float32), np.empty(8, np.float32), np.empty((eights, 2), np.int64)
    chunks = (rows + ROWS - 1) // ROWS
    for item in range(first, last):
        expert, chunk = divmod(item, chunks)
        for place in range(width // run):
            for eight in range(eights):
                for at in range(8):
                    counts[eight, at] = metric[expert, place * eights + eight, at, at]
            _bases(counts, halves, base)
            for row in range(chunk * ROWS, min(rows, (chunk + 1) * ROWS)):
                size = np.float32(0)
                for at in range(run):
                    own[at] = given[expert, place * run + at, row]
                for eight in range(eights):
                    moved_eight(columns, own, inverse[expert, place * eights + eight], expert, start,
                                place * run + eight * 8, row, eight * 8, target[eight])  # fmt: skip
                    for at in range(8):
                        size += target[eight, at] * target[eight, at]
                guess = np.sqrt(size / run) * usual
                best, found = np.float32(0), np.float32(0)
                for turn in range(2 if signs == SHIFT else 1):
                    shift, tried = np.float32((1 - 2 * turn) / SHIFTED), guess
                    for _ in range(ROUNDS if size > 0 else 0):
                        inverted = 1 / tried
                        along, across = np.float32(0), np.float32(0)
                        for eight in range(eights):
                            for at in range(8):
                                scaled[at] = target[eight, at] * inverted
                            _choose(scaled, counts, base, eight, halves, starts, others, table, signs, shift, linear,
                                    costs, entries, values)  # fmt: skip
                            for at in range(8):
                                along += counts[eight, at] * target[eight, at] * values[at]
                                across += counts[eight, at] * values[at] * values[at]
                        if along <= 0:
                            break
                        tried = along / across
                        if along * tried > best:
                            best, found = along * tried, tried
                ideal[expert, row, place] = found


@_inside  # type: ignore[untyped-decorator]
def _way(tries, before, moved):  # type: ignore[no-untyped-def]
    """Where the next step to be tried lies from the best: up, down where that was no better, and on where it was."""
    if tries < 2:
        return 1
    if moved == 0:
        return -1 if before == 1 and tries == 2 else 0
    return before if moved * before > 0 else 0


@_inside  # type: ignore[untyped-decorator]
def _of_run(upper, metric, expert, start, place, run, ahead, counts):  # type: ignore[no-untyped-def]
    """A run's own part of the factor into ahead [run, run], what errors count into counts [b, 8]."""
    first = start + place * run
    for at in range(run):
        counts[at // 8, at % 8] = metric[expert, (place * run + at) // 8, at % 8, at % 8]
        for later in range(run):
            ahead[at, later] = upper[expert, first + at, first + later]


@_inside  # type: ignore[untyped-decorator]
def _keep(weights, kept, found, numbers, size, expert, number, row, place, entries, negative, errors):  # type: ignore[no-untyped-def]
    """A run's entries and signs where they belong, its errors [run] into those of all rows."""
    eights = found.shape[0]
    parts = entries.shape[2] // negative.shape[2]
    for eight in range(eights):
        mask = 0
        for part in range(parts):
            entries[expert, number, (place * eights + eight) * parts + part] = numbers[found[eight, part]]
        for at in range(8):
            error = kept[eight * 8 + at]
            errors[row, eight * 8 + at] = error
            mask |= ((weights[eight * 8 + at] - error) * size < 0) << at
        negative[expert, number, place * eights + eight] = mask


@_compiled  # type: ignore[untyped-decorator]
def _sweep(  # type: ignore[no-untyped-def]
    columns, given, upper, start, inverse, metric, halves, starts, others, table, numbers, factors, run, signs, near,
    scale, ideal, steps, entries, negative, residual, first, last,
):  # fmt: skip
    """Into steps [E, N, R], entries [E, N, W/D], negative [E, N, W/8] and residual [E, K, N] the codes of a block whose
    scales [E, N] are given; near: steps on each side of the one nearest to the ideal scale that are tried, the nearest
    first."""
    rows, width, eights, parts = columns.shape[2], given.shape[1], run // 8, 8 // table.shape[0]
    counts = np.empty((eights, 8), np.float32)
    base = np.empty((eights, parts, 2, halves.shape[2]), np.float32)
    linear, costs = np.empty(8, np.float32), np.empty((2, halves.shape[2]), np.float32)
    ahead, taken = np.empty((run, run), np.float32), np.empty((ROWS, width), np.float32)
    weights, target, values = np.empty(run, np.float32), np.empty(8, np.float32), np.empty(8, np.float32)
    across, moved, made = np.empty(8, np.float32), np.empty(8, np.float32), np.empty(8, np.float32)
    rest, other, found = np.empty(8, np.float32), np.empty((eights, 2), np.int64), np.empty((eights, 2), np.int64)
    kept, gifts, errors = np.zeros(run, np.float32), np.empty(run, np.float32), np.zeros((ROWS, run), np.float32)
    turns = 2 if signs == SHIFT else 1
    chunks = (rows + ROWS - 1) // ROWS
    for item in range(first, last):
        expert, chunk = divmod(item, chunks)
        begin, count = chunk * ROWS, min(ROWS, rows - chunk * ROWS)
        for at in range(width):
            for row in range(count):
                taken[row, at] = given[expert, at, begin + row]
        for place in range(width // run):
            _of_run(upper, metric, expert, start, place, run, ahead, counts)
            _bases(counts, halves, base)
            for row in range(count):
                unit = scale[expert, begin + row]
                for at in range(run):
                    weights[at] = columns[expert, start + place * run + at, begin + row]
                middle = nearest_step(unit, factors, ideal[expert, begin + row, place])
                limit, step, turn, way, attempts = _FAR, middle, 0, 1, (2 * near + 1) * turns
                tried, size = middle, unit * factors[middle]
                for attempt in range(attempts + 1):
                    away, side = attempt // turns, attempt % turns
                    if attempt == attempts:  # the best one, once more
                        tried, side = step, turn
                    elif side == 0 and away > 0:
                        if table.shape[0] == 8:
                            way = _way(away, way, step - middle)
                            tried = step + way
                        else:  # fours have more levels, and several scales that suit them
                            tried = middle + (away + 1) // 2 * (1 if away % 2 else -1)
                    if (away > 0 and way == 0 and attempt < attempts) or not 0 <= tried < factors.shape[0]:
                        continue
                    size, shift = unit * factors[tried], np.float32((1 - 2 * side) / SHIFTED)
                    cost = _run(weights, taken, row, place * run, ahead, inverse, metric, expert, counts, base, halves,
                                starts, others, table, signs, size, shift, limit if attempt < attempts else _ANY,
                                linear, costs, gifts, target, values, across, moved, made, rest, other, kept,
                                found)  # fmt: skip
                    if cost < limit:
                        limit, step, turn = cost, tried, side
                steps[expert, begin + row, place] = step + (SHIFTED * turn if signs == SHIFT else 0)
                _keep(weights, kept, found, numbers, size, expert, begin + row, row, place, entries, negative, errors)
            for at in range(run):
                for row in range(count):
                    residual[expert, start + place * run + at, begin + row] = errors[row, at]
            give(upper, expert, start, place * run, run, errors, count, taken)


def _tiles(columns: Tensor) -> int:
    return len(columns) * -(-columns.shape[2] // ROWS)


def fitted(name: str, columns: Tensor, given: Tensor, start: int, inverse: Tensor, metric: Tensor) -> Tensor:
    """The scales that a type's runs would have, each for itself: [E, N, R].

    columns: [E, K, N]; given: [E, W, N], what the columns before `start` give to those from it on; inverse, metric:
    [E, W/8, 8, 8] of the block's eights.
    """
    kind, values = KINDS[name], table(name)
    ideal = torch.zeros(len(columns), columns.shape[2], given.shape[1] // kind.run)
    if kind.signs == "levels":
        in_threads(
            fit_levels,
            _tiles(columns),
            columns,
            given,
            start,
            inverse,
            metric,
            values[0].contiguous(),
            kind.run,
            ideal,
        )
        return ideal
    halves, starts, others, order = book(name)
    usual, signs = kind.usual / float(values.square().mean().sqrt()), _SIGNS[kind.signs]
    in_threads(
        _fit, _tiles(columns), columns, given, start, inverse, metric, halves, starts, others,
        values[:, order].contiguous(), kind.run, signs, np.float32(usual), ideal,
    )  # fmt: skip
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
    kind, values = KINDS[name], table(name)
    experts, _, rows = columns.shape
    width = given.shape[1]
    steps = torch.zeros(experts, rows, width // kind.run, dtype=torch.uint8)
    entries = torch.zeros(experts, rows, width // kind.length, dtype=torch.int16)
    negative = torch.zeros(experts, rows, width // 8, dtype=torch.uint8)
    inverse, metric, pivots = parts
    if kind.signs == "levels":
        in_threads(
            round_levels, _tiles(columns), columns, given, upper, start, pivots, values[0].contiguous(), kind.factors,
            kind.run, near, scale, ideal, steps, entries, residual,
        )  # fmt: skip
        return entries, negative, steps
    halves, starts, others, order = book(name)
    in_threads(
        _sweep, _tiles(columns), columns, given, upper, start, inverse, metric, halves, starts, others,
        values[:, order].contiguous(), order, kind.factors, kind.run, _SIGNS[kind.signs], near, scale, ideal, steps,
        entries, negative, residual,
    )  # fmt: skip
    return entries, negative, steps


def last_factor(kind: Kind) -> float:
    """The factor of the step that the largest scale of a block would take."""
    return float(kind.factors[0] if kind.signs == "levels" else kind.factors[-1])
