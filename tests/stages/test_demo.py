"""The demo recipe's claim, on the bundled model: mixed beats uniform at no more bytes."""

from pathlib import Path

from moeq import pipeline, results
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages.context import Context

RECIPE = Path(__file__).parents[2] / "recipes" / "demo.yaml"


def test_mixed_beats_uniform_2_bit_at_the_same_bytes(tmp_path: Path) -> None:
    recipe = load_recipe(RECIPE, ["corpus.sequences=96", "eval.perplexity.sequences=96", "eval.limit=8"])
    context = Context(recipe=recipe, model_name=str(recipe.model), out=tmp_path, reporter=Reporter(quiet=True))
    pipeline.run(context)
    rows = {row["name"]: row for row in results.final_rows(context)}
    mixed, uniform = rows["mixed-2.3"], rows["uniform-2"]
    assert mixed["expert_bytes"] <= uniform["expert_bytes"]
    assert mixed["perplexity"] < uniform["perplexity"]
    assert rows["original"]["perplexity"] < rows["uniform-4"]["perplexity"] < rows["uniform-3"]["perplexity"]
    assert rows["uniform-4"]["kl"] < rows["uniform-3"]["kl"] < mixed["kl"] < uniform["kl"]
    assert rows["hot4+mixed-2.3"]["perplexity"] < rows["hot4+uniform-2"]["perplexity"]
    for row in rows.values():
        assert row["accuracy"] is not None
        if row["name"] != "original":
            assert row["speedup_over_monde_bandwidth_rule"] > row["speedup_over_monde_cost_optimal"] > 1
    assert context.directory("report").joinpath("report.html").stat().st_size > 10_000
