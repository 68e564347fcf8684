"""Every method on random tables: budgets are kept, optimal is optimal, k-means does not see the order of experts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from random_inputs import BITS, expert_bytes, inputs_of, least_bytes, with_options

from moeq.artifacts.losses import SCHEMA, LossTable
from moeq.artifacts.targets import refusal, targets
from moeq.assigners import assign, mopeq, optimal, report, uniform
from moeq.assigners.inputs import AssignInputs
from moeq.assigners.online import decide
from moeq.assigners.sensitivity import columns, objective, tables
from moeq.errors import AssignmentError, BudgetError, FormatError
from moeq.recipe import AssignSection


@given(st.integers(0, 10**6), st.sampled_from([(1, 4), (2, 2)]), st.floats(0, 1))
@settings(max_examples=examples(60), deadline=None)
def test_optimal_equals_a_search_over_everything(seed: int, shape: tuple[int, int], share: float) -> None:
    inputs = inputs_of(seed, *shape)
    least = least_bytes(inputs)
    limit = int(least + share * 3 * least)
    inputs = with_options(inputs, method="optimal", expert_bytes=limit)
    best = np.inf
    for flat in itertools.product(BITS, repeat=shape[0] * shape[1]):
        bits = list(np.array(flat).reshape(shape))
        if expert_bytes(inputs, bits) <= limit:
            best = min(best, sum(t.losses[int(b)][e] for t, w in zip(tables(inputs), bits, strict=True)
                                 for e, b in enumerate(w)))  # fmt: skip
    found = assign(inputs)
    assert expert_bytes(inputs, found.bits()) <= limit
    assert objective(inputs, found) == pytest.approx(best, rel=1e-9, abs=1e-15)
    assert report.score(inputs, found).gap in (None, pytest.approx(0, abs=1e-9))


@given(
    st.integers(0, 10**6), st.integers(1, 4), st.integers(2, 16), st.fractions(1, 4, max_denominator=16),
    st.sampled_from(["none", "mass", "squared"]), st.sampled_from([None, "measured"]), st.booleans(),
)  # fmt: skip
@settings(max_examples=examples(60), deadline=None)
def test_every_method_keeps_its_budget_and_none_beats_optimal(
    seed: int, layers: int, experts: int, average: Fraction, weighting: str, measured: str | None, in_bytes: bool
) -> None:
    shared = {"loss_weighting": weighting, "layer_weighting": measured}
    inputs = inputs_of(seed, layers, experts)
    limit = int(least_bytes(inputs) * average)
    budget = {"expert_bytes": limit} if in_bytes else {"code_bits": str(average)}
    optimal = with_options(inputs, method="optimal", **budget, **shared)
    best = objective(optimal, assign(optimal))
    for method in ("prefix-split", "frequency", "optimal"):
        for scope in [None] if method == "prefix-split" else ["layer", "model"]:
            if scope == "layer" and method == "optimal" and in_bytes:
                continue  # a layer's share can be below its least
            mine = with_options(inputs, method=method, scope=scope, **budget, **shared)
            try:
                found = assign(mine)
            except AssignmentError:
                assert scope == "layer"
                assert in_bytes
                continue
            if in_bytes:
                assert expert_bytes(mine, found.bits()) <= limit
            else:
                assert found.code_bits() <= average
            assert objective(mine, found) >= best * (1 - 1e-9)
            assert report.score(mine, found).gap is None or report.score(mine, found).gap >= 0
    for method, bits in (("mopeq", None), ("uniform", 2), ("uniform", 8)):
        mine = with_options(inputs, method=method, bits=bits, **shared)
        found = assign(mine)
        score = report.score(mine, found)
        assert score.proven
        assert score.objective >= score.optimum * (1 - 1e-9)
    hot = with_options(inputs, method="budget", expert_bytes=2 * limit, cold_bits=1, hot_bits=4, **shared)
    assert expert_bytes(hot, assign(hot).bits()) <= 2 * limit


def test_clusters_take_the_widths_in_the_order_of_their_means() -> None:
    values = np.array([0.9, 5.0, 1.0, 5.1, 9.0, 0.95])
    assert mopeq.cluster(values, [2, 4, 3]).tolist() == [2, 3, 2, 3, 4, 2]
    assert mopeq.cluster(np.ones(4), (2, 3, 4)).tolist() == [4] * 4  # one cluster: the widest
    assert mopeq.cluster(np.array([1.0, 1.0, 2.0]), (2, 3, 4)).tolist() == [3, 3, 4]
    assert mopeq.spread(np.array([3.0, 3.0])).tolist() == [1.0, 1.0]


def test_frequency_at_two_and_a_half_and_three_bits() -> None:
    for average, widths in (("5/2", [3, 2]), ("3", [4, 2])):
        inputs = inputs_of(3, 2, 8, method="frequency", code_bits=average)
        for layer, bits in enumerate(assign(inputs).bits()):
            order = np.argsort(-inputs.profile.total(layer)[0], kind="stable")
            assert bits[order].tolist() == [widths[0]] * 4 + [widths[1]] * 4


@given(st.integers(0, 10**6), st.integers(2, 4), st.floats(0, 1), st.booleans())
@settings(max_examples=examples(40), deadline=None)
def test_frequency_pays_for_every_layer_before_it_widens_any(
    seed: int, layers: int, share: float, listed: bool
) -> None:
    """Layers differ in what a narrow expert takes of a wide one's bytes."""
    inputs = inputs_of(seed, layers, 4)
    rng = np.random.default_rng(seed)
    rising = np.cumsum(rng.integers(0, 30, (layers, len(BITS))), axis=1) + 1
    sizes = tuple({0: 0, 16: 999} | dict(zip(BITS, row.tolist(), strict=True)) for row in rising)
    inputs = replace(inputs, bytes=sizes)
    least, most = (sum(4 * own[bits] for own in sizes) for bits in (BITS[0], BITS[-1]))
    limit = int(least + share * (most - least))
    widths = {"widths": list(BITS)} if listed else {}
    for scope in ("layer", "model"):
        found = assign(with_options(inputs, method="frequency", expert_bytes=limit, scope=scope, **widths))
        assert least <= expert_bytes(inputs, found.bits()) <= limit


def test_budget_counts_hot_experts_and_picks_them_by_warm_up() -> None:
    inputs = inputs_of(5, 1, 6)
    cold, high = inputs.bytes[0][2], inputs.bytes[0][4]
    room = 6 * cold + 2 * (high - cold) + 77
    inputs = with_options(inputs, method="budget", expert_bytes=room + 100, transient_bytes=100)
    bits = assign(inputs).bits()[0]
    assert (bits == 4).sum() == 2
    assert set(np.argsort(-inputs.profile.scores[0][0].sum(0))[:2]) == set(np.flatnonzero(bits == 4))


def test_size_counts_the_rest_of_the_checkpoint() -> None:
    inputs = inputs_of(7, 2, 6)
    whole = least_bytes(inputs) + 1000
    bits = assign(with_options(inputs, method="optimal", size=whole)).bits()
    assert {int(width) for layer in bits for width in layer} == {1}
    with pytest.raises(AssignmentError, match=rf"size: {whole - 1} bytes .* the least possible is {whole} "):
        assign(with_options(inputs, method="optimal", size=whole - 1))


@pytest.mark.parametrize("target", list(targets()))
def test_optimal_stays_within_a_target(target: str) -> None:
    code_bits = "5/2" if min(targets()[target].widths) < 3 else "9/2"
    inputs = inputs_of(11, 3, 6, symmetric=True, method="optimal", code_bits=code_bits, target=target)
    if target == "llama.cpp":
        with pytest.raises(AssignmentError, match=r"ask for 4 code bits or more, or set losses.group_size: 256"):
            assign(inputs)
        inputs = replace(inputs, group_size=256)
    found = assign(inputs)
    assert refusal(targets()[target], found.expert_widths(), inputs.profile.layers, symmetric=True) is None
    prices = {price.target: price for price in report.prices(inputs, found)}
    assert objective(inputs, found) == pytest.approx(prices[target].objective)
    order = [prices[name].ratio for name in ("native", "auto-round", "vllm-cuda")]
    assert order == sorted(order)
    assert order[0] == pytest.approx(1)


def test_a_target_refuses_what_it_cannot_load() -> None:
    inputs = inputs_of(11, 3, 6, method="prefix-split", code_bits="5/2", target="vllm")
    with pytest.raises(FormatError, match=r"target vllm: .*symmetric grids only"):
        assign(inputs)
    with pytest.raises(FormatError, match=r"target vllm: layer\.\d, expert \d: \d bits.*method optimal"):
        assign(replace(inputs, symmetric=True))
    one = inputs_of(11, 3, 6, method="uniform", bits=3, target="llama.cpp", symmetric=True)
    with pytest.raises(FormatError, match=r"3 bits; llama.cpp loads 4, 5, 8, 16 of this grid"):
        assign(one)
    with pytest.raises(FormatError, match="symmetric grids only"):
        assign(with_options(inputs, method="optimal", code_bits=3, target="transformers"))
    one = with_options(inputs, method="uniform", bits=1, target="gptqmodel")
    with pytest.raises(FormatError, match=r"layer\.0, expert 0: 1 bits; gptqmodel loads 2, 3, 4, 8, 16"):
        assign(one)


def test_what_a_target_never_loads_is_said_before_the_budget() -> None:
    for symmetric, said in ((False, "vllm reads symmetric grids only"), (True, "cannot be met")):
        inputs = inputs_of(11, 3, 6, symmetric=symmetric, method="optimal", code_bits="5/2")
        (price,) = report.prices(inputs, assign(inputs), ["vllm"])
        assert said in str(price.refusal)


def test_one_width_for_all_says_what_the_next_wider_takes() -> None:
    inputs = inputs_of(13, 2, 8, method="uniform", bits=2)
    assert uniform.remark(inputs, assign(inputs)) is None  # the width was asked for
    widths = inputs.measured()
    size, weights = 8 * sum(one[widths[1]] for one in inputs.bytes), 8 * sum(inputs.weights)
    short = with_options(inputs, method="uniform", expert_bytes=size - 1)
    assert uniform.remark(short, assign(short)) == (
        f"uniform: {widths[0]} bit within the budget; {widths[1]} take {8 * size / weights:.4g} a weight"
    )
    widest = with_options(inputs, method="uniform", expert_bytes=10 * size * max(widths))
    assert uniform.remark(widest, assign(widest)) is None
    of_model = with_options(replace(inputs, symmetric=True), method="optimal", expert_bytes=size, target="transformers")
    said = optimal.remark(of_model, assign(of_model)) or ""  # of a budget that is met well below what was asked for
    assert said.startswith(f"optimal: {widths[1]} bits within the budget; {widths[2]} take ")
    mixed = with_options(inputs, method="optimal", expert_bytes=size)
    assert optimal.remark(mixed, assign(mixed)) is None


def test_frontier_marks_what_is_dominated() -> None:
    inputs = inputs_of(13, 2, 8, method="optimal", code_bits=2)
    points = report.frontier(inputs, ("3/2", "2", "3"), assign)
    assert {"uniform", "prefix-split", "frequency", "optimal", "mopeq hybrid within layers"} <= {
        p.method for p in points
    }
    assert not any(point.dominated for point in points if point.method == "optimal")
    size, weights = 8 * sum(one[2] for one in inputs.bytes), 8 * sum(inputs.weights)
    one_width = next(point for point in points if point.method == "uniform" and point.expert_bytes == size)
    assert one_width.bits_per_weight == 8 * size / weights > 2
    assert one_width.dominated


@pytest.mark.parametrize("value", [np.nan, -1.0, np.inf])
def test_bad_tables_name_layer_and_expert(value: float) -> None:
    inputs = inputs_of(17, 2, 4, method="optimal", code_bits=2)
    rows = inputs.losses.rows()
    next(r for r in rows if (r["layer"], r["expert"], r["bits"]) == (1, 2, 3))["loss"] = value
    assert_refused(inputs, rows, r"layer\.1, expert 2: the loss at 3 bits is")


@pytest.mark.parametrize("gone", [3, 1])
def test_missing_experts_name_layer_and_expert(gone: int) -> None:
    inputs = inputs_of(17, 2, 4, method="optimal", code_bits=2)
    rows = [r for r in inputs.losses.rows() if (r["layer"], r["expert"]) != (0, gone)]
    assert_refused(inputs, rows, rf"layer\.0, expert {gone}: the loss at 1 bits is missing")


def assert_refused(inputs: AssignInputs, rows: list[dict[str, object]], message: str) -> None:
    import pyarrow as pa

    for method in ("optimal", "prefix-split"):
        broken = replace(
            inputs,
            losses=LossTable(pa.Table.from_pylist(rows, schema=SCHEMA)),
            config=AssignSection(method=method, code_bits=2),
            memo={},
        )
        with pytest.raises(AssignmentError, match=message):
            assign(broken)


def test_columns_have_a_row_for_every_expert() -> None:
    inputs = inputs_of(19, 2, 4, method="optimal", code_bits=2)
    found = columns(inputs, inputs.traces(), sampled=[np.zeros(4)] * 2)
    assert {len(values) for values in found.values()} == {8}
    assert found["frobenius_hessian_trace"] == np.concatenate(inputs.traces()).tolist()
    assert found["sampled_hessian_trace"] == [0.0] * 8
    assert (min(found["hybrid_importance"]), max(found["hybrid_importance"]) <= 1) == (0.0, True)
    assert "sampled_hessian_trace" not in columns(inputs, inputs.traces())
    assert found["bytes_2"][0] == inputs.bytes[0][2]
    assert found["calibration_hessian_trace"] == [1.0] * 8
    assert sum(found["routing_mass"][:4]) == pytest.approx(1)


def test_measured_layer_weights_make_the_objective_a_divergence() -> None:
    inputs = inputs_of(23, 3, 6, method="uniform", bits=2, layer_weighting="measured", loss_weighting="squared")
    assert objective(inputs, assign(inputs)) == pytest.approx(sum(inputs.effects.divergence))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("gpu_experts", [0, 2, 7])
def test_online_decision_equals_the_assigner(weighted: bool, gpu_experts: int) -> None:
    options = {"gpu_experts": gpu_experts, "loss_weighting": "mass" if weighted else "none"}
    inputs = inputs_of(29, 3, 7, method="prefix-split", code_bits="7/3", **options)
    wanted = assign(inputs)
    counts, scores = (np.stack(part) for part in zip(*(inputs.profile.total(n) for n in range(3)), strict=True))
    losses = np.stack([np.stack([one[b] for b in (1, 2, 3, 4)], 1) for one in inputs.losses.matrix("gptq")])
    found = decide(counts, scores, losses, "7/3", gpu_experts=gpu_experts, weighted=weighted)
    assert found.bits.tolist() == [bits.tolist() for bits in wanted.bits()]
    assert found.hot.tolist() == [hot.tolist() for hot in wanted.hot()]


Section = Callable[..., AssignSection]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "uniform"}, "method uniform needs bits, bits_per_weight, expert_bytes or size"),
        ({"method": "optimal", "code_bits": 2, "size": "1GiB"}, "one budget is enough"),
        ({"method": "mopeq", "code_bits": 2}, "code_bits belongs to frequency, optimal or prefix-split"),
        ({"method": "uniform", "bits": 2, "metric": "hessian"}, "metric belongs to mopeq"),
        ({"method": "budget", "size": "1GiB", "hot_bits": 2, "cold_bits": 3}, "hot_bits must not be below"),
        ({"method": "optimal", "code_bits": 5, "widths": [2, 4]}, "between 2 and 4"),
        ({"method": "optimal", "code_bits": 2, "widths": [2, 2]}, "none twice"),
    ],
)
def test_sections_that_make_no_sense(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AssignSection(**options)


def test_impossible_average(tmp_path: Path) -> None:
    with pytest.raises(AssignmentError, match=r"average of 1 code bits cannot be met .*; ask for 2 code bits or more"):
        assign(inputs_of(1, 2, 4, method="optimal", code_bits=1, target="gptqmodel"))


@pytest.mark.parametrize("method", ["prefix-split", "frequency", "optimal", "uniform", "budget"])
def test_stored_bits_are_a_limit_on_bytes(method: str) -> None:
    """The same assignment comes of either; the least that a refusal names can be had."""
    inputs = inputs_of(5, 2, 6)
    weights, more = 6 * sum(inputs.weights), {"cold_bits": 1} if method == "budget" else {}
    for bits in (Fraction(5, 2), Fraction(10, 3), Fraction(4)):
        stored = assign(with_options(inputs, method=method, bits_per_weight=str(bits), **more))
        in_bytes = assign(with_options(inputs, method=method, expert_bytes=int(bits * weights / 8), **more))
        assert stored.layers == in_bytes.layers
        assert 8 * expert_bytes(inputs, stored.bits()) <= bits * weights
    with pytest.raises(BudgetError, match=r"1\.1 bits a weight cannot be met; the least possible is") as caught:
        assign(with_options(inputs, method=method, bits_per_weight="1.1", **more))
    least = str(caught.value).partition("ask for at least ")[2].split(",")[0]
    assign(with_options(inputs, method="optimal", bits_per_weight=least))
    assert str(caught.value).endswith(", or lengthen losses.group_size")


def test_groups_of_one_length_are_not_to_be_lengthened() -> None:
    inputs = replace(inputs_of(5, 2, 6, method="optimal", bits_per_weight="1.1"), codebook="mxfp4")
    with pytest.raises(BudgetError, match=r"ask for at least [\d.]+$"):
        assign(inputs)


def test_stored_bits_leave_experts_on_the_gpu_out() -> None:
    inputs = inputs_of(5, 2, 6, method="optimal", bits_per_weight=3, gpu_experts=2)
    found = assign(inputs)
    cold = [(n, c.bits) for n, layer in enumerate(found.layers) for c in layer.experts if c.tier == "ndp"]
    size = sum(inputs.bytes[layer][bits] for layer, bits in cold)
    weights = sum(inputs.weights[layer] for layer, _ in cold)
    assert 2.9 < 8 * size / weights <= 3
