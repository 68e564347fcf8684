"""Checkpoints whose numbers are odd: damaged weights are named by file and tensor, odd activations are left out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from fork_server import ForkServer
from robustness.runs import write_recipe
from robustness.test_bad_input import EXPERT, QUANTIZATION, Models, assert_refused, models

__all__ = ["models"]  # the fixture


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_damaged_expert_is_named(
    moeq: ForkServer, recipe: Path, models: Models, tmp_path: Path, layer: int, value: float
) -> None:
    key = EXPERT.format(layer, 2)
    model = models.edited(key, lambda tensor: tensor.index_fill(0, torch.tensor([3]), value))
    finished = moeq.run("losses", recipe, "--model", model, "--out", tmp_path / "out", "--quiet")
    where = f"{models.shard(model, key)}: {key}: weights are not finite"
    assert_refused(finished, QUANTIZATION, where, f"model.layers.{layer}.mlp.experts, expert 2, gate_proj")


@pytest.mark.parametrize("key", ["model.embed_tokens.weight", "model.layers.1.self_attn.o_proj.weight"])
def test_a_damaged_weight_outside_the_experts_is_named(
    moeq: ForkServer, recipe: Path, models: Models, tmp_path: Path, key: str
) -> None:
    model = models.edited(key, lambda tensor: torch.full_like(tensor, torch.nan))
    finished = moeq.run("profile", recipe, "--model", model, "--out", tmp_path / "out", "--quiet")
    assert_refused(finished, QUANTIZATION, f"{models.shard(model, key)}: {key}: weights are not finite")


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_tokens_that_are_not_finite_are_left_out_and_counted(
    moeq: ForkServer, recipe: Path, models: Models, tmp_path: Path, value: float
) -> None:
    """One word of the vocabulary is damaged: what comes after it in a sequence is lost, the rest goes on."""
    from tokenizers import Tokenizer

    word = Tokenizer.from_file(str(models.whole / "tokenizer.json")).encode(" the").ids[-1]
    model = models.edited("model.embed_tokens.weight", lambda tensor: tensor.index_fill(0, torch.tensor([word]), value))
    out = tmp_path / "out"
    finished = moeq.run("losses", recipe, "--model", model, "--out", out)
    assert finished.code == 0, finished.stderr
    printed = " ".join(finished.stderr.split())
    said = re.findall(r"model\.layers\.(\d)\.mlp\.experts: (\d+) of 768 tokens left out", printed)
    assert [int(layer) for layer, _ in said] == [0, 1, 2], finished.stderr
    assert all(0 < int(lost) < 768 for _, lost in said)
    assert re.search(r"fallbacks of 15 experts: .*left_out_tokens 15", printed)
    summary = json.loads((out / "losses" / "stage.json").read_text("utf-8"))["summary"]
    assert summary["fallbacks"]["left_out_tokens"] == summary["experts"] == 15
    rows = pq.read_table(out / "losses" / "losses.parquet").to_pylist()
    assert all("left_out_tokens" in row["fallback"] for row in rows if row["method"] == "gptq")
    assert all(row["loss"] < float("inf") for row in rows)


def test_a_whole_run_with_experts_of_zeros_and_equal_rows(
    moeq: ForkServer, recipe: Path, models: Models, tmp_path: Path
) -> None:
    for expert, change in {0: torch.zeros_like, 3: lambda tensor: tensor[:1].expand_as(tensor).contiguous()}.items():
        for name in ("w1", "w2", "w3"):
            key = EXPERT.format(1, expert).replace("w1", name)
            model = models.edited(key, change)
            models.whole = model.rename(models.folder / f"changed-{expert}-{name}")
    settings = yaml.safe_load(recipe.read_text("utf-8"))
    settings["losses"] |= {"clip": "mse", "methods": ["gptq", "rtn"]}
    out = tmp_path / "out"
    changed = write_recipe(tmp_path / "r.yaml", settings)
    finished = moeq.run("run", changed, "--model", models.whole, "--out", out, "--quiet")
    assert (finished.code, finished.stderr) == (0, "")
    rows = pq.read_table(out / "losses" / "losses.parquet").to_pylist()
    zero = [row for row in rows if (row["layer"], row["expert"]) == (1, 0)]
    assert zero
    assert all((row["loss"], row["relative_loss"]) == (0, 0) for row in zero)
    assert all(row["loss"] < float("inf") for row in rows)
