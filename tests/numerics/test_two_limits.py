"""The knapsack with two limits against a search over all solutions, and its bound."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from moeq.numerics import knapsack, two_limits


def brute_force(losses: np.ndarray, costs: np.ndarray, limit: int, times: np.ndarray, most: float) -> float:
    items = np.arange(len(losses))
    found = [np.array(c) for c in itertools.product(range(losses.shape[1]), repeat=len(losses))]
    within = [c for c in found if costs[items, c].sum() <= limit and times[items, c].sum() <= most * (1 + 1e-12)]
    return min((float(losses[items, c].sum()) for c in within), default=np.inf)


def table(seed: int, items: int, width: int, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Losses, costs and times: unrelated, with ties, or falling and rising with the width as those of experts do."""
    rng = np.random.default_rng(seed)
    if kind == "ties":
        shape = (items, width)
        return rng.integers(0, 4, shape).astype(float), rng.integers(0, 4, shape), rng.integers(0, 3, shape) / 4
    losses, costs = rng.lognormal(0, 3, (items, width)), rng.integers(0, 30, (items, width))
    times = rng.random((items, width))
    if kind == "experts":
        losses, costs = -np.sort(-losses, 1), np.tile(np.sort(costs[:1], 1), (items, 1))
        times = rng.random((items, 1)) * (costs + 1.5)
    return losses, costs, times


@given(
    st.integers(0, 2**31), st.integers(1, 6), st.integers(1, 4), st.sampled_from(["random", "ties", "experts"]),
    st.floats(0, 1.2), st.floats(0, 1.1),
)  # fmt: skip
@settings(max_examples=examples(400), deadline=None)
def test_equals_brute_force(seed: int, items: int, width: int, kind: str, share: float, time_share: float) -> None:
    losses, costs, times = table(seed, items, width, kind)
    least = knapsack.least_cost(costs)
    limit = int(least + share * (int(costs.max(1).sum()) - least))
    most = float(times.min(1).sum() + time_share * (times.max(1).sum() - times.min(1).sum()))
    best = brute_force(losses, costs, limit, times, most)
    if best == np.inf:
        with pytest.raises(ValueError, match="the least time is"):
            two_limits.solve(losses, costs, limit, times, most)
        return
    found = two_limits.solve(losses, costs, limit, times, most)
    rows = np.arange(items)
    assert found.proven
    assert found.cost == costs[rows, found.choices].sum() <= limit
    assert times[rows, found.choices].sum() <= most * (1 + 1e-11)
    assert found.loss == pytest.approx(losses[rows, found.choices].sum())
    assert found.loss == pytest.approx(best, rel=1e-9, abs=1e-12)
    assert found.bound <= found.loss


@pytest.mark.parametrize("seed", range(4))
def test_the_search_that_ends_early_keeps_both_limits_and_a_bound(seed: int) -> None:
    losses, costs, times = table(seed, 60, 5, "experts")
    limit = int(costs.sum(0).mean())
    most = float(times[:, 1].sum())
    early = two_limits.solve(losses, costs, limit, times, most, effort=200_000)
    rows = np.arange(60)
    assert costs[rows, early.choices].sum() <= limit
    assert times[rows, early.choices].sum() <= most * (1 + 1e-11)
    exact = two_limits.solve(losses, costs, limit, times, most)
    assert early.bound <= exact.loss <= early.loss * (1 + 1e-9)
    assert exact.loss >= knapsack.solve(losses, costs, limit).loss * (1 - 1e-9)


def test_without_the_effort_it_says_that_nothing_is_proven() -> None:
    losses, costs, times = table(3, 200, 4, "experts")
    found = two_limits.solve(losses, costs, int(costs.sum(0).mean()), times, float(times[:, 1].sum()), effort=0)
    assert not found.proven
    assert found.bound < found.loss


def test_a_limit_of_time_that_does_not_bind_changes_nothing() -> None:
    losses, costs, times = table(5, 40, 4, "experts")
    limit = int(costs.sum(0).mean())
    free = knapsack.solve(losses, costs, limit)
    found = two_limits.solve(losses, costs, limit, times, float(times.max(1).sum()))
    assert (found.loss, found.proven) == (free.loss, True)


def test_the_least_time_is_within_reach_and_nothing_below_it() -> None:
    losses, costs, times = table(7, 5, 4, "random")
    limit = int(costs.min(1).sum()) + 20
    least = two_limits.least_time(times, costs, limit)
    assert two_limits.solve(losses, costs, limit, times, least).proven
    with pytest.raises(ValueError, match="the least time is"):
        two_limits.solve(losses, costs, limit, times, least * (1 - 1e-9))
