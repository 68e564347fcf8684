"""A server under a rate of requests: a queue that theory knows, the estimator's own steps, and what cannot keep up."""

from __future__ import annotations

import numpy as np
import pytest

from moeq.errors import EstimateError
from moeq.estimator import load_geometry, load_hardware, uniform_placement
from moeq.estimator.points import policy_points
from moeq.estimator.serving import ServedRow, Steps, serve, served, steps_of
from moeq.estimator.simulation import Simulation, build_simulation

MIXTRAL = load_geometry("mixtral-8x7b")


def simulation(name: str = "h100-ndp-cxl", hot: int = 4) -> Simulation:
    placement = uniform_placement(MIXTRAL, bits=3, hot_experts=hot)
    return build_simulation(MIXTRAL, load_hardware(name), placement, samples=64)


def one(steps: Steps, rate: float, outputs: int, requests: int = 2000) -> ServedRow:
    return serve(steps, policy="x", rate=rate, input_tokens=64, output_tokens=outputs, requests=requests)


@pytest.mark.parametrize("load", [0.2, 0.5, 0.8])
def test_prompts_alone_are_a_queue_with_one_server(load: float) -> None:
    """M/D/1: the mean wait is load / (2 (1 - load)) services (Pollaczek and Khinchine)."""
    steps = Steps(prompt=0.75, batches=np.array([1]), seconds=np.array([0.25]))
    arrivals = 60_000
    row = one(steps, load, 1, arrivals)
    waits = np.array(row.first_seconds) - 1.0
    assert row.busy_share == pytest.approx(load, rel=0.05)
    assert row.keeps_up
    service, now, total = 1.0, 0.0, []
    for arrival in np.cumsum(np.random.default_rng(0).exponential(1 / load, arrivals)):
        now = max(now, arrival) + service
        total.append(now - arrival - service)
    assert np.mean(total) == pytest.approx(load / (2 * (1 - load)), rel=0.1)
    assert waits == pytest.approx(np.quantile(total[arrivals // 10 :], (0.5, 0.9, 0.99)), abs=1e-6)


def test_a_request_alone_takes_what_the_estimator_says() -> None:
    """As many decode steps as tokens, the first of them the first's: what a point of the grid counts."""
    made = simulation()
    steps = steps_of(made, "context_aware", 128, 32)
    decoded, read = {1: made.decode(1)}, {(1, 128): made.prefill(1, 128)}
    points = policy_points(made, [(1, 128, 32)], decoded, read, kv_growth=False)
    of_grid = next(point for point in points if point.policy == "context_aware")
    row = one(steps, 1e-6, 32, 50)
    assert row.first_seconds == pytest.approx([of_grid.time_to_first_token_seconds] * 3)
    assert row.first_seconds[0] + 31 * row.token_seconds[0] == pytest.approx(of_grid.end_to_end_seconds)
    assert row.most_rate == pytest.approx(1 / (steps.prompt + 32 * steps.step(steps.largest) / steps.largest))
    assert row.token_seconds == pytest.approx([steps.step(1)] * 3)
    assert row.mean_batch == 1


def test_steps_of_two_sequences_are_shared() -> None:
    """The second arrives during the first's prompt: a step alone, ten together, the second's last alone."""
    steps = Steps(prompt=1.0, batches=np.array([1, 2]), seconds=np.array([0.1, 0.15]))
    row = one(steps, 1e9, 11, 2)
    assert row.tokens_per_second == pytest.approx(22 / (2 * 1.0 + 2 * 0.1 + 10 * 0.15))
    assert row.mean_batch == pytest.approx(22 / 12)


@pytest.mark.parametrize("rate", [0.02, 0.4, 0.9, 5.0])
def test_steps_that_are_alike_may_be_taken_at_once(rate: float) -> None:
    """A server that goes step by step, token by token."""
    steps = Steps(prompt=0.7, batches=np.array([1, 2, 3]), seconds=np.array([0.1, 0.15, 0.16]))
    requests, outputs = 300, 9
    arrivals = np.cumsum(np.random.default_rng(0).exponential(1 / rate, requests))
    now, next_one, running, first, last = 0.0, 0, {}, {}, {}
    while len(last) < requests:
        if not running and arrivals[next_one] > now:
            now = arrivals[next_one]
        here = int(np.searchsorted(arrivals, now, side="right"))
        while next_one < here and len(running) < 3:
            now += 0.7
            running[next_one] = outputs
            next_one += 1
        now += steps.step(len(running))
        for request in list(running):
            running[request] -= 1
            first.setdefault(request, now)
            if running[request] == 0:
                last[request] = now
                del running[request]
    counted = range(requests // 10, requests)
    row = one(steps, rate, outputs, requests)
    quantiles = (0.5, 0.9, 0.99)
    assert row.first_seconds == pytest.approx(np.quantile([first[r] - arrivals[r] for r in counted], quantiles))
    later = [(last[r] - first[r]) / (outputs - 1) for r in counted]
    assert row.token_seconds == pytest.approx(np.quantile(later, quantiles))


def test_more_requests_wait_longer_until_the_queue_grows() -> None:
    made = simulation()
    rows = {rate: served(made, ["context_aware", "static_mixed"], rate, 512, 64, 0) for rate in (0.05, 0.3, 40.0)}
    for index in range(2):
        first = [each[index].first_seconds[-1] for each in rows.values()]
        assert first == sorted(first)
        assert [each[index].keeps_up for each in rows.values()] == [True, rows[0.3][index].most_rate > 0.3, False]
        assert all(each[index].tokens_per_second <= 64 * each[index].most_rate * 1.01 for each in rows.values())


def test_the_largest_batch_is_what_fits() -> None:
    small = steps_of(simulation("a100-host-pcie4", hot=6), "context_aware", 2048, 2048).largest
    assert small < steps_of(simulation("h200-host-pcie5", hot=6), "context_aware", 2048, 2048).largest
    with pytest.raises(EstimateError, match="--rate, context_aware: needs"):
        steps_of(simulation("a100-host-pcie4", hot=8), "context_aware", 2048, 2048)


def test_batches_are_not_only_those_that_double() -> None:
    """Beside five FP16 experts a layer 80 GB hold some tens of sequences of 4,096 tokens, no power of two."""
    made = simulation("a100-host-pcie4", hot=5)
    steps = steps_of(made, "context_aware", 2048, 2048)
    assert made.over_memory(steps.largest, 4096) is None
    assert made.over_memory(steps.largest + 1, 4096) is not None
    assert steps.batches.tolist() == [1, 2, 4, 8, 16, 32, steps.largest]
    assert steps.largest not in (32, 64)


def test_the_largest_batch_is_what_a_policy_has_room_for_itself() -> None:
    placement = uniform_placement(MIXTRAL, bits=8, hot_experts=0)
    made = build_simulation(MIXTRAL, load_hardware("h100-ndp-cxl"), placement, samples=16)
    gpu = load_hardware("h100-ndp-cxl").all_gpus.memory_capacity_bytes
    experts = MIXTRAL.num_layers * MIXTRAL.num_experts * MIXTRAL.expert_parameters * 8.125 / 8  # a scale a group
    room = (gpu - MIXTRAL.non_expert_bytes - experts) // float(MIXTRAL.kv_bytes(8192))
    assert steps_of(made, "static_mixed", 4096, 4096).largest == room > 1
    for policy in ("monde_opt", "hobbit"):  # which hold nothing of the placement's experts on the GPU
        assert (
            steps_of(simulation(hot=6), policy, 1024, 512).largest
            == steps_of(simulation(hot=0), policy, 1024, 512).largest
        )


def test_policies_that_cannot_hold_a_request_are_left_out() -> None:
    placement = uniform_placement(MIXTRAL, bits=12, hot_experts=0)
    made = build_simulation(MIXTRAL, load_hardware("h100-ndp-cxl"), placement, samples=16)
    rows = served(made, ["static_mixed", "monde_opt"], 0.01, 65_536, 65_536, 0)
    assert [row.policy for row in rows] == ["monde_opt"]
    with pytest.raises(EstimateError, match="static_mixed"):
        served(made, ["static_mixed"], 0.01, 65_536, 65_536, 0)
