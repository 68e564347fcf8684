"""How sure a measure is, and the difference between two evaluations of the same items.

Letters: n items.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeq.artifacts.evaluation import Change
from moeq.errors import EvaluationError
from moeq.numerics import inference
from moeq.numerics.inference import Group, Spread

Floats = NDArray[np.float64]
HOW = (
    "paired; 95 % by Student's t, of a text over its documents, or over windows as dependent ones, by domain; "
    "p: two-sided, after Holm over the rows of a measure"
)


@dataclass(frozen=True, kw_only=True)
class Items:
    """What one measure is made of, item by item: [n] values and [n] weights.

    kind mean: the sum of values over the sum of weights (an accuracy: weights of one); perplexity: exp of minus the sum
    of log-likelihoods over the sum of tokens (or words, or bytes); bits: the same as bits instead of its exponential.
    names: what says that two evaluations have the same items. Of windows of text, in the order of the text: documents,
    the number of each one's, and strata, its domain. Items without documents are independent.
    """

    kind: str
    values: Floats
    weights: Floats
    names: tuple[str, ...]
    strata: tuple[str, ...] | None = None
    documents: tuple[int, ...] | None = None

    @property
    def ratio(self) -> float:
        return float(self.values.sum() / self.weights.sum())

    @property
    def value(self) -> float:
        if self.kind == "perplexity":
            return float(np.exp(-self.ratio))
        return self.ratio if self.kind == "mean" else -self.ratio / math.log(2)

    @property
    def parts(self) -> Floats:
        """What each item adds [n] to the error of the measure, of a perplexity to that of its logarithm: linear."""
        slope = {"mean": 1.0, "perplexity": -1.0, "bits": -1 / math.log(2)}[self.kind]
        return np.asarray(slope * (self.values - self.ratio * self.weights) / self.weights.sum())

    @property
    def groups(self) -> list[Group]:
        return inference.grouped(len(self.names), self.strata, self.documents)


def standard_error(items: Items) -> float | None:
    """Of one measure alone; None for a single item."""
    spread = inference.spread(items.parts, items.groups)
    if not spread.degrees:
        return None
    return float(spread.error) * (items.value if items.kind == "perplexity" else 1.0)


def compare(own: Sequence[Items], first: Sequence[Items], *, where: str = "comparison") -> Change:
    """The difference of the mean over several measures (of one alone: its own), item by item.

    What is common to an item cancels. Perplexities, alone, are compared by their logarithms: the interval is that of
    ln(first + difference). p is never below 2 ** (1 - n) of n items whose values differ, the least that flipping the
    signs of n differences can give. With too few items there is neither. Raises EvaluationError when the items differ.
    """
    pairs = list(zip(own, first, strict=True))
    for items, others in pairs:
        if items.names != others.names or items.kind != others.kind:
            raise EvaluationError(
                f"made of other items ({len(items.names)} and {len(others.names)})",
                where=where,
                do="evaluate both on the same items, text and windows, with the same version of moeq",
            )
    estimates = [_estimate(items, others) for items, others in pairs]
    centre = float(np.mean([of for of, _, _ in estimates]))
    spread = inference.added([one for _, one, _ in estimates]).scaled(1 / len(pairs))
    short = [(len(items.names), fewest) for (items, _), (_, _, fewest) in zip(pairs, estimates, strict=True)]
    fewest = max((fewest for count, fewest in short if count < fewest), default=None)
    alone = own[0].kind == "perplexity"
    low = high = p = None
    if fewest is None:
        half = float(spread.half_width)
        ends = (centre - half, centre + half)
        low, high = (_finite(first[0].value * np.expm1(end)) for end in ends) if alone else ends
        differing = sum(int((items.values != others.values).sum()) for items, others in pairs)
        p = min(1.0, max(float(spread.p(np.asarray(centre))), 2.0 ** (1 - differing)))
    return Change(
        difference=float(np.mean([items.value - others.value for items, others in pairs])),
        low=low,
        high=high,
        p=p,
        stderr=float(spread.error) * (own[0].value if alone else 1.0) if spread.degrees else None,
        items=spread.items,
        effective_items=float(spread.effective),
        degrees_of_freedom=float(spread.degrees),
        fewest_items=fewest,
    )


def _finite(value: float) -> float:
    """JSON has no infinite numbers."""
    return float(np.nan_to_num(value))


def _estimate(own: Items, first: Items) -> tuple[float, Spread, int]:
    """The centre of a difference's interval (of perplexities: of ln(own / first)), its spread, and the items it takes.

    The logarithm moves as ln(first + difference) does with `first` held: its error is that of the difference.
    """
    if _are_answers(own) and _are_answers(first):
        shrunk, spread = inference.of_answers(own.values - first.values)
        return float(shrunk), spread, inference.FEWEST_ITEMS
    groups = (first if own.strata is None else own).groups  # earlier results do not name domains
    centre, share = own.value - first.value, 1.0
    if own.kind == "perplexity":
        centre = first.ratio - own.ratio
        share = math.exp(-centre)
    spread = inference.spread(own.parts - share * first.parts, groups)
    return centre, spread, max(group.fewest for group in groups)


def _are_answers(items: Items) -> bool:
    """Whether the items are right or wrong, independent of one another and of one weight."""
    alone = items.kind == "mean" and items.strata is None and items.documents is None
    return alone and bool(np.isin(items.values, (0.0, 1.0)).all() and (items.weights == 1).all())
