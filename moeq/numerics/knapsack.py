"""The multiple-choice knapsack, exactly: one width for every item, the least loss within a cost.

Lagrange's bound comes first: for a price p of a unit of cost, every item takes the choice of the
least loss + p * cost; the best price is found from the lower convex hulls of all items. What the bound leaves open is
small, so the rest is a search over deviations from that solution. With r the penalty of a deviation (what it loses at
price p) and `slack` the cost that is left,

    loss of a solution = bound + sum of its penalties + p * slack,

and a deviation whose penalty alone exceeds the best solution's excess over the bound is in no better one. The others
enter in order of their penalties, as a table from cost to the least penalty (dynamic programming over costs): when the
next item's least penalty exceeds the excess, the best solution is proven optimal (Pisinger's expanding core, 1995). A
table is thinned by what is left to do: unless a state is the end, it takes at least one more deviation, and as many
as its penalty leaves room for must bring its cost near the limit.
Costs are integers; losses are floats, so "optimal" means up to rounding of their sum.

Letters: N items, W choices, S states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

EFFORT = 200_000_000
QUICK = 512  # states of a first pass, which is not exact, for a good solution to start with
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
States = list[Any]  # what deviations add so far to what each limit counts, and at last their penalties, each [S]


@dataclass(frozen=True, kw_only=True)
class Solution:
    """choices: [N] position of the choice of every item; proven: no solution has less loss; bound: none can have less
    (the loss itself where that is proven, else Lagrange's bound)."""

    choices: Ints
    cost: int
    loss: float
    bound: float
    proven: bool


def least_cost(costs: Ints) -> int:
    """The smallest cost of any solution; costs [N, W]."""
    return int(costs.min(1).sum()) if len(costs) else 0


def solve(losses: Floats, costs: Ints, limit: int, effort: int = EFFORT) -> Solution:
    """The solution of least loss with a cost of at most `limit`; of equal ones, not always the cheapest.

    losses [N, W] finite; costs [N, W] whole numbers; effort: states that the search may make before it ends with the
    best solution so far, unproven (thousands of items that are exactly alike can need that many). Raises ValueError
    when even the cheapest solution costs more.
    """
    if limit < least_cost(costs):
        raise ValueError(f"the least cost is {least_cost(costs)}, the limit {limit}")
    if not len(losses):
        return Solution(choices=np.zeros(0, np.int64), cost=0, loss=0.0, bound=0.0, proven=True)
    items = np.arange(len(losses))
    unit = unit_of(costs)
    scale = float(np.abs(losses).max()) or 1.0
    value, cost = losses / scale, (costs - costs.min(1, keepdims=True)) // unit
    search = _Cheapest(value, cost, (limit - least_cost(costs)) // unit)
    search.run(effort, QUICK)
    proven = search.run(effort)
    loss = float(losses[items, search.best].sum())
    bound = loss if proven else min(loss, search.bound * scale)
    total = int(costs[items, search.best].sum())
    return Solution(choices=search.best, cost=total, loss=loss, bound=bound, proven=proven)


def unit_of(costs: Ints) -> int:
    """The greatest number that divides every difference of costs [N, W] within an item."""
    return int(np.gcd.reduce((costs - costs.min(1, keepdims=True)).ravel())) or 1


def relaxed(value: Floats, cost: Ints, room: int) -> tuple[Ints, float]:
    """Choices [N] on the convex hulls that cost at most `room`, and the price at which the next step no longer fits.

    Every item walks its hull from its cheapest choice; the steps of all items are taken in order of what they save
    for a unit of cost. The first step that does not fit sets the price: the greedy solution of the linear relaxation
    (Zemel, 1980). value, cost: [N, W], every item's least cost 0.
    """
    items = np.arange(len(value))
    cheapest = np.where(cost == 0, value, np.inf).argmin(1)
    here, taken = cheapest, []
    while True:
        more = cost - cost[items, here][:, None]
        saved = value[items, here][:, None] - value
        rate = np.where((more > 0) & (saved > 0), saved / np.maximum(more, 1), 0.0)
        best = rate.max(1)
        moving = best > 0
        if not moving.any():
            break
        steepest = np.where(rate == best[:, None], cost, -1).argmax(1)  # of equal rates, the farthest
        taken.append((best[moving], items[moving], steepest[moving], more[items, steepest][moving]))
        here = np.where(moving, steepest, here)
    if not taken:
        return cheapest, 0.0
    rates, who, where, steps = (np.concatenate(part) for part in zip(*taken, strict=True))
    order = np.argsort(-rates, kind="stable")  # stable: an item's steps stay in their order
    rates, who, where, spent = rates[order], who[order], where[order], steps[order].cumsum()
    fitting = int(np.searchsorted(spent, room, side="right"))
    choices = cheapest.copy()
    choices[who[:fitting]] = where[:fitting]  # later steps of an item overwrite earlier ones
    return choices, float(rates[fitting]) if fitting < len(rates) else 0.0


class Search:
    """Deviations from the choices of the relaxed problem, until none can be better than the best solution found.

    best: [N] the choices; excess: what they lose more than `bound`. What limits count and losses are in units of the
    caller. Subclasses say which states are of use.
    """

    margin = 1.0  # of the distance that moves can bridge, where they are rounded

    def __init__(
        self,
        value: Floats,
        counted: Sequence[Ints | Floats],
        limits: Sequence[float],
        prices: Sequence[float],
        start: Ints,
        useless: NDArray[np.bool_],
    ) -> None:
        """value, useless and what each limit counts: [N, W]; prices: of a unit of each; start: [N] least priced."""
        items = np.arange(len(value))
        priced = value
        for price, count in zip(prices, counted, strict=True):
            priced = priced + price * count
        least = priced[items, start]
        self.start, self.prices = start, prices
        self.moves = [count - count[items, start][:, None] for count in counted]  # [N, W] what a deviation adds
        self.targets = [limit - count[items, start].sum() for limit, count in zip(limits, counted, strict=True)]
        self.bound = float(least.sum())
        for price, limit in zip(prices, limits, strict=True):
            self.bound -= price * limit
        penalty = np.maximum(priced - least[:, None], 0.0)  # only rounding makes it negative
        self.penalty = np.where(useless, np.inf, penalty)  # [N, W]
        first = self.penalty.min(1)
        self.order = np.argsort(first, kind="stable")
        self.firsts = np.append(first[self.order], np.inf)
        self.best, self.excess = start, math.inf

    def run(self, effort: int, most: int | None = None) -> bool:
        """Improve `best`; whether it is proven. most: states kept at a time, those of the lowest penalties."""
        tables = [*self.moves, self.penalty]
        states: States = [np.zeros(1, table.dtype) for table in tables]
        trail: list[tuple[int, Ints, Ints]] = []  # item; choice and earlier state of every state
        reaches = [self._reach(moves) for moves in self.moves]
        for rank, item in enumerate(self.order.tolist()):
            if self.firsts[rank] >= self.excess:
                return most is None
            choices = np.flatnonzero(self.penalty[item] < self.excess)
            count = len(states[-1])
            earlier, chosen = np.tile(np.arange(count), len(choices) + 1), np.repeat(np.append(-1, choices), count)
            more = [np.append(np.zeros(1, table.dtype), table[item, choices]) for table in tables]
            states = [(adds[:, None] + before).ravel() for adds, before in zip(more, states, strict=True)]
            effort -= len(earlier)
            if effort < 0:
                return False
            trail.append((item, chosen, earlier))
            self._take_best(states, trail)
            keep = self.useful(states, self._open(states, rank + 1, [float(reach[rank + 1]) for reach in reaches]))
            if most is not None and len(keep) > most:
                keep = self.nearest(states[-1][keep], keep, most)
            states = [part[keep] for part in states]
            trail[-1] = (item, chosen[keep], earlier[keep])
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

    def _take_best(self, states: States, trail: list[tuple[int, Ints, Ints]]) -> None:
        *counted, excess = states
        for price, target, added in zip(self.prices, self.targets, counted, strict=True):
            left = target - added
            excess = np.where(left >= 0, excess + price * left, np.inf)
        index = int(excess.argmin())
        if excess[index] < self.excess:
            self.excess, self.best = float(excess[index]), traced(self.start, trail, index)

    def _open(self, states: States, rank: int, reaches: Sequence[float]) -> Ints:
        """States that can still become better than the best one.

        rank: of the next deviation, whose penalty is the least of those that follow; reaches: the largest of their
        moves, by limit.
        """
        *counted, penalties = states
        left, following = self.excess - penalties, float(self.firsts[rank])
        allowed = left > following
        if following > 0 and np.isfinite(following):
            steps = np.floor(left / following)
            for price, target, added, reach in zip(self.prices, self.targets, counted, reaches, strict=True):
                distance = np.maximum(added - target, 0)
                if price > 0:
                    distance = np.maximum(distance, target - added - left / price)
                allowed &= distance <= steps * (reach * self.margin)
        return np.flatnonzero(allowed)


class _Cheapest(Search):
    """Deviations from the relaxed solution under one limit."""

    def __init__(self, value: Floats, cost: Ints, room: int) -> None:
        start, price = relaxed(value, cost, room)
        same = cost == cost[np.arange(len(value)), start][:, None]
        super().__init__(value, [cost], [room], [price], start, same | dominated(cost, value))
        self.excess = price * float(self.targets[0])

    def useful(self, states: States, keep: Ints) -> Ints:
        """States [S] by rising cost, of which none costs and loses more than another."""
        costs, penalties = states
        keep = keep[np.argsort(costs[keep], kind="stable")]  # runs that are sorted already: quick
        losses = penalties[keep] - self.prices[0] * costs[keep]
        before = np.append(np.inf, np.minimum.accumulate(losses)[:-1])
        keep = keep[losses < before]
        last = np.append(costs[keep][1:] != costs[keep][:-1], True)  # of equal costs, each loses less than the last
        return np.asarray(keep[last[: len(keep)]], np.int64)

    def nearest(self, penalties: Floats, keep: Ints, most: int) -> Ints:
        """`most` of the states [S] in order of their penalties [S]."""
        return keep[np.argsort(penalties, kind="stable")[:most]]


def traced(start: Ints, trail: list[tuple[int, Ints, Ints]], state: int) -> Ints:
    """The choices [N] of a state: those at the start, and its deviations.

    trail: of every item that was looked at, its number, every state's choice (-1: none) and the state it came from.
    """
    choices = start.copy()
    for item, chosen, earlier in reversed(trail):
        if chosen[state] >= 0:
            choices[item] = chosen[state]
        state = int(earlier[state])
    return choices


def dominated(cost: Ints, *others: Floats) -> NDArray[np.bool_]:
    """[N, W] whether another choice of the item is no higher in any table [N, W] (of equals, the first stays)."""
    beaten = np.zeros(cost.shape, bool)
    for choice in range(cost.shape[-1]):
        for other in range(cost.shape[-1]):
            pairs = [(table[:, other], table[:, choice]) for table in (cost, *others)]
            no_worse = np.all([left <= right for left, right in pairs], 0)
            better = np.any([left < right for left, right in pairs], 0)
            beaten[:, choice] |= no_worse & (better | (other < choice))
    return beaten
