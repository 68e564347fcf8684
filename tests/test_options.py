"""Options are declared once: their fields say what is given, and what that changes of a recipe."""

from __future__ import annotations

from dataclasses import fields

import pytest

from moeq.cli.runs import PlanOptions
from moeq.cli.stages import AssignOptions
from moeq.comparison.eval_options import OF_SUBJECTS, OF_TASKS, EvalOptions
from moeq.estimation.estimate_options import APART, EstimateOptions
from moeq.options import LAST, RARE, RunOptions, StageOptions


def test_options_that_are_ordered_and_rare_exist() -> None:
    assert set(LAST) <= {one.name for one in fields(PlanOptions)}
    assert set(RARE) <= {one.name for one in fields(RunOptions)}


def test_only_what_is_given_changes_a_recipe() -> None:
    assert StageOptions().changes() == []
    given = StageOptions(set_=["seed=1"], widen=True, verify=False, format=["native", "llama.cpp"])
    assert given.changes() == ["seed=1", "export.widen=True", "export.verify=False", "export.formats=[llama.cpp]"]
    tasks = EvalOptions(tasks="a, b", batch_size="8", limit=3)
    assert tasks.changes() == ["eval.limit=3", "eval.tasks=[a, b]", "eval.batch_size=8"]
    grid = EstimateOptions(recipe=["r.yaml", "out=3"], grid=["in=1,2"], context=7)
    assert grid.changes()[:2] == ["estimate.context=7", "estimate.grid.inputs=[1, 2]"]
    assert grid.changes()[2] == "estimate.grid.outputs=[3]"


@pytest.mark.parametrize(
    ("asked", "dropped"),
    [
        (AssignOptions(size="1GiB"), {"bits", "bits_per_weight", "code_bits", "expert_bytes"}),
        (AssignOptions(set_=["assign.bits=2"]), {"bits_per_weight", "code_bits", "expert_bytes", "size"}),
        (AssignOptions(method="uniform"), {"code_bits", "ndp_latency_ms"}),
        (AssignOptions(method="optimal", ndp_latency=2.0), {"bits"}),
        (AssignOptions(target="vllm"), set()),
    ],
)
def test_a_budget_or_a_method_replaces_the_recipes_budget(asked: AssignOptions, dropped: set[str]) -> None:
    nulls = {one.removesuffix("=null") for one in asked.changes() if one.endswith("=null")}
    assert nulls == {f"assign.{name}" for name in dropped}


def test_options_are_asked_for_by_their_marks() -> None:
    assert EvalOptions(text="a", dtype="auto", limit=2, truncate=True).given(OF_SUBJECTS) == ["--text", "--truncate"]
    assert EvalOptions(limit=2, truncate=True).given(OF_TASKS) == ["--limit", "--truncate"]
    assert EstimateOptions(model="a", kv_growth=True, policy=["x"]).given(APART) == ["--policy", "--kv-growth"]
