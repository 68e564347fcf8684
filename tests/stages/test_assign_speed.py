"""assign.speed: the estimator times what is assigned, the objective rises with the speed, and its gap is bounded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moeq import pipeline
from moeq.assigners import sensitivity
from moeq.errors import BudgetError, RecipeError
from moeq.estimator import estimate, load_geometry, load_hardware
from moeq.estimator.placement import assignment_placement
from moeq.estimator.workload import Grid
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages import assign
from moeq.stages.assign_speed import assign_for_speed
from moeq.stages.context import Context
from moeq.stages.estimate_sizes import profiled_popularity

SMALL = (
    "corpus.sequences=12", "corpus.sequence_length=48", "losses.methods=[rtn]", "losses.bits=[2, 3, 4, 8]",
    "assign.quantizer=rtn", "assign.method=optimal", "estimate.geometry=mixtral-8x7b", "estimate.context=1024",
)  # fmt: skip
CASES = [  # 8x7B at 8 bits fits one GPU whole, 8x22B does not
    ("a100-host-pcie4", "mixtral-8x7b", (90, 110, 130)),
    ("h100-ndp-cxl", "mixtral-8x22b", (6, 14, 30)),
]


def context_of(out: Path, *changes: str) -> Context:
    return Context(
        recipe=load_recipe(None, [*SMALL, *changes]),
        model_name="bundled:tiny-mixtral",
        out=out,
        reporter=Reporter(quiet=True),
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Context:
    context = context_of(tmp_path_factory.mktemp("speed") / "run")
    pipeline.run(context, ("profile", "losses"))
    return context


def found(measured: Context, speed: float | None, hardware: str, *changes: str) -> tuple[Any, dict[str, Any], float]:
    """The assignment, its summary and its objective."""
    asked = [f"assign.hardware={hardware}", *([] if speed is None else [f"assign.speed={speed}tok/s"]), *changes]
    context = context_of(measured.out, *asked)
    inputs = assign.inputs_of(context, context.recipe.assign, "timed")
    if speed is None:
        made, told = assign.decide(inputs), {}
    else:
        made, told = assign_for_speed(context, inputs, assign.decide)
    return made, told, sensitivity.objective(inputs, made)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("hardware", "name", "speeds"), CASES)
def test_the_estimator_confirms_the_speed_and_faster_costs_more(
    measured: Context, hardware: str, name: str, speeds: tuple[int, ...]
) -> None:
    objectives = []
    for speed in speeds:
        made, told, objective = found(measured, speed, hardware, f"estimate.geometry={name}")
        assert told["tokens_per_second"] >= speed == told["speed_limit"]
        assert 0 <= told["objective_gap"] < 0.05
        geometry = load_geometry(name)
        again = estimate(
            geometry,
            load_hardware(hardware),
            assignment_placement(made, made.group_size),
            group_size=made.group_size,
            zero_points=not made.symmetric,
            popularity=profiled_popularity(measured),
            policies=(told["speed_policy"],),
            grid=Grid(inputs=(128,), outputs=(16,)),
            context=1024,
        )
        point = again.point(told["speed_policy"], batch=1, input_tokens=128, output_tokens=16)
        assert point.decode_tokens_per_second == pytest.approx(told["tokens_per_second"], rel=1e-9)
        objectives.append(objective)
    assert objectives == sorted(objectives)
    assert objectives[0] < objectives[-1]


def test_no_plain_assignment_of_the_same_speed_loses_less(measured: Context) -> None:
    """Optima for a budget of bytes, timed: those that are as fast lose no less."""
    hardware = "a100-host-pcie4"
    _, told, objective = found(measured, 110, hardware)
    context = context_of(measured.out, f"assign.hardware={hardware}", "assign.speed=1")
    for bits in (2.3, 2.6, 3, 3.5, 4, 5):
        inputs = assign.inputs_of(context, context.recipe.assign, "plain")
        section = inputs.config.model_copy(update={"bits_per_weight": str(bits), "speed": None})
        plain = assign.decide(replace(inputs, config=section))
        slow = context_of(
            measured.out, f"assign.hardware={hardware}", "assign.speed=0.001", f"assign.bits_per_weight={bits}"
        )
        timed = assign_for_speed(slow, assign.inputs_of(slow, slow.recipe.assign, "plain"), assign.decide)[1]
        if timed["tokens_per_second"] >= told["tokens_per_second"]:
            assert sensitivity.objective(inputs, plain) >= objective * (1 - 1e-9)


def test_without_a_budget_only_the_speed_counts(measured: Context) -> None:
    """Slow enough for the widest codes: nothing is lost beyond them."""
    _, told, objective = found(measured, 1, "h100-ndp-cxl")
    _, _, least = found(measured, None, "h100-ndp-cxl", "assign.bits_per_weight=17")
    assert objective == least
    assert told["objective_gap"] == 0


def test_a_speed_that_nothing_gives_is_refused_with_the_fastest(measured: Context) -> None:
    refused = r"assign\.speed: 100000 tokens a second cannot be met on a100-host-pcie4 .* narrowest give (\d+\.?\d*);"
    with pytest.raises(BudgetError, match=refused) as caught:
        found(measured, 100_000, "a100-host-pcie4")
    fastest = float(str(caught.value).split(" narrowest give ")[1].split(";")[0])
    assert fastest > 150
    _, told, _ = found(measured, int(0.99 * fastest), "a100-host-pcie4")
    assert told["tokens_per_second"] <= 1.001 * fastest


def test_what_does_not_go_with_it(tmp_path: Path) -> None:
    for changes, words in (
        (("assign.method=frequency", "assign.code_bits=3"), "speed belongs to optimal"),
        (("assign.scope=layer",), "speed is one limit for all layers"),
        (("assign.ndp_latency_ms=3",), "give one of them"),
    ):
        with pytest.raises(RecipeError, match=words):
            context_of(tmp_path, "assign.speed=20", *changes)
    with pytest.raises(RecipeError, match="20tok/s"):
        context_of(tmp_path, "assign.speed=fast")
