"""The search that both knapsacks share: deviations from the least priced choices, item by item.

At prices of the limits every item has a least priced choice; the penalty of a deviation is what it loses more than that
at the prices. With Lagrange's bound at these prices,

    loss of a solution = bound + sum of its penalties + prices * what is left of the limits,

and a deviation whose penalty alone exceeds the best solution's excess over the bound is in no better one. The others
enter in order of their penalties, as a table from what the limits count to the least penalty (dynamic programming):
when the next item's least penalty exceeds the excess, nothing better is left (Pisinger's expanding core, 1995). A table
is thinned by what is left to do: unless a state is the end, it takes at least one more deviation, and as many as its
penalty leaves room for must bring its cost near the limit.

Letters: N items, W choices, S states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeq.numerics.certificate import Floats, Ints

WIDEST = 1_000_000  # states made at a time, at most: what bounds the memory
COMPARED = 1 << 18  # pairs of choices compared at a time
ROUNDING = 2.0**-49  # of a priced loss: differences below come from the rounding of products and sums
States = list[Any]  # what deviations add so far to what each limit counts, and at last their penalties, each [S]
Step = tuple[int, Ints, int, NDArray[np.integer[Any]]]  # of a search: see `traced`


class Search:
    """Deviations from the least priced choices, until none can be better than the best solution found.

    best: [N] the choices, if there are any yet; excess: how far they lie above the bound at the prices. Subclasses say
    which states are of use.
    """

    margin = 1.0  # of the distance that moves can bridge, where they are rounded

    def __init__(
        self,
        value: Floats,
        counted: Sequence[Ints | Floats],
        limits: Sequence[float],
        prices: Sequence[float],
        near: Ints,
        useless: NDArray[np.bool_],
    ) -> None:
        """value, useless and what each limit counts: [N, W]; prices: of a unit of each; near: [N] least priced, up to
        rounding."""
        items = np.arange(len(value))
        priced = np.where(useless, np.inf, value)
        for price, count in zip(prices, counted, strict=True):
            priced = priced + price * count
        own = priced[items, near]
        self.start = start = np.where(own - priced.min(1) <= ROUNDING * own, near, priced.argmin(1))
        self.prices, self.limits, self.counted = prices, limits, counted
        self.moves = [count - count[items, start][:, None] for count in counted]  # [N, W] what a deviation adds
        self.targets = [limit - count[items, start].sum() for limit, count in zip(limits, counted, strict=True)]
        penalty = value - value[items, start][:, None]
        for price, moves in zip(prices, self.moves, strict=True):
            penalty = penalty + price * moves
        self.above = np.maximum(penalty, 0.0)  # [N, W]; only rounding makes a penalty negative
        useless = useless.copy()
        useless[items, start] = True
        self.best, self.excess = start, math.inf
        self._enter(np.where(useless, np.inf, self.above))

    def _enter(self, penalty: Floats) -> None:
        """Set the penalties [N, W] and the order of the items."""
        first = penalty.min(1)
        self.penalty, self.order = penalty, np.argsort(first, kind="stable")
        self.firsts = np.append(first[self.order], np.inf)

    def offer(self, choices: Ints) -> None:
        """Take choices [N] as the best, if they are within the limits and better."""
        items = np.arange(len(choices))
        excess = math.fsum(self.above[items, choices])
        for price, limit, count in zip(self.prices, self.limits, self.counted, strict=True):
            left = float(limit - count[items, choices].sum())
            excess += price * left if left >= 0 else math.inf
        if excess < self.excess:
            self.best, self.excess = choices, excess

    def run(self, effort: int, most: int | None = None) -> bool:
        """Improve `best`; whether nothing is left. most: states kept at a time, those of the lowest penalties."""
        tables = [*self.moves, self.penalty]
        states: States = [np.zeros(1, table.dtype) for table in tables]
        trail: list[Step] = []
        self._take_best(states, trail)
        reaches = [self._reach(moves) for moves in self.moves]
        for rank, item in enumerate(self.order.tolist()):
            if self.firsts[rank] >= self.excess:
                return most is None
            choices = np.append(-1, np.flatnonzero(self.penalty[item] < self.excess))
            count = len(states[-1])
            effort -= len(choices) * count
            if effort < 0 or len(choices) * count > WIDEST:
                return False
            more = [np.append(np.zeros(1, table.dtype), table[item, choices[1:]]) for table in tables]
            states = [(adds[:, None] + before).ravel() for adds, before in zip(more, states, strict=True)]
            trail.append((item, choices, count, np.arange(len(states[-1]))))
            self._take_best(states, trail)
            keep = self.useful(states, self._open(states, rank + 1, [float(reach[rank + 1]) for reach in reaches]))
            if most is not None and len(keep) > most:
                keep = self.nearest(states[-1][keep], keep, most)
            states = [part[keep] for part in states]
            trail[-1] = (item, choices, count, keep.astype(np.int32))
            if not len(keep):
                return most is None
        return most is None

    def useful(self, states: States, keep: Ints) -> Ints:
        """Of the states [S] to keep, those that no other makes useless."""
        raise NotImplementedError

    def nearest(self, penalties: Floats, keep: Ints, most: int) -> Ints:
        """`most` of the states [S] to keep, whose penalties [S] are the lowest."""
        raise NotImplementedError

    def _reach(self, moves: Ints | Floats) -> Ints | Floats:
        """The largest move of every item in order and of all that follow, and none behind the last, [N + 1]."""
        own = np.abs(np.where(np.isfinite(self.penalty), moves, 0)).max(1)[self.order]
        return np.append(np.maximum.accumulate(own[::-1])[::-1], 0)

    def _take_best(self, states: States, trail: list[Step]) -> None:
        *counted, excess = states
        for price, target, added in zip(self.prices, self.targets, counted, strict=True):
            left = target - added
            excess = np.where(left >= 0, excess + price * left, np.inf)
        index = int(excess.argmin())
        if excess[index] < self.excess:
            self.excess, self.best = float(excess[index]), traced(self.start, trail, index)

    @np.errstate(over="ignore")  # an infinite quotient is no limit
    def _open(self, states: States, rank: int, reaches: Sequence[float]) -> Ints:
        """States that can still become better than the best one.

        rank: of the next deviation, whose penalty is the least of those that follow; reaches: the largest of their
        moves, by limit.
        """
        *counted, penalties = states
        left, following = self.excess - penalties, float(self.firsts[rank])
        allowed = left > following
        if following > 0 and np.isfinite(following):
            steps = np.minimum(np.floor(left / following), len(self.order) - rank)
            for price, target, added, reach in zip(self.prices, self.targets, counted, reaches, strict=True):
                distance = np.maximum(added - target, 0)
                if price > 0:
                    distance = np.maximum(distance, target - added - left / price)
                allowed &= distance <= steps * (reach * self.margin)
        return np.flatnonzero(allowed)


def traced(start: Ints, trail: list[Step], state: int) -> Ints:
    """The choices [N] of a state: those at the start, and its deviations.

    trail: of every item that was looked at, its number, the choices that every earlier state was tried with (the first:
    none), how many states those were, and of the states [S] that were kept where they stood among all that were made.
    """
    choices = start.copy()
    for item, tried, count, kept in reversed(trail):
        which, state = divmod(int(kept[state]), count)
        if which:
            choices[item] = tried[which]
    return choices


def dominated(cost: Ints, *others: Floats) -> NDArray[np.bool_]:
    """[N, W] whether another choice of the item is no higher in any table [N, W] (of equals, the first stays)."""
    count = cost.shape[-1]
    earlier = np.tri(count, k=-1, dtype=bool)  # [choice, other]
    beaten = np.empty(cost.shape, bool)
    step = max(1, COMPARED // max(1, count * count))
    for at in range(0, len(cost), step):
        no_worse, better = np.ones(1, bool), earlier
        for table in (cost, *others):
            own, other = table[at : at + step, :, None], table[at : at + step, None, :]
            no_worse = no_worse & (other <= own)
            better = better | (other < own)
        beaten[at : at + step] = (no_worse & better).any(-1)
    return beaten
