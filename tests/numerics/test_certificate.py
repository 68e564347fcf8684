"""Certificates of the knapsacks: nothing is proven and wrong, and what was changed in one is noticed."""

from __future__ import annotations

import itertools
import tracemalloc
from dataclasses import replace
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from cases import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moeq.numerics import knapsack, two_limits
from moeq.numerics.certificate import TOLERANCE, Certificate, Problem, bounded, confirmed

PLACES = 200  # binary, behind the point: enough for all of these
KINDS = ("random", "far apart", "ties", "alike", "dominated", "never chosen")


def whole(values: np.ndarray) -> np.ndarray:
    """Floats as whole numbers, exactly."""
    exact = [Fraction(value) * 2**PLACES for value in np.ravel(values).tolist()]
    assert all(value.denominator == 1 for value in exact)
    return np.array([int(value) for value in exact], object).reshape(np.shape(values))


@cache
def every_choice(items: int, width: int) -> np.ndarray:
    """[W**N, N]"""
    return np.array(list(itertools.product(range(width), repeat=items)), np.int64).reshape(-1, items)


def kept(problem: Problem) -> Problem:
    """The problem with what counts as kept: the limit of time, and a slack for rounding."""
    return replace(problem, most=problem.most * (1 + two_limits.SLACK))


def least(problem: Problem) -> int | None:
    """The least loss within the limits by a search over all choices, in units of 2**-PLACES; None: there are none."""
    every = every_choice(*problem.losses.shape)
    rows = np.arange(len(problem.losses))
    within = problem.costs[rows, every].sum(1) <= problem.limit
    if problem.times is not None:
        within &= (whole(problem.times)[rows, every].sum(1) <= int(whole(np.array([kept(problem).most]))[0])).astype(
            bool
        )
    return min(whole(problem.losses)[rows, every[within]].sum(1).tolist(), default=None)


def instance(rng: np.random.Generator) -> Problem:
    """A few items, of losses up to 1e18 times as large as others; limits loose, tight, or what some choice needs."""
    items, width = int(rng.integers(1, 6)), int(rng.integers(1, 5))
    if width == 4:
        items = min(items, 4)
    kind = KINDS[rng.integers(len(KINDS))]
    shape = (items, width)
    costs = rng.integers(0, 12, shape) * int(rng.integers(1, 4))
    losses = 10.0 ** rng.uniform(0, 18 if kind == "far apart" else 3, shape)
    times = rng.random(shape)
    if kind in ("ties", "alike"):
        losses, times = rng.integers(0, 4, shape) * 10.0 ** rng.integers(-3, 15), rng.integers(0, 3, shape) / 4
    if kind == "alike":
        costs, losses, times = (np.repeat(table[:1], items, 0) for table in (costs, losses, times))
        losses = losses * (1 + 1e-9 * rng.integers(0, 2, shape))
    if kind == "dominated" and width > 1:
        losses[:, 0], costs[:, 0] = losses[:, 1] * (1 + rng.integers(0, 2, items)), costs[:, 1] + 1
    if kind == "never chosen":
        losses[rng.random(shape) < 0.2] *= 1e15
    losses[rng.random(shape) < 0.1] = 0.0
    rows, some = np.arange(items), rng.integers(0, width, items)
    span = int(costs.max(1).sum()) - knapsack.least_cost(costs)
    limit = int(rng.choice([costs[rows, some].sum(), knapsack.least_cost(costs) + int(rng.random() * span)]))
    fast = times.min(1).sum()
    most = float(rng.choice([times[rows, some].sum(), fast + rng.random() * (times.max(1).sum() - fast)]))
    return Problem(losses=losses, costs=costs, limit=limit, times=times, most=most)


def count_proven(problems: list[Problem]) -> int:
    """How many are proven; AssertionError for one that is wrong, or whose bound is."""
    proven = 0
    for problem in problems:
        best = least(problem)
        if best is None:
            with pytest.raises(ValueError, match="the least time is"):
                solve(problem)
            continue
        found = solve(problem)
        loss = int(whole(problem.losses)[np.arange(len(problem.losses)), found.choices].sum())
        assert loss / 2**PLACES == found.loss
        assert loss >= best
        assert Fraction(found.certificate.bound) * 2**PLACES <= best
        if found.proven:
            above = loss - int(whole(problem.losses).min(1).sum())
            assert loss - best <= TOLERANCE * above
        else:
            assert Fraction(found.bound) * 2**PLACES <= best
        proven += found.proven
    return proven


def solve(problem: Problem, effort: int = 4_000_000) -> knapsack.Solution:
    if problem.times is None:
        return knapsack.solve(problem.losses, problem.costs, problem.limit, effort)
    return two_limits.solve(problem.losses, problem.costs, problem.limit, problem.times, problem.most, effort)


@pytest.mark.parametrize("count", [700, pytest.param(7000, marks=pytest.mark.full)])
def test_of_all_instances_with_one_limit_none_is_proven_and_wrong(count: int) -> None:
    rng = np.random.default_rng(0)
    assert count_proven([replace(instance(rng), times=None) for _ in range(count)]) == count


@pytest.mark.parametrize("count", [400, pytest.param(3000, marks=pytest.mark.full)])
def test_of_all_instances_with_two_limits_none_is_proven_and_wrong(count: int) -> None:
    rng = np.random.default_rng(1)
    problems = [instance(rng) for _ in range(count)]
    possible = sum(least(problem) is not None for problem in problems)
    assert count_proven(problems) == possible


def experts(seed: int, items: int, *, timed: bool) -> Problem:
    """Losses that fall and times that rise with the width, of items with the same costs."""
    rng = np.random.default_rng(seed)
    losses = np.array([0.55, 0.17, 0.045, 0.011]) * rng.lognormal(0, 2, (items, 1)) * rng.lognormal(0, 0.2, (items, 4))
    costs = np.tile([20, 31, 53, 92], (items, 1))
    times = rng.random((items, 1)) * (costs + 1.5)
    most = float(times.sum(0) @ [0.3, 0.4, 0.2, 0.1])
    return Problem(
        losses=-np.sort(-losses, 1),
        costs=costs,
        limit=int(costs.sum(0) @ [0.3, 0.4, 0.2, 0.1]),
        times=times if timed else None,
        most=most,
    )


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("seed", [36, 46, 57, 74, 105, 110])
@pytest.mark.parametrize("far", [1e15, 1e18])
def test_a_loss_that_nobody_takes_swallows_no_difference(far: float, seed: int, timed: bool) -> None:
    """Small differences were rounded away beside it: these were called proven, and 0.2 to 51 % above the optimum."""
    rng = np.random.default_rng(seed)
    losses, costs = -np.sort(-rng.lognormal(0, 1, (6, 4)), 1), rng.integers(0, 6, (6, 4))
    rng.integers(0, 40, (6, 4))
    costs = np.tile(np.sort(costs[:1], 1), (6, 1))
    times = rng.random((6, 1)) * (costs + 1.5)
    losses[0, 0] *= far
    most = float(times.mean(1).sum())
    problem = Problem(
        losses=losses, costs=costs, limit=int(costs.mean(1).sum()), times=times if timed else None, most=most
    )
    found, best = solve(problem), least(problem)
    assert best is not None
    assert found.proven
    assert found.loss == pytest.approx(best / 2**PLACES, rel=1e-12)


@given(st.integers(0, 2**31), st.booleans(), st.floats(0, 2), st.floats(0, 2))
@example(362880, False, 2.0, 1.125)  # no room and nothing that costs, at a price far above the gap
@settings(max_examples=examples(300), deadline=None)
def test_whatever_is_claimed_only_what_holds_is_confirmed(seed: int, timed: bool, first: float, second: float) -> None:
    """Prices, choices and bounds that no search made: near those of the optimum, or far from it."""
    rng = np.random.default_rng(seed)
    problem = instance(rng)
    problem = problem if timed else replace(problem, times=None)
    best = least(problem)
    if best is None:
        return
    found, rows = solve(problem), np.arange(len(problem.losses))
    own = found.certificate
    prices = tuple(price * factor for price, factor in zip(own.prices, (first, second), strict=False))
    choices = found.choices.copy()
    choices[rng.integers(len(choices))] = rng.integers(problem.losses.shape[1])
    loss = int(whole(problem.losses)[rows, choices].sum())
    above = loss - int(whole(problem.losses).min(1).sum())
    certificate = Certificate(prices=prices, bound=own.bound * first, rounding=above / 2**PLACES * 2.0**-41)
    if confirmed(kept(problem), choices, loss / 2**PLACES, certificate, 10**5):
        assert loss - best <= TOLERANCE * above
        assert Fraction(certificate.bound) * 2**PLACES <= best
    bound = best / 2**PLACES * second
    if bounded(kept(problem), choices, prices, bound, 10**5):
        assert Fraction(bound) * 2**PLACES <= best


@pytest.mark.parametrize("timed", [False, True])
def test_what_was_changed_in_a_certificate_is_noticed(timed: bool) -> None:
    problem = experts(3, 40, timed=timed)
    found = solve(problem)
    problem, certificate, effort = kept(problem), found.certificate, 10**6

    def holds(choices: np.ndarray = found.choices, loss: float = found.loss, **changed: object) -> bool:
        return confirmed(problem, choices, loss, replace(certificate, **changed), effort)  # type: ignore[arg-type]

    assert found.proven
    assert holds()
    assert min(certificate.prices) > 0
    for place, price in enumerate(certificate.prices):
        for factor in (0.0, 0.9, 1.1, -1.0, np.inf, np.nan):
            prices = list(certificate.prices)
            prices[place] = factor * price
            assert not holds(prices=tuple(prices))
    assert not holds(prices=certificate.prices[:-1])
    assert not holds(prices=(*certificate.prices, 0.0))
    for bound in (certificate.bound * (1 + 1e-9), found.loss, np.inf, np.nan):
        assert not holds(bound=bound)
    assert holds(bound=certificate.bound * (1 - 1e-9))  # a lower one holds as well
    for rounding in (-1e-300, found.loss / 2**39, np.inf, np.nan):
        assert not holds(rounding=rounding)
    for loss in (np.nextafter(found.loss, 0), np.nextafter(found.loss, np.inf), -found.loss, np.nan):
        assert not holds(loss=loss)


@pytest.mark.parametrize("timed", [False, True])
def test_choices_that_are_not_the_best_are_not_confirmed(timed: bool) -> None:
    problem = experts(4, 12, timed=timed)
    found = solve(problem)
    problem, rows, refused = kept(problem), np.arange(12), 0
    for item, choice in itertools.product(range(12), range(4)):
        choices = found.choices.copy()
        choices[item] = choice
        if choice != found.choices[item]:
            loss = float(sum(map(Fraction, problem.losses[rows, choices].tolist()), Fraction(0)))
            above = loss - float(problem.losses.min(1).sum())
            certificate = replace(found.certificate, rounding=above * 2.0**-41)
            assert not confirmed(problem, choices, loss, certificate, 10**6)
            refused += 1
    assert refused == 36
    assert not confirmed(problem, found.choices[:-1], found.loss, found.certificate, 10**6)
    assert not confirmed(problem, found.choices + 4, found.loss, found.certificate, 10**6)


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("power", [-600, -40, 3, 600])
def test_a_certificate_holds_of_the_problem_at_another_scale(timed: bool, power: int) -> None:
    problem = experts(5, 30, timed=timed)
    found, factor = solve(problem), 2.0**power
    scaled = replace(problem, losses=problem.losses * factor)
    again = solve(scaled)
    assert again.proven
    assert (again.loss, again.choices.tolist()) == (found.loss * factor, found.choices.tolist())
    own = found.certificate
    moved = Certificate(
        prices=tuple(price * factor for price in own.prices), bound=own.bound * factor, rounding=own.rounding * factor
    )
    assert moved == again.certificate
    assert confirmed(kept(scaled), found.choices, found.loss * factor, moved, 10**6)
    assert not confirmed(kept(problem), found.choices, found.loss, moved, 10**6)


@pytest.mark.parametrize("timed", [False, True])
def test_a_bound_is_confirmed_up_to_where_it_holds(timed: bool) -> None:
    problem = experts(3, 40, timed=timed)
    found = solve(problem)
    one = solve(replace(problem, times=None))
    prices = found.certificate.prices
    assert bounded(kept(problem), found.choices, prices, found.certificate.bound, 0)
    assert not bounded(kept(problem), found.choices, prices, found.loss * (1 + 1e-9), 10**6)
    if timed:  # time by a price of 0: the bound is what cost alone leaves
        assert bounded(kept(problem), one.choices, (one.certificate.prices[0], 0.0), one.loss * (1 - 1e-9), 10**6)
        assert not bounded(kept(problem), one.choices, (one.certificate.prices[0], 0.0), one.loss * (1 + 1e-9), 10**6)


def nearly_alike(spread: float, costs: np.ndarray, seed: int = 7) -> np.ndarray:
    """Losses of as many items as there are costs."""
    rng = np.random.default_rng(seed)
    return np.array([0.55, 0.17, 0.045, 0.011]) * (1 + spread * rng.normal(size=costs.shape))


def solved_in_little(problem: Problem, effort: int = knapsack.EFFORT) -> knapsack.Solution:
    tracemalloc.start()
    found = solve(problem, effort)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 250e6
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    ("spread", "row"),
    [
        (0.0, (7, 11, 18, 29)), (1e-9, (1064, 2064, 3064, 4064)), (1e-3, (7, 11, 18, 29)),
        pytest.param(0.0, (1064, 2064, 3064, 4064), marks=pytest.mark.full),
        pytest.param(1e-9, (7, 11, 18, 29), marks=pytest.mark.full),
        pytest.param(1e-3, (1064, 2064, 3064, 4064), marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_thousands_of_items_nearly_alike_are_proven(spread: float, row: tuple[int, ...]) -> None:
    costs = np.tile(row, (3000, 1))
    limit = int(costs[:, 1:3].mean(1).sum()) + 5
    assert solved_in_little(Problem(losses=nearly_alike(spread, costs), costs=costs, limit=limit)).proven


@pytest.mark.full
@pytest.mark.parametrize("timed", [False, True])
def test_a_search_that_does_not_end_takes_little_and_says_how_near_it_came(timed: bool) -> None:
    """These, of nearly the same costs, too, took 1.4 GB; they are not proven, nor called so."""
    rng = np.random.default_rng(8)
    costs = np.array([1000, 2000, 3000, 4000]) + rng.integers(0, 5, (3000, 4))
    limit = int(0.7 * costs[:, 0].sum() + 0.3 * costs[:, 3].sum())
    times = nearly_alike(1e-3, costs, seed=9)[:, ::-1].copy()
    most = float(times.sum(0) @ [0.6, 0.4, 0.0, 0.0])
    problem = Problem(
        losses=nearly_alike(1e-3, costs), costs=costs, limit=limit, times=times if timed else None, most=most
    )
    found = solved_in_little(problem, 1_000_000 if timed else 5_000_000)
    assert not found.proven
    assert found.loss * (1 - 1e-3) <= found.bound < found.loss
    assert bounded(kept(problem), found.choices, found.certificate.prices, found.certificate.bound, 0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e308])
def test_losses_and_times_that_are_no_numbers_are_refused(value: float) -> None:
    losses, costs, times = np.ones((3, 2)), np.ones((3, 2), np.int64), np.ones((3, 2))
    bad = losses * value
    with pytest.raises(ValueError, match="must be finite"):
        knapsack.solve(bad, costs, 3)
    with pytest.raises(ValueError, match="must be finite"):
        two_limits.solve(bad, costs, 3, times, 3.0)
    with pytest.raises(ValueError, match="must be finite"):
        two_limits.solve(losses, costs, 3, bad, 3.0)
