"""The multiple-choice knapsack, exactly: one width for every item, the least loss within a cost.

Lagrange's bound comes first: for a price p of a unit of cost, every item takes the choice of the
least loss + p * cost; the best price is found from the lower convex hulls of all items. What the bound leaves open is
small, so the rest is a search over deviations from that solution. With r the penalty of a deviation (what it loses at
price p) and `slack` the cost that is left,

    loss of a solution = bound + sum of its penalties + p * slack,

and a deviation whose penalty alone exceeds the best solution's excess over the bound is in no better one. The others
enter in order of their penalties, as a table from cost to the least penalty (dynamic programming over costs): when the
next item's least penalty exceeds the excess, nothing better is left (Pisinger's expanding core, 1995). A
table is thinned by what is left to do: unless a state is the end, it takes at least one more deviation, and as many
as its penalty leaves room for must bring its cost near the limit.

The search is in floats and proves nothing by itself: a solution is called proven when `certificate` has confirmed it in
whole numbers, at the prices that the search ended with. Losses count from every item's least one and penalties from the
choice that deviates, so that a large loss that nobody takes, or that nobody can avoid, swallows no small difference.

Letters: N items, W choices, S states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeq.numerics.certificate import Certificate, Floats, Ints, Problem, bounded, confirmed

EFFORT = 40_000_000
WIDEST = 1_000_000  # states made at a time, at most: what bounds the memory
QUICK = 512  # states of a first pass, which is not exact, for a good solution to start with
BROAD = 8192  # states of a last pass, where the exact one did not go to the end
UNENDED = 10  # of the effort one part in so many is for the check of what a search that did not end has found
POOLED = 4  # deviations of a cost, on average, from which on those of equal cost are taken as alike
BLOCK = 100_000  # of them that enter the search at a time
ROUNDING = 2.0**-49  # of a priced loss: differences below come from the rounding of products and sums
ALLOWED = 2.0**-41  # the rounding of a certificate, of what the solution loses above the least of every item
States = list[Any]  # what deviations add so far to what each limit counts, and at last their penalties, each [S]


@dataclass(frozen=True, kw_only=True)
class Solution:
    """choices: [N] position of the choice of every item; loss: their sum, rounded once; proven: the certificate is
    confirmed, no solution loses less (by more than its rounding); bound: none can have less (the loss itself where that
    is proven, else the certificate's, or a higher one that was confirmed)."""

    choices: Ints
    cost: int
    loss: float
    bound: float
    proven: bool
    certificate: Certificate


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search ended with: choices [N], the price of a unit of cost, and whether it went to the end."""

    choices: Ints
    price: float
    ended: bool


def least_cost(costs: Ints) -> int:
    """The smallest cost of any solution; costs [N, W]."""
    return int(costs.min(1).sum()) if len(costs) else 0


def solve(losses: Floats, costs: Ints, limit: int, effort: int = EFFORT) -> Solution:
    """The solution of least loss with a cost of at most `limit`; of equal ones, not always the cheapest.

    losses [N, W] finite; costs [N, W] whole numbers; effort: states that the search may make before it ends with the
    best solution so far, and each pass of the check before it gives up (thousands of items that are nearly alike can
    need that many). Raises ValueError when even the cheapest solution costs more, or losses are not finite.
    """
    found = search(losses, costs, limit, effort)
    problem = Problem(losses=losses, costs=costs, limit=limit)
    return certified(problem, found.choices, (found.price,), effort if found.ended else effort // UNENDED)


def search(losses: Floats, costs: Ints, limit: int, effort: int = EFFORT) -> Found:
    """The choices [N] that `solve` finds, not checked; losses, costs [N, W], raises as there."""
    if limit < least_cost(costs):
        raise ValueError(f"the least cost is {least_cost(costs)}, the limit {limit}")
    refuse_infinite(losses)
    if not len(losses):
        return Found(choices=np.zeros(0, np.int64), price=0.0, ended=True)
    unit = unit_of(costs)
    cost = (costs - costs.min(1, keepdims=True)) // unit
    deviations = _Cheapest(losses - losses.min(1, keepdims=True), cost, (limit - least_cost(costs)) // unit)
    deviations.run(effort, QUICK)
    ended = deviations.pooled(effort) or deviations.run(effort)
    if not ended:
        deviations.run(effort, BROAD)
    return Found(choices=deviations.best, price=deviations.prices[0] / unit, ended=ended)


def certified(problem: Problem, choices: Ints, prices: tuple[float, ...], effort: int) -> Solution:
    """Choices [N] with the certificate that prices give, proven if that is confirmed."""
    items = np.arange(len(choices))
    loss = math.fsum(problem.losses[items, choices])
    above = math.fsum(problem.losses[items, choices] - problem.losses.min(1)) if len(choices) else 0.0
    certificate = Certificate(prices=prices, bound=lagrange(problem, prices), rounding=ALLOWED * above)
    proven = confirmed(problem, choices, loss, certificate, effort)
    bound = loss if proven else min(loss, certificate.bound)
    if not proven and not bounded(problem, choices, prices, bound, 0):
        raise ArithmeticError(f"the bound {bound:g} at prices {prices} is not confirmed")
    cost = int(problem.costs[items, choices].sum())
    return Solution(choices=choices, cost=cost, loss=loss, bound=bound, proven=proven, certificate=certificate)


def lagrange(problem: Problem, prices: Sequence[float]) -> float:
    """The bound at prices of the limits, lowered by what rounding can have raised it, for losses [N, W]."""
    counted = [(problem.costs, float(problem.limit))]
    if problem.times is not None:
        counted.append((problem.times, problem.most))
    priced, size = problem.losses, np.abs(problem.losses)
    for price, (table, _) in zip(prices, counted, strict=True):
        priced, size = priced + price * table, size + price * np.abs(table)
    spent = [price * limit for price, (_, limit) in zip(prices, counted, strict=True)]
    if not len(priced):
        return -math.fsum(spent)
    least = priced.min(1)
    own = size[np.arange(len(size)), priced.argmin(1)]
    sizes = [*np.where(problem.losses.min(1) < 0, size.max(1), own).tolist(), *np.abs(spent).tolist()]
    return math.fsum([*least.tolist(), *(-part for part in spent)]) - ROUNDING * math.fsum(sizes)


def refuse_infinite(*tables: Floats) -> None:
    """ValueError for losses or times [N, W] that are not numbers, or too large to add up."""
    for table in tables:
        with np.errstate(over="ignore"):
            total = float(np.abs(table).max(1, initial=0.0).sum())
        if not math.isfinite(total):
            raise ValueError("losses and times must be finite, and so their sums")


def unit_of(costs: Ints) -> int:
    """The greatest number that divides every difference of costs [N, W] within an item."""
    return int(np.gcd.reduce((costs - costs.min(1, keepdims=True)).ravel())) or 1


@dataclass(frozen=True, kw_only=True)
class Relaxed:
    """Choices [N] on the convex hulls, and the price at which the next step no longer fits.

    next: the item of that step, the choice that it leads to, and the share of it that fits; None where all fit.
    """

    choices: Ints
    price: float
    next: tuple[int, int, float] | None


def relaxed(value: Floats, cost: Ints, room: int) -> Relaxed:
    """The greedy solution of the linear relaxation (Zemel, 1980), with a cost of at most `room`.

    Every item walks its hull from its cheapest choice; the steps of all items are taken in order of what they save
    for a unit of cost. The first step that does not fit sets the price. value, cost: [N, W], every item's least cost 0;
    choices of infinite value are not taken.
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
        return Relaxed(choices=cheapest, price=0.0, next=None)
    rates, who, where, steps = (np.concatenate(part) for part in zip(*taken, strict=True))
    order = np.argsort(-rates, kind="stable")  # stable: an item's steps stay in their order
    rates, who, where, spent = rates[order], who[order], where[order], steps[order].cumsum()
    fitting = int(np.searchsorted(spent, room, side="right"))
    choices = cheapest.copy()
    choices[who[:fitting]] = where[:fitting]  # later steps of an item overwrite earlier ones
    if fitting == len(rates):
        return Relaxed(choices=choices, price=0.0, next=None)
    step = int(steps[order][fitting])
    share = 1 - (int(spent[fitting]) - room) / step
    return Relaxed(choices=choices, price=float(rates[fitting]), next=(int(who[fitting]), int(where[fitting]), share))


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
        useless = dominated(cost, value)
        greedy = relaxed(np.where(useless, np.inf, value), cost, room)
        super().__init__(value, [cost], [room], [greedy.price], greedy.choices, useless)
        self.offer(greedy.choices)

    def pooled(self, effort: int) -> bool:
        """Improve `best` by sets of deviations of which those of equal cost are alike; whether nothing is left.

        Of deviations of equal cost the cheapest are taken, as if an item could deviate twice: where the best set has an
        item twice, or there are many costs, it says nothing.
        """
        who, what = np.nonzero(self.penalty < self.excess)
        costs = self.moves[0][who, what]
        order = np.lexsort((self.penalty[who, what], costs))
        who, what, costs = who[order], what[order], costs[order]
        starts = np.flatnonzero(np.diff(costs, prepend=-1) != 0) if len(costs) else costs
        if len(starts) * POOLED > len(costs) or not len(costs):
            return not len(costs)
        ends = np.append(starts[1:], len(costs)).tolist()
        blocks = [
            (at, min(at + BLOCK, end))
            for start, end in zip(starts.tolist(), ends, strict=True)
            for at in range(start, end, BLOCK)
        ]
        many = _Alike(
            self, [costs[at] for at, _ in blocks], [self.penalty[who[at:end], what[at:end]] for at, end in blocks]
        )
        if not many.run(effort):
            return False
        if many.excess < self.excess:
            moves = np.concatenate(
                [np.arange(at, at + 1 + last) for (at, _), last in zip(blocks, many.best.tolist(), strict=True)]
            )
            if len(np.unique(who[moves])) < len(moves):
                return False
            self.best, self.excess = self.start.copy(), many.excess
            self.best[who[moves]] = what[moves]
        return True

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


class _Alike(_Cheapest):
    """Blocks of deviations of equal cost, by rising penalty; the choice of a block: how many deviate, less 1."""

    def __init__(self, deviations: _Cheapest, costs: Sequence[int], penalties: Sequence[Floats]) -> None:
        """costs: of one deviation of every block; penalties: of its deviations."""
        sums = np.full((len(costs), BLOCK), np.inf)
        for row, own in zip(sums, penalties, strict=True):
            row[: len(own)] = own.cumsum()
        self.prices, self.targets = deviations.prices, deviations.targets
        self.best = self.start = np.full(len(costs), -1)
        self.excess = deviations.excess
        self.moves = [np.array(costs)[:, None] * np.arange(1, BLOCK + 1)]
        self._enter(sums)


Step = tuple[int, Ints, int, NDArray[np.integer[Any]]]  # of a search: see `traced`


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
    beaten = np.zeros(cost.shape, bool)
    for choice in range(cost.shape[-1]):
        for other in range(cost.shape[-1]):
            pairs = [(table[:, other], table[:, choice]) for table in (cost, *others)]
            no_worse = np.all([left <= right for left, right in pairs], 0)
            better = np.any([left < right for left, right in pairs], 0)
            beaten[:, choice] |= no_worse & (better | (other < choice))
    return beaten
