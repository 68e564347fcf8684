"""Options are declared once: their fields say what is given, and what that changes of a recipe."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from moeq.cli.runs import PlanOptions
from moeq.cli.stages import AssignOptions
from moeq.comparison.eval_options import OF_SUBJECTS, OF_TASKS, EvalOptions
from moeq.errors import RecipeError
from moeq.estimation.estimate_options import APART, EstimateOptions
from moeq.options import LAST, RARE, BuildOptions, RunOptions, StageOptions
from moeq.recipe import budget_keys, load_recipe
from moeq.recipe.agreement import changes_of


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


def test_paths_are_text_whatever_yaml_sees_in_them() -> None:
    asked = [EvalOptions(include_path=Path("2024")), AssignOptions(hardware="a: b #1.yaml")]
    found = load_recipe(None, [change for one in asked for change in one.changes()])
    assert (found.eval.include_path, found.assign.hardware) == ("2024", "a: b #1.yaml")


@pytest.mark.parametrize(
    ("asked", "before", "kept"),
    [
        (BuildOptions(bits="2.5"), "{method: optimal, code_bits: 2}", {"bits_per_weight": "5/2"}),
        (AssignOptions(size="1GiB"), "{method: optimal, bits_per_weight: 3}", {"size": 1 << 30}),
        (AssignOptions(expert_bytes="1GiB"), "{method: optimal, size: 3GiB}", {"expert_bytes": 1 << 30}),
        (StageOptions(set_=["assign.bits=2"]), "{method: uniform, size: 3GiB}", {"bits": 2}),
        (
            AssignOptions(method="uniform"),
            "{method: optimal, bits_per_weight: 3, granularity: projection, ndp_latency_ms: 3}",
            {"bits_per_weight": "3"},
        ),
        (
            AssignOptions(method="optimal", ndp_latency=2.0),
            "{method: uniform, bits_per_weight: 3}",
            {"bits_per_weight": "3", "ndp_latency_ms": 2.0},
        ),
        (AssignOptions(target="vllm"), "{method: optimal, code_bits: 2}", {"code_bits": "2", "target": "vllm"}),
        (AssignOptions(bits_per_weight="3").by_names_of_today(), "{size: 3GiB}", {"bits_per_weight": "3"}),
    ],
)
def test_a_budget_or_a_method_replaces_what_the_recipe_has_of_another(
    asked: StageOptions, before: str, kept: dict[str, object], tmp_path: Path
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"assign: {before}\n", "utf-8")
    section = load_recipe(path, asked.changes()).assign
    may = {*budget_keys(), "granularity", "ndp_latency_ms", "target"}
    found = {key: value for key, value in section.model_dump().items() if key in may and value is not None}
    assert found == kept


def test_two_budgets_and_a_text_on_both_sides_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for asked, words in (
        (AssignOptions(bits="2", expert_bytes="1GiB"), "one budget is enough: --bits or --expert-bytes"),
        (BuildOptions(text=["a"], eval_text=["b", "a"]), "--eval-text: a is in --text"),
    ):
        with pytest.raises(RecipeError, match=words):
            asked.changes()
    assert BuildOptions(text=["bundled"], eval_text=["bundled"]).changes()
    with pytest.raises(RecipeError, match="both are given"):
        AssignOptions(bits="2", bits_per_weight="3").by_names_of_today()
    assert AssignOptions(bits_per_weight="3").by_names_of_today() == AssignOptions(bits="3")
    assert capsys.readouterr().err == "--bits-per-weight is now --bits\n"


@pytest.mark.parametrize(
    ("given", "override", "option"),
    [
        ({"bits": "5/2"}, "assign.bits_per_weight={}", ("2.5", "3", "--bits")),
        ({"bits": "4"}, "assign={{method: optimal, bits_per_weight: {}}}", ("4", "3", "--bits")),
        ({"code_bits": "2"}, "assign.average_bits={}", ("2", "3", "--code-bits")),
        ({"size": "12GiB"}, "assign.size={}", ("12884901888", "12GB", "--size")),
        ({"text": ["a.txt"]}, "corpus.source={}", ("a.txt", "b.txt", "--text")),
        ({"workers": 2}, "workers={}", ("2", "3", "--workers")),
        ({"quantizer": "rtn"}, "assign.quantizer={}", ("rtn", "gptq", "--quantizer")),
        ({"refine": True}, "quantize.refine={}", ("{iterations: 5}", "null", "--refine")),
        ({"verify": False}, "export.verify={}", ("false", "true", "--no-verify")),
        ({"format": ["gptqmodel"]}, "export.formats={}", ("[gptqmodel]", "[llama.cpp]", "--format")),
        ({"trust_remote_code": True}, "trust_remote_code={}", ("true", "false", "--trust-remote-code")),
        ({"what": "m"}, "model={}", ("m", "n", "MODEL")),
    ],
)
def test_an_option_and_a_set_of_its_key_have_to_agree(
    given: dict[str, Any], override: str, option: tuple[str, str, str]
) -> None:
    same, other, name = option
    assert changes_of(BuildOptions(**given, set_=[override.format(same)]))
    with pytest.raises(RecipeError, match=f"^--set .*: says otherwise than {name}; give one of them"):
        changes_of(BuildOptions(**given, set_=["losses.bits=[4]", override.format(other)]))


@pytest.mark.parametrize(
    ("given", "flag"),
    [({"text": ["a", ""]}, "--text"), ({"size": ""}, "--size"), ({"model": ""}, "--model"), ({"set_": [""]}, "--set")],
)
def test_an_option_without_a_value_is_refused(given: dict[str, Any], flag: str) -> None:
    """As a variable that is not set leaves it: an empty size was no budget, an empty text a bug in moeq."""
    with pytest.raises(RecipeError, match=f"{flag} is empty; give a value, or leave it out"):
        BuildOptions(**given)


def test_what_is_run_is_a_recipe_by_its_ending_and_a_model_otherwise() -> None:
    recipe, model = StageOptions(what="a/b.yaml"), StageOptions(what="org/name")
    assert (recipe.recipe_path, recipe.named_model) == (Path("a/b.yaml"), None)
    assert (model.recipe_path, model.named_model) == (None, "org/name")
    assert StageOptions(what="b.yml", model="m").named_model == "m"
    with pytest.raises(RecipeError, match="two models: a and --model b"):
        _ = StageOptions(what="a", model="b").named_model
    with pytest.raises(RecipeError, match="--quality goes without a recipe"):
        _ = BuildOptions(what="b.yml", quality="best").preset_name


def test_options_are_asked_for_by_their_marks() -> None:
    assert EvalOptions(text="a", dtype="auto", limit=2, truncate=True).given(OF_SUBJECTS) == ["--text", "--truncate"]
    assert EvalOptions(limit=2, truncate=True).given(OF_TASKS) == ["--limit", "--truncate"]
    assert EstimateOptions(model="a", kv_growth=True, policy=["x"]).given(APART) == ["--policy", "--kv-growth"]
