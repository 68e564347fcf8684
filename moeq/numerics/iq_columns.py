"""What every i-quant's columns have in common, of LANES rows at once: targets of eights, steps, what a run's errors
give to later columns. Arrays are addresses; those of many rows lie column after column."""

from __future__ import annotations

import numpy as np

from moeq.numerics import vectors
from moeq.numerics.sweep import inside
from moeq.numerics.vectors import LANES

FAR = np.float32(3e38)
NONE, ONE = np.float32(0), np.float32(1)
BYTES = 4  # of a number


@inside  # type: ignore[untyped-decorator]
def inverse_of(size):  # type: ignore[no-untyped-def]
    """1 / size, and 0 for a scale of 0."""
    return vectors.pick(vectors.equal(size, vectors.floats(NONE)), size, vectors.ratio(vectors.floats(ONE), size))


@inside  # type: ignore[untyped-decorator]
def targets(columns, stride, own, inverse, size, into):  # type: ignore[no-untyped-def]
    """The targets of an eight in units of a scale, into [8]: its weights, `stride` numbers from one to the next, moved
    by what is given to them, own [8]; inverse: [8, 8], lower triangular; size: 0 where there is no scale."""
    inverted = inverse_of(size)
    for at in range(8):
        total = vectors.floats_at(columns, at * stride)
        for other in range(at + 1):
            factor = vectors.floats(vectors.number_at(inverse, at * 8 + other))
            total = vectors.fused(factor, vectors.floats_at(own, other * LANES), total)
        vectors.put_floats(into, at * LANES, vectors.mul(total, inverted))


@inside  # type: ignore[untyped-decorator]
def give(upper, inputs, first, run, width, errors, into):  # type: ignore[no-untyped-def]
    """Add to into [W] what the errors [run] of a run give to all later columns of the block; four columns at a time;
    upper: of the block's own part of the factor, `inputs` numbers from one line to the next."""
    for at in range(0, run, 4):
        line = (first + at) * inputs
        one, two = vectors.floats_at(errors, at * LANES), vectors.floats_at(errors, (at + 1) * LANES)
        three, four = vectors.floats_at(errors, (at + 2) * LANES), vectors.floats_at(errors, (at + 3) * LANES)
        for place in range(first + run, width):
            total = vectors.floats_at(into, place * LANES)
            total = vectors.fused(vectors.floats(vectors.number_at(upper, line + place)), one, total)
            total = vectors.fused(vectors.floats(vectors.number_at(upper, line + inputs + place)), two, total)
            total = vectors.fused(vectors.floats(vectors.number_at(upper, line + 2 * inputs + place)), three, total)
            total = vectors.fused(vectors.floats(vectors.number_at(upper, line + 3 * inputs + place)), four, total)
            vectors.put_floats(into, place * LANES, total)


@inside  # type: ignore[untyped-decorator]
def factor_of(step, least, each):  # type: ignore[no-untyped-def]
    """What a scale is multiplied by at a step."""
    return vectors.fused(vectors.floats(step), vectors.floats(each), vectors.floats(least))


@inside  # type: ignore[untyped-decorator]
def nearest_step(unit, least, each, steps, ideal):  # type: ignore[no-untyped-def]
    """The step whose scale comes nearest to the ideal one."""
    middle, distance = vectors.words(0), vectors.floats(FAR)
    for step in range(steps):
        tried = vectors.mul(unit, factor_of(vectors.words(step), least, each))
        away = vectors.size_of(vectors.sub(tried, ideal))
        nearer = vectors.less(away, distance)
        middle, distance = vectors.pick(nearer, vectors.words(step), middle), vectors.pick(nearer, away, distance)
    return middle
