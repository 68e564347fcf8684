"""What every i-quant's columns have in common: targets of eights, steps, what a run's errors give to later columns."""

from __future__ import annotations

import numpy as np

from moeq.numerics.sweep import inside

ROWS = 16  # that are worked on side by side
FAR = np.float32(3e38)


@inside  # type: ignore[untyped-decorator]
def moved_eight(columns, given, inverse, expert, start, first, row, local, into):  # type: ignore[no-untyped-def]
    """The target of an eight [8]: its weights, moved by what is given to them; local: place of the eight in the run."""
    for at in range(8):
        total = columns[expert, start + first + at, row]
        for other in range(at + 1):
            total += inverse[at, other] * given[local + other]
        into[at] = total


@inside  # type: ignore[untyped-decorator]
def give(upper, expert, start, first, run, errors, count, into):  # type: ignore[no-untyped-def]
    """Add to into [rows, W], of `count` rows, what the errors [rows, run] of a run give to all later columns of the
    block; four columns at a time."""
    for at in range(0, run, 4):
        one, two = upper[expert, start + first + at], upper[expert, start + first + at + 1]
        three, four = upper[expert, start + first + at + 2], upper[expert, start + first + at + 3]
        for row in range(count):
            error1, error2, error3, error4 = (
                errors[row, at],
                errors[row, at + 1],
                errors[row, at + 2],
                errors[row, at + 3],
            )
            line = into[row]
            for place in range(first + run, into.shape[1]):
                given = error1 * one[start + place] + error2 * two[start + place]
                line[place] += given + error3 * three[start + place] + error4 * four[start + place]


@inside  # type: ignore[untyped-decorator]
def nearest_step(unit, factors, ideal):  # type: ignore[no-untyped-def]
    """The step whose scale comes nearest to the ideal one."""
    middle, distance = 0, FAR
    for step in range(factors.shape[0]):
        away = abs(unit * factors[step] - ideal)
        if away < distance:
            middle, distance = step, away
    return middle
