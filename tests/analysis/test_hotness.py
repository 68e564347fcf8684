"""Which experts are in high precision: Algorithm 1 of paper 001 step by step, stationary and shifting workloads."""

from __future__ import annotations

import numpy as np
import pytest
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from moeq.analysis.hotness import Control, Controller, gained

E, TOP_K, PERIOD = 64, 8, 128
SURE = Control(places=16, ema=0.99, threshold=0.5, certainty=4.0)


def folded(steps: list[tuple[np.ndarray, np.ndarray]], ema: float, experts: int = E) -> tuple[np.ndarray, np.ndarray]:
    """What one layer gains by steps of (experts [n], weights [n])."""
    sums, squares = np.zeros(experts), np.zeros(experts)
    for step, (chosen, weights) in enumerate(steps):
        left = np.full(len(chosen), float(len(steps) - 1 - step))
        one, two = gained(chosen, weights, left, num_experts=experts, ema=ema)
        sums, squares = sums + one, squares + two
    return sums[None], squares[None]


def popularity(seed: int) -> np.ndarray:
    share = 1 / np.arange(1, E + 1)
    return np.random.default_rng(seed).permutation(share / share.sum())


def drawn(share: np.ndarray, steps: int, rng: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
    """Steps of one token each, which chooses without replacement."""
    chosen = np.argsort(-(np.log(share) + rng.gumbel(size=(steps, E))), axis=1)[:, :TOP_K]
    return [(row, weights) for row, weights in zip(chosen, rng.dirichlet(np.ones(TOP_K), size=steps), strict=True)]


@settings(max_examples=examples(50), deadline=None)
@given(
    seed=st.integers(0, 10_000),
    places=st.integers(0, 6),
    ema=st.sampled_from([0.5, 0.9, 0.99]),
    threshold=st.sampled_from([0.0, 0.5, 1.0]),
    most=st.sampled_from([None, 0, 1, 2]),
)
def test_algorithm_1_step_by_step(seed: int, places: int, ema: float, threshold: float, most: int | None) -> None:
    rng, experts = np.random.default_rng(seed), 6
    hotness = rng.permutation(experts) / experts + rng.random(experts) / 100
    controller = Controller.after_warmup(Control(places=places, ema=ema, threshold=threshold), hotness[None].copy())
    ranked = sorted(range(experts), key=lambda e: -hotness[e])
    high, tau = set(ranked[:places]), 0.0
    if 0 < places < experts:
        tau = threshold * hotness[ranked[places - 1]]
    assert set(np.flatnonzero(controller.high[0])) == high
    for _ in range(5):
        steps = [(rng.permutation(experts)[:2], rng.random(2)) for _ in range(int(rng.integers(1, 6)))]
        for chosen, weights in steps:
            given_now = np.zeros(experts)
            given_now[chosen] = weights
            hotness = ema * hotness + (1 - ema) * given_now
        controller.fold(folded(steps, ema, experts)[0], len(steps))
        np.testing.assert_allclose(controller.hotness[0], hotness, rtol=1e-12)
        wanted = {e for e in sorted(range(experts), key=lambda e: -hotness[e])[:places] if hotness[e] >= tau}
        entering = sorted(wanted - high, key=lambda e: -hotness[e])
        leaving = sorted(high - wanted, key=lambda e: -hotness[e])
        late = [] if most is None else entering[most:]
        high = (wanted - set(late)) | set(leaving[: len(late)])
        assert set(np.flatnonzero(controller.decide(most)[0])) == high
        assert len(high) <= places


@pytest.mark.parametrize("seed", range(4))
def test_a_stationary_workload_settles(seed: int) -> None:
    """At most one switch in 1,000 steps and layer, after 20 periods."""
    rng, share = np.random.default_rng(seed), popularity(seed)
    steps = drawn(share, PERIOD, rng)
    controller = Controller.after_warmup(SURE, folded(steps, SURE.ema)[0])
    controller.squares = folded(steps, SURE.ema)[1]
    switches, periods = 0, 20 + 4000 // PERIOD
    for period in range(periods):
        before = controller.high.copy()
        sums, squares = folded(drawn(share, PERIOD, rng), SURE.ema)
        controller.fold(sums, PERIOD, squares)
        controller.decide()
        switches += int((controller.high & ~before).sum()) if period >= 20 else 0
    assert switches <= 4


@pytest.mark.parametrize("seed", range(4))
def test_a_shift_is_followed_within_three_periods(seed: int) -> None:
    """Four fifths of what the best 16 experts of the new workload are given, and more than half of what was missing."""
    rng, share, other = np.random.default_rng(seed), popularity(seed), popularity(seed + 100)
    controller = Controller.after_warmup(SURE, folded(drawn(share, PERIOD, rng), SURE.ema)[0])
    for _ in range(20):
        sums, squares = folded(drawn(share, PERIOD, rng), SURE.ema)
        controller.fold(sums, PERIOD, squares)
        controller.decide()
    best = np.sort(other)[-SURE.places :].sum()
    before = other[controller.high[0]].sum() / best
    for _ in range(3):
        sums, squares = folded(drawn(other, PERIOD, rng), SURE.ema)
        controller.fold(sums, PERIOD, squares)
        controller.decide()
    after = other[controller.high[0]].sum() / best
    assert after > 0.8
    assert 1 - after < (1 - before) / 2


def test_what_chance_explains_changes_nothing() -> None:
    """Of two experts that are chosen alike the one in place stays; without certainty they change places."""
    switches = []
    for certainty in (0.0, 4.0):
        rng = np.random.default_rng(0)
        control = Control(places=1, ema=0.9, threshold=0.0, certainty=certainty)
        controller = Controller.after_warmup(control, np.array([[0.5, 0.49]]))
        count = 0
        for _ in range(200):
            steps = [(np.array([int(rng.integers(2))]), np.ones(1)) for _ in range(10)]
            sums, squares = folded(steps, 0.9, 2)
            before = controller.high.copy()
            controller.fold(sums, 10, squares)
            count += int((controller.decide() & ~before).sum())
        switches.append(count)
    assert switches[0] > 50
    assert switches[1] == 0


def test_squares_are_at_least_the_variance_of_hotness() -> None:
    rng, share = np.random.default_rng(3), popularity(3)
    ends = [folded(drawn(share, 400, rng), 0.98) for _ in range(60)]
    found = np.concatenate([sums for sums, _ in ends]).var(axis=0, ddof=1)
    told = np.concatenate([squares for _, squares in ends]).mean(axis=0)
    assert found.sum() <= told.sum() <= 2 * found.sum()
