"""moeq estimate of a packed checkpoint: bits and places from its manifest, sizes from its configuration."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from family_models import save
from typer.testing import CliRunner

from moeq import pipeline
from moeq.artifacts.assignment import read_assignment
from moeq.artifacts.manifest import read_manifest
from moeq.cli import app
from moeq.errors import MoeqError
from moeq.estimation.subject import read_model
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages.context import Context

SMALL = (
    "corpus.sequences=4", "corpus.sequence_length=32", "losses.group_size=16", "losses.bits=[1,2,3,4]",
    "losses.methods=[rtn]", "assign={method: optimal, code_bits: 3, gpu_experts: 1, quantizer: rtn}",
    "profile.trace=true", "eval.compare=[]",
)  # fmt: skip
ONE = ("--grid", "in=16", "out=16", "--json")


@pytest.fixture(scope="module")
def finished(tiny_mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the tiny model up to its export, with a recorded trace."""
    out = tmp_path_factory.mktemp("estimated") / "run"
    context = Context(
        recipe=load_recipe(None, SMALL), model_name=str(tiny_mixtral), out=out, reporter=Reporter(quiet=True)
    )
    pipeline.run(context, ("profile", "losses", "assign", "quantize", "export"))
    return out


def case(*arguments: str | Path) -> Any:
    done = CliRunner().invoke(app, ["estimate", *map(str, arguments), *ONE])
    assert done.exit_code == 0, done.exception
    return json.loads(done.stdout)["cases"][0]


def test_a_run_stands_for_its_checkpoint_on_other_hardware(finished: Path, tmp_path: Path) -> None:
    """Beside --hardware, --grid and the like, which are not the stage's; nothing is written into the run."""
    kept = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    wanted = case("--model", finished / "checkpoint", "--hardware", "h100-ndp-pcie4")
    for named in (("--out", finished), ("--model", finished)):
        assert case(*named, "--hardware", "h100-ndp-pcie4") == wanted
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == kept
    unfinished = tmp_path / "run"
    unfinished.mkdir()
    (unfinished / "recipe.yaml").write_text("name: x\n")
    done = CliRunner().invoke(app, ["estimate", str(unfinished), "--hardware", "h100-ndp-pcie4"])
    assert "this run has no checkpoint; go on with it: moeq run" in str(done.exception)


@pytest.mark.full
def test_every_way_to_say_it_gives_the_same_estimate(finished: Path, tiny_mixtral: Path) -> None:
    checkpoint = finished / "checkpoint"
    packed = case("--model", checkpoint)
    by_manifest = case("--model", tiny_mixtral, "--manifest", checkpoint / "placement.json")
    by_assignment = case("--model", tiny_mixtral, "--assignment", finished / "assign" / "assignment.json")
    for other in (by_manifest, by_assignment):
        for one, its in zip(packed["estimate"]["points"], other["estimate"]["points"], strict=True):
            assert one["end_to_end_seconds"] == pytest.approx(its["end_to_end_seconds"], rel=1e-12)
        assert other["estimate"]["group_size"] == packed["estimate"]["group_size"] == 16
        assert other["estimate"]["zero_points"]


@pytest.mark.full
def test_bytes_are_those_of_the_assignment(finished: Path, tiny_mixtral: Path) -> None:
    found, geometry = case("--model", finished / "checkpoint"), read_model(str(tiny_mixtral)).geometry
    assignment = read_assignment(finished / "assign" / "assignment.json")
    expected = sum(
        geometry.expert_bytes(choice.bits, 16, zero_points=True)
        for layer in assignment.layers
        for choice in layer.experts
        if choice.tier == "gpu"
    )
    hot = next(part for part in found["capacity"]["gpu"]["parts"] if part["name"] == "hot experts")
    assert hot["bytes"] == pytest.approx(expected)
    assert found["capacity"]["gpu"]["parts"][0]["bytes"] == 2 * geometry.non_expert_parameters


@pytest.mark.full
def test_a_checkpoint_whose_experts_are_given_fewer_numbers(tmp_path: Path) -> None:
    """28 of the model's 40; its own checkpoint was refused as that of another model."""
    source, out = save("nemotron_h", tmp_path / "source"), tmp_path / "run"
    context = Context(recipe=load_recipe(None, SMALL), model_name=str(source), out=out, reporter=Reporter(quiet=True))
    pipeline.run(context, ("profile", "losses", "assign", "quantize", "export"))
    assignment = read_assignment(out / "assign" / "assignment.json")
    found, geometry = case("--model", out / "checkpoint"), read_model(str(source)).geometry
    near = [choice.bits for layer in assignment.layers for choice in layer.experts if choice.tier != "gpu"]
    expected = sum(geometry.expert_bytes(bits, 16, zero_points=True) for bits in near)
    assert geometry.expert_parameters == 2 * 28 * 24
    assert found["estimate"]["capacity"]["ndp_expert_bytes"] == pytest.approx(expected)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_beside_the_experts_count_where_they_are_packed(tied: bool, tmp_path: Path) -> None:
    """Embeddings that are the head too were none: as many weights were missing as the table has."""
    source, out = save("qwen3_moe", tmp_path / "source", tie_word_embeddings=tied), tmp_path / "run"
    others = "others={attention: 8, dense: 8, embeddings: 8, head: 8, method: rtn}"
    recipe = load_recipe(None, [*SMALL, "assign={method: uniform, bits: 3, quantizer: rtn}", others])
    context = Context(recipe=recipe, model_name=str(source), out=out, reporter=Reporter(quiet=True))
    pipeline.run(context, ("profile", "losses", "assign", "quantize", "export"))
    wanted, found = (read_model(str(folder)).geometry for folder in (source, out / "checkpoint"))
    assert found.non_expert_parameters == wanted.non_expert_parameters
    manifest = read_manifest(out / "checkpoint")
    packed = sum(one.rows * one.inputs for one in manifest.others)
    stored = 2 * (wanted.non_expert_parameters - packed) + sum(one.bytes for one in manifest.others)
    assert 1.05 * wanted.non_expert_parameters < stored < 1.5 * wanted.non_expert_parameters
    own = case("--model", out / "checkpoint")
    for one in (own, case("--model", source, "--manifest", out / "checkpoint")):
        assert one["capacity"]["gpu"]["parts"][0]["bytes"] == pytest.approx(stored)
        said = (
            f"all but the experts at {8 * stored / wanted.non_expert_parameters:.2f} bits a weight, under every policy"
        )
        assert said in one["estimate"]["assumptions"]
    assert pipeline.run(context, ("estimate",))
    of_run = json.loads((out / "estimate" / "estimate.json").read_text())
    assert of_run["geometry"]["other_bits"] == pytest.approx(own["geometry"]["other_bits"])
    as_saved = case("--model", out / "checkpoint", "--other-bits", "16")
    assert as_saved["capacity"]["gpu"]["parts"][0]["bytes"] == 2 * wanted.non_expert_parameters
    assert "other_bits" not in as_saved["geometry"]


def test_uniform_widths_may_replace_those_of_the_checkpoint(finished: Path) -> None:
    assert case("--model", finished / "checkpoint", "--bits", "2")["estimate"]["placement"].startswith("2 code bits")


def test_codes_of_a_checkpoint_are_stored_as_it_has_them(finished: Path) -> None:
    done = CliRunner().invoke(app, ["estimate", "--model", str(finished), "--group-size", "64"])
    assert "says how its codes are stored; give --bits, too" in str(done.exception)
    assert case("--model", finished, "--bits", 3, "--group-size", 64)["estimate"]["group_size"] == 64


def test_a_trace_of_the_run(finished: Path) -> None:
    found = case("--model", finished / "checkpoint", "--trace", finished / "profile" / "trace.safetensors")
    assert found["estimate"]["routing"] == {"1": "trace"}
    assert found["hit_rates"]["gpu_experts"] == [1, 1]


def test_a_manifest_of_another_model(finished: Path) -> None:
    refused = CliRunner().invoke(
        app, ["estimate", "--model", "mixtral-8x7b", "--manifest", str(finished / "checkpoint")]
    )
    assert isinstance(refused.exception, MoeqError)
    assert refused.exception.exit_code == 10
    assert str(refused.exception).startswith(f"{finished / 'checkpoint' / 'placement.json'}: 2 MoE layers")


def test_the_stage_of_a_run_stays_the_stage(finished: Path, tiny_mixtral: Path, tmp_path: Path) -> None:
    """Also of a run whose stages were run one by one, without a recipe in its directory."""
    copy = tmp_path / "run"
    shutil.copytree(finished, copy)
    (copy / "recipe.yaml").unlink()
    wanted = [word for one in SMALL for word in ("--set", one)]
    done = CliRunner().invoke(
        app,
        ["estimate", "--out", str(copy), "--model", str(tiny_mixtral), "--json", "--quiet", *wanted],
    )
    assert done.exit_code == 0, done.exception
    assert json.loads(done.stdout)["stage"] == "estimate"
    refused = CliRunner().invoke(app, ["estimate", "--out", str(copy), "--model", str(tiny_mixtral), "--bits", "3"])
    assert "a run lies in it" in str(refused.exception)


def test_the_stage_follows_the_recorded_trace(finished: Path, tiny_mixtral: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(finished, copy)
    wanted = ["--set", "estimate.popularity=trace", "--set", "estimate.grid={inputs: [16], outputs: [16]}"]
    done = CliRunner().invoke(app, ["estimate", "--out", str(copy), "--json", "--quiet", *wanted])
    assert done.exit_code == 0, done.exception
    (one,) = json.loads((copy / "estimate" / "estimate.json").read_text())["estimates"]
    assert one["routing"] == {"1": "trace"}
    refused = CliRunner().invoke(app, ["estimate", "--out", str(copy), *wanted, "--set", "profile.trace=false"])
    assert "estimate.popularity trace needs profile.trace" in str(refused.exception)
