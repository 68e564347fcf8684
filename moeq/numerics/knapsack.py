"""The multiple-choice knapsack, exactly: one width for every item, the least loss within a cost.

Lagrange's bound comes first: for a price p of a unit of cost, every item takes the choice of the least loss + p * cost;
the best price is found from the lower convex hulls of all items. What the bound leaves open is small, so the rest is a
search over deviations from that solution (numerics.deviations). Where many deviations cost the same, as those of
experts of one shape do, they are first searched by their costs: of each the cheapest few.

The search is in floats and proves nothing by itself: a solution is called proven when `certificate` has confirmed it in
whole numbers, at the prices that the search ended with. Losses count from every item's least one and penalties from the
choice that deviates, so that a large loss that nobody takes, or that nobody can avoid, swallows no small difference.

Letters: N items, W choices, S states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moeq.numerics.certificate import Certificate, Floats, Ints, Problem, bounded, confirmed
from moeq.numerics.deviations import ROUNDING, WIDEST, Search, States, dominated

EFFORT = 40_000_000  # states; of each that is kept 4 bytes stay in memory until the search ends
QUICK = 512  # states of a first pass, which is not exact, for a good solution to start with
SWAPS = 1000  # changes of one or two items
GAIN = 1e-12  # of the excess: what is less is rounding
UNENDED = 10  # of the effort one part in so many is for the check of what a search that did not end has found
POOLED = 4  # deviations of a cost, on average, from which on those of equal cost are taken as alike
ALLOWED = 2.0**-41  # the rounding of a certificate, of what the solution loses above the least of every item


@dataclass(frozen=True, kw_only=True)
class Solution:
    """choices: [N] position of the choice of every item; loss: their sum, rounded once; proven: the certificate is
    confirmed, no solution loses less (by more than its rounding); bound: none can have less (the loss itself where that
    is proven, else one that is confirmed)."""

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
    return certified(problem, found.choices, (found.price,), effort, ended=found.ended)


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
    if effort:
        deviations.swap()
    ended = deviations.pooled(effort) or deviations.run(effort)
    return Found(choices=deviations.best, price=deviations.prices[0] / unit, ended=ended)


def certified(
    problem: Problem, choices: Ints, prices: tuple[float, ...], effort: int, *, ended: bool = True
) -> Solution:
    """Choices [N] with the certificate that prices give, proven if that is confirmed.

    effort: states of a pass of the check; ended: the search that found them did, or little effort is for their proof.
    """
    items = np.arange(len(choices))
    loss = math.fsum(problem.losses[items, choices])
    above = math.fsum(problem.losses[items, choices] - problem.losses.min(1)) if len(choices) else 0.0
    certificate = Certificate(prices=prices, bound=lagrange(problem, prices), rounding=ALLOWED * above)
    proven = confirmed(problem, choices, loss, certificate, effort if ended else effort // UNENDED)
    bound = loss if proven else _bound(problem, choices, certificate)
    cost = int(problem.costs[items, choices].sum())
    return Solution(choices=choices, cost=cost, loss=loss, bound=bound, proven=proven, certificate=certificate)


def _bound(problem: Problem, choices: Ints, certificate: Certificate) -> float:
    """The certificate's bound, if that is confirmed; else what no choices go below."""
    if bounded(problem, choices, certificate.prices, certificate.bound, 0):
        return certificate.bound
    return math.nextafter(math.fsum(problem.losses.min(1)), -math.inf)


def lagrange(problem: Problem, prices: Sequence[float]) -> float:
    """The bound at prices of the limits, lowered by what rounding can have raised it, for losses [N, W]."""
    counted: list[tuple[Ints | Floats, float]] = [(problem.costs, float(problem.limit))]
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


class _Cheapest(Search):
    """Deviations from the relaxed solution under one limit."""

    def __init__(self, value: Floats, cost: Ints, room: int) -> None:
        useless = dominated(cost, value)
        greedy = relaxed(np.where(useless, np.inf, value), cost, room)
        super().__init__(value, [cost], [room], [greedy.price], greedy.choices, useless)
        self.offer(greedy.choices)

    def swap(self) -> None:
        """Improve `best` by changes of one item or two, the one that gains most first, until none does."""
        items, usable = np.arange(len(self.start)), np.isfinite(self.penalty)
        usable[items, self.start] = True
        choices = self.best.copy()
        for _ in range(SWAPS):
            above = self.above - self.above[items, choices][:, None]
            changes = usable & (above < self.excess)
            changes[items, choices] = False
            who, what = np.nonzero(changes)
            more = self.moves[0][who, what] - self.moves[0][who, choices[who]]
            order = np.argsort(more, kind="stable")
            who, what, more = who[order], what[order], more[order]
            left = self.targets[0] - int(self.moves[0][items, choices].sum())
            lost = above[who, what] - self.prices[0] * more
            single, pair, other = _least_sums(lost, more, left)
            pair[who[other] == who] = np.inf
            least = np.minimum(single, pair)
            if not len(least) or least.min() >= -GAIN * self.excess:
                break
            one = int(least.argmin())
            changed = [one] if single[one] <= pair[one] else [one, int(other[one])]
            choices[who[changed]] = what[changed]
        self.offer(choices)

    def pooled(self, effort: int) -> bool:
        """Improve `best` by sets of deviations of which those of equal cost are alike; whether nothing is left.

        Of deviations of equal cost the cheapest are taken, as if an item could deviate twice; where the best set has an
        item twice, others take its place. Of use where costs are few.
        """
        who, what = np.nonzero(self.penalty < self.excess)
        costs = self.moves[0][who, what]
        order = np.lexsort((self.penalty[who, what], costs))
        who, what, costs = who[order], what[order], costs[order]
        if not len(who):
            return True
        cuts = np.flatnonzero(np.diff(costs)) + 1
        most = int(np.diff(cuts, prepend=0, append=len(who)).max())
        if (len(cuts) + 1) * max(POOLED, most * len(who) // WIDEST) > len(who):
            return False
        many = _Alike(self, costs[np.append(0, cuts)], np.split(self.penalty[who, what], cuts))
        if not many.run(effort):
            return False
        choices, deviating = self.start.copy(), np.zeros(len(self.start), bool)
        for moves, count in zip(np.split(np.arange(len(who)), cuts), (many.best + 1).tolist(), strict=True):
            taken = moves[~deviating[who[moves]]][:count]
            choices[who[taken]], deviating[who[taken]] = what[taken], True
        self.offer(choices)
        return self.excess <= many.excess * (1 + GAIN)

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
    """Deviations of equal cost as one item each, whose choice is how many deviate, the cheapest first, less 1."""

    def __init__(self, deviations: _Cheapest, costs: Ints, penalties: Sequence[Floats]) -> None:
        """costs: of one deviation of every kind, which all differ; penalties: of every deviation of it, rising."""
        sums = np.full((len(costs), max(map(len, penalties))), np.inf)
        for row, own in zip(sums, penalties, strict=True):
            row[: len(own)] = own.cumsum()
        self.prices, self.targets = deviations.prices, deviations.targets
        self.best = self.start = np.full(len(costs), -1)
        self.excess = deviations.excess
        self.moves = [costs[:, None] * np.arange(1, sums.shape[1] + 1)]
        self._enter(sums)


def _least_sums(lost: Floats, more: Ints | Floats, left: int) -> tuple[Floats, Floats, Ints]:
    """Of changes by rising cost what each loses alone, and with the best other one, within what is left; and the other.

    inf where the cost is too high. lost, more: [S] loss and cost.
    """
    lowest = np.minimum.accumulate(lost)
    where = np.maximum.accumulate(np.where(lost <= lowest, np.arange(len(lost)), 0))
    last = np.searchsorted(more, left - more, side="right") - 1
    single = np.where(more <= left, lost, np.inf)
    return single, np.where(last >= 0, lost + lowest[last], np.inf), where[last]
