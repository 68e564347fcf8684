"""The knapsack against a search over all solutions, and its bound."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from moeq.numerics import knapsack


def brute_force(losses: np.ndarray, costs: np.ndarray, limit: int) -> float:
    items = np.arange(len(losses))
    found = [np.array(c) for c in itertools.product(range(losses.shape[1]), repeat=len(losses))]
    return min(float(losses[items, c].sum()) for c in found if costs[items, c].sum() <= limit)


@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(1, 4), st.booleans(), st.floats(0, 1.2))
@settings(max_examples=examples(300), deadline=None)
def test_equals_brute_force(seed: int, items: int, width: int, ties: bool, share: float) -> None:
    rng = np.random.default_rng(seed)
    costs = rng.integers(0, 30, (items, width)) * int(rng.integers(1, 5))
    losses = rng.integers(0, 4, (items, width)).astype(float) if ties else rng.lognormal(0, 3, (items, width))
    least, most = knapsack.least_cost(costs), int(costs.max(1).sum())
    limit = int(least + share * (most - least))
    found = knapsack.solve(losses, costs, limit)
    rows = np.arange(items)
    assert found.proven
    assert found.cost == costs[rows, found.choices].sum() <= limit
    assert found.loss == pytest.approx(losses[rows, found.choices].sum())
    assert found.loss == pytest.approx(brute_force(losses, costs, limit), rel=1e-9, abs=1e-12)
    assert found.bound <= found.loss


def test_larger_ones_agree_with_a_table_over_all_costs() -> None:
    rng = np.random.default_rng(0)
    costs = np.tile([3, 7, 9, 12, 25], (60, 1))
    losses = np.sort(rng.lognormal(0, 1.5, (60, 5)), 1)[:, ::-1].copy()
    for limit in range(180, 700, 37):
        table = np.full(limit + 1, np.inf)
        table[0] = 0
        for row, cost in zip(losses, costs, strict=True):
            options = [
                np.append(np.full(c, np.inf), table[: limit + 1 - c] + v) for v, c in zip(row, cost, strict=True)
            ]
            table = np.min(options, 0)
        assert knapsack.solve(losses, costs, limit).loss == pytest.approx(table.min())


def test_too_low_a_limit_and_nothing_to_decide() -> None:
    with pytest.raises(ValueError, match="the least cost is 5, the limit 4"):
        knapsack.solve(np.ones((1, 2)), np.array([[5, 6]]), 4)
    empty = knapsack.solve(np.zeros((0, 3)), np.zeros((0, 3), int), 0)
    assert (empty.loss, empty.cost, empty.proven) == (0.0, 0, True)


def test_without_the_effort_it_says_that_nothing_is_proven() -> None:
    rng = np.random.default_rng(1)
    losses, costs = rng.random((200, 3)), rng.integers(1, 1000, (200, 3))
    found = knapsack.solve(losses, costs, 60_000, effort=0)
    exact = knapsack.solve(losses, costs, 60_000)
    assert exact.proven
    assert not found.proven
    assert found.bound <= exact.loss <= found.loss
