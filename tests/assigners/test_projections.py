"""optimal with a width for every matrix of an expert, or every layer: exact, within budget, refused with reasons."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from random_inputs import BITS, NAMES, inputs_of, spent, with_matrices, with_options

from moeq.artifacts.assignment import matrix_widths, read_assignment, write_assignment
from moeq.artifacts.targets import refusal, targets
from moeq.assigners import assign, report
from moeq.assigners.inputs import routing_mass
from moeq.assigners.limits import choices
from moeq.assigners.sensitivity import columns, matrix_tables, objective, tables
from moeq.errors import AssignmentError, BudgetError, FormatError


@given(st.integers(0, 10**6), st.sampled_from([(1, 2), (2, 1)]), st.floats(0, 1), st.booleans())
@settings(max_examples=examples(15), deadline=None)
def test_matrices_equal_a_search_over_everything(seed: int, shape: tuple[int, int], share: float, two: bool) -> None:
    names = NAMES[1:] if two else NAMES
    inputs = with_matrices(seed, *shape, names)
    least = sum(one[1] * shape[1] for one in inputs.bytes)
    limit = int(least * (1 + 3 * share))
    inputs = with_options(inputs, method="optimal", expert_bytes=limit, granularity="projection", widths=[1, 2, 4])
    losses = [matrix_tables(inputs)[layer][name] for layer in range(shape[0]) for name in names]
    sizes = [inputs.matrix_bytes[layer][name] for layer in range(shape[0]) for name in names]
    best = np.inf
    for flat in itertools.product((1, 2, 4), repeat=shape[1] * len(losses)):
        rows = np.array(flat).reshape(len(losses), shape[1])
        cost = sum(size[int(b)] for size, row in zip(sizes, rows, strict=True) for b in row)
        if cost <= limit:
            best = min(
                best, sum(of[int(b)][e] for of, row in zip(losses, rows, strict=True) for e, b in enumerate(row))
            )
    found = assign(inputs)
    assert spent(inputs, found) <= limit
    assert objective(inputs, found) == pytest.approx(best, rel=1e-9, abs=1e-15)


@given(
    st.integers(0, 10**6), st.integers(1, 3), st.integers(2, 6), st.fractions(1, 4, max_denominator=16),
    st.sampled_from(["none", "mass", "squared"]), st.sampled_from([None, "measured"]), st.booleans(),
    st.sampled_from([0, 1]),
)  # fmt: skip
@settings(max_examples=examples(40), deadline=None)
def test_finer_is_never_worse(
    seed: int,
    layers: int,
    experts: int,
    average: Fraction,
    weighting: str,
    measured: str | None,
    in_bytes: bool,
    hot: int,
) -> None:
    inputs = with_matrices(seed, layers, experts)
    limit = int(sum(one[1] * experts for one in inputs.bytes) * average)
    fixed = sum(one[16] - one[1] for one in inputs.bytes) * hot
    budget = {"expert_bytes": limit + fixed} if in_bytes else {"code_bits": str(average)}
    shared = {"method": "optimal", "loss_weighting": weighting, "layer_weighting": measured, "gpu_experts": hot}
    values, terms = [], with_options(inputs, granularity="projection", **budget, **shared)
    for granularity in ("projection", "expert", "layer"):
        mine = with_options(inputs, granularity=granularity, **budget, **shared)
        found = assign(mine)
        values.append((objective(terms, found), objective(mine, found)))
        score = report.score(mine, found)
        assert score.proven
        if granularity != "layer":
            assert score.optimum == pytest.approx(values[-1][1], rel=1e-9, abs=1e-15)
        if in_bytes:
            assert spent(mine, found) <= limit + fixed
        elif found.code_bits("ndp") is not None:
            assert found.code_bits("ndp") <= average
        assert all(choice.bits == 16 for layer in found.layers for choice in layer.experts if choice.tier == "gpu")
    slack = 1 + 1e-9
    assert values[0][0] <= min(values[1][0], values[2][0]) * slack  # in the same terms
    assert values[1][1] <= values[2][1] * slack


@given(
    st.integers(0, 10**6), st.floats(0, 1), st.sampled_from(["expert_bytes", "code_bits"]),
    st.lists(st.sets(st.sampled_from([1, 2, 4]), min_size=1), min_size=4, max_size=4), st.booleans(),
)  # fmt: skip
@settings(max_examples=examples(40), deadline=None)
def test_matrices_of_which_not_all_widths_are_loaded(
    seed: int, share: float, budget: str, loaded: list[set[int]], stacks: bool
) -> None:
    """Two layers of two experts of two matrices equal a search over what is loaded of each; below the least that it
    can be, the refusal says that."""
    kept = [[(*sorted(loaded[2 * layer + which]), 16) for which in (0, 1)] for layer in (0, 1)]
    inputs = replace(with_matrices(seed, 2, 2, NAMES[1:], symmetric=True), group_size=256)
    target = {"target": "llama.cpp"} if stacks else {}

    def cost(layer: int, which: int, bits: int) -> Fraction:
        if budget == "code_bits":
            return Fraction(bits, 4)
        return Fraction(list(inputs.matrix_bytes[layer].values())[which][bits])

    cells = [(layer, which) for layer in (0, 1) for which in (0, 1)]
    least, most = (
        sum(2 * cost(*cell, pick(kept[cell[0]][cell[1]][:-1])) for cell in cells) / (2 if budget == "code_bits" else 1)
        for pick in (min, max)
    )
    limit = least + Fraction(share).limit_denominator(64) * (most - least)
    value = int(limit) if budget == "expert_bytes" else str(limit)
    options = {"method": "optimal", "granularity": "projection", "widths": [1, 2, 4], **target}
    inputs = replace(with_options(inputs, **options, **{budget: value}), loaded=tuple(map(tuple, kept)))
    items = [(*cell, experts) for cell in cells for experts in ([[0, 1]] if stacks else [[0], [1]])]
    best = np.inf
    for chosen in itertools.product(*(kept[layer][which][:-1] for layer, which, _ in items)):
        paid = sum(len(of) * cost(layer, which, b) for (layer, which, of), b in zip(items, chosen, strict=True))
        if paid <= (int(limit) if budget == "expert_bytes" else 2 * limit):
            best = min(best, sum(
                list(matrix_tables(inputs)[layer].values())[which][b][expert]
                for (layer, which, of), b in zip(items, chosen, strict=True) for expert in of
            ))  # fmt: skip
    found = assign(inputs)
    assert objective(inputs, found) == pytest.approx(best, rel=1e-9, abs=1e-15)
    for layer, mine in enumerate(found.layers):
        for choice in mine.experts:
            widths = choice.projections or dict.fromkeys(inputs.matrix_bytes[layer], choice.bits)
            assert all(bits in own for bits, own in zip(widths.values(), kept[layer], strict=True))
    if budget == "expert_bytes" and least > 1:
        with pytest.raises(BudgetError, match=rf"least possible is {int(least)}\b"):
            assign(with_options(inputs, **options, expert_bytes=int(least) - 1))


def test_experts_of_one_width_take_one_that_is_loaded_of_all_their_matrices() -> None:
    inputs = with_matrices(2, 1, 4, NAMES[1:], symmetric=True, method="optimal", code_bits=3)
    inputs = replace(inputs, loaded=(((1, 2, 4, 16), (2, 8, 16)),))
    assert choices(inputs) == (2,)
    assert assign(replace(inputs, config=inputs.config.model_copy(update={"code_bits": "2"}))).widths() == [2]
    apart = with_options(inputs, method="optimal", code_bits=3, granularity="projection")
    assert choices(apart) == (1, 2, 4, 8)
    with pytest.raises(AssignmentError, match=r"none of the widths \[1, 4\] can be loaded"):
        assign(with_options(inputs, method="optimal", code_bits=3, widths=[1, 4]))


def test_an_expert_is_worth_the_sum_of_its_matrices_where_they_are_decided() -> None:
    inputs = with_matrices(3, 2, 4, method="optimal", code_bits=2, granularity="projection")
    whole = tables(with_options(inputs, method="optimal", code_bits=2))
    assert inputs.losses is not None
    for layer, (matrices, table) in enumerate(zip(matrix_tables(inputs), tables(inputs), strict=True)):
        for bits in (*BITS, 16):
            np.testing.assert_allclose(sum(of[bits] for of in matrices.values()), table.losses[bits])
            assert bits == 16 or not np.allclose(table.losses[bits], whole[layer].losses[bits])
        for row in inputs.losses.rows("up_proj"):
            if row["layer"] == layer:
                share = routing_mass(inputs, layer)[row["expert"]]
                assert matrices["up_proj"][row["bits"]][row["expert"]] == pytest.approx(share * row["loss"])


def test_the_optimum_of_experts_is_counted_in_the_terms_that_were_asked_for() -> None:
    """One memo serves sections of both granularities."""
    inputs = with_matrices(9, 2, 4, method="optimal", code_bits=2, granularity="projection")
    found = assign(inputs)
    prices = {price.target: price for price in report.prices(inputs, found)}
    alone = with_matrices(9, 2, 4, method="optimal", code_bits=2)
    plain = {price.target: price for price in report.prices(alone, assign(alone))}
    shared = with_options(inputs, method="optimal", code_bits=2)
    again = {price.target: price for price in report.prices(shared, assign(shared))}
    assert again == plain
    assert prices["auto-round"].objective != pytest.approx(plain["auto-round"].objective)


def test_layers_share_a_width() -> None:
    found = assign(with_matrices(4, 5, 6, method="optimal", code_bits=2, granularity="layer"))
    assert [len(set(bits.tolist())) for bits in found.bits()] == [1] * 5
    assert len(found.widths()) > 1


def test_code_bits_are_spent_to_a_matrix_and_written_down(tmp_path: Path) -> None:
    """2.5 bits of 2 x 3 experts with 3 matrices each: 45 bits of matrices, 15 of experts."""
    inputs = with_matrices(10, 2, 3, method="optimal", code_bits="5/2", granularity="projection")
    found = assign(inputs)
    assert found.code_bits() == Fraction(5, 2)
    mixed = [choice for layer in found.layers for choice in layer.experts if choice.projections is not None]
    assert mixed
    assert all(choice.bits == max(choice.projections.values()) for choice in mixed)
    assert {bits for one in found.expert_widths() for widths in one for bits in matrix_widths(widths)} == set(
        found.widths()
    )
    write_assignment(tmp_path / "assignment.json", found)
    assert read_assignment(tmp_path / "assignment.json") == found
    points = report.frontier(inputs, ["2"], assign)
    assert {"optimal", "optimal by matrix"} <= {point.method for point in points}
    best = [point for point in points if point.method == "optimal by matrix"]
    for other in (point for point in points if not point.method.startswith("optimal")):
        fitting = [point.objective for point in best if point.expert_bytes <= other.expert_bytes]
        assert min(fitting) <= other.objective * (1 + 1e-9)
    rows = columns(inputs, [np.ones(3)] * 2)
    assert set(rows["bytes_2"]) == {inputs.bytes[layer][2] for layer in range(2)}


def test_a_thousand_experts_are_decided_exactly() -> None:
    inputs = with_matrices(6, 8, 128, method="optimal", code_bits=2, granularity="projection")
    score = report.score(inputs, assign(inputs))
    assert score.proven
    assert score.gap == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("target", ["auto-round", "gptqmodel"])
def test_targets_that_take_widths_of_matrices(target: str) -> None:
    inputs = with_matrices(7, 2, 4, symmetric=True, method="optimal", code_bits="5/2", granularity="projection")
    free, within = assign(inputs), assign(with_options(inputs, method="optimal", code_bits="5/2",
                                                       granularity="projection", target=target))  # fmt: skip
    assert within.is_mixed
    assert refusal(targets()[target], within.expert_widths(), inputs.profile.layers, symmetric=True) is None
    coarse = replace(targets()[target], granularity="expert", widths=targets()["native"].widths)
    reason = refusal(coarse, free.expert_widths(), inputs.profile.layers, symmetric=True)
    assert reason is not None
    assert re.search(r"gate_proj \d, up_proj \d, down_proj \d bits; it takes one width for all matrices", reason)


def test_widths_of_matrices_that_a_layers_experts_share() -> None:
    """One type a stack: matrices may differ where all experts of the layer are alike."""
    alike, other = {"gate_proj": 4, "up_proj": 4, "down_proj": 8}, {"gate_proj": 8, "up_proj": 4, "down_proj": 8}
    names = ["layers.0", "layers.1"]
    target = targets()["llama.cpp"]
    assert refusal(target, [[alike, alike], [4, 4]], names, symmetric=True) is None
    assert refusal(targets()["vllm"], [[alike, alike], [4, 4]], names, symmetric=True) is not None
    for mixed in ([alike, other], [alike, 4]):
        reason = refusal(target, [[4, 4], mixed], names, symmetric=True)
        assert reason is not None
        assert reason.startswith("layers.1, expert 1: ")
        assert "one width for all experts of a layer" in reason


def test_one_width_for_a_matrix_of_all_of_a_layers_experts() -> None:
    """The least of all assignments that have one, by trying them all."""
    inputs = with_matrices(7, 2, 4, symmetric=True, method="optimal", code_bits=3, granularity="projection",
                           target="llama.cpp")  # fmt: skip
    inputs = replace(inputs, group_size=256)
    found = assign(inputs)
    assert found.is_mixed
    assert all(len({str(one) for one in mine}) == 1 for mine in found.expert_widths())
    assert refusal(targets()["llama.cpp"], found.expert_widths(), inputs.profile.layers, symmetric=True) is None
    prices = {price.target: price for price in report.prices(inputs, found)}
    assert objective(inputs, found) == pytest.approx(prices["llama.cpp"].objective)
    assert prices["llama.cpp"].objective <= prices["vllm-cuda"].objective
    tables = [list(one.values()) for one in matrix_tables(inputs)]
    widths = sorted(set(tables[0][0]) & set(targets()["llama.cpp"].widths) - {16})
    best = min(
        sum(tables[place // 3][place % 3][bits].sum() for place, bits in enumerate(chosen))
        for chosen in itertools.product(widths, repeat=6)
        if sum(chosen) <= 18
    )
    assert objective(inputs, found) == pytest.approx(best)


@pytest.mark.parametrize("target", ["vllm-cuda", "transformers"])
def test_targets_refuse_widths_of_matrices(target: str) -> None:
    inputs = with_matrices(7, 2, 4, symmetric=True, method="optimal", code_bits="5/2", granularity="projection")
    found = assign(inputs)
    usual = replace(targets()[target], widths=targets()["native"].widths)
    reason = refusal(usual, found.expert_widths(), inputs.profile.layers, symmetric=True)
    assert reason is not None
    with pytest.raises(FormatError, match=rf"target {target}: granularity projection cannot .*target: native"):
        assign(with_options(inputs, method="optimal", code_bits="5/2", granularity="projection", target=target))
    priced = {price.target: price for price in report.prices(inputs, found)}
    assert priced["native"].ratio == pytest.approx(1)
    assert priced[target].ratio is not None
    assert priced[target].ratio > 1


def test_without_rows_of_projections_it_says_what_to_set() -> None:
    inputs = with_matrices(8, 2, 3, method="optimal", code_bits=2, granularity="projection")
    bare = replace(inputs, losses=inputs_of(8, 2, 3).losses)
    with pytest.raises(AssignmentError, match=r"every projection alone.*losses\.per_projection: true.*moeq losses"):
        assign(bare)
