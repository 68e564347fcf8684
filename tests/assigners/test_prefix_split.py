"""prefix-split against a brute-force search, and its budget in exact rationals."""

from fractions import Fraction

import numpy as np
import pytest
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from moeq.assigners.prefix_split import increments, split
from moeq.errors import AssignmentError


def brute_force(losses: np.ndarray, budget: int) -> float:
    """Largest gain over every non-increasing sequence of widths that uses the whole budget."""
    experts = len(losses)
    best = -np.inf
    for four in range(experts + 1):
        for three in range(experts + 1 - four):
            for two in range(experts + 1 - four - three):
                if 3 * four + 2 * three + two == budget:
                    widths = [4] * four + [3] * three + [2] * two + [1] * (experts - four - three - two)
                    best = max(best, sum(losses[i, 0] - losses[i, w - 1] for i, w in enumerate(widths)))
    return best


@given(st.integers(1, 9), st.integers(0, 2**31), st.data())
@settings(max_examples=examples(300), deadline=None)
def test_finds_the_best_split(experts: int, seed: int, data: st.DataObject) -> None:
    budget = data.draw(st.integers(0, 3 * experts))
    losses = np.random.default_rng(seed).random((experts, 4))
    four, three, two, one = split(losses[None], np.array([experts]), np.array([budget]))[0]
    assert min(four, three, two, one) >= 0
    assert four + three + two + one == experts
    assert 3 * four + 2 * three + two == budget
    widths = np.repeat([4, 3, 2, 1], [four, three, two, one])
    gain = (losses[:, 0] - losses[np.arange(experts), widths - 1]).sum()
    assert gain == pytest.approx(brute_force(losses, budget), abs=1e-12)


def test_layers_of_different_sizes_at_once() -> None:
    rng = np.random.default_rng(0)
    sizes, budgets = [3, 8, 0, 5], [4, 9, 0, 15]
    losses = np.zeros((4, 8, 4))
    for layer, size in enumerate(sizes):
        losses[layer, :size] = rng.random((size, 4))
    together = split(losses, np.array(sizes), np.array(budgets))
    for layer, (size, budget) in enumerate(zip(sizes, budgets, strict=True)):
        alone = split(losses[layer : layer + 1, :size].reshape(1, size, 4), np.array([size]), np.array([budget]))
        assert together[layer].tolist() == alone[0].tolist()


@pytest.mark.full
@given(st.lists(st.integers(0, 128), min_size=1, max_size=20), st.fractions(1, 4, max_denominator=60))
@settings(max_examples=examples(300), deadline=None)
def test_increments_spend_the_budget_exactly(counts: list[int], average: Fraction) -> None:
    spent = increments(counts, average)
    exact = [count * (average - 1) for count in counts]
    assert sum(spent) == int(sum(exact))
    assert all(abs(whole - value) < 1 for whole, value in zip(spent, exact, strict=True))
    assert all(0 <= whole <= 3 * count for whole, count in zip(spent, counts, strict=True))


def test_largest_remainders_get_what_is_left() -> None:
    assert increments([8, 8, 8], Fraction("2.1")) == [9, 9, 8]  # 8.8 each: 26 of 26.4, the first ones first
    assert increments([1, 2, 4], Fraction("2.3")) == [1, 3, 5]  # 1.3, 2.6, 5.2: one left for the 0.6


def test_average_out_of_range() -> None:
    with pytest.raises(AssignmentError, match="between 1 and 4"):
        increments([8], Fraction(9, 2))
