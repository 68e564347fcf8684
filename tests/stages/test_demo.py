"""The demo recipe's claim, on the bundled model: its export beats the paper's mix and uniform at no more bytes."""

from pathlib import Path

import pytest

from moeq import pipeline, results
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages.context import Context

RECIPE = Path(__file__).parents[2] / "recipes" / "demo.yaml"


SMALLER = ("corpus.sequences=32", "eval.perplexity.sequences=32", "eval.limit=2", "quantize.tune={steps: 8}")


@pytest.mark.full
def test_what_is_exported_is_the_best_at_its_size_and_the_paper_stands_beside_it(tmp_path: Path) -> None:
    recipe = load_recipe(RECIPE, SMALLER)
    context = Context(recipe=recipe, model_name=str(recipe.model), out=tmp_path, reporter=Reporter(quiet=True))
    pipeline.run(context)
    rows = {row["name"]: row for row in results.final_rows(context)}
    exported, uniform, paper = rows["optimal-2.1"], rows["uniform-2"], rows["prefix-split-2.1"]
    assert exported["exported"]
    assert exported["label"] == "optimal by matrix, 2.1 bits, tuned"
    assert max(exported["expert_bytes"], paper["expert_bytes"]) <= uniform["expert_bytes"]
    for measure in ("perplexity", "kl"):
        assert exported[measure] < paper[measure] < uniform[measure]
        assert rows["hot4+prefix-split-2.1"][measure] < rows["hot4+uniform-2"][measure]
    assert exported["same_top"] > paper["same_top"] > uniform["same_top"]
    assert rows["original"]["perplexity"] < rows["uniform-4"]["perplexity"] < rows["uniform-3"]["perplexity"]
    assert rows["hot4+uniform-2"]["label"] == "4 experts in FP16 + 2-bit"
    for row in rows.values():
        assert row["accuracy"] is not None
        if row["name"] != "original":
            assert row["speedup_over_monde_bandwidth_rule"] > row["speedup_over_monde_cost_optimal"] > 1
    assert context.directory("report").joinpath("report.html").stat().st_size > 10_000
