"""Experts that may be dropped: the exact optimum, as wholes, and none where a target or the table has them not."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from random_inputs import NAMES, inputs_of, spent, table_of, with_matrices, with_options

from moeq.artifacts.assignment import DROPPED, matrix_widths
from moeq.assigners import assign, report
from moeq.assigners.inputs import AssignInputs
from moeq.assigners.sensitivity import matrix_tables, objective, tables
from moeq.errors import AssignmentError

WIDTHS = [1, 2, 4]


def least_of_everything(inputs: AssignInputs, layers: int, experts: int, names: tuple[str, ...], limit: int) -> float:
    """The least objective of all ways to give matrices widths and to drop experts, one after the other."""
    ways = [*itertools.product(WIDTHS, repeat=len(names)), None]
    best = np.inf
    for chosen in itertools.product(ways, repeat=layers * experts):
        cost, loss = 0, 0.0
        for place, way in enumerate(chosen):
            layer, expert = divmod(place, experts)
            if way is None:
                loss += tables(inputs)[layer].losses[DROPPED][expert]
                continue
            for name, bits in zip(names, way, strict=True):
                cost += inputs.matrix_bytes[layer][name][bits]
                loss += matrix_tables(inputs)[layer][name][bits][expert]
        if cost <= limit:
            best = min(best, loss)
    return float(best)


@given(st.integers(0, 10**6), st.sampled_from([(1, 2), (2, 1)]), st.floats(0, 1))
@settings(max_examples=examples(15), deadline=None)
def test_dropping_equals_a_search_over_everything(seed: int, shape: tuple[int, int], share: float) -> None:
    names = NAMES[1:]
    inputs = with_matrices(seed, *shape, names)
    limit = 1 + int(sum(one[4] for one in inputs.bytes) * shape[1] * share)
    inputs = with_options(
        inputs, method="optimal", expert_bytes=limit, granularity="projection", widths=WIDTHS, drop=True
    )
    found = assign(inputs)
    assert spent(inputs, found) <= limit
    wanted = least_of_everything(inputs, *shape, names, limit)
    assert objective(inputs, found) == pytest.approx(wanted, rel=1e-9, abs=1e-15)


@given(
    st.integers(0, 10**6), st.integers(1, 3), st.integers(2, 6), st.floats(0.2, 1.5),
    st.sampled_from(["none", "mass", "squared"]), st.sampled_from(["expert", "projection"]),
    st.sampled_from(["model", "layer"]), st.sampled_from([0, 1]),
)  # fmt: skip
@settings(max_examples=examples(40), deadline=None)
def test_that_experts_may_be_dropped_never_costs(
    seed: int, layers: int, experts: int, share: float, weighting: str, granularity: str, scope: str, hot: int
) -> None:
    inputs = with_matrices(seed, layers, experts)
    least = sum(one[1] * (experts - hot) + one[16] * hot for one in inputs.bytes)
    common = {"method": "optimal", "expert_bytes": int(least * (1 + share)), "granularity": granularity, "scope": scope}
    common |= {"loss_weighting": weighting, "gpu_experts": hot}
    results = {}
    for drop in (False, True):
        own = with_options(inputs, **common, drop=drop)
        try:
            results[drop] = assign(own)
        except AssignmentError:
            assert scope == "layer"  # its share of the budget can be too small without dropping
            assert not drop
            continue
        assert spent(own, results[drop]) <= common["expert_bytes"]
        for layer in results[drop].layers:
            for choice in layer.experts:
                assert choice.bits or drop
                assert DROPPED not in matrix_widths(choice.widths) or choice.widths == DROPPED
                assert (choice.quantizer is None) == (choice.bits in (DROPPED, 16))
                assert choice.tier != "gpu" or choice.bits == 16
    if len(results) == 2:
        kept, free = (objective(inputs_with(inputs, common), results[drop]) for drop in (False, True))
        assert free <= kept * (1 + 1e-9)


def inputs_with(inputs: AssignInputs, options: dict[str, object]) -> AssignInputs:
    return with_options(inputs, **options, drop=True)


def test_less_than_the_narrowest_width_can_be_asked_for() -> None:
    inputs = with_matrices(3, 2, 6)
    half = sum(one[1] * 6 for one in inputs.bytes) // 2
    options = {"method": "optimal", "expert_bytes": half, "granularity": "projection"}
    with pytest.raises(AssignmentError, match="least possible"):
        assign(with_options(inputs, **options))
    dropping = assign(with_options(inputs, **options, drop=True))
    assert 0 < sum(choice.is_dropped for layer in dropping.layers for choice in layer.experts) < 12
    found = report.score(with_options(inputs, **options, drop=True), dropping)
    assert found.proven
    assert found.gap == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("granularity", ["expert", "projection"])
def test_what_files_say_of_dropped_experts_is_within_the_size(granularity: str) -> None:
    inputs = with_matrices(3, 2, 6)
    records = tuple({name: dict.fromkeys(own, 7) for name, own in layer.items()} for layer in inputs.matrix_bytes)
    inputs = replace(inputs, record_bytes=records)
    size = inputs.other_bytes + sum(one[1] * 6 for one in inputs.bytes) // 2
    found = assign(with_options(inputs, method="optimal", size=size, granularity=granularity, drop=True))
    assert found.drops
    assert inputs.other_bytes + spent(inputs.in_the_checkpoint(), found) <= size


def test_an_expert_that_calibration_hardly_reached_counts_as_if_it_could_be_reached() -> None:
    """Never given a token it would cost nothing to drop; it counts with 4 tokens of what the others weigh."""
    inputs = inputs_of(5, 1, 4, method="optimal", code_bits=2, loss_weighting="squared", drop=True)
    counts = np.array([0, 100, 100, 10_000])
    profile = replace(inputs.profile, counts=(np.stack([counts, 0 * counts])[None],))
    rows = [row | {"weighted_energy": 1.0} for row in inputs.losses.rows()]  # type: ignore[union-attr]
    dropped = tables(replace(inputs, profile=profile, losses=table_of(rows), memo={}))[0].losses[DROPPED]
    per_token = dropped[3] / (np.sqrt(10_001) + 1) ** 2
    assert dropped[0] == pytest.approx(4 * per_token)
    assert dropped[1] == pytest.approx((np.sqrt(101) + 1) ** 2 * per_token)


def test_none_is_dropped_where_that_cannot_be() -> None:
    inputs = with_matrices(3, 2, 6)
    low = sum(one[2] * 6 for one in inputs.bytes)
    options = {"method": "optimal", "expert_bytes": low, "granularity": "projection", "drop": True}
    assert assign(with_options(inputs, **options)).drops
    assert not assign(with_options(replace(inputs, droppable=False), **options)).drops, "experts with biases"
    within = with_options(replace(inputs, symmetric=True), **options, target="auto-round")
    assert not assign(replace(within, config=within.config.model_copy(update={"granularity": "expert"}))).drops


def test_a_table_that_does_not_say_what_experts_answer() -> None:
    inputs = with_matrices(3, 1, 4)
    assert inputs.losses is not None
    nulls = pa.nulls(len(inputs.losses.table), pa.float64())
    place = inputs.losses.table.schema.get_field_index("weighted_energy")
    before = replace(inputs.losses, table=inputs.losses.table.set_column(place, "weighted_energy", nulls))
    options = {"method": "optimal", "code_bits": 2, "granularity": "projection", "loss_weighting": "squared"}
    assert not assign(with_options(replace(inputs, losses=before), **options)).drops
    with pytest.raises(AssignmentError, match="what its experts answer was not measured"):
        assign(with_options(replace(inputs, losses=before), **options, drop=True))
