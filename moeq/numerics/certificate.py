"""Proofs of the knapsacks' optima, checked in whole numbers and apart from the searches that found them.

A float is a whole number of some power of two: with all figures in units of one such power, sums, products and
comparisons are exact. At the prices of a certificate every item has a reference choice, the least priced one; r is what
another choice loses at these prices more than it. Then, for any choices,

    loss = Lagrange's bound + sum of their r + price of cost * cost left + price of time * time left,

and none within the limits loses less than some figure if no set of deviations from the reference has its r and what it
leaves below the gap between the bound and that figure. A deviation whose r alone reaches the gap is in no such set; the
sets of the others are gone through, those of equal cost and time merged. For that, r and times become int64 in units so
small that no sum overflows, rounded down: sums are never above the true ones. Two passes, each of a counted number of
states:

    pooled      deviations that cost alike are one group, of which the cheapest k are taken. An item may be taken twice:
                more than what is possible, so no less a proof, and quick where thousands of items are alike.
    by item     every item's deviations are one group, of which at most one is taken.

Letters: N items, W choices, S states, M deviations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, takewhile

import numpy as np
from numpy.typing import NDArray

TOLERANCE = Fraction(1, 2**40)  # of what choices lose above the least of every item: the most that rounding may be
WIDEST = 1_000_000  # states made at a time, at most: what bounds the memory
FINENESS = 2**60  # units of the whole numbers that sums are made of, at most
SHARE = 4  # of the rounding that all references together may lie above the least priced choices: one in so many
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Whole = NDArray[np.object_]  # Python's whole numbers, of any length


@dataclass(frozen=True, kw_only=True)
class Problem:
    """losses [N, W]; costs [N, W], which add up to at most `limit`; times [N, W], which add up to at most `most`."""

    losses: Floats
    costs: Ints
    limit: int
    times: Floats | None = None
    most: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """Why choices are the best ones within limits.

    prices: of a unit of cost and, with a second limit, of time; bound: none loses less, as these prices show; rounding:
    so much less another may lose than what is said to be the least.
    """

    prices: tuple[float, ...]
    bound: float
    rounding: float


def confirmed(problem: Problem, choices: Ints, loss: float, certificate: Certificate, effort: int) -> bool:
    """Whether choices [N] are within all limits and proven to be the best, up to the certificate's rounding.

    loss: the exact sum of their losses, rounded to the nearest float; effort: states that a pass may make. False, too,
    where a figure of the certificate is wrong, or the rounding above TOLERANCE.
    """
    if not _well_formed(problem, choices, certificate.prices):
        return False
    exact = _Exact(problem, certificate.prices)
    total, unit = exact.loss(choices), 2**exact.places
    above = Fraction(total - exact.least_loss(), unit)
    if not exact.keeps(choices) or total / unit != loss or not 0 <= certificate.rounding <= TOLERANCE * above:
        return False
    if not certificate.bound <= Fraction(exact.bound(), unit):
        return False
    rounding = math.floor(Fraction(certificate.rounding) * unit)
    return exact.none_below(total - rounding, choices, rounding, effort)


def bounded(problem: Problem, choices: Ints, prices: tuple[float, ...], bound: float, effort: int) -> bool:
    """Whether it is proven that nothing within the limits loses less than `bound`.

    The limit of cost is kept exactly, that of time (if there is one) by its price. choices: [N] good ones, whatever
    they are; prices, effort: as in `confirmed`.
    """
    if not _well_formed(problem, choices, prices) or not math.isfinite(bound):
        return False
    exact = _Exact(problem, prices)
    rounding = math.floor(TOLERANCE * (exact.loss(choices) - exact.least_loss()))
    total = math.ceil(Fraction(bound) * 2**exact.places)
    return exact.none_below(total, choices, rounding, effort, by_cost=True)


def _well_formed(problem: Problem, choices: Ints, prices: Sequence[float]) -> bool:
    """Whether there is a choice of every item, and a price of every limit."""
    items, width = problem.losses.shape
    limits = 1 if problem.times is None else 2
    return (
        choices.shape == (items,)
        and bool(((choices >= 0) & (choices < width)).all())
        and len(prices) == limits
        and float(np.abs(problem.costs.astype(float)).sum()) < FINENESS
        and all(math.isfinite(price) and price >= 0 for price in prices)
    )


def _places(values: Floats) -> int:
    """How many binary places behind the point hold floats exactly."""
    powers = np.frexp(values[values != 0])[1]
    return max(0, 53 - int(powers.min(initial=53)))


def _whole(values: Floats, places: int) -> Whole:
    """Floats in units of 2**-places, of which there must be enough."""
    fractions, powers = np.frexp(values)
    shifts = np.where(values == 0, 0, powers.astype(np.int64) - 53 + places)
    whole: Whole = np.ldexp(fractions, 53).astype(np.int64).astype(object) << shifts.astype(object)
    return whole


@dataclass(frozen=True, kw_only=True)
class _Counted:
    """What one limit counts, [N, W], and its limit, in whole numbers; price: of one, in the problem's units."""

    table: Whole
    most: int
    price: int

    def left(self, choices: Ints) -> int:
        return self.most - int(self.table[np.arange(len(choices)), choices].sum())


class _Exact:
    """A problem at some prices, in units of 2**-places."""

    def __init__(self, problem: Problem, prices: Sequence[float]) -> None:
        self.items = np.arange(len(problem.losses))
        ratios = [Fraction(price) for price in prices]
        tables = [(problem.costs.astype(object), int(problem.limit), 0)]
        if problem.times is not None:
            fine = _places(np.append(problem.times, problem.most))
            most = int(_whole(np.array([problem.most]), fine)[0])
            tables.append((_whole(problem.times, fine), most, fine))
        behind = [ratio.denominator.bit_length() - 1 + fine for ratio, (_, _, fine) in zip(ratios, tables, strict=True)]
        self.places = max(_places(problem.losses), *behind)
        self.losses = _whole(problem.losses, self.places)
        self.counted = [
            _Counted(table=table, most=most, price=ratio.numerator << (self.places - used))
            for (table, most, _), ratio, used in zip(tables, ratios, behind, strict=True)
        ]
        self.priced = self.losses
        for one in self.counted:
            if one.price:
                self.priced = self.priced + one.table * one.price

    def loss(self, choices: Ints) -> int:
        return int(self.losses[self.items, choices].sum())

    def least_loss(self) -> int:
        """The sum of every item's least loss, whatever it costs."""
        return int(self.losses.min(1).sum())

    def keeps(self, choices: Ints) -> bool:
        """Whether choices [N] are within all limits."""
        return all(one.left(choices) >= 0 for one in self.counted)

    def bound(self) -> int:
        """Lagrange's bound at the prices."""
        return int(self.priced.min(1).sum()) - sum(one.price * one.most for one in self.counted)

    def none_below(self, total: int, choices: Ints, rounding: int, effort: int, *, by_cost: bool = False) -> bool:
        """Whether it is proven that nothing within the limits loses less than `total`, by_cost: within that of cost.

        choices: [N] are the references, except where they are priced above the least by more than a share of
        `rounding`: where many items are alike, few then deviate from them in any good solution.
        """
        if not len(choices):
            return total <= 0
        gap = total - self.bound()
        if gap <= 0:
            return True
        own, least = self.priced[self.items, choices], self.priced.min(1)
        near = (own - least <= rounding // (SHARE * len(choices))).astype(bool)
        reference = np.where(near, choices, self.priced.argmin(1))
        # Counted from the reference, r would be below 0 where that is not the least priced; 0 stands for it. What a
        # solution loses at the prices above the bound, priced - least of every item, is at least its r all the same.
        above = np.maximum(self.priced - self.priced[self.items, reference][:, None], 0)
        moving = (above < gap).astype(bool)
        moving[self.items, reference] = False
        who, what = np.nonzero(moving)
        moves = _Moves(
            items=who,
            above=above[who, what],
            changes=[one.table[who, what] - one.table[who, reference[who]] for one in self.counted],
            left=[one.left(reference) for one in self.counted],
            prices=[one.price for one in self.counted],
            gap=gap,
        )
        return moves.none_below_gap(effort, by_cost=by_cost)


@dataclass(frozen=True, kw_only=True)
class _Moves:
    """Deviations from the reference, in whole numbers of any length.

    items: [M] whose they are, rising; above: [M] their r; changes: [M] of what each limit counts; left: of each limit
    at the reference; prices: of each; gap: what r and all that is left, at these prices, must come to.
    """

    items: Ints
    above: Whole
    changes: list[Whole]
    left: list[int]
    prices: list[int]
    gap: int

    def none_below_gap(self, effort: int, *, by_cost: bool) -> bool:
        """Whether it is proven that all sets of moves within the limits come to the gap.

        by_cost: the limit of time need not be looked at. Where it has no price it is looked at last.
        """
        game = self._of_cost()._in_int64()
        if game is None or game.pooled(effort):
            return True
        timed = len(self.left) == 2 and not by_cost
        if (not timed or not self.prices[1]) and game.by_item(effort):
            return True
        if not timed:
            return False
        game = self._in_int64()
        return game is None or game.by_item(effort)

    def _of_cost(self) -> _Moves:
        """The same without a limit of time, and without moves that cost nothing: their r is at least 0."""
        priced = self.changes[0].astype(bool)
        return _Moves(
            items=self.items[priced],
            above=self.above[priced],
            changes=[self.changes[0][priced]],
            left=self.left[:1],
            prices=self.prices[:1],
            gap=self.gap,
        )

    def _in_int64(self) -> _Game | None:
        """Everything rounded so that no sum is above the true one, and none overflows; None: the gap is closed.

        Costs stay exact. Where time has a price, it is in the units of r, rounded down: of every item that moves, what
        it takes is less than one too low, so what is left is that much too high, and the gap is raised by as much.
        """
        unit = math.gcd(*self.changes[0].tolist()) or 1
        room, rest = divmod(self.left[0], unit)
        price, gap = self.prices[0] * unit, self.gap - self.prices[0] * rest
        if gap <= 0:
            return None
        costs = self.changes[0] // unit
        farthest = abs(room) + int(np.abs(costs).sum())
        timed = len(self.left) == 2
        latest = abs(self.left[1]) + int(np.abs(self.changes[1]).sum()) if timed else 0
        largest = max(gap, price * max(1, farthest), latest * self.prices[1] if timed else 0)
        fine = price * FINENESS // largest
        room = room if fine else min(room, farthest - abs(room))
        quantum = Fraction(price, fine) if fine else Fraction(largest, FINENESS)
        times, span, weight = np.zeros(len(costs), np.int64), 0, 0
        if timed:
            weight = int(self.prices[1] > 0)
            scale = self.prices[1] / quantum if weight else Fraction(FINENESS, max(1, latest))
            times, span = _floors(self.changes[1], scale), math.floor(self.left[1] * scale)
        return _Game(
            items=self.items,
            above=_floors(self.above, 1 / quantum),
            costs=_floors(costs, Fraction(1)),
            times=times,
            room=room,
            span=span,
            price=fine,
            weight=weight,
            gap=math.ceil(gap / quantum) + weight * len(np.unique(self.items)),
            timed=timed,
        )


def _floors(values: Whole, scale: Fraction) -> Ints:
    """[M] the whole numbers below values * scale."""
    floors: Whole = values * scale.numerator // scale.denominator
    return floors.astype(np.int64)


Group = tuple[Ints, Ints, Ints]  # moves [M] of which at most one is taken: costs, times, and r


@dataclass(frozen=True, kw_only=True)
class _Game:
    """Moves [M] in int64: what they cost and take more, and r; room, span: what is left of cost and of time.

    A set of moves comes to the sum of its r + price * room left + weight * span left.
    """

    items: Ints
    above: Ints
    costs: Ints
    times: Ints
    room: int
    span: int
    price: int
    weight: int
    gap: int
    timed: bool

    def by_item(self, effort: int) -> bool:
        """Whether all sets within room and span come to the gap; False, too, where `effort` ends."""
        cuts = np.flatnonzero(np.diff(self.items)) + 1
        parts = [np.split(part, cuts) for part in (self.costs, self.times, self.above)]
        return _Passage(self, list(zip(*parts, strict=True))).ends(effort)

    def pooled(self, effort: int) -> bool:
        """The same, of sets that may hold several moves of an item; False where that makes no fewer groups."""
        every = np.unique(self.costs)
        if len(every) >= len(np.unique(self.items)):
            return False
        groups = []
        for cost in every.tolist():
            rising = accumulate(np.sort(self.above[self.costs == cost]).tolist())
            sums = np.array(list(takewhile(lambda total: total < self.gap, rising)), np.int64)
            groups.append((cost * np.arange(1, len(sums) + 1), np.zeros_like(sums), sums))
        return _Passage(self, groups).ends(effort)


class _Passage:
    """All sets of moves, group by group in order of the least r; those of no use any more are left out."""

    def __init__(self, game: _Game, groups: list[Group]) -> None:
        self.game = game
        self.groups = sorted((group for group in groups if len(group[0])), key=lambda group: int(group[2].min()))
        self.firsts = [int(group[2].min()) for group in self.groups]
        self.reach = [[_following(self.groups, place, sign) for sign in (-1, 1)] for place in (0, 1)]

    def ends(self, effort: int) -> bool:
        """Whether every set within the limits comes to the gap; False, too, where `effort` states do not show it."""
        states: Group = (np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64))
        if self._below(states):
            return False
        for rank, group in enumerate(self.groups):
            made = len(states[0]) * (len(group[0]) + 1)
            effort -= made
            if effort < 0 or made > WIDEST:
                return False
            costs, times, above = (
                (np.append(0, moves)[:, None] + before).ravel() for moves, before in zip(group, states, strict=True)
            )
            states = costs, times, above
            if self._below(states):
                return False
            states = self._thinned(self._open(states, rank + 1))
            if not len(states[0]):
                return True
        return True

    def _below(self, states: Group) -> bool:
        """Whether a state within the limits does not come to the gap."""
        game, (costs, times, above) = self.game, states
        total = above + game.price * (game.room - costs) + game.weight * (game.span - times)
        return bool(((costs <= game.room) & (times <= game.span) & (total < game.gap)).any())

    def _open(self, states: Group, rank: int) -> Group:
        """States from which groups from `rank` on, one or more of them, can come within the limits below the gap."""
        game, (costs, times, above) = self.game, states
        if rank == len(self.groups):
            return costs[:0], times[:0], above[:0]
        spare = game.gap - 1 - above  # the r of what follows, and what is left in the end, come to no more
        least, following = self.firsts[rank], len(self.groups) - rank
        steps = np.minimum(spare // least, following) if least else np.full(len(spare), following)
        kept = spare >= least
        for used, end, price, (down, up) in zip(
            (costs, times), (game.room, game.span), (game.price, game.weight), self.reach, strict=True
        ):
            kept &= used - end <= down.bridged(steps, rank)
            if price:
                kept &= end - used - spare // price <= up.bridged(steps, rank)
        return costs[kept], times[kept], above[kept]

    def _thinned(self, states: Group) -> Group:
        """States without those that cost as much as another, take no less and lose no less; of one limit, without
        those that cost no less and lose no less."""
        game, (costs, times, above) = self.game, states
        losses = above - game.price * costs - game.weight * times
        order = np.lexsort((losses, times, costs) if game.timed else (losses, costs))
        costs, times, above, losses = costs[order], times[order], above[order], losses[order]
        if game.timed and len(order):
            number = np.append(0, np.cumsum(np.diff(costs) != 0))
            losses = np.unique(losses, return_inverse=True)[1] - number * len(order)  # lower for every further cost
        kept = np.append(True, losses[1:] < np.minimum.accumulate(losses)[:-1])[: len(order)]
        return costs[kept], times[kept], above[kept]


@dataclass(frozen=True, kw_only=True)
class _Reach:
    """How far groups from a rank on change what a limit counts: the farthest of one of them, and all of them."""

    farthest: Ints
    together: Ints

    def bridged(self, steps: Ints, rank: int) -> Ints:
        """What steps [S] of one group each can change at most."""
        far, total = int(self.farthest[rank]), int(self.together[rank])
        bridged: Ints = np.minimum(np.minimum(steps, total // max(far, 1) + 1) * far, total)  # cut before it overflows
        return bridged


def _following(groups: Sequence[Group], place: int, sign: int) -> _Reach:
    """Of the costs (place 0) or times (1) of groups, upward (sign 1) or downward (-1)."""
    own = np.array([max(0, int((sign * group[place]).max())) for group in groups], np.int64)[::-1]
    return _Reach(farthest=np.maximum.accumulate(own)[::-1], together=np.cumsum(own)[::-1])
