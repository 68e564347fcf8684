"""The multiple-choice knapsack with a second limit: one width for every item, the least loss within a cost and a time.

Both limits have a price. For a price q of a unit of time, `knapsack.relaxed` prices cost for the losses + q * time and
gives a bound that no solution goes below; it is concave in q and made of lines, and rises as long as the relaxed
solution takes longer than the limit. With p the price of cost, r the penalty of a deviation from the cheapest
choice at these prices, and what is left of both limits,

    loss of a solution = bound + sum of its penalties + p * cost left + q * time left,

and the search over deviations is that of `deviations`, with the time of a state beside its cost. A state makes
another useless when it costs as much, takes no longer and loses no more. Times are floats, and count as kept within
SLACK of the limit. Small problems are solved exactly; for thousands of items the search often ends before it has a
proof, and the bound says how far its best solution can be from the optimum. As with one limit, a solution is proven
when `certificate` has confirmed it, and so is the bound.

Letters: N items, W choices, S states.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moeq.numerics import knapsack
from moeq.numerics.certificate import Floats, Ints, Problem, bounded
from moeq.numerics.deviations import ROUNDING, Search, States, dominated
from moeq.numerics.knapsack import Relaxed, Solution, certified, relaxed

EFFORT = 4_000_000  # states
BEAMS = (512, 4096)  # states kept in the passes that are not exact
SLACK = 1e-12  # of the limit of time
NEARBY = (1e-3, 1e-3, 1e-3)  # steps between prices at which the bound is raised
LOWERED = 2.0**-40  # of a raised bound, beside what its terms are: so that rounding does not refute it
STEPS = 100  # of the price of time, at most: one for every line of the bound that is met


def least_time(times: Floats, costs: Ints, limit: int) -> float:
    """The least time of a cost of at most `limit`; times, costs [N, W].

    Raises ValueError when even the cheapest solution costs more.
    """
    return _time(times, _fastest(times, costs, limit))


def _fastest(times: Floats, costs: Ints, limit: int) -> Ints:
    return knapsack.search(times, costs, limit).choices


def _time(times: Floats, choices: Ints) -> float:
    return math.fsum(times[np.arange(len(choices)), choices])


def solve(losses: Floats, costs: Ints, limit: int, times: Floats, most: float, effort: int = EFFORT) -> Solution:
    """The solution of least loss that costs at most `limit` and takes at most `most`.

    losses, times [N, W] finite, times not negative; costs [N, W] whole numbers; effort: states that the exact search
    may make before it ends with the best solution so far, unproven. Raises ValueError when nothing is within both, or
    losses or times are not finite.
    """
    knapsack.refuse_infinite(losses, times, np.array([[most]]))
    fastest, until = _fastest(times, costs, limit), most * (1 + SLACK)
    if _time(times, fastest) > until:
        raise ValueError(f"the least time is {_time(times, fastest):g}, the limit {most:g}")
    problem = Problem(losses=losses, costs=costs, limit=limit, times=times, most=until)
    if not len(losses):
        return certified(problem, fastest, (0.0, 0.0), effort)
    dual = _Dual.of(problem)
    if dual.price == 0:
        free = knapsack.search(losses, costs, limit)
        if _time(times, free.choices) <= until:
            return certified(problem, free.choices, (free.price, 0.0), knapsack.EFFORT, ended=free.ended)
    search = _Within(dual, fastest)
    for kept in BEAMS:
        search.run(effort, kept)
    ended = search.run(effort)
    prices = (dual.greedy.price / dual.unit, dual.price)
    solution = certified(problem, search.best, prices, effort, ended=ended)
    if solution.proven:
        return solution
    return replace(solution, bound=max(solution.bound, dual.raised(problem, 2 * effort)))


@dataclass(frozen=True, kw_only=True)
class _Dual:
    """The problem as the search takes it, and the prices of both limits that give the highest bound.

    value: [N, W] losses beyond every item's least; time: [N, W]; cost: [N, W] beyond the cheapest choice, in units of
    `unit`; useless: [N, W] choices that another makes so; room, most: the limits; price: of a unit of time; greedy: the
    choices at that price, and the price of a unit of cost.
    """

    value: Floats
    cost: Ints
    time: Floats
    useless: NDArray[np.bool_]
    room: int
    most: float
    unit: int
    price: float
    greedy: Relaxed

    @classmethod
    def of(cls, problem: Problem) -> _Dual:
        losses, costs, times = problem.losses, problem.costs, problem.times
        assert times is not None
        unit = knapsack.unit_of(costs)
        value = losses - losses.min(1, keepdims=True)
        cost = (costs - costs.min(1, keepdims=True)) // unit
        room = (problem.limit - knapsack.least_cost(costs)) // unit
        useless = dominated(cost, times, value)
        price, greedy = _best_price(np.where(useless, np.inf, value), cost, times, room, problem.most)
        return cls(
            value=value,
            cost=cost,
            time=times,
            useless=useless,
            room=room,
            most=problem.most,
            unit=unit,
            price=price,
            greedy=greedy,
        )

    def raised(self, problem: Problem, effort: int) -> float:
        """The bound with the limit of cost kept exactly, at a few prices of time near the best; -inf where none of them
        is confirmed."""
        items = np.arange(len(self.value))
        low, price, high = 0.0, self.price, np.inf
        best: tuple[float, Ints, tuple[float, float]] | None = None
        for step in NEARBY:
            inner = knapsack.search(self.value + price * self.time, self.cost, self.room, effort)
            time = _time(self.time, inner.choices)
            if inner.ended:
                terms = [*problem.losses[items, inner.choices].tolist(), price * time, -price * self.most]
                bound = math.fsum(terms) - LOWERED * math.fsum(map(abs, terms))
                if best is None or bound > best[0]:
                    best = bound, inner.choices, (inner.price / self.unit, price)
            if time > self.most:
                low, price = price, min(price * (1 + step), (price + high) / 2)
            else:
                high, price = price, max(price * (1 - step), (price + low) / 2)
        if best is not None and bounded(problem, best[1], best[2], best[0], effort):
            return best[0]
        return -math.inf


def _best_price(value: Floats, cost: Ints, time: Floats, room: int, most: float) -> tuple[float, Relaxed]:
    """The price of time at the highest bound, and relaxed choices [N] there.

    Over the price of time a relaxed solution is a line, and the bound is the lowest of all: at every price that of the
    solution there. Of two lines, one of a solution that takes too long and one of another, the next price is where they
    cross; where none is below the crossing, the bound is highest.
    """
    items, usable = np.arange(len(value)), np.isfinite(value)
    time = np.where(usable, time, 0.0)  # useless choices are of infinite value

    def total(table: Floats, greedy: Relaxed) -> float:
        """Of values or times, of the relaxed solution."""
        whole = math.fsum(table[items, greedy.choices])
        if greedy.next is None:
            return whole
        item, choice, share = greedy.next
        return whole + share * float(table[item, choice] - table[item, greedy.choices[item]])

    slow, fast = relaxed(value, cost, room), relaxed(np.where(usable, time, np.inf), cost, room)
    if total(time, slow) <= most:
        return 0.0, slow
    low, high, price = 0.0, np.inf, 0.0
    for _ in range(STEPS):
        saved, lost = total(time, slow) - total(time, fast), total(value, fast) - total(value, slow)
        if saved <= 0:
            break
        price = min(max(lost / saved, low), high)
        if price in (low, high):
            break
        middle = relaxed(value + price * time, cost, room)
        crossing = total(value, slow) + price * total(time, slow)
        if total(value, middle) + price * total(time, middle) >= crossing * (1 - ROUNDING):
            break
        if total(time, middle) > most:
            low, slow = price, middle
        else:
            high, fast = price, middle
    choices = _between(slow.choices, fast.choices, cost, time, room, most)
    return price, replace(relaxed(value + price * time, cost, room), choices=choices)


def _between(slow: Ints, fast: Ints, cost: Ints, time: Floats, room: int, most: float) -> Ints:
    """The slow choices [N] with as few as possible of the fast ones in their place that both limits are kept; else the
    fast ones. What differs is priced alike, up to rounding: of items that are alike thousands differ."""
    items = np.arange(len(slow))
    changed = np.flatnonzero(slow != fast)
    used = [
        float(table[items, slow].sum()) + np.append(0, np.cumsum((table[items, fast] - table[items, slow])[changed]))
        for table in (cost, time)
    ]
    kept = np.flatnonzero((used[0] <= room) & (used[1] <= most))
    if not len(kept):
        return fast
    choices = slow.copy()
    choices[changed[: kept[0]]] = fast[changed[: kept[0]]]
    return choices


class _Within(Search):
    """Deviations from the choices at the best prices; `best` starts as the better of them and the fastest solution."""

    margin = 1 + SLACK

    def __init__(self, dual: _Dual, fastest: Ints) -> None:
        prices, limits = (dual.greedy.price, dual.price), (dual.room, dual.most)
        super().__init__(dual.value, (dual.cost, dual.time), limits, prices, dual.greedy.choices, dual.useless)
        self.offer(fastest)
        self.offer(dual.greedy.choices)

    def useful(self, states: States, keep: Ints) -> Ints:
        """Of states [S] that cost the same, those that neither take longer nor lose more than another."""
        costs, times, penalties = states
        losses = penalties[keep] - self.prices[0] * costs[keep] - self.prices[1] * times[keep]
        order = np.lexsort((losses, times[keep], costs[keep]))
        keep, losses = keep[order], losses[order]
        return keep[_improving(costs[keep], losses)]

    def nearest(self, penalties: Floats, keep: Ints, most: int) -> Ints:
        """`most` of the states [S] with the lowest penalties [S], in any order."""
        return keep[np.argpartition(penalties, most)[:most]]


def _improving(groups: Ints, losses: Floats) -> NDArray[np.bool_]:
    """[S] whether a loss is below all that stand before it in its group; groups rise."""
    if not len(losses):
        return np.zeros(0, bool)
    starts = np.append(True, groups[1:] != groups[:-1])
    places = np.unique(losses, return_inverse=True)[1]  # in place of losses: whole numbers, which nothing absorbs
    lowered = places - np.cumsum(starts) * len(losses)  # later groups lie below all of the earlier ones
    before = np.append(len(losses), np.minimum.accumulate(lowered)[:-1])
    return np.asarray((lowered < before) | starts)
