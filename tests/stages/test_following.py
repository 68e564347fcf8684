"""Precision that follows the workload as a part of a recipe's evaluation."""

from __future__ import annotations

from pathlib import Path

import family_models
import pytest
import torch

from moeq import pipeline
from moeq.artifacts.evaluation import read_eval
from moeq.errors import EvaluationError, ModelError, RecipeError
from moeq.planning.plan import add_up
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages import following, report
from moeq.stages.context import Context
from moeq.stages.needs import LEVERS, Sizes
from moeq.stages.order import STAGES

RECIPE = (
    "corpus.sequences=4", "corpus.sequence_length=32", "losses.group_size=32", "losses.bits=[2,4]",
    "losses.methods=[rtn]", "losses.nested=true", "assign={method: uniform, bits: 2, quantizer: rtn}",
    "quantize.replicas=all", "eval.compare=[{name: high, method: uniform, bits: 4, quantizer: rtn}]",
    "eval.perplexity={sequences: 3, sequence_length: 24, batch_size: 1}", "export.verify=false",
    "eval.dynamic=[{period: 1, ema: 0.5, certainty: 0}, {memory: 1GiB}, {memory: 1GiB, host: 1MiB}]",
)  # fmt: skip


ONLY_FOUR = "losses.nested=false", "assign.bits=4", "eval.dynamic=[{high: 4}]"


def context(folder: Path, *changes: str) -> Context:
    if not (folder / "model").exists():
        family_models.save("mixtral", folder / "model", hidden_size=64, intermediate_size=96)
    recipe = load_recipe(None, [*RECIPE, *changes])
    return Context(recipe=recipe, model_name=str(folder / "model"), out=folder / "run", reporter=Reporter(quiet=True))


@pytest.mark.full
def test_rows_of_the_checkpoint_whose_precision_follows(tmp_path: Path) -> None:
    """Without memory it has that of its own assignment, all low; with enough, every expert is high."""
    run = context(tmp_path)
    pipeline.run(run, ("profile", "losses", "assign", "quantize", "export", "eval", "estimate", "report"))
    rows = {row.name: row for row in read_eval(run.directory("eval") / "eval.json").rows}
    original, own, high, low, most, again = rows.values()
    assert list(rows)[3:] == [
        "dynamic 4/2 bits in its own bytes period=1 ema=0.5 certainty=0", "dynamic 4/2 bits in 1.00 GiB",
        "dynamic 4/2 bits in 1.00 GiB host 1.00 MiB",
    ]  # fmt: skip
    assert low.perplexity == pytest.approx(own.perplexity, rel=1e-4)
    assert most.perplexity == again.perplexity == pytest.approx(high.perplexity, rel=1e-4)
    assert most.perplexity != pytest.approx(low.perplexity, rel=1e-4)
    for row in (low, most, again):
        assert row.dynamic is not None
        assert (row.assignment, row.exported, row.dynamic["pool_bytes"]) == (None, False, row.expert_bytes)
        assert (row.dynamic["steps"], row.dynamic["failures"]) == (3, 0)
        assert set(row.changes) == {"perplexity"}
        assert row.checkpoint_bytes == own.checkpoint_bytes
    assert low.dynamic["decisions"] == 3
    assert original.dynamic is own.dynamic is high.dynamic is None
    page = (run.directory("report") / "report.html").read_text()
    assert all(name in page for name in list(rows)[3:])
    assert report.is_intact(run)


def test_what_it_takes_is_foreseen(tmp_path: Path) -> None:
    """More rows in eval.json, and the memory beside the device."""
    stage = [one for one in STAGES if one.name == "eval"]
    without = add_up(Sizes(context(tmp_path, "eval.dynamic=[]")), stage)[0]
    need = add_up(Sizes(context(tmp_path)), stage)[0]
    assert need.lasting["eval.json"] > 1.5 * without.lasting["eval.json"]
    run = Sizes(context(tmp_path, "eval.dynamic=[{memory: 8GiB}, {memory: 1MB, host: 1MB}]"))
    much, little = following.moments(run, {"logits": 5.0})
    assert sum(much.values()) > 8 * 2**30 > 2**30 > sum(little.values())
    assert little["experts beside the device"] == 1e6
    assert {*much} - {"logits"} <= {*LEVERS}


def test_where_precision_follows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = context(tmp_path)
    following.check(run)
    with pytest.raises(ModelError, match="4 bits and fewer are asked for"):
        following.check(context(tmp_path, "losses.bits=[4]", *ONLY_FOUR))
    monkeypatch.setitem(run.model.__dict__, "device", torch.device("meta"))
    with pytest.raises(EvaluationError, match="CPU alone"):
        following.check(run)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        (["quantize.replicas=placed"], RecipeError, "quantize.replicas: all"),
        (["eval.dynamic=[{high: 4, low: 3}]"], RecipeError, "3 bits is not among losses.bits"),
        (["eval.dynamic=[{period: 2}, {period: 2}]"], RecipeError, "none twice"),
    ],
)
def test_what_cannot_be_is_refused_with_the_recipe(
    changes: list[str], error: type[Exception], said: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said):
        context(tmp_path, *changes)
