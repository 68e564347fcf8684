"""i-quants of single levels, IQ4_XS: GPTQ's columns on 16 levels that are not equally far apart, compiled.

A run of weights that share a step is made with several steps, and the cheapest is kept, as in iq_search.py. Letters:
E experts, K inputs, N output rows, W columns of a block, R runs of one.
"""

from __future__ import annotations

import numpy as np

from moeq.numerics.iq_columns import FAR, ROWS, give, moved_eight, nearest_step
from moeq.numerics.sweep import compiled, inside

FIRST = 8  # scales that are tried first, of either sign


@inside  # type: ignore[untyped-decorator]
def _level(levels, wanted):  # type: ignore[no-untyped-def]
    """The place of the nearest level, of levels in order: how many middles between two lie below."""
    place = 0
    for at in range(levels.shape[0] - 1):
        place += wanted > np.float32(0.5) * (levels[at] + levels[at + 1])
    return place


@compiled  # type: ignore[untyped-decorator]
def fit_levels(columns, given, start, inverse, metric, levels, run, ideal, first, last):  # type: ignore[no-untyped-def]
    """Into ideal [E, N, R] the scale of every run with the least error, weighted by the diagonal of metric alone."""
    rows, width, eights = columns.shape[2], given.shape[1], run // 8
    target, own, counts = np.empty(run, np.float32), np.empty(run, np.float32), np.empty(run, np.float32)
    chunks = (rows + ROWS - 1) // ROWS
    for item in range(first, last):
        expert, chunk = divmod(item, chunks)
        for row in range(chunk * ROWS, min(rows, (chunk + 1) * ROWS)):
            for place in range(width // run):
                for at in range(run):
                    own[at] = given[expert, place * run + at, row]
                most = np.float32(0)
                for eight in range(eights):
                    number = place * eights + eight
                    moved_eight(
                        columns,
                        own,
                        inverse[expert, number],
                        expert,
                        start,
                        place * run + eight * 8,
                        row,
                        eight * 8,
                        target[eight * 8 : eight * 8 + 8],
                    )
                    for at in range(8):
                        counts[eight * 8 + at] = metric[expert, number, at, at]
                        most = max(most, abs(target[eight * 8 + at]))
                best, found = np.float32(0), np.float32(0)
                if most > 0:
                    for turn in range(2):
                        for tried in range(FIRST):
                            guess = (1 - 2 * turn) * most / np.float32(90 + 8 * tried)
                            along, across = np.float32(0), np.float32(0)
                            for at in range(run):
                                value = levels[_level(levels, target[at] / guess)]
                                along += counts[at] * target[at] * value
                                across += counts[at] * value * value
                            if along * along > best * across:
                                best, found = along * along / across, along / across
                ideal[expert, row, place] = found


@compiled  # type: ignore[untyped-decorator]
def round_levels(  # type: ignore[no-untyped-def]
    columns, given, upper, start, pivots, levels, factors, run, near,
    scale, ideal, steps, entries, residual, first, last,
):  # fmt: skip
    """Into steps [E, N, R], entries [E, N, W] and residual [E, K, N] the codes of a block of given scales [E, N];
    near: steps on each side of the one nearest to the ideal scale that are tried."""
    rows, width = columns.shape[2], given.shape[1]
    taken = np.empty((ROWS, width), np.float32)
    own, kept = np.empty(run, np.float32), np.zeros(run, np.float32)
    errors, found = np.zeros((ROWS, run), np.float32), np.empty(run, np.int64)
    chunks = (rows + ROWS - 1) // ROWS
    for item in range(first, last):
        expert, chunk = divmod(item, chunks)
        begin = chunk * ROWS
        count = min(ROWS, rows - begin)
        for row in range(count):
            for at in range(width):
                taken[row, at] = given[expert, at, begin + row]
        for place in range(width // run):
            for row in range(count):
                unit = scale[expert, begin + row]
                middle = nearest_step(unit, factors, ideal[expert, begin + row, place])
                best = FAR
                for step in range(max(0, middle - near), min(factors.shape[0], middle + near + 1)):
                    size = unit * factors[step]
                    inverted = 1 / size if size != 0 else np.float32(0)
                    cost = np.float32(0)
                    for at in range(run):
                        own[at] = taken[row, place * run + at]
                    for at in range(run):
                        column = start + place * run + at
                        weight = columns[expert, column, begin + row]
                        entry = _level(levels, (weight + own[at]) * inverted)
                        error = weight - size * levels[entry]
                        off = error + own[at]
                        cost += pivots[expert, column] * off * off
                        if cost >= best:
                            break
                        found[at], kept[at] = entry, error
                        line = upper[expert, column]
                        for later in range(at + 1, run):
                            own[later] += error * line[start + place * run + later]
                    if cost < best:
                        best = cost
                        steps[expert, begin + row, place] = step
                        for at in range(run):
                            errors[row, at] = kept[at]
                            entries[expert, begin + row, place * run + at] = found[at]
            for at in range(run):
                for row in range(count):
                    residual[expert, start + place * run + at, begin + row] = errors[row, at]
            give(upper, expert, start, place * run, run, errors, count, taken)
