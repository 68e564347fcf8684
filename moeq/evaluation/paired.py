"""How sure a difference between two evaluations of the same items is: paired bootstrap over the items.

Letters: n items, B resamples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moeq.artifacts.evaluation import Change
from moeq.artifacts.files import digest_of
from moeq.errors import EvaluationError

RESAMPLES = 2000
SEED = 1234
_AT_ONCE = 1 << 22  # counts of resamples in memory


@dataclass(frozen=True, kw_only=True)
class Items:
    """What one measure is made of, item by item: [n] values and [n] weights.

    kind mean: the sum of values over the sum of weights (an accuracy: weights of one); perplexity: exp of minus the sum
    of log-likelihoods over the sum of tokens (or words, or bytes); bits: the same as bits instead of its exponential.
    names: what says that two evaluations have the same items.
    """

    kind: str
    values: np.ndarray
    weights: np.ndarray
    names: tuple[str, ...]

    def measure(self, counts: np.ndarray) -> np.ndarray:
        """The measure [B] of items that are there so many times, [B, n]."""
        ratio = np.asarray((counts @ self.values) / (counts @ self.weights))
        if self.kind == "perplexity":
            return np.asarray(np.exp(-ratio))
        return np.asarray(-ratio / np.log(2)) if self.kind == "bits" else ratio

    @property
    def value(self) -> float:
        return float(self.measure(np.ones((1, len(self.values))))[0])


def compare(
    own: Sequence[Items],
    first: Sequence[Items],
    *,
    where: str = "comparison",
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> Change | None:
    """The difference of the mean over several measures (of one alone: its own), items of each drawn with replacement.

    The same draws go to both, so that what is common to an item cancels. p is never below 2 ** (1 - n) of n items
    whose values differ, the least that flipping the signs of n differences can give: resamples alone are too sure of
    few. None of a single item, which says nothing of how sure it is. Raises EvaluationError when the items differ.
    """
    pairs = list(zip(own, first, strict=True))
    for items, others in pairs:
        if items.names != others.names or items.kind != others.kind:
            raise EvaluationError(
                f"made of other items ({len(items.names)} and {len(others.names)})",
                where=where,
                do="evaluate both on the same items, text and windows",
            )
    count = sum(len(items.names) for items in own)
    if count < 2:
        return None
    differing = sum(int((items.values != others.values).sum()) for items, others in pairs)
    total = np.zeros(resamples)
    for items, others in pairs:
        draws = _draws(items, resamples, seed)
        total += np.concatenate([items.measure(counts) - others.measure(counts) for counts in draws])
    drawn = total / len(own)
    observed = float(np.mean([items.value - others.value for items, others in pairs]))
    tail = min(int((drawn <= 0).sum()), int((drawn >= 0).sum()))
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Change(
        difference=observed,
        low=float(low),
        high=float(high),
        p=min(1.0, max(2 * (tail + 1) / (resamples + 1), 2.0 ** (1 - differing))),
        stderr=float(drawn.std(ddof=1)),
        items=count,
        resamples=resamples,
        seed=seed,
    )


def standard_error(items: Items, *, resamples: int = RESAMPLES, seed: int = SEED) -> float | None:
    """Of one measure alone, over resampled items; None for a single one."""
    if len(items.names) < 2:
        return None
    return float(np.concatenate([items.measure(counts) for counts in _draws(items, resamples, seed)]).std(ddof=1))


def _draws(items: Items, resamples: int, seed: int) -> list[np.ndarray]:
    """How often each item is drawn, [b, n] in parts that together have all resamples; decided by seed and items."""
    rng = np.random.default_rng([seed, int(digest_of(items.names)[:15], 16)])
    count = len(items.names)
    step = max(1, _AT_ONCE // count)
    share = np.full(count, 1 / count)
    sizes = [min(step, resamples - start) for start in range(0, resamples, step)]
    return [rng.multinomial(count, share, size=size).astype(float) for size in sizes]
