"""Runs with a mirror: what one machine made, another goes on with, whole or broken off in the middle of losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer
from robustness.runs import STAGES, digests, save_short_corpus, tiny_recipe, write_recipe

from moeq import pipeline
from moeq.artifacts.mirror import LIST
from moeq.errors import ArtifactError
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages import losses
from moeq.stages.context import Context

SMALL = (
    "corpus.sequences=12", "corpus.sequence_length=48", "losses.group_size=16", "losses.bits=[2,3]", "threads=1",
    "assign={method: uniform, bits: 2}", "eval.compare=[]",
)  # fmt: skip


def context(model: Path, out: Path, said: list[str], *overrides: str) -> Context:
    reporter = Reporter(quiet=True)
    reporter.say = said.append  # type: ignore[method-assign]
    return Context(recipe=load_recipe(None, [*SMALL, *overrides]), model_name=str(model), out=out, reporter=reporter)


@pytest.mark.full
def test_another_machine_has_nothing_left_to_do(moeq: ForkServer, tiny_mixtral: Path, tmp_path: Path) -> None:
    """The run, its checkpoint and other formats; and what is changed there comes back."""
    corpus, url = save_short_corpus(tmp_path / "corpus.jsonl"), f"file://{tmp_path}/bucket/run"
    recipe = tiny_recipe(tiny_mixtral, corpus, threads=1, mirror=url)
    recipe["export"] = {"formats": ["dequantized"]}
    path = write_recipe(tmp_path / "recipe.yaml", recipe)
    first = moeq.run("run", path, "--out", tmp_path / "first", "--quiet")
    assert (first.code, first.stderr) == (0, "")
    second = moeq.run("run", path, "--out", tmp_path / "second", "--json")
    assert second.code == 0
    assert [stage["skipped"] for stage in json.loads(second.stdout)["stages"]] == [True] * len(STAGES)
    assert digests(tmp_path / "second") == digests(tmp_path / "first")
    for folder in ("checkpoint", "checkpoint-dequantized", "report", "store"):
        names = {path.name for path in (tmp_path / "first" / folder).rglob("*")} - {".lock"}
        assert names == {path.name for path in (tmp_path / "second" / folder).rglob("*")} - {".lock"}
    other = moeq.run("assign", "--out", tmp_path / "second", "--set", "assign={method: uniform, bits: 3}", "--quiet")
    assert (other.code, other.stderr) == (0, "")
    changed = json.loads((tmp_path / "bucket/run/assign/assignment.json").read_text("utf-8"))
    assert changed == json.loads((tmp_path / "second/assign/assignment.json").read_text("utf-8"))


def test_replicas_of_a_run_that_broke_off_are_gone_on_with(
    tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, keep, kept = f"mirror=file://{tmp_path}/bucket/run", losses._keep, []

    def break_off(*given: Any) -> None:
        keep(*given)
        kept.append(given[1])
        raise MemoryError

    monkeypatch.setattr(losses, "_keep", break_off)
    with pytest.raises(MemoryError):
        pipeline.run(context(tiny_mixtral, tmp_path / "first", [], url), ("profile", "losses"))
    monkeypatch.setattr(losses, "_keep", keep)
    assert kept == [0]
    names = json.loads((tmp_path / "bucket/run" / LIST).read_text("utf-8"))["files"]
    assert any(name.endswith("layer-000.safetensors") for name in names)
    said: list[str] = []
    outcomes = pipeline.run(context(tiny_mixtral, tmp_path / "second", said, url), ("profile", "losses"))
    assert [outcome.skipped for outcome in outcomes] == [True, False]
    assert "  4 of 8 sets of losses and replicas are in the store" in said, said
    alone = pipeline.run(context(tiny_mixtral, tmp_path / "alone", []), ("profile", "losses"))
    assert [one.record.digest for one in alone] == [one.record.digest for one in outcomes]


def test_a_mirror_of_another_models_run_is_refused_and_stays(
    tiny_mixtral: Path, tiny_qwen: Path, tmp_path: Path
) -> None:
    url, away = f"file://{tmp_path}/bucket/run", tmp_path / "bucket" / "run"
    pipeline.run(context(tiny_mixtral, tmp_path / "first", [], f"mirror={url}"), ("profile",))
    there = {path: path.read_bytes() for path in away.rglob("*") if path.is_file()}
    with pytest.raises(ArtifactError, match="the run in it was made from another model") as refused:
        pipeline.run(context(tiny_qwen, tmp_path / "second", [], f"mirror={url}"), ("profile",))
    assert (refused.value.where, refused.value.do) == (f"mirror: {url}", "give another address")
    assert {path: path.read_bytes() for path in away.rglob("*") if path.is_file()} == there
    assert not (tmp_path / "second").exists()
