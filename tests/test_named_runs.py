"""Commands take a run's directory as it is: those on a run go on with it, those on a checkpoint take its checkpoint."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from moeq.cli import app
from moeq.errors import ArtifactError, RecipeError
from moeq.folders import checkpoint_of, is_run
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.results import next_steps
from moeq.stages.context import Context

LESS = ("corpus.sequences=4", "corpus.sequence_length=24", "losses.methods=[rtn]", "losses.group_size=16",
        "eval.perplexity.sequences=2", "eval.perplexity.sequence_length=24", "eval.tasks=[]", "eval.compare=[]",
        "assign={method: uniform, bits: 3, quantizer: rtn}", "export.verify=false")  # fmt: skip


@pytest.fixture(scope="module")
def run(tiny_mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from moeq import pipeline

    out = tmp_path_factory.mktemp("named") / "run"
    context = Context(
        recipe=load_recipe(None, LESS), model_name=str(tiny_mixtral), out=out, reporter=Reporter(quiet=True)
    )
    pipeline.run(context, ("profile", "losses", "assign", "quantize", "export"))
    return out


def answered(*words: str) -> str:
    done = CliRunner().invoke(app, [*words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_what_a_run_is(run: Path, tiny_mixtral: Path, tmp_path: Path) -> None:
    assert is_run(run)
    assert not any(is_run(path) for path in (run / "checkpoint", run / "losses", tiny_mixtral, tmp_path / "nowhere"))
    assert checkpoint_of(run) == run / "checkpoint"
    assert checkpoint_of(tiny_mixtral) == tiny_mixtral
    assert not is_run(Path("n" * 300)), "too long for a name"
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "recipe.yaml").touch()
    with pytest.raises(ArtifactError, match="begun: this run has no checkpoint; go on with it: moeq run"):
        checkpoint_of(begun)


def test_stages_go_on_with_a_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for stage in ("profile", "losses", "assign", "quantize", "export"):
        assert json.loads(answered(stage, str(run), "--json"))["skipped"], stage
    monkeypatch.chdir(run.parent)
    assert json.loads(answered("export", "run", "--json"))["skipped"]
    assert json.loads(answered("export", "run", "--out", "run", "--json"))["skipped"]
    done = CliRunner().invoke(app, ["export", "run", "--out", "other"])
    assert isinstance(done.exception, RecipeError)
    assert not Path("other").exists()


def test_a_budget_changes_the_run_that_is_named(run: Path) -> None:
    from shutil import copytree

    other = copytree(run, run.parent / "changed")
    made = json.loads(answered("assign", str(other), "--bits", "2.75", "--json"))
    assert not made["skipped"]
    assert yaml.safe_load(answered("recipe", str(other)))["assign"]["bits_per_weight"] == 2.75
    assert load_recipe(other / "recipe.yaml").assign.bits_per_weight == "11/4"
    assert "bits_per_weight: 2.75\n" in (other / "recipe.yaml").read_text("utf-8")


def test_estimates_are_of_the_run_that_is_named(run: Path) -> None:
    assert json.loads(answered("estimate", str(run), "--json"))["stage"] == "estimate"


def test_a_runs_recipe_is_printed(run: Path) -> None:
    assert yaml.safe_load(answered("recipe", str(run))) == yaml.safe_load(answered("recipe", str(run / "recipe.yaml")))


def test_a_run_stands_for_its_checkpoint(run: Path) -> None:
    assert answered("generate", str(run), "a b", "--max-new-tokens", "3").strip()


@pytest.mark.full
def test_a_run_is_verified_and_converted_as_its_checkpoint(run: Path, tmp_path: Path) -> None:
    assert json.loads(answered("verify", str(run), "--json"))["checkpoint"] == str(run / "checkpoint")
    out = tmp_path / "plain"
    answered("convert", str(run), "--to", "dequantized", "--out", str(out), "--no-verify")
    assert (out / "config.json").is_file()


def test_runs_are_cleaned_by_name(run: Path) -> None:
    (_,) = {answered("gc", *words, "--dry-run", "--json") for words in ((str(run),), ("--out", str(run)))}


@pytest.mark.parametrize("name", ["-model", "hf://org/model", "a model"])
def test_what_follows_a_run_takes_its_model_for_no_option(name: str, run: Path, tiny_mixtral: Path) -> None:
    """`moeq eval -model` ended in an unknown option."""
    made = Context(recipe=load_recipe(None, LESS), model_name=str(tiny_mixtral), out=run, reporter=Reporter(quiet=True))
    called = replace(made, model_name=name)
    vars(called)["model"] = made.model  # what lies there, whatever it is called
    words = shlex.split(next_steps(called)["measure again"])
    assert words == ["moeq", "eval", "./-model" if name == "-model" else name, str(run / "checkpoint")]
