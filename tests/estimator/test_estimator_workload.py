"""Routing outcomes: probabilities, token counts, popularity, exact enumeration against naive and sampled routing."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from moeq.errors import EstimateError
from moeq.estimator.workload import (
    Grid,
    normalize_popularity,
    placed_popularity,
    routing_outcomes,
    top_k_sets,
    zipf_popularity,
)

WEIGHTS = st.lists(st.floats(0.01, 100), min_size=2, max_size=7)


def naive_sets(popularity: np.ndarray, top_k: int) -> dict[tuple[int, ...], float]:
    """Probability of every set by all orders in which its members may be drawn."""
    result: dict[tuple[int, ...], float] = {}
    for order in itertools.permutations(range(len(popularity)), top_k):
        left, probability = 1.0, 1.0
        for expert in order:
            probability *= popularity[expert] / left
            left -= popularity[expert]
        key = tuple(sorted(order))
        result[key] = result.get(key, 0.0) + probability
    return result


@given(weights=WEIGHTS, data=st.data())
@settings(max_examples=examples(60), deadline=None)
def test_enumeration_equals_all_orders(weights: list[float], data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, len(weights)))
    popularity = normalize_popularity(weights, num_experts=len(weights), top_k=top_k)
    members, probability = top_k_sets(popularity, top_k)
    expected = naive_sets(popularity, top_k)
    assert len(members) == math.comb(len(weights), top_k)
    for row, value in zip(members.tolist(), probability, strict=True):
        assert value == pytest.approx(expected[tuple(row)], rel=1e-6, abs=1e-12)


@given(weights=WEIGHTS, batch=st.integers(1, 9), seed=st.integers(0, 1000), data=st.data())
@settings(max_examples=examples(60), deadline=None)
def test_outcomes_are_a_distribution_of_all_tokens(
    weights: list[float], batch: int, seed: int, data: st.DataObject
) -> None:
    top_k = data.draw(st.integers(1, len(weights)))
    popularity = normalize_popularity(weights, num_experts=len(weights), top_k=top_k)
    outcomes = routing_outcomes(popularity, top_k=top_k, batch=batch, samples=17, seed=seed)
    assert outcomes.probability.sum() == pytest.approx(1.0)
    assert (outcomes.probability >= 0).all()
    assert (outcomes.tokens.sum(axis=1) == batch * top_k).all()
    assert outcomes.tokens.min() >= 0
    assert outcomes.tokens.max() <= batch
    assert outcomes.method == ("exact" if batch == 1 else "monte-carlo")


@given(weights=WEIGHTS, data=st.data())
@settings(max_examples=examples(60), deadline=None)
def test_more_popular_experts_are_drawn_more_often(weights: list[float], data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, len(weights)))
    popularity = normalize_popularity(weights, num_experts=len(weights), top_k=top_k)
    outcomes = routing_outcomes(popularity, top_k=top_k, batch=1)
    frequency = outcomes.probability @ outcomes.tokens
    by_popularity = frequency[np.argsort(popularity, kind="stable")]
    assert (np.diff(by_popularity) >= -1e-9).all()
    if top_k == 1:
        assert frequency == pytest.approx(popularity)


@pytest.mark.parametrize("batch", [1, 4])
def test_sampled_frequency_respects_popularity(batch: int) -> None:
    popularity = np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])
    exact = routing_outcomes(popularity, top_k=2, batch=1)
    drawn = routing_outcomes(popularity, top_k=2, batch=batch, samples=20_000, seed=3, max_exact_outcomes=0)
    assert drawn.method == "monte-carlo"
    frequency = drawn.probability @ drawn.tokens / batch
    assert frequency == pytest.approx(exact.probability @ exact.tokens, abs=0.015)


def test_enumeration_agrees_with_monte_carlo() -> None:
    popularity = np.array([0.3, 0.2, 0.2, 0.1, 0.1, 0.05, 0.03, 0.02])
    members, probability = top_k_sets(popularity, 2)
    drawn = routing_outcomes(popularity, top_k=2, batch=1, samples=40_000, seed=1, max_exact_outcomes=0)
    for (first, second), expected in zip(members.tolist(), probability, strict=True):
        share = (drawn.tokens[:, first] * drawn.tokens[:, second]).mean()
        assert share == pytest.approx(expected, abs=4 * math.sqrt(expected / 40_000))


def test_a_seed_is_deterministic() -> None:
    popularity = np.full(16, 1 / 16)
    first, again, other = (routing_outcomes(popularity, top_k=4, batch=8, samples=32, seed=seed) for seed in (5, 5, 6))
    assert np.array_equal(first.tokens, again.tokens)
    assert not np.array_equal(first.tokens, other.tokens)


def test_large_expert_counts() -> None:
    wide = routing_outcomes(np.full(128, 1 / 128), top_k=2, batch=1)
    assert (wide.method, len(wide.probability)) == ("exact", 8128)
    assert routing_outcomes(np.full(128, 1 / 128), top_k=8, batch=1).method == "monte-carlo"
    assert routing_outcomes(np.full(300, 1 / 300), top_k=1, batch=1).method == "exact"


def test_experts_that_are_never_drawn() -> None:
    popularity = normalize_popularity([0, 3, 1, 0], num_experts=4, top_k=2)
    for outcomes in (
        routing_outcomes(popularity, top_k=2, batch=1),
        routing_outcomes(popularity, top_k=2, batch=5, samples=50),
    ):
        assert (outcomes.probability @ outcomes.tokens)[[0, 3]].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("weights", [[1, 2], [1, -1, 1], [1, float("nan"), 1], [1, 0, 0], [0, 0, 0]])
def test_impossible_popularity_is_an_error(weights: list[float]) -> None:
    with pytest.raises(EstimateError, match="popularity"):
        normalize_popularity(weights, num_experts=3, top_k=2)


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 2.5])
def test_zipf_popularity(exponent: float) -> None:
    popularity = zipf_popularity(16, exponent)
    assert popularity.sum() == pytest.approx(1)
    assert popularity[0] / popularity[7] == pytest.approx(8**exponent)
    assert (np.diff(popularity) <= 0).all()


@pytest.mark.parametrize("exponent", [-0.1, float("inf"), float("nan")])
def test_an_impossible_zipf_exponent_is_an_error(exponent: float) -> None:
    with pytest.raises(EstimateError, match="a Zipf exponent of"):
        zipf_popularity(4, exponent)


def test_placed_popularity_goes_by_place_and_width() -> None:
    hot = np.array([[False, True, False, True], [False, False, False, False]])
    bits = np.array([[2.0, 16, 4, 16], [1, 3, 2, 3]])
    popularity = placed_popularity(hot, bits, 1.0) * (1 + 1 / 2 + 1 / 3 + 1 / 4)
    assert popularity == pytest.approx(np.array([[1 / 4, 1, 1 / 3, 1 / 2], [1 / 4, 1, 1 / 3, 1 / 2]]))


def test_an_empty_grid_is_an_error() -> None:
    with pytest.raises(EstimateError, match="grid batches"):
        Grid(batches=())
    with pytest.raises(EstimateError, match="grid inputs"):
        Grid(inputs=(0,))


def test_what_is_left_of_extreme_popularity_is_not_lost() -> None:
    members, probability = top_k_sets(np.array([1.0, 1e-17, 1e-20, 1e-20]), 2)
    drawn = {tuple(each): one for each, one in zip(members.tolist(), probability.tolist(), strict=True)}
    assert drawn[0, 1] == pytest.approx(1 / 1.002)
    assert drawn[0, 2] == drawn[0, 3] == pytest.approx(1e-3 / 1.002)
