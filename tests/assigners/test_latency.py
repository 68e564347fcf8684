"""The NDP latency beside the budget: kept, optimal, the estimator's own, and refused where it is impossible."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
from assigners.test_projections import with_matrices
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from random_inputs import BITS, expert_bytes, inputs_of, least_bytes

from moeq.assigners import assign, latency, report
from moeq.assigners.inputs import AssignInputs, activation_rate
from moeq.assigners.sensitivity import matrix_tables, objective, tables
from moeq.errors import AssignmentError
from moeq.estimator import Grid, ModelGeometry, Placement, estimate, known_hardware, load_hardware
from moeq.estimator.terms import expert_seconds
from moeq.recipe import AssignSection

PARAMETERS = 3 * 64 * 32


def timed(inputs: AssignInputs, **options: object) -> AssignInputs:
    """The inputs with the times of their experts on the paper's hardware."""
    widths = [*BITS, 16]
    times = expert_seconds(PARAMETERS, widths, load_hardware("paper-ctxmoe"), group_size=64, zero_points=True)
    seconds = dict(zip(widths, times.tolist(), strict=True))
    return replace(
        inputs, config=AssignSection(**options), ndp_seconds=(seconds,) * len(inputs.profile.layers), memo={}
    )


def milliseconds(inputs: AssignInputs, bits: list[np.ndarray]) -> float:
    return 1e3 * sum(
        float(activation_rate(inputs, layer)[expert]) * inputs.ndp_seconds[layer][int(width)]
        for layer, widths in enumerate(bits)
        for expert, width in enumerate(widths)
    )


@pytest.mark.full
@given(st.integers(0, 10**6), st.sampled_from([(1, 5), (2, 2)]), st.floats(0.1, 1), st.floats(0, 1))
@settings(max_examples=examples(60), deadline=None)
def test_optimal_within_a_latency_equals_a_search_over_everything(
    seed: int, shape: tuple[int, int], share: float, time_share: float
) -> None:
    inputs = timed(inputs_of(seed, *shape, method="uniform", bits=2), method="uniform", bits=2)
    least, ends = least_bytes(inputs), [np.full(shape, bits) for bits in (1, 8)]
    limit = int(least + share * 3 * least)
    low, high = (milliseconds(inputs, list(bits)) for bits in ends)
    most = low + time_share * (high - low) or 1e-9
    inputs = timed(inputs, method="optimal", expert_bytes=limit, ndp_latency_ms=most)
    best = np.inf
    for flat in itertools.product(BITS, repeat=shape[0] * shape[1]):
        bits = list(np.array(flat).reshape(shape))
        if expert_bytes(inputs, bits) <= limit and milliseconds(inputs, bits) <= most * (1 + 1e-12):
            best = min(best, sum(t.losses[int(b)][e] for t, w in zip(tables(inputs), bits, strict=True)
                                 for e, b in enumerate(w)))  # fmt: skip
    found = assign(inputs)
    assert expert_bytes(inputs, found.bits()) <= limit
    assert 1e3 * latency.achieved(inputs, found) == pytest.approx(milliseconds(inputs, found.bits()))
    assert milliseconds(inputs, found.bits()) <= most * (1 + 1e-9)
    assert objective(inputs, found) == pytest.approx(best, rel=1e-9, abs=1e-15)
    score = report.score(inputs, found)
    assert score.proven
    assert score.gap in (None, pytest.approx(0, abs=1e-9))


@pytest.mark.cases(6)
@pytest.mark.parametrize("hardware", [name for name in known_hardware() if load_hardware(name).ndp.computes])
@pytest.mark.parametrize("gpu_experts", [0, 2])
def test_it_is_the_estimators_time_of_the_near_data_side(hardware: str, gpu_experts: int) -> None:
    """With routing that is alike for all experts, the estimate of the same placement spends the same on the NDP."""
    inputs = inputs_of(3, 2, 6, method="frequency", code_bits="5/2", gpu_experts=gpu_experts)
    even = np.full((1, 2, 6), 100)
    profile = replace(inputs.profile, counts=(even, even), tokens=np.array([[300, 300]]))
    device = load_hardware(hardware)
    widths = [*BITS, 16]
    times = expert_seconds(PARAMETERS, widths, device, group_size=64, zero_points=True)
    inputs = replace(inputs, profile=profile, ndp_seconds=(dict(zip(widths, times.tolist(), strict=True)),) * 2)
    found = assign(inputs)
    geometry = ModelGeometry(
        name="small", num_layers=2, hidden_size=64, intermediate_size=32, num_experts=6, top_k=2,
        num_attention_heads=4, num_key_value_heads=4, head_dim=16, non_expert_parameters=1000,
    )  # fmt: skip
    placement = Placement(name="x", bits=np.stack(found.bits()), hot=np.stack(found.hot()))
    made = estimate(
        geometry, device, placement, group_size=64, zero_points=True, grid=Grid(inputs=(128,), outputs=(512,))
    )
    term = next(row for row in made.terms if (row.policy, row.term) == ("context_aware", "ndp_experts"))
    assert latency.achieved(inputs, found) == pytest.approx(term.seconds)


def test_a_latency_costs_objective_and_only_where_it_binds() -> None:
    inputs = timed(inputs_of(5, 3, 12, method="uniform", bits=2), method="optimal", code_bits="5/2")
    free = assign(inputs)
    took = 1e3 * latency.achieved(inputs, free)
    loose = timed(inputs, method="optimal", code_bits="5/2", ndp_latency_ms=took)
    assert [bits.tolist() for bits in assign(loose).bits()] == [bits.tolist() for bits in free.bits()]
    tight = timed(inputs, method="optimal", code_bits="5/2", ndp_latency_ms=0.8 * took)
    found = assign(tight)
    assert 1e3 * latency.achieved(tight, found) <= 0.8 * took
    assert objective(tight, found) > objective(inputs, free)


@given(st.integers(0, 10**6), st.sampled_from([(1, 2), (2, 1)]), st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=examples(25), deadline=None)
def test_matrices_within_a_latency_equal_a_search_over_everything(
    seed: int, shape: tuple[int, int], share: float, time_share: float
) -> None:
    """Every matrix takes its part of the time that its expert would take at the matrix's width."""
    names, widths = ("up_proj", "down_proj"), (1, 2, 4)
    inputs = with_matrices(seed, *shape, names)
    limit = int(sum(one[1] * shape[1] for one in inputs.bytes) * (1 + 3 * share))
    inputs = timed(inputs, method="uniform", bits=2)
    low, high = (milliseconds(inputs, list(np.full(shape, bits))) for bits in (1, 4))
    most = low + time_share * (high - low) or 1e-9
    options = {"expert_bytes": limit, "granularity": "projection", "widths": list(widths)}
    inputs = timed(inputs, method="optimal", ndp_latency_ms=most, **options)
    items = list(itertools.product(range(shape[0]), range(shape[1]), names))
    best = np.inf
    for flat in itertools.product(widths, repeat=len(items)):
        chosen = list(zip(items, flat, strict=True))
        cost = sum(inputs.matrix_bytes[layer][name][bits] for (layer, _, name), bits in chosen)
        rates = [activation_rate(inputs, layer)[expert] for (layer, expert, _), _ in chosen]
        taken = 1e3 * sum(r * inputs.ndp_seconds[0][bits] / 2 for r, (_, bits) in zip(rates, chosen, strict=True))
        if cost <= limit and taken <= most * (1 + 1e-12):
            best = min(best, sum(matrix_tables(inputs)[la][na][bits][ex] for (la, ex, na), bits in chosen))
    found = assign(inputs)
    assert 1e3 * latency.achieved(inputs, found) <= most * (1 + 1e-9)
    assert objective(inputs, found) == pytest.approx(best, rel=1e-9, abs=1e-15)


def test_experts_on_the_gpu_take_no_time_of_the_ndp() -> None:
    inputs = timed(inputs_of(7, 2, 6, method="uniform", bits=2), method="uniform", bits=2, gpu_experts=6)
    assert latency.achieved(inputs, assign(inputs)) == 0
    some = timed(inputs, method="optimal", code_bits=2, gpu_experts=3)
    least = 1e3 * latency.achieved(some, assign(timed(some, method="uniform", bits=1, gpu_experts=3)))
    kept = timed(some, method="optimal", code_bits=2, gpu_experts=3, ndp_latency_ms=1.01 * least)
    assert 1e3 * latency.achieved(kept, assign(kept)) <= 1.01 * least


@pytest.mark.parametrize("target", ["vllm-cuda", "transformers", "gptqmodel"])
def test_it_holds_within_a_target(target: str) -> None:
    inputs = inputs_of(11, 3, 6, symmetric=True, method="uniform", bits=2)
    free = timed(inputs, method="optimal", code_bits=4, target=target)
    most = 800 * latency.achieved(free, assign(free))
    kept = timed(inputs, method="optimal", code_bits=4, target=target, ndp_latency_ms=most)
    found = assign(kept)
    assert 1e3 * latency.achieved(kept, found) <= most
    prices = {price.target: price for price in report.prices(kept, found)}
    assert objective(kept, found) == pytest.approx(prices[target].objective)


def test_impossible_ones_name_the_least_possible_which_can_be_had() -> None:
    inputs = timed(inputs_of(13, 2, 5, method="uniform", bits=2), method="optimal", code_bits=2, ndp_latency_ms=1e-9)
    with pytest.raises(AssignmentError, match=r"ndp_latency_ms: 1e-09 ms a token on the NDP cannot be met") as refused:
        assign(inputs)
    least = float(re.findall(r"the least possible is ([\d.e-]+)", str(refused.value))[0])
    found = assign(timed(inputs, method="optimal", code_bits=2, ndp_latency_ms=least))
    assert {int(width) for bits, layer in zip(found.bits(), range(2), strict=True)
            for width, rate in zip(bits, activation_rate(inputs, layer), strict=True) if rate > 0} == {1}  # fmt: skip


def test_times_that_were_not_given_are_asked_for() -> None:
    with pytest.raises(AssignmentError, match="the times of the experts are not known"):
        assign(inputs_of(1, method="optimal", code_bits=2, ndp_latency_ms=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "uniform", "bits": 2, "ndp_latency_ms": 1}, "ndp_latency_ms belongs to optimal"),
        ({"method": "optimal", "code_bits": 2, "ndp_latency_ms": 0}, "greater than 0"),
        ({"method": "optimal", "code_bits": 2, "ndp_latency_ms": 1, "scope": "layer"}, "needs scope model"),
    ],
)
def test_sections_that_make_no_sense(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AssignSection(**options)


def test_an_unproven_optimum_says_how_far_it_may_be() -> None:
    open_ = report.Score(objective=1.01, optimum=1.01, proven=False, bound=1.0)
    assert open_.as_json()["gap_to_bound"] == pytest.approx(0.01)
    assert "bound" not in report.Score(objective=1.0, optimum=1.0, proven=True, bound=1.0).as_json()
    assert report.Score(objective=1.0 + 2**-52, optimum=1.0, proven=True, bound=1.0).gap == 0.0, "as a run prints it"
