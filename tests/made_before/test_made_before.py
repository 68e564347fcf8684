"""What an earlier moeq made still inspects, loads, converts and goes on.

Archives are kept for good. Where a change of keys means that a stage of an old run is made again, or other bytes are
made, the archive's index says so (`again`, `otherwise`) and the CHANGELOG why; where a format is read no more, a test
here says by which line it is refused.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import peers
import pyarrow.parquet as pq
import pytest
import torch
from made_before import demo_digests
from made_before.archives import (
    GGUF,
    NATIVE,
    Kept,
    answers,
    context_aware,
    decoded,
    differences,
    digests,
    moeq,
    names,
    other_environment,
    refused,
)
from transformers import AutoModelForCausalLM

import moeq as package
from moeq.recipe import load_recipe

MISSING = 13  # exit code


def same(found: Any, wanted: Any) -> bool:
    """Whether everything that is wanted is found, sums of floats apart; there may be more keys by now."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        return all(key in found and same(found[key], value) for key, value in wanted.items())
    if isinstance(wanted, list) and isinstance(found, list):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return math.isclose(found, wanted, rel_tol=1e-9) if isinstance(wanted, float) else bool(found == wanted)


def close(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether a model answers as it did; matrix products differ from processor to processor."""
    entropy = math.isclose(found["cross_entropy"], wanted["cross_entropy"], rel_tol=1e-4)
    return entropy and found["logits"] == pytest.approx(wanted["logits"], rel=1e-3, abs=1e-3)


def test_there_are_archives() -> None:
    assert names()


def test_inspect_says_what_it_said(kept: Kept) -> None:
    for path, wanted in kept.wanted["inspect"].items():
        found = moeq("inspect", kept.folder / path)
        text = json.dumps(found).replace(f"{kept.folder}/", "")
        figures = {key: value for key, value in wanted.items() if key != "check"}  # a sentence on what was compared
        assert same(json.loads(text), figures), path
        assert ("check" in found) == ("check" in wanted), path


def test_recipes_load(kept: Kept) -> None:
    paths = sorted([*kept.folder.rglob("*.yaml")])
    assert len(paths) > 4
    for path in paths:
        load_recipe(path)


def test_checkpoints_hold_the_same_weights(kept: Kept, tmp_path: Path) -> None:
    """Of every format that converts: decoded to the last bit, and what comes of it answers as it did."""
    for path, wanted in kept.wanted["decoded"].items():
        plain = tmp_path / path
        plain.parent.mkdir(parents=True, exist_ok=True)
        moeq("convert", kept.folder / path, "--to", "dequantized", "--out", plain, "--no-verify")
        assert decoded(plain) == wanted["weights"], path
        assert close(answers(AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)), wanted), path


@pytest.mark.cases(2)
@pytest.mark.parametrize("path", NATIVE)
def test_native_checkpoints_load(kept: Kept, path: str, tmp_path: Path) -> None:
    checkpoint = kept.copy(path, tmp_path)
    (checkpoint / "stage.json").unlink(missing_ok=True)  # as it is published
    wanted = kept.wanted["native"][path]
    assert close(answers(package.load(checkpoint, dtype="float32", verify=True)), wanted)
    assert close(answers(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)), wanted)
    verdict = moeq("verify", checkpoint, "--quiet")
    assert verdict["right"]
    assert verdict["provenance"].startswith("not said by a provenance.json"), "there was none"


def test_gguf_is_read(kept: Kept) -> None:
    peers.module("gguf")
    verdict = moeq("verify", kept.folder / GGUF, "--against", kept.model("run"), "--quiet")
    assert verdict["distance"]["weights_error"] == pytest.approx(kept.wanted["gguf"]["weights_error"], rel=1e-5)
    assert verdict["distance"]["equal"] > kept.wanted["gguf"]["equal"]  # those of another type are compared too, now
    assert verdict["distance"]["changed"] == kept.wanted["gguf"]["changed"]
    assert verdict["problems"] == kept.wanted["gguf"]["problems"]


def test_replicas_that_are_not_placed_are_read(kept: Kept) -> None:
    assert context_aware(kept.folder) == pytest.approx(kept.wanted["context_aware"], rel=1e-3)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["run", "vit-run"])
def test_a_run_goes_on_where_it_lies_now(kept: Kept, name: str, tmp_path: Path) -> None:
    """Only the recipe's copy says where a model lay: a run that was moved with it wants --model, once."""
    run, model = kept.copy(name, tmp_path), kept.model(name)
    code, line = refused("run", "--out", run, "--quiet")
    assert code == MISSING
    assert "no such file or directory" in line
    before = digests(run)
    stages = moeq("run", "--out", run, "--model", model, "--quiet")["stages"]
    again = [stage["stage"] for stage in stages if not stage["skipped"]]
    assert again == kept.again(name)
    if not again:
        assert differences(before, digests(run)) == []
    for stage in stages:
        assert moeq(stage["stage"], "--out", run, "--quiet")["skipped"], stage["stage"]


def test_a_store_serves_without_the_stage_that_filled_it(kept: Kept, tmp_path: Path) -> None:
    run, old = kept.copy("run", tmp_path), kept.folder / "run"
    shutil.rmtree(run / "losses")
    moeq("losses", "--out", run, "--model", kept.model("run"), "--quiet")
    assert differences(digests(old / "store"), digests(run / "store")) == [], "nothing is made that is there"
    rows = [pq.read_table(one / "losses" / "losses.parquet") for one in (old, run)]
    assert rows[0].equals(rows[1].select(rows[0].schema.names)), "what came later is not known of them"


@pytest.mark.full
def test_later_stages_read_what_earlier_ones_made(kept: Kept, tmp_path: Path) -> None:
    """From the kept profile, losses, store and assignment come the same bytes, and figures as close as floats are."""
    run, old = kept.copy("run", tmp_path), kept.folder / "run"
    for name in ("quantize", "checkpoint", "eval", "estimate", "report"):
        shutil.rmtree(run / name)
    stages = moeq("run", "--out", run, "--model", kept.model("run"), "--set", "eval.tasks=[]", "--quiet")["stages"]
    first = [name for name in ("profile", "losses", "assign") if name not in kept.again("run")]
    assert [one["stage"] for one in stages if one["skipped"]] == first
    for name in ("quantize", "checkpoint"):
        changed = differences(digests(old / name, kept.wanted["made_by"]["moeq"]), digests(run / name))
        now = {"placement.json", "placement.schema.json", "quantizers.json"}  # errors and digests of tensors are new
        assert set(changed) <= {"README.md", "provenance.json"} | now, "the card has the evaluation's figures"
    before, after = (json.loads((one / "eval" / "eval.json").read_text("utf-8"))["rows"] for one in (old, run))
    assert [(row["name"], row["expert_bytes"]) for row in before] == [
        (row["name"], row["expert_bytes"]) for row in after
    ]
    figures = [row["perplexity"] for row in after]
    assert figures == pytest.approx([row["perplexity"] for row in before], rel=0.02), "in bfloat16"
    assert (run / "report" / "report.html").stat().st_size > 10_000


def test_files_of_a_run_go_into_commands_without_it(kept: Kept) -> None:
    run = kept.folder / "run"
    figures = moeq(
        "estimate", "--model", run / "checkpoint", "--trace", run / "profile" / "trace.safetensors",
        "--grid", "in=64", "out=64", "batch=1",
    )  # fmt: skip
    assert figures["cases"]
    assert moeq("eval", kept.folder / "comparison.json")["rows"]
    assert moeq("gc", "--out", run, "--dry-run") is not None


@pytest.mark.parametrize("name", ["run", "vit-run"])
def test_the_same_files_are_made_today(kept: Kept, name: str, tmp_path: Path) -> None:
    """A whole run again: every byte of every stage, where floating point is as it was; the store's keys apart."""
    reason = other_environment(kept.wanted["made_by"])
    if reason is not None:
        pytest.skip(reason)
    moeq("run", kept.folder / f"{name}.yaml", "--model", kept.model(name), "--out", tmp_path / "run", "--quiet")
    before, after = digests(kept.folder / name, kept.wanted["made_by"]["moeq"]), digests(tmp_path / "run")
    otherwise = [path for path in differences(before, after) if not path.startswith("store/")]
    assert otherwise == kept.wanted["runs"][name]["otherwise"]


@pytest.mark.full
def test_the_demo_makes_the_same_files() -> None:
    recorded = json.loads(demo_digests.RECORDED.read_text("utf-8"))
    reason = other_environment(recorded["made_by"])
    if reason is not None:
        pytest.skip(reason)
    assert differences(recorded["files"], demo_digests.demo()["files"]) == []
