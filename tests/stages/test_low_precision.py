"""eval.low_precision: every point is the perplexity of that assignment, whatever was swapped before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeq import pipeline
from moeq.artifacts.assignment import FULL, Assignment, ExpertChoice, LayerAssignment
from moeq.artifacts.low_precision import COLDEST, HOTTEST, RANDOM, LowPrecisionReport
from moeq.errors import RecipeError
from moeq.evaluation.perplexity import perplexity
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages import analysis, evaluate, profile
from moeq.stages.context import Context

SMALL = (
    "corpus.sequences=8", "corpus.sequence_length=32", "losses.group_size=16", "losses.methods=[rtn]",
    "losses.bits=[1, 2, 4]", "losses.per_projection=false", "assign={method: uniform, bits: 4, quantizer: rtn}",
    "eval.perplexity={sequences: 4, sequence_length: 32, batch_size: 3}", "export.verify=false",
    "eval.compare=[{name: two, method: uniform, bits: 2, quantizer: rtn}]",
)  # fmt: skip
SWEEPS = "eval.low_precision=[{shares: [0, 0.4, 1], seeds: 2}, {high_bits: 4, shares: [0.6], seeds: 0}]"
STAGES = ("profile", "losses", "assign", "quantize", "export", "eval")


def context(model: Path, out: Path, *overrides: str) -> Context:
    recipe = load_recipe(None, [*SMALL, *overrides])
    return Context(recipe=recipe, model_name=str(model), out=out, reporter=Reporter(quiet=True))


@pytest.fixture(scope="module")
def finished(tiny_mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Context:
    found = context(tiny_mixtral, tmp_path_factory.mktemp("low") / "run", SWEEPS)
    pipeline.run(found)
    return found


def report_of(one: Context) -> LowPrecisionReport:
    found = analysis.measured(one)
    assert found is not None
    return found


def alone(one: Context, low: list[set[int]], bits: int, high: int) -> float:
    """Perplexity of fresh weights with some experts of every layer at the low width."""
    assignment = Assignment(
        name="by hand",
        method="uniform",
        parameters={"quantizer": "rtn"},
        group_size=16,
        layers=tuple(
            LayerAssignment(
                name=layer.name,
                experts=tuple(
                    ExpertChoice(tier="ndp", bits=bits if expert in low[layer.index] else high, importance=0.0)
                    for expert in range(layer.num_experts)
                ),
            )
            for layer in one.model.layers
        ),
    )
    assert one.text.evaluation is not None
    with one.model.overlay() as overlay:
        model = evaluate.replaced(one, overlay, assignment)
        found = perplexity(model, one.text.evaluation, 3, one.model.device, lambda: None, one.model.streamed)
    return float(found["perplexity"])


@pytest.mark.full
def test_the_ends_are_the_original_and_the_uniform_assignment(finished: Context) -> None:
    rows = {row.name: row.perplexity for row in evaluate.load(finished).rows}
    first = report_of(finished).sweeps[0]
    assert [(curve.order, curve.number) for curve in first.curves] == [
        (COLDEST, None), (HOTTEST, None), (RANDOM, 0), (RANDOM, 1)
    ]  # fmt: skip
    for curve in first.curves:
        assert [point.low_experts for point in curve.points] == [0, 4, 10]
        assert curve.points[0].perplexity == rows["original"]
        assert curve.points[-1].perplexity == rows["two"]
    assert len({curve.points[1].perplexity for curve in first.curves}) > 1


@pytest.mark.full
def test_points_between_are_what_the_assignment_alone_gives(finished: Context) -> None:
    counted = profile.load(finished)
    order = [counted.total(layer)[0].argsort(kind="stable").tolist() for layer in range(2)]
    first, second = report_of(finished).sweeps
    cold, hot = [set(layer[:2]) for layer in order], [set(layer[-2:]) for layer in order]
    assert first.curves[0].points[1].perplexity == alone(finished, cold, 2, FULL)
    assert first.curves[1].points[1].perplexity == alone(finished, hot, 2, FULL)
    cold = [set(layer[:3]) for layer in order]
    assert second.curves[0].points[0].perplexity == alone(finished, cold, 2, 4)


@pytest.mark.full
def test_the_page_shows_the_curves(finished: Context) -> None:
    page = (finished.directory("report") / "report.html").read_text("utf-8")
    assert "Share of experts at a low width" in page
    assert "2-bit among full-precision experts" in page
    assert "random 2" in page


@pytest.mark.full
def test_a_streamed_model_gives_the_same(finished: Context, tiny_mixtral: Path, tmp_path: Path) -> None:
    streamed = context(tiny_mixtral, tmp_path / "run", SWEEPS, "stream=always")
    pipeline.run(streamed, STAGES)
    for one, other in zip(report_of(streamed).sweeps, report_of(finished).sweeps, strict=True):
        assert [point.perplexity for curve in one.curves for point in curve.points] == pytest.approx(
            [point.perplexity for curve in other.curves for point in curve.points]
        )
    again = context(tiny_mixtral, tmp_path / "run", "stream=always")
    assert not pipeline.run(again, STAGES)[-1].skipped
    assert analysis.measured(again) is None
    assert not (again.directory("eval") / "low_precision.json").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("eval.low_precision=[{bits: 4, high_bits: 4}]", "bits is 4, not below high_bits"),
        ("eval.low_precision=[{bits: 3}]", "eval.low_precision 0: 3 bits is not among losses.bits"),
        ("eval.low_precision=[{bits: 1, high_bits: 8}]", "8 bits is not among losses.bits"),
        ("eval.low_precision=[{quantizer: gptq}]", "quantizer gptq is not among losses.methods"),
        ("eval.low_precision=[{shares: [0.5, 2]}]", "give 1 or less"),
        ("eval.low_precision=[{shares: [0.5, 0.5]}]", "none twice"),
    ],
)
def test_what_a_recipe_cannot_ask_for(override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(None, [*SMALL, override])
    with pytest.raises(RecipeError, match=r"eval\.low_precision 0: it needs eval\.perplexity"):
        load_recipe(None, [*SMALL, "eval.low_precision=[{}]", "eval.perplexity=null"])
