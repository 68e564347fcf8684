"""Presets: complete, valid, named; recipes that are written of them hold what was asked and keep their comments."""

from __future__ import annotations

import json
import shlex
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from moeq.bundled.preset_files import DEFAULT, QUALITIES, chosen_preset, preset_names, preset_path
from moeq.cli import app
from moeq.errors import RecipeError
from moeq.options import StageOptions
from moeq.recipe import Start, load_recipe
from moeq.recipe.editing import as_yaml, with_values
from moeq.recipe.reading import parse_recipe
from moeq.starting import context_of

RECIPES = Path(__file__).parents[2] / "recipes"
CHANGES: list[list[str]] = [
    [],
    ["--bits", "3.25"],
    ["--size", "12GiB", "--group-size", "32"],
    ["--code-bits", "2.5", "--refine", "--quantizer", "signround"],
    ["--bits", "2.5", "--tune"],
    ["--text", "a: b.txt", "--text", "bundled", "--eval-text", "#c.txt"],
    ["--set", "seed=3", "--set", "others.head=8", "--set", "reparam={}", "--set", "eval.perplexity.batch_size=2"],
    ["--set", "assign={method: uniform, bits: 3}", "--set", "eval.compare=[]", "--set", "losses.bits=[2, 3]"],
    ["--set", "assign.method=uniform", "--set", "assign.bits=3"],
    ["--quantizer", "signround", "--set", "losses.symmetric=true"],
]


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_a_recipe_of_its_own_with_a_comment_on_what_counts(name: str) -> None:
    path = preset_path(name)
    recipe, text = load_recipe(path), path.read_text("utf-8")
    assert recipe.model is None
    assert text.startswith(f"# Preset {name}")
    assert text.count("#") > 6
    assert max(map(len, text.splitlines())) <= 120
    stored = {"fast", "balanced", "best"}
    assert (recipe.assign.bits_per_weight is not None) == (name in {*stored, "paper-001"})
    assert set(QUALITIES) == stored


def test_a_preset_is_named_once_and_right() -> None:
    assert chosen_preset(None, None) is None
    assert chosen_preset("paper-000", None) == "paper-000"
    assert chosen_preset(None, "best") == "best"
    for named, words in (
        (("best", "best"), "--preset goes without --quality"),
        (("paper-0000", None), "did you mean 'paper-000'"),
        ((None, "beste"), "no quality 'beste'; did you mean 'best'"),
        ((None, "paper-000"), "no quality 'paper-000'"),
    ):
        with pytest.raises(RecipeError, match=words):
            chosen_preset(*named)


def test_without_a_recipe_the_default_preset_is_where_a_recipe_starts() -> None:
    assert Start().recipe() == load_recipe(preset_path(DEFAULT))
    assert Start(preset="best").recipe().quantize.tune is not None
    fast, balanced = (Start(preset=name).recipe() for name in ("fast", "balanced"))
    assert (fast.losses.methods, fast.assign.quantizer) == (["gptq"], "gptq")
    assert (balanced.losses.methods, balanced.assign.quantizer) == (["trellis"], "trellis")
    assert {one.quantizer for one in balanced.eval.compare} == {"trellis"}
    changed = Start(changes=["assign.size=3GiB"]).recipe()
    assert (changed.assign.size, changed.assign.bits_per_weight) == (3 << 30, None)
    split = Start(changes=["assign.method=prefix-split"]).recipe()
    assert (split.assign.granularity, split.assign.bits_per_weight) == (None, "5/2")
    with pytest.raises(RecipeError, match=r"^--bits is 99; give a number between"):
        Start(changes=["assign.bits_per_weight=99"], names={"assign.bits_per_weight": "--bits"}).recipe()
    with pytest.raises(RecipeError, match="preset paper-002"):
        Start(preset="paper-002", changes=["losses.bits=[8]"]).recipe()


def test_sequences_of_a_preset_are_cut_to_what_the_model_knows_but_not_those_that_are_asked_for() -> None:
    short = Start(positions=64).recipe()
    assert (short.corpus.sequence_length, short.eval.perplexity.sequence_length) == (64, 64)  # type: ignore[union-attr]
    assert Start(positions=512).recipe() == Start().recipe()
    asked = Start(changes=["corpus.sequence_length=100", "eval.perplexity=null"], positions=64).recipe()
    assert (asked.corpus.sequence_length, asked.eval.perplexity) == (100, None)


@pytest.mark.cases(35)
@pytest.mark.parametrize("name", [*preset_names()])
@pytest.mark.parametrize("options", CHANGES, ids=lambda options: "_".join(options) or "as-it-is")
def test_init_writes_a_recipe_equal_to_the_preset_with_its_changes(
    name: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["init", "bundled:tiny-mixtral", "--preset", name, *options])
    if isinstance(done.exception, RecipeError):  # a method that keeps no budget, widths that it does not take
        assert name.startswith("paper")
        assert not (tmp_path / "recipe.yaml").exists()
        return
    assert done.exit_code == 0, done.output
    assert "moeq run recipe.yaml --out moeq-out/tiny-mixtral" in done.output
    written, text = load_recipe(Path("recipe.yaml")), Path("recipe.yaml").read_text("utf-8")
    shown = CliRunner().invoke(app, ["recipe", "--preset", name, "--model", "bundled:tiny-mixtral", *options, "--json"])
    assert written.model_dump(mode="json").items() <= json.loads(shown.stdout).items()
    assert written.model == "bundled:tiny-mixtral"
    kept = [line for line in preset_path(name).read_text("utf-8").splitlines() if line.startswith("#")]
    assert [line for line in text.splitlines() if line.startswith("#")] == kept
    again = CliRunner().invoke(app, ["init"])
    assert "recipe.yaml: is there already" in str(again.exception)
    assert Path("recipe.yaml").read_text("utf-8") == text


@pytest.mark.parametrize("name", ["a b.yml", "it's.yaml", "-r.yaml", "sub/plain.yaml"])
def test_what_follows_init_can_be_copied(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["init", "bundled:tiny-mixtral", "--out", f"./{name}", "--json"])
    _, command, written, *more = shlex.split(json.loads(done.stdout)["next"])
    assert (command, Path(written)) == ("run", Path(name))
    assert CliRunner().invoke(app, ["recipe", written]).exit_code == 0
    assert more == ["--out", "moeq-out/tiny-mixtral"]


def test_init_prints_and_fits_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "mixtral", "max_position_embeddings": 96}', "utf-8")
    done = CliRunner().invoke(app, ["init", "model", "--out", "-"])
    assert done.exit_code == 0, done.output
    assert "sequence_length: 96 " in done.stdout
    assert "model: model " in done.stdout
    whole = CliRunner().invoke(app, ["init", "model", "--out", "-", "--json"])
    assert json.loads(whole.stdout) == {"schema_version": 1, "text": done.stdout}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    packed = {"model_type": "mixtral", "quantization_config": {"quant_method": "moeq"}}
    (model / "config.json").write_text(json.dumps(packed), "utf-8")
    for words, refusal in (
        (["init", "nowhere.yaml"], "is a recipe"),
        (["init", "model"], "model/config.json: already quantized (moeq); give the original checkpoint; moeq convert"),
        (["init", "./nowhere"], "no such file or directory"),
        (["init", "--out", "recipe"], "--out recipe: is no name of a recipe; end its name in .yaml"),
        (["recipe", "nowhere"], "is no recipe"),
        (["recipe", "x.yaml", "--preset", "fast"], "--preset goes without a recipe"),
    ):
        assert refusal in str(CliRunner().invoke(app, words).exception)


def test_init_for_a_runtime_is_what_run_for_it_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["init", "bundled:tiny-mixtral", "--for", "auto-round", "--bits", "3.5"])
    assert done.exit_code == 0, done.output
    asked = StageOptions(what="bundled:tiny-mixtral", for_="auto-round", set_=["assign.bits_per_weight=3.5"])
    wanted = context_of(asked, "plan").recipe
    written = load_recipe(Path("recipe.yaml"))
    assert written == wanted.model_copy(update={"model": "bundled:tiny-mixtral"})
    assert (written.losses.methods, written.export.formats) == (["gptq"], ["auto-round"])
    alone = CliRunner().invoke(app, ["init", "--for", "vllm", "--out", "-"])
    assert "--for vllm: no model" in str(alone.exception)


def test_values_stand_in_place_of_others_and_comments_stay() -> None:
    text = "name: a    # first\nmodel: null\n\nassign:  # how\n  bits: 3  # wide\n  widths: [2]\n\neval:\n  tasks: []\n"
    wanted: dict[str, Any] = {
        "name": "b", "model": None, "seed": 4, "assign": {"bits": None, "widths": [2, 3], "size": "1GiB"},
        "eval": {"tasks": [], "limit": 2}, "others": {"head": 8},
    }  # fmt: skip
    assert with_values(text, wanted) == (
        "name: b    # first\nmodel: null\nseed: 4\n\nassign:  # how\n  widths: [2, 3]\n  size: 1GiB\n\n"
        "eval:\n  tasks: []\n  limit: 2\n\nothers:\n  head: 8\n"
    )


def test_another_method_takes_the_quantizers_of_the_one_before_along(tmp_path: Path) -> None:
    """Also where all defaults are filled in, as in a run's own recipe; what is named beside it stays as it is named."""
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(Start(preset="balanced").recipe().model_dump(mode="json")), "utf-8")
    changed = load_recipe(path, ["losses.methods=[gptq]", "quantize.refine={}"])
    assert {changed.assign.quantizer, *(one.quantizer for one in changed.eval.compare)} == {"gptq"}
    assert Start(path=path, quantizer="gptq").recipe().losses.methods == ["gptq"]
    for quantizer, methods in (("signround", ["signround"]), ("best", ["trellis"])):
        assert Start(path=path, quantizer=quantizer).recipe().losses.methods == methods
    grid = Start(path=path, quantizer="gptq", changes=["losses.act_order=false", "losses.nested=true"])
    assert grid.recipe() == load_recipe(path, grid.every_change())  # of what the quantizer alone can do
    for methods, words in (("5", "is 5; give a list"), ("[foo]", "is 'foo'; give")):
        with pytest.raises(RecipeError, match=words):
            Start(path=path, quantizer="gptq", changes=[f"losses.methods={methods}"]).recipe()
    grids = Start(preset="fast", quantizer="signround").recipe()
    assert (grids.losses.methods, grids.assign.quantizer) == (["gptq", "signround"], "signround")
    with pytest.raises(RecipeError, match="quantizer rtn is not among"):
        load_recipe(path, ["losses.methods=[gptq]", "assign.quantizer=rtn"])


@settings(deadline=None, max_examples=examples(12))
@given(st.fractions(min_value=1, max_value=16, max_denominator=10**7))
def test_budgets_are_written_as_decimals_where_these_are_exact(budget: Fraction) -> None:
    data = load_recipe(None, [f"assign.bits_per_weight={budget}", "assign.code_bits=null"]).model_dump(mode="json")
    text = as_yaml(data)
    assert yaml.safe_load(text)["assign"]["bits_per_weight"] == pytest.approx(float(budget)) or "/" in text
    assert parse_recipe(text).model_dump(mode="json") == data


@pytest.mark.parametrize(("budget", "written"), [("5/2", "2.5"), ("3", "3"), ("2.300", "2.3"), ("7/3", "7/3")])
def test_a_budget_in_a_recipes_text(budget: str, written: str) -> None:
    data = load_recipe(None, [f"assign.bits_per_weight={budget}"]).model_dump(mode="json")
    assert f"\n  bits_per_weight: {written}\n" in as_yaml(data)
