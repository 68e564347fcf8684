"""The multiple-choice knapsack, exactly: one width for every item, the least loss within a cost.

N items, W choices. Lagrange's bound comes first: for a price p of a unit of cost, every item takes the choice of the
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
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

EFFORT = 200_000_000
QUICK = 512  # states of a first pass, which is not exact, for a good solution to start with
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


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
    search = _Search(value, cost, (limit - least_cost(costs)) // unit)
    search.run(effort, QUICK)
    proven = search.run(effort)
    loss = float(losses[items, search.best].sum())
    bound = loss if proven else min(loss, search.bound * scale)
    total = int(costs[items, search.best].sum())
    return Solution(choices=search.best, cost=total, loss=loss, bound=bound, proven=proven)


def unit_of(costs: Ints) -> int:
    """The greatest number that divides every difference of costs within an item."""
    return int(np.gcd.reduce((costs - costs.min(1, keepdims=True)).ravel())) or 1


def relaxed(value: Floats, cost: Ints, room: int) -> tuple[Ints, float]:
    """Choices [N] on the convex hulls that cost at most `room`, and the price at which the next step no longer fits.

    Every item walks its hull from its cheapest choice; the steps of all items are taken in order of what they save
    for a unit of cost. The first step that does not fit sets the price.
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


class _Search:
    """Deviations from the relaxed solution, until none can be better than the best one found.

    best: [N] the choices; excess: what they lose more than `bound`. Costs and losses in units of the caller.
    """

    def __init__(self, value: Floats, cost: Ints, room: int) -> None:
        items = np.arange(len(value))
        self.start, self.price = relaxed(value, cost, room)
        self.best = self.start
        priced = value + self.price * cost
        penalty = np.maximum(priced - priced[items, self.start][:, None], 0.0)  # only rounding makes it negative
        self.moves = cost - cost[items, self.start][:, None]  # [N, W] what a deviation costs more
        self.target = room - int(cost[items, self.start].sum())
        self.bound = float(priced[items, self.start].sum() - self.price * room)
        self.excess = self.price * self.target
        useless = (self.moves == 0) | dominated(cost, value)
        self.penalty = np.where(useless, np.inf, penalty)  # [N, W]
        self.first = self.penalty.min(1)
        self.order = np.argsort(self.first, kind="stable")

    def run(self, effort: int, most: int | None = None) -> bool:
        """Improve `best`; whether it is proven. most: states kept at a time, the nearest to the best."""
        shifts, penalties = np.zeros(1, np.int64), np.zeros(1)  # of every state: cost and penalty so far
        trail: list[tuple[int, Ints, Ints]] = []  # item; choice and earlier state of every state
        firsts = np.append(self.first[self.order], np.inf)
        reach = np.abs(np.where(np.isfinite(self.penalty), self.moves, 0)).max(1)[self.order]
        reach = np.maximum.accumulate(reach[::-1])[::-1]  # the largest move of all items that follow
        for rank, item in enumerate(self.order.tolist()):
            if firsts[rank] >= self.excess:
                return most is None
            choices = np.flatnonzero(self.penalty[item] < self.excess)
            moved = (shifts + self.moves[item, choices][:, None]).ravel()
            raised = (penalties + self.penalty[item, choices][:, None]).ravel()
            chosen = np.repeat(choices, len(shifts))
            earlier = np.tile(np.arange(len(shifts)), len(choices) + 1)
            shifts, penalties = np.append(shifts, moved), np.append(penalties, raised)
            chosen = np.append(np.full(len(shifts) - len(moved), -1), chosen)
            effort -= len(shifts)
            if effort < 0:
                return False
            trail.append((item, chosen, earlier))
            slack = self.target - shifts
            excess = np.where(slack >= 0, penalties + self.price * slack, np.inf)
            state = int(excess.argmin())
            if excess[state] < self.excess:
                self.excess, self.best = float(excess[state]), traced(self.start, trail, state)
            following = int(reach[rank + 1]) if rank + 1 < len(reach) else 0
            keep = self._open(shifts, penalties, float(firsts[rank + 1]), following)
            if most is not None and len(keep) > most:
                keep = keep[np.argsort(penalties[keep], kind="stable")[:most]]
            shifts, penalties = shifts[keep], penalties[keep]
            trail[-1] = (item, chosen[keep], earlier[keep])
            if not len(keep):
                return most is None
        return most is None

    def _open(self, shifts: Ints, penalties: Floats, following: float, reach: int) -> Ints:
        """States that can still become better than the best, by rising cost; none costs and loses more than another.

        following: the least penalty of all deviations that follow; reach: the largest of their moves.
        """
        left = self.excess - penalties
        allowed = left > following
        if following > 0 and np.isfinite(following):
            distance = np.maximum(shifts - self.target, 0)
            if self.price > 0:
                distance = np.maximum(distance, self.target - shifts - left / self.price)
            allowed &= distance <= np.floor(left / following) * reach
        keep = np.flatnonzero(allowed)
        keep = keep[np.argsort(shifts[keep], kind="stable")]  # runs that are sorted already: quick
        losses = penalties[keep] - self.price * shifts[keep]
        before = np.append(np.inf, np.minimum.accumulate(losses)[:-1])
        keep = keep[losses < before]
        last = np.append(shifts[keep][1:] != shifts[keep][:-1], True)  # of equal costs, each loses less than the last
        return np.asarray(keep[last[: len(keep)]], np.int64)


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
    found = np.zeros(cost.shape, bool)
    choices = range(cost.shape[-1])
    for one in choices:
        for other in choices:
            pairs = [(table[:, other], table[:, one]) for table in (cost, *others)]
            no_worse = np.all([left <= right for left, right in pairs], 0)
            better = np.any([left < right for left, right in pairs], 0)
            found[:, one] |= no_worse & (better | (other < one))
    return found
