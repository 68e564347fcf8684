"""Parts of experts with changing precision: what tokens chose in bounded room, the cache beside the device, reading
ahead, pools under any order of work."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from late_streams import LateStreams

from moeq.analysis.coactivation import coactivation, soon_hot
from moeq.analysis.hotness import Control, Controller
from moeq.artifacts.trace import RoutingTrace
from moeq.runtime.dynamic.host import HostCache
from moeq.runtime.dynamic.pools import HIGH, LOW, Budget, Pools
from moeq.runtime.dynamic.seen import MOST_CALLS, Seen

E = 8


@settings(max_examples=examples(40), deadline=None)
@given(
    tokens=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    ema=st.sampled_from([0.5, 0.9, 0.99]),
    seed=st.integers(0, 1000),
)
def test_what_was_seen_is_the_average_of_algorithm_1(tokens: list[int], ema: float, seed: int) -> None:
    """Calls of few tokens and of many, also of experts that are none (numbers from E on, or below 0), and of weights
    that are no numbers, which add nothing."""
    generator, seen = torch.Generator().manual_seed(seed), Seen(E, ema)
    hotness, squares = np.zeros(E), np.zeros(E)
    for count in tokens:
        index = torch.randint(-1, E + 2, (count, 2), generator=generator)
        weights = torch.rand(count, 2, generator=generator)
        weights[:1, 0] = torch.tensor([0.5, torch.nan, torch.inf])[count % 3]
        seen.add(index, weights)
        hotness, squares = ema * hotness, ema**2 * squares
        for expert, weight in zip(index.flatten().tolist(), weights.flatten().tolist(), strict=True):
            if 0 <= expert < E and math.isfinite(weight):
                hotness[expert] += (1 - ema) * weight / count
                squares[expert] += ((1 - ema) * weight / count) ** 2
    sums, steps, found = seen.drained()
    assert steps == len(tokens)
    np.testing.assert_allclose(sums[0], hotness, rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose(found[0], squares, rtol=1e-5, atol=1e-12)
    assert seen.drained()[1] == 0


def test_what_was_seen_takes_bounded_room() -> None:
    seen = Seen(E, 0.9)
    for _ in range(3):
        seen.add(torch.zeros(50_000, 2, dtype=torch.long), torch.ones(50_000, 2))
        assert seen.held_bytes == 2 * 8 * E
    for _ in range(20 * MOST_CALLS):
        seen.add(torch.zeros(E // 2, 2, dtype=torch.long), torch.ones(E // 2, 2))
        assert seen.held_bytes <= MOST_CALLS * 12 * E + 2 * 8 * E


def test_what_was_seen_is_a_copy() -> None:
    seen, index, weights = Seen(E, 0.5), torch.tensor([[1, 2]]), torch.ones(1, 2)
    seen.add(index, weights)
    index.zero_()
    weights.zero_()
    assert seen.drained()[0][0].tolist() == [0, 0.5, 0.5, 0, 0, 0, 0, 0]


def test_warm_up_fixes_tau_by_what_the_routers_really_give() -> None:
    """What was known weighs as much as the steps since, whatever its scale, and tau is the last place's share."""
    for scale in (0.001, 1.0, 1000.0):
        controller = Controller.after_warmup(
            Control(places=2, ema=0.5, threshold=0.5), scale * np.array([[4.0, 3, 2, 1]])
        )
        assert not controller.begin(np.zeros((1, 4)), 1)
        gained = np.array([[0.0, 0.0, 3.0, 1.0]])
        assert controller.begin(gained, 1)
        known = np.array([4, 3, 2, 1]) / 10 * (4 / 0.5)
        np.testing.assert_allclose(controller.hotness[0], 0.5 * known + gained[0])
        np.testing.assert_allclose(controller.tau, [[0.5 * np.sort(0.5 * known + gained[0])[-2]]])


@settings(max_examples=examples(60), deadline=None)
@given(
    limit=st.integers(0, 400),
    wanted=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60),
)
def test_a_host_cache_keeps_what_was_used_last_within_its_bound(limit: int, wanted: list[tuple[int, bool]]) -> None:
    cache = HostCache(limit, (32, 64), 4)
    slots = max(1, min(4, limit // 96))
    assert cache.nbytes == slots * 96
    last: list[int] = []
    for expert, fails in wanted:
        held, _ = cache.take((0, expert, HIGH))
        assert (held is not None) == (expert in last[-slots:])
        if held is None:

            def write(into: torch.Tensor, expert: int = expert, fails: bool = fails) -> None:
                if fails:
                    raise OSError("gone")
                into.fill_(expert)

            if fails:
                last = last[-slots:][1:] if len(last) >= slots else last
                with pytest.raises(OSError, match="gone"):
                    cache.fill((0, expert, HIGH), write)
                continue
            held = cache.fill((0, expert, HIGH), write)
        last = [one for one in last[-slots:] if one != expert] + [expert]
        assert held.unique().tolist() == [expert]
        assert cache.kept_bytes <= cache.nbytes


def test_a_version_that_came_ahead_is_a_hit_once_and_pushes_out_nothing_that_is_wanted() -> None:
    cache = HostCache(0, (32, 64), 4)
    assert cache.room_ahead(HIGH, set())
    cache.fill((0, 1, HIGH), lambda into: into.fill_(1).sum().item(), ahead=True)  # type: ignore[arg-type, return-value]
    assert cache.take((0, 1, HIGH))[1]
    assert not cache.take((0, 1, HIGH))[1]
    assert not cache.room_ahead(HIGH, {(0, 1, HIGH)})
    assert cache.room_ahead(HIGH, {(0, 2, HIGH)})
    cache.clear()
    assert cache.kept_bytes == 0


def test_slots_from_which_copies_are_on_their_way_are_left_alone() -> None:
    """What nothing reads goes first, however young; where copies read everything, the oldest one is waited for."""
    streams, cache = LateStreams(), HostCache(2 * 96, (32, 64), 4)
    for expert in (0, 1):
        cache.fill((0, expert, HIGH), lambda into, expert=expert: into.fill_(expert).sum().item())  # type: ignore[misc]
    events = [streams.beside(lambda: None) for _ in range(2)]
    cache.hold((0, 0, HIGH), events[0])
    assert not cache.room_ahead(HIGH, {(0, 1, HIGH)})
    assert cache.room_ahead(HIGH, {(0, 0, HIGH)})
    cache.fill((0, 2, HIGH), lambda into: into.fill_(2).sum().item())  # type: ignore[arg-type, return-value]
    assert cache.take((0, 0, HIGH))[0] is not None
    assert cache.take((0, 1, HIGH))[0] is None
    cache.take((0, 2, HIGH))
    cache.hold((0, 2, HIGH), events[1])
    assert not cache.room_ahead(HIGH, set())
    assert not events[0].done()
    cache.fill((0, 3, HIGH), lambda into: into.fill_(3).sum().item())  # type: ignore[arg-type, return-value]
    assert events[0].done()
    assert not events[1].done()
    cache.clear()
    assert events[1].done(), "memory that is read is not given back"


@settings(max_examples=examples(60), deadline=None)
@given(
    memory=st.integers(0, 40_000),
    layers=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    transient=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_pools_stay_within_the_budget_and_share_no_block(
    memory: int, layers: list[int], transient: int, seed: int
) -> None:
    """Experts change at random, as copies make them change: a block of the new version, then the old one back."""
    budget = Budget(
        low_bytes=64, high_bytes=192, layers=layers, transient=transient, memory_bytes=memory, other_bytes={"all": 500}
    )
    if memory < budget.least_bytes + 500:
        return
    pools, rng = Pools(budget, 64), random.Random(seed)
    assert budget.pool_bytes <= budget.left_bytes
    assert pools.held.nbytes == 64 + budget.pool_bytes
    there = {}
    for layer, experts in enumerate(layers):
        for expert in range(experts):
            version = HIGH if expert < budget.places else LOW
            there[layer, expert] = version, pools.pools[version].take()
    for _ in range(200):
        place = rng.choice(list(there))
        version, block = there[place]
        fresh = pools.pools[1 - version].take()
        if fresh is not None:
            assert block is not None
            there[place] = 1 - version, fresh
            pools.pools[version].give_back(block)
        spans = sorted((start, start + pools.pools[of].size) for of, start in there.values() if start is not None)
        assert len(spans) == sum(layers)
        assert all(one[1] <= two[0] for one, two in itertools.pairwise(spans))
        assert spans[0][0] >= 64
        assert spans[-1][1] <= pools.held.nbytes


def trace(experts: list[list[list[int]]]) -> RoutingTrace:
    chosen = np.array(experts, dtype=np.int16)
    return RoutingTrace(
        layers=("a", "b"), num_experts=(3, 3), top_k=1, experts=chosen, lengths=np.array([len(chosen)], np.int32),
        prefill=np.array([0], np.int32), domains=("text",),
    )  # fmt: skip


def test_experts_follow_each_other_as_a_trace_says() -> None:
    found = coactivation(trace([[[0], [2]], [[0], [2]], [[0], [1]], [[1], [0]]]))
    np.testing.assert_allclose(found[0], [[0, 1 / 3, 2 / 3], [1, 0, 0], [1 / 4, 1 / 4, 2 / 4]])


def test_what_follows_hot_experts_is_soon_hot() -> None:
    follows = [np.array([[0, 0, 1.0], [1, 0, 0], [0, 1, 0]])]
    hotness = [np.array([0.9, 0.1, 0]), np.array([0.5, 0.4, 0.1])]
    high = [np.array([True, False, False])] * 2
    assert soon_hot(hotness, high, follows, 4) == [(1, 2)]
    assert soon_hot(hotness, high, follows, 0) == []
    assert soon_hot(hotness, [np.array([False, False, True])] * 2, follows, 4) == []
    assert soon_hot([np.zeros(3), np.ones(3)], high, follows, 4) == []
