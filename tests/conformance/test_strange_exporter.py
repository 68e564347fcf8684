"""Somebody else's exporter, one file and an entry point: from the recipe to plan, checkpoint, proof and report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer
from made_sources import MadeSource
from strange_exporter import ENTRIES, MODULES
from strangers import on_path, started, write_package

from moeq import inspection
from moeq.artifacts.sums import NAME as SUMS
from moeq.errors import ArtifactError
from moeq.exporters import write
from moeq.exporters.foreign import WriteOptions
from moeq.exporters.readers import open_packed
from moeq.registry import EXPORTERS

ALL = """
import json
import sys
from pathlib import Path

from moeq import conversion, inspection, pipeline
from moeq.planning.plan import make_plan
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages import frontier
from moeq.stages.context import Context

model, out, *overrides = sys.argv[1:]
recipe, quiet = load_recipe(None, overrides), Reporter(quiet=True)
context = Context(recipe=recipe, model_name=model, out=Path(out), reporter=quiet)
plan = make_plan(context, probe=False)
pipeline.run(context)
checkpoint = Path(out) / "checkpoint-strangers-runtime"
copy = conversion.convert(Path(out) / "checkpoint", "strangers", Path(out) / "copy", verify=True, reporter=quiet)
seen = [inspection.inspect(path) for path in (Path(out), checkpoint, Path(out) / "copy")]
print(json.dumps({
    "plan": next(stage.lasting for stage in plan.stages if stage.stage == "export"), "copy": copy, "inspect": seen,
    "prices": [price["target"] for price in frontier.prices(context)],
}, default=str))
"""
SMALL = (
    "corpus.sequences=8", "corpus.sequence_length=32", "losses.group_size=16", "losses.bits=[2,3]",
    "losses.methods=[rtn]", "assign={method: uniform, bits: 2, quantizer: rtn, target: strangers-runtime}",
    "export.formats=[strangers]", "export.strangers_note=by way of the recipe", "eval.compare=[]", "eval.tasks=[]",
    "eval.perplexity.sequences=4", "eval.perplexity.sequence_length=32", "estimate.grid.inputs=[128]",
)  # fmt: skip


@pytest.fixture
def package(tmp_path: Path) -> Path:
    write_package(tmp_path / "there", EXPORTERS.group, ENTRIES, MODULES)
    return tmp_path / "there"


@pytest.mark.full
def test_it_runs_from_the_recipe_to_the_report(
    moeq_anew: ForkServer, package: Path, tiny_mixtral: Path, tmp_path: Path
) -> None:
    out, program = tmp_path / "run", tmp_path / "all.py"
    program.write_text(ALL)
    done = moeq_anew.run(str(tiny_mixtral), str(out), *SMALL, program=program, package=package)
    assert done.code == 0, done.stderr
    told = json.loads(done.stdout)
    checkpoint = out / "checkpoint-strangers-runtime"
    assert json.loads((checkpoint / "config.json").read_text())["quantization_config"]["note"] == (
        "by way of the recipe"
    )  # fmt: skip
    size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    assert told["plan"]["../checkpoint-strangers-runtime"] == pytest.approx(size, rel=0.05)
    verified = moeq_anew.run("verify", checkpoint, "--json", package=package, fresh_probe=True)
    assert verified.code == 0, verified.stderr
    verdict = json.loads(verified.stdout)
    assert (verdict["target"], verdict["problems"], len(verdict["layers"])) == ("strangers-runtime", [], 2)
    assert verdict["layers"][0]["error"] < 1e-4
    assert told["copy"]["verified_with"] == "strangers-runtime"
    assert (out / "copy" / SUMS).is_file()
    run, stage, copy = told["inspect"]
    assert run["checkpoint-strangers-runtime"] == stage["checked_files"]
    assert stage["kind"] == copy["kind"] == "packed checkpoint (the strangers' format)"
    assert "strangers-runtime" in told["prices"]
    page = next((out / "report").glob("*.html")).read_text("utf-8")
    assert "strangers" in page
    assert "by way of the recipe" in page


@pytest.mark.full
def test_the_command_line_knows_it_and_what_it_cannot_do(package: Path, tiny_mixtral: Path, tmp_path: Path) -> None:
    run = ("export", "--model", str(tiny_mixtral), "--out", str(tmp_path / "run"), "--format")
    assert "did you mean 'strangers-runtime'?" in started(package, *run, "stranger").stderr
    narrow = ("strangers", "--set", "losses.bits=[2]", "--set", "assign={method: uniform, bits: 2, target: nobody}")
    assert "unknown runtime 'nobody'; use one of native" in started(package, *run, *narrow).stderr
    help_of = started(package, "convert", "--help").stdout
    assert "strangers" in help_of


def test_without_its_package_its_checkpoints_are_refused_by_name(tiny_mixtral: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_mixtral, tmp_path / "copy")
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    packed = config | {"quantization_config": {"quant_method": "strangers", "grids": {}}}
    (tmp_path / "copy" / "config.json").write_text(json.dumps(packed))
    with pytest.raises(ArtifactError, match="quant_method strangers is not supported; moeq reads its own checkpoints"):
        open_packed(tmp_path / "copy")


def raising(*_: object) -> None:
    raise ZeroDivisionError("by a bug")


def of_another_kind(*_: object) -> str:
    return "what?"


@pytest.mark.parametrize(
    ("function", "wrong", "told"),
    [
        ("__init__", raising, r"failed at layout\(\) of .*config\.json \(ZeroDivisionError: by a bug\)"),
        ("grid", raising, r"failed at grid\(\) of strangers_exporter\.Layout \(ZeroDivisionError: by a bug\)"),
        ("grid", of_another_kind, r"failed at grid\(\) of .* \(TypeError: it returns a str, no Grid\)"),
        ("shape", raising, r"failed at shape\(\) of strangers_exporter\.Layout"),
        ("check", raising, r"failed at check\(\) of strangers_exporter\.Layout"),
        ("read", raising, r"failed at read\(\) of strangers_exporter\.Layout"),
        ("read", of_another_kind, r"failed at read\(\) of .* \(TypeError: it returns a str, no Stored\)"),
        ("anchor", None, r"failed at anchor and parts of strangers_exporter\.Layout \(AttributeError"),
    ],
)
def test_what_its_layout_raises_names_its_package(
    function: str, wrong: Any, told: str, package: Path, tiny_qwen: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """What it says of a matrix that is not as it should be, by a ValueError, stays as it is."""
    with on_path(package, EXPORTERS, MODULES):
        source = MadeSource(tiny_qwen, lambda *_: 2, group_size=16)
        write("strangers-runtime", source, tmp_path / "made", WriteOptions())
        kind = EXPORTERS.get("strangers").layout

        def looked_at() -> object:
            if function == "shape":
                return inspection.inspect(tmp_path / "made")
            opened = open_packed(tmp_path / "made")
            return opened.expert(opened.layers[0], 0)

        looked_at()
        monkeypatch.setattr(kind, function, wrong) if wrong else monkeypatch.delattr(kind, function)
        with pytest.raises(ArtifactError, match=f"^strangers 1\\.0: exporter 'strangers' {told}.*; report it to"):
            looked_at()
        if function in ("shape", "check", "read"):
            said = ValueError("codes are too short")
            monkeypatch.setattr(kind, function, lambda *_: (_ for _ in ()).throw(said))
            with pytest.raises(ArtifactError, match=r"made.*codes are too short"):
                looked_at()
