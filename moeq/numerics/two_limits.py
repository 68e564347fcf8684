"""The multiple-choice knapsack with a second limit: one width for every item, the least loss within a cost and a time.

Both limits have a price. For a price q of a unit of time, `knapsack.relaxed` prices cost for the losses + q * time and
gives a bound that no solution goes below; it is concave in q, so golden section finds the best. With p the price of
cost, r the penalty of a deviation from the cheapest choice at these prices, and what is left of both limits,

    loss of a solution = bound + sum of its penalties + p * cost left + q * time left,

and the search over deviations is that of `knapsack`, with the time of a state beside its cost. A state makes
another useless when it costs as much, takes no longer and loses no more. Times are floats, and count as kept within
SLACK of the limit. Small problems are solved exactly; for thousands of items the search often ends before it has a
proof, and the bound says how far its best solution can be from the optimum.

Letters: N items, W choices, S states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeq.numerics import knapsack
from moeq.numerics.knapsack import Floats, Ints, Search, Solution, States

EFFORT = 4_000_000  # states
BEAMS = (512, 4096)  # states kept in the passes that are not exact
SLACK = 1e-12  # of the limit of time
NEARBY = (1e-3, 1e-3, 1e-3)  # steps between prices at which the bound is raised
STEPS = 60  # of golden section
STEEPEST = 1e15  # price of time at which nothing but time counts


def least_time(times: Floats, costs: Ints, limit: int) -> Solution:
    """The fastest solution (its loss is its time) of a cost of at most `limit`; times, costs [N, W].

    Raises ValueError when even the cheapest solution costs more.
    """
    return knapsack.solve(times, costs, limit)


def solve(losses: Floats, costs: Ints, limit: int, times: Floats, most: float, effort: int = EFFORT) -> Solution:
    """The solution of least loss that costs at most `limit` and takes at most `most`.

    losses, times [N, W] finite, times not negative; costs [N, W] whole numbers; effort: states that the exact search
    may make before it ends with the best solution so far, unproven. Raises ValueError when nothing is within both.
    """
    fastest = least_time(times, costs, limit)
    if fastest.loss > most * (1 + SLACK):
        raise ValueError(f"the least time is {fastest.loss:g}, the limit {most:g}")
    if not len(losses):
        return fastest
    items = np.arange(len(losses))
    dual = _Dual.of(losses, costs, limit, times, most)
    if dual.price == 0:
        free = knapsack.solve(losses, costs, limit)
        if float(times[items, free.choices].sum()) <= most * (1 + SLACK):
            return free
    search = _Within(dual, fastest.choices)
    for kept in BEAMS:
        search.run(effort, kept)
    proven = search.run(effort)
    loss = float(losses[items, search.best].sum())
    bound = loss if proven else min(loss, max(search.bound, dual.raised(2 * effort)) * dual.scale)
    cost = int(costs[items, search.best].sum())
    return Solution(choices=search.best, cost=cost, loss=loss, bound=bound, proven=proven)


@dataclass(frozen=True, kw_only=True)
class _Dual:
    """The problem in its own units, and the prices of both limits that give the highest bound.

    value, time: [N, W], the largest of each 1; cost: [N, W] beyond the cheapest choice; room, most: the limits;
    start: [N] the choices at these prices; price, cost_price: of a unit of time and of cost; scale: of `value`.
    """

    value: Floats
    cost: Ints
    time: Floats
    room: int
    most: float
    start: Ints
    price: float
    cost_price: float
    scale: float

    @classmethod
    def of(cls, losses: Floats, costs: Ints, limit: int, times: Floats, most: float) -> _Dual:
        unit = knapsack.unit_of(costs)
        scale, second = (float(np.abs(table).max(initial=0)) or 1.0 for table in (losses, times))
        value, time = losses / scale, times / second
        cost = (costs - costs.min(1, keepdims=True)) // unit
        room = (limit - knapsack.least_cost(costs)) // unit
        until = most * (1 + SLACK) / second
        start, price, cost_price = _best_prices(value, cost, time, room, until)
        return cls(
            value=value,
            cost=cost,
            time=time,
            room=room,
            most=until,
            start=start,
            price=price,
            cost_price=cost_price,
            scale=scale,
        )

    def raised(self, effort: int) -> float:
        """The bound with the limit of cost kept exactly, at a few prices of time near the best."""
        items = np.arange(len(self.value))
        low, price, high, bound = 0.0, self.price, np.inf, -np.inf
        for step in NEARBY:
            inner = knapsack.solve(self.value + price * self.time, self.cost, self.room, effort)
            bound = max(bound, inner.bound - price * self.most)
            if float(self.time[items, inner.choices].sum()) > self.most:
                low, price = price, min(price * (1 + step), (price + high) / 2)
            else:
                high, price = price, max(price * (1 - step), (price + low) / 2)
        return bound


def _best_prices(value: Floats, cost: Ints, time: Floats, room: int, most: float) -> tuple[Ints, float, float]:
    """Choices [N] and the prices of time and of cost at the highest bound found.

    The bound is concave in the price of time: where it is highest is found by golden section.
    """
    seen: dict[float, tuple[float, Ints, float]] = {}

    def bound(price: float) -> float:
        if price not in seen:
            weighed = value + price * time
            choices, cost_price = knapsack.relaxed(weighed, cost, room)
            least = float((weighed + cost_price * cost).min(1).sum())
            seen[price] = least - cost_price * room - price * most, choices, cost_price
        return seen[price][0]

    high = 1.0
    while bound(2 * high) > bound(high) and high < STEEPEST:
        high *= 2
    while bound(high / 4) >= bound(high / 2) and high > 1 / STEEPEST:
        high /= 2
    _golden(bound, 0.0, 2 * high)
    bound(0.0)
    best = max(sorted(seen), key=lambda price: seen[price][0])  # of equal ones, the lowest
    return seen[best][1], best, seen[best][2]


def _golden(function: Callable[[float], float], low: float, high: float) -> None:
    """Evaluate a concave function ever nearer to its maximum between two ends."""
    ratio = (5**0.5 - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    for _ in range(STEPS):
        if function(left) >= function(right):
            high, right = right, left
            left = high - ratio * (high - low)
        else:
            low, left = left, right
            right = low + ratio * (high - low)


class _Within(Search):
    """Deviations from the choices at the best prices; `best` starts as the better of them and the fastest solution."""

    margin = 1 + SLACK

    def __init__(self, dual: _Dual, fastest: Ints) -> None:
        items, counted = np.arange(len(dual.value)), (dual.cost, dual.time)
        prices, limits = (dual.cost_price, dual.price), (dual.room, dual.most)
        priced = dual.value + dual.cost_price * dual.cost + dual.price * dual.time
        start = np.where(priced[items, dual.start] <= priced.min(1), dual.start, priced.argmin(1))
        useless = knapsack.dominated(dual.cost, dual.time, dual.value)
        useless[items, start] = True
        super().__init__(dual.value, counted, limits, prices, start, useless)
        excess = float(dual.value[items, fastest].sum()) - self.bound
        own = float(prices[0] * self.targets[0] + prices[1] * self.targets[1])
        if min(self.targets) < 0 or own >= excess:
            self.best, self.excess = fastest, excess
        else:
            self.excess = own

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
    number = np.cumsum(starts) - 1
    low, high = float(losses.min()), float(losses.max())
    lowered = losses - number * (2 * (high - low) + 1.0)  # later groups lie below all of the earlier ones
    before = np.append(np.inf, np.minimum.accumulate(lowered)[:-1])
    return np.asarray((lowered < before) | starts)
