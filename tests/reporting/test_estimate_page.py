"""Estimates on pages: energy where it is known, refused policies with their sums, what hardly moves folded away."""

from __future__ import annotations

import re
from dataclasses import asdict, replace

import pytest

from moeq.estimator import Estimate, Grid, estimate, load_geometry, load_hardware, uniform_placement
from moeq.estimator.capacity import plan_capacity
from moeq.estimator.cases import Case, EstimateDocument
from moeq.estimator.points import BASELINES
from moeq.reporting import formats, speed
from moeq.reporting.bars import Beside, Series, beside_chart, grouped_bars
from moeq.reporting.estimate_page import beyond_positions, render

LARGE = load_geometry("mixtral-8x22b")


def made(hardware: str) -> Estimate:
    placement = uniform_placement(LARGE, bits=5, hot_experts=1)
    return estimate(LARGE, load_hardware(hardware), placement, grid=Grid(inputs=(128, 512), outputs=(64,)))


@pytest.fixture(scope="module")
def preset() -> Estimate:
    return made("paper-ctxmoe")


def test_energy_has_a_column_where_the_hardware_gives_it(preset: Estimate) -> None:
    assert "J, link" not in speed.requests(preset)
    found = made("monde-a100-ndp")
    own = [point for point in found.points if point.policy == "context_aware"][-1]
    assert own.energy_by_device is not None
    table = speed.requests(found)
    assert "J, link" in table
    for joules in own.energy_by_device.values():
        assert f">{formats.number(joules)}<" in table


def test_a_refused_policy_is_named_with_its_sum(preset: Estimate) -> None:
    assert "static_mixed" in {row.policy for row in preset.refused}
    (_, listed) = speed.refused(preset)
    assert "static mixed precision" in listed
    assert "of GPU memory" in listed
    assert speed.refused(preset.model_copy(update={"refused": ()})) == []


def test_what_hardly_moves_a_figure_is_folded_away(preset: Estimate) -> None:
    now = speed.assumed(preset)
    assert set(now) == set(BASELINES)
    shown, folded = speed.sensitivity(preset)
    still = [row for row in preset.sensitivity if speed.effect(row, now) < speed.SAME]
    assert still
    assert len(still) < len(preset.sensitivity)
    assert f"{len(still)} more changes" in folded
    assert shown.count("<tr") == 2 + len(preset.sensitivity) - len(still)


def test_the_page_of_one_case(preset: Estimate) -> None:
    placement = uniform_placement(LARGE, bits=5, hot_experts=1)
    plan = plan_capacity(
        LARGE, load_hardware("paper-ctxmoe"), placement, batch=1, context=576, group_size=128, zero_points=False
    )
    case = Case(name="<one>", geometry=asdict(LARGE), estimate=preset, capacity=plan)
    page = render(EstimateDocument(name="page", hardware="paper-ctxmoe", routing="uniform", cases=(case,)))
    assert "&lt;one&gt;" in page
    assert "<one>" not in page
    identifiers = re.findall(r' id="([^"]+)"', page)
    assert len(identifiers) == len(set(identifiers))
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(identifiers)
    links = {found[2] for found in re.finditer(r'(src|href)="((?:https?:)?//[^"]*)', page)}
    assert links
    assert all(link.startswith("https://arxiv.org/abs/") for link in links), "papers, which a reader may follow"
    assert page.count("<figure") == 2


def test_every_name_on_the_page_is_escaped_and_nothing_may_run(preset: Estimate) -> None:
    placement = uniform_placement(LARGE, bits=5, hot_experts=1)
    plan = plan_capacity(
        LARGE, load_hardware("paper-ctxmoe"), placement, batch=1, context=576, group_size=128, zero_points=False
    )
    hostile = "</style><script>alert(1)</script>"
    named = preset.model_copy(update={"geometry": hostile, "assumptions": (hostile,)})
    case = Case(name=hostile, geometry=asdict(LARGE), estimate=named, capacity=plan)
    page = render(EstimateDocument(name=hostile, hardware=hostile, routing=hostile, cases=(case,)))
    assert "<script" not in page
    assert page.count("</style>") == 1
    assert page.count("&lt;/style&gt;&lt;script&gt;") >= 5
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    assert policy.startswith("default-src &#x27;none&#x27;; ")
    assert "script" not in policy


def test_bars_stand_for_their_values() -> None:
    series = [Series(name="a", values=[1.0, 2.0], inner=[0.5, 1.0]), Series(name="mine", values=[2.0, 4.0], own=True)]
    drawing = grouped_bars("bars", "Bars", ["x", "y"], series, "seconds", "inside")
    for word in ("a", "mine", "inside", "seconds", "x", "y"):
        assert f">{word}<" in drawing.svg
    rows = [Beside(name="one", stated=(8.7, 8.7), estimate=(8.5, 8.5), missed=True, note="far")]
    assert ">estimate, missed<" in beside_chart("beside", "Beside", rows, "times").svg
    near = [Beside(name="one", stated=(8.7, 8.7), estimate=(8.5, 8.5), missed=False, note="near")]
    assert "missed" not in beside_chart("beside", "Beside", near, "times").svg


def test_the_models_name_and_one_name_for_each_policy(preset: Estimate) -> None:
    placement = uniform_placement(LARGE, bits=5, hot_experts=1)
    plan = plan_capacity(
        LARGE, load_hardware("paper-ctxmoe"), placement, batch=1, context=576, group_size=128, zero_points=False
    )

    def page(estimate: Estimate) -> str:
        case = Case(name="one", geometry=asdict(LARGE), estimate=estimate, capacity=plan)
        return render(EstimateDocument(name="page", hardware="paper-ctxmoe", routing="uniform", cases=(case,)))

    shown = page(preset)
    assert "Model: mixtral-8x22b (56 MoE layers of 8 experts, top 2, hidden size 6,144)." in shown
    assert "positions" not in shown
    for name in (
        ">MoNDE, bandwidth",
        ">MoNDE, cost",
        "this assignment, context-aware",
        ">over bandwidth rule<",
        "monde_",
        "gpu_only",
    ):
        assert name not in shown, name
    assert ">over MoNDE (bandwidth rule)<" in shown
    past = page(preset.model_copy(update={"context": 65_537}))
    assert "mixtral-8x22b was made for 65,536 positions (max_position_embeddings), and 65,537 tokens" in past
    assert "positions" not in page(preset.model_copy(update={"context": 65_536}))
    unknown = Case(name="one", geometry=asdict(replace(LARGE, max_positions=None)), estimate=preset, capacity=plan)
    assert beyond_positions(unknown) == ""
