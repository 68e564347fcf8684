"""`moeq reparam` with reparam.integer: the integer forward beside the folded checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from integer_reader import replay as independent_replay

from moeq.artifacts.stage import read_record
from moeq.errors import RecipeError
from moeq.inspection import inspect
from moeq.integers.artifacts.integer_report import read_report
from moeq.integers.artifacts.reparam import read_reparam
from moeq.planning.plan import make_plan
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from stages.test_reparam_vit import context_of, model_of, reparam

WANTED = ("reparam.integer.vectors=1", "reparam.integer.schemes=false", "eval.images.images=12")


@pytest.mark.full
def test_the_integer_forward_lies_beside_the_folded_checkpoint(tmp_path: Path) -> None:
    model, run = model_of(tmp_path / "model"), tmp_path / "run"
    reparam(model, run, *WANTED)
    folder = run / "reparam" / "integer"
    differing, _ = independent_replay(folder)
    assert differing == []
    assert inspect(folder)["model"] == "model"
    report, record = read_report(run / "reparam"), read_record(run / "reparam", "reparam")
    assert list(report.tasks) == list(record.summary["integer"]) == ["task-0"]
    assert (report.tasks["task-0"].calibration_images, report.tasks["task-0"].images) == (24, 12)
    names = {"integer/manifest.json", "integer/vectors.safetensors", "integer.json", "integer.schema.json"}
    assert names <= set(record.files)
    assert inspect(run / "reparam" / "integer.json")["task-0"]["widths"] == "8/8/4"
    assert [row["norm"] for row in inspect(run / "reparam" / "reparam.json")["norms"]][:2] == [
        "blocks.0.norm1", "blocks.0.norm2",
    ]  # fmt: skip
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    scales = {value["name"]: value["scale"] for value in manifest["values"]}
    for norm in read_reparam(run / "reparam").norms:
        assert scales[norm.path] == norm.scale
    assert manifest["model"] == record.model.model_dump(mode="json")
    before = (folder / "manifest.json").read_bytes()
    reparam(model, run, *WANTED)
    assert (folder / "manifest.json").read_bytes() == before
    reparam(model, run, *WANTED, "reparam.integer.attention=8")
    assert (folder / "manifest.json").read_bytes() != before
    reparam(model, run)
    assert not folder.exists()
    assert not list((run / "reparam").glob("integer*"))


def test_every_task_has_its_own_and_the_plan_counts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(Reporter, "say", lambda _, text: said.append(text.strip()))
    model = model_of(tmp_path / "model", num_tasks=2)
    planned = (
        make_plan(context_of(model, tmp_path / "plan", *WANTED, "assign.code_bits=2"), probe=False)
        .stages[0]
        .lasting["integer"]
    )
    reparam(model, tmp_path / "run", *WANTED)
    written = sum(path.stat().st_size for path in (tmp_path / "run" / "reparam" / "integer").rglob("*.*"))
    assert 0.8 < planned / written < 1.25
    folders = sorted(path.name for path in (tmp_path / "run" / "reparam" / "integer").iterdir())
    assert folders == ["task-0", "task-1"]
    assert {str(tmp_path / "run" / "reparam" / "integer" / name) for name in folders} <= set(said)
    found = [independent_replay(tmp_path / "run" / "reparam" / "integer" / name) for name in folders]
    assert [differing for differing, _ in found] == [[], []]
    assert (found[0][1]["logits"] != found[1][1]["logits"]).any()


def test_what_has_no_integer_forward_is_refused_before_anything_is_written(tmp_path: Path, tiny_mixtral: Path) -> None:
    with pytest.raises(RecipeError, match=r"reparam\.integer: MixtralForCausalLM has no integer forward; leave"):
        reparam(
            tiny_mixtral, tmp_path / "run", "reparam.integer={}", "corpus.source=bundled", "corpus.sequence_length=32"
        )
    assert not (tmp_path / "run").exists()
    with pytest.raises(RecipeError, match=r"activations is 6, .* folded for 8; set reparam\.bits to 6, too$"):
        load_recipe(None, ["reparam.integer.activations=6"])
    assert load_recipe(None, ["reparam.integer.activations=6", "reparam.bits=6"]).reparam is not None
