"""How far off a sum of items is that are independent, of documents, or in order: variance, Student's t, Holm.

Independent items, and the sums of independent documents, have the sample variance. Windows of a text in their order are
dependent: the long-run variance of a series is the mean square of its first K cosine coefficients, and a mean over the
error that follows has Student's t with K degrees of freedom (equal-weighted cosines, EWC: Lazarus, Lewis, Stock and
Watson, "HAR Inference: Recommendations for Practice", JBES 36, 2018). With K = n - 1 it is the sample variance. Strata
add up; degrees of freedom of the sum after Satterthwaite (Biometrics Bulletin 2, 1946).

Letters: n items, K cosines, m p values; leading axes are repetitions that have their strata and documents in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CONFIDENCE = 0.95
FEWEST_ITEMS = 8  # independent ones; with fewer there is no interval
FEWEST_IN_ORDER = 16  # items of a series
FEWEST_DOCUMENTS = 10  # from which on they, not the items in their order, are what is drawn
# The paper has 0.4, for a lag-1 correlation of .7; windows have .09 to .25. The largest with which ten rows of 40
# windows at .3 have false positives of .05 after Holm (tests/numerics/test_inference.py); with 0.6 they have .055.
COSINES = 0.5  # K over n ** (2/3)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Items of a stratum: their places [n], and the document of each, in the order of the text.

    documents None: independent items.
    """

    places: Ints
    documents: Ints | None

    @property
    def by_document(self) -> bool:
        return self.documents is not None and len(np.unique(self.documents)) >= FEWEST_DOCUMENTS

    @property
    def fewest(self) -> int:
        """Items of which an interval is given."""
        return FEWEST_ITEMS if self.documents is None or self.by_document else FEWEST_IN_ORDER

    @property
    def enough(self) -> bool:
        return len(self.places) >= self.fewest

    def spread(self, parts: Floats) -> Spread:
        """Of the sum of these items' parts of an estimate; parts: [..., n of all strata]."""
        own = parts[..., self.places]
        count = own.shape[-1]
        if count < 2:
            nothing = np.zeros(own.shape[:-1])
            return Spread(variance=nothing, degrees=nothing, independent=nothing, items=count)
        independent = count * own.var(-1, ddof=1)
        variance, degrees = independent, count - 1
        if self.documents is not None and self.by_document:
            order = np.argsort(self.documents, kind="stable")
            starts = np.unique(self.documents[order], return_index=True)[1]
            sums = np.add.reduceat(own[..., order], starts, axis=-1)
            variance, degrees = len(starts) * sums.var(-1, ddof=1), len(starts) - 1
        elif self.documents is not None:
            degrees = cosines(count)
            variance = count * long_run_variance(own, degrees)
        return Spread(
            variance=variance, degrees=np.full(own.shape[:-1], float(degrees)), independent=independent, items=count
        )


def grouped(count: int, strata: Sequence[str] | None = None, documents: Sequence[int] | None = None) -> list[Group]:
    """The items by stratum (None: one); strata of too few items for a variance of their own are joined into one.

    What differs between joined strata then counts as chance, so that errors are rather too large (collapsed strata:
    Cochran, Sampling Techniques, 5A.12).
    """
    of_all = None if documents is None else np.asarray(documents, np.int64)

    def group(places: Ints) -> Group:
        return Group(places=places, documents=None if of_all is None else of_all[places])

    labels = np.zeros(count, np.int64) if strata is None else np.unique(np.asarray(strata), return_inverse=True)[1]
    groups = [group(np.flatnonzero(labels == label)) for label in range(int(labels.max(initial=0)) + 1)]
    kept = sorted((own for own in groups if own.enough), key=lambda own: len(own.places))
    few = [own for own in groups if not own.enough]
    if not few:
        return kept
    joined = group(np.sort(np.concatenate([own.places for own in few])))
    if kept and not joined.enough:
        joined = group(np.sort(np.concatenate([joined.places, kept.pop(0).places])))
    return [*kept, joined]


def cosines(count: int) -> int:
    """K of a series of so many items."""
    return max(1, min(count - 1, int(COSINES * count ** (2 / 3))))


def long_run_variance(series: Floats, count: int) -> Floats:
    """Of series [..., n], by so many cosines: n times the variance of their means."""
    from scipy.fft import dct  # scipy takes as long to import as all else of a light command

    coefficients = dct(series, type=2, norm="ortho", axis=-1)[..., 1 : count + 1]
    return np.asarray((coefficients**2).mean(-1))


def half_width(variance: Floats, degrees: Floats | float) -> Floats:
    """Of the interval of 95 % by Student's t, elementwise."""
    from scipy.special import stdtrit

    return np.asarray(stdtrit(degrees, (1 + CONFIDENCE) / 2) * np.sqrt(variance))


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Of an estimate that is a sum over items: variance [...], with so many degrees of freedom [...].

    independent: the variance [...] if all items were independent of one another.
    """

    variance: Floats
    degrees: Floats
    independent: Floats
    items: int

    @property
    def error(self) -> Floats:
        """The standard error [...]."""
        return np.asarray(np.sqrt(self.variance))

    @property
    def effective(self) -> Floats:
        """How many independent items [...] would leave as large an error; never more than there are."""
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(self.variance > 0, self.independent / self.variance, 1.0)
        return np.asarray(self.items * np.minimum(share, 1.0))

    @property
    def half_width(self) -> Floats:
        """Of the interval of 95 %, [...]."""
        return half_width(self.variance, self.degrees)

    def p(self, estimate: Floats) -> Floats:
        """Two-sided, of estimates [...] where 0 is expected."""
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(estimate == 0, 0.0, np.abs(estimate) / self.error)
        from scipy.special import stdtr

        return np.asarray(2 * stdtr(self.degrees, -ratio))

    def scaled(self, factor: float) -> Spread:
        """Of the estimate times a number."""
        square = factor**2
        return Spread(
            variance=square * self.variance,
            degrees=self.degrees,
            independent=square * self.independent,
            items=self.items,
        )


def added(spreads: Sequence[Spread]) -> Spread:
    """Of the sum of independent estimates; no degrees of freedom where one of them has none."""
    if len(spreads) == 1:
        return spreads[0]
    variances, degrees = (np.stack([getattr(own, side) for own in spreads]) for side in ("variance", "degrees"))
    variance, known = variances.sum(0), (degrees > 0).all(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        joined = np.where(variance > 0, variance**2 / (variances**2 / degrees).sum(0), degrees.sum(0))
    return Spread(
        variance=variance,
        degrees=np.where(known, joined, 0.0),
        independent=np.asarray(sum(own.independent for own in spreads)),
        items=sum(own.items for own in spreads),
    )


def spread(parts: Floats, groups: Sequence[Group]) -> Spread:
    """Of estimates that are the sums of their items' parts [..., n]."""
    return added([group.spread(parts) for group in groups])


def of_answers(differences: Floats) -> tuple[Floats, Spread]:
    """The centre of an interval of the mean of differences [..., n] of answers, each -1, 0 or 1, and its spread.

    An answer is added for either side, so that a few that agree are not certain (Bonett and Price, J. Educ. Behav.
    Stat. 37, 2012, with Student's t of n + 1 degrees).
    """
    count = differences.shape[-1] + 2
    centre = differences.sum(-1) / count
    variance = np.asarray(((differences**2).sum(-1) + 2 - count * centre**2) / (count * (count - 1)))
    degrees = np.full(variance.shape, count - 1.0)
    return centre, Spread(variance=variance, degrees=degrees, independent=variance, items=count - 2)


def holm(p: Floats) -> Floats:
    """p values [..., m], adjusted so that the chance of any error among the m is the level (Holm, 1979)."""
    order = np.argsort(p, axis=-1, kind="stable")
    factors = np.arange(p.shape[-1], 0, -1)
    rising = np.maximum.accumulate(np.take_along_axis(p, order, -1) * factors, axis=-1)
    adjusted = np.empty_like(rising)
    np.put_along_axis(adjusted, order, np.minimum(rising, 1.0), -1)
    return adjusted
