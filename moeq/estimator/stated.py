"""Estimates beside what a publication states: inside its range or not, and how far its ends are missed."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

from moeq.errors import EstimateError
from moeq.estimator.result import Estimate, Frozen
from moeq.recipe import StatedSection


class Comparison(Frozen):
    """One stated figure and its estimate, both from the least to the largest over the grid.

    `inside`: the estimate lies in the stated range, to within half a unit of its last printed digit. `deviation`: of
    the end that is farther off, relative to what is stated. `missed`: whether that is beyond what was allowed.
    """

    case: str
    figure: str
    over: str | None
    stated_low: float
    stated_high: float
    low: float
    high: float
    only_largest: bool
    inside: bool
    deviation: float
    missed: bool
    source: str

    @property
    def verdict(self) -> str:
        """In one word: missed, or near."""
        return "missed" if self.missed else "near"

    @property
    def name(self) -> str:
        """The figure in words."""
        kind = self.figure.replace("_", " ")
        return "near-data side over FP16" if self.over is None else f"{kind} over {self.over}"


def compare(case: str, stated: Sequence[StatedSection], estimate: Estimate, *, miss_beyond: float) -> list[Comparison]:
    """Every stated figure of a case beside its estimate; EstimateError for a baseline that was not estimated."""
    return [_compare(case, figure, _values(figure, estimate, case), miss_beyond) for figure in stated]


def _values(stated: StatedSection, estimate: Estimate, case: str) -> Sequence[float]:
    """The figure over the grid at its first batch."""
    if stated.over is None:
        return [estimate.ndp_speedup_over_fp16]
    try:
        rows = estimate.speedups_over(stated.over, batch=estimate.points[0].batch)
    except EstimateError as error:
        raise EstimateError(error.what, where=f"estimate.figures, {case}", do=error.do) from None
    return [row.decode if stated.figure == "decode" else row.end_to_end for row in rows]


def _compare(case: str, stated: StatedSection, values: Sequence[float], miss_beyond: float) -> Comparison:
    low, high = max(values) if stated.only_largest else min(values), max(values)
    ends = ((low, stated.low), (high, stated.high))
    deviation = max((value / printed - 1 for value, printed in ends), key=abs)
    return Comparison(
        case=case,
        figure=stated.figure,
        over=stated.over,
        stated_low=stated.low,
        stated_high=stated.high,
        low=low,
        high=high,
        only_largest=stated.only_largest,
        inside=low >= stated.low - _half_digit(stated.low) and high <= stated.high + _half_digit(stated.high),
        deviation=deviation,
        missed=abs(deviation) > miss_beyond,
        source=stated.source,
    )


def _half_digit(printed: float) -> float:
    """Half a unit of the last digit that a number is printed with: 0.05 of 8.7, 0.5 of 18."""
    exponent = Decimal(f"{printed:g}").as_tuple().exponent
    assert isinstance(exponent, int)
    return 0.5 * 10.0**exponent
