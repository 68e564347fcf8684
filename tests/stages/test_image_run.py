"""The bundled vision transformer from profile to report, without a tokenizer, and what is refused of such models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageClassification

from moeq import pipeline, results
from moeq.artifacts.manifest import read_manifest
from moeq.artifacts.stage import read_record
from moeq.errors import CorpusError, ModelError, MoeqError, RecipeError
from moeq.generation import generate
from moeq.inspection import inspect
from moeq.integers.artifacts.integer_report import read_report
from moeq.models import loading
from moeq.models.corpus import ImageSequences
from moeq.planning.plan import error_of, make_plan
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.reporting import formats
from moeq.runtime.checkpoint import load_checkpoint
from moeq.stages import evaluate, profile
from moeq.stages.context import Context
from moeq.stages.needs import Sizes
from moeq.stages.replicas import load_effects, load_expert_effects
from moeq.stages.text_sizes import Text
from moeq.verification import verify

RECIPE = Path(__file__).parents[2] / "recipes" / "coqmoe-digits.yaml"
QUICK = (
    "corpus.sequences=64", "losses.methods=[gptq]", "losses.layer_effects={bits: 2}",
    "losses.expert_effects={bits: 2, sequences: 16, experts: 3}",
    "estimate.grid.inputs=[128]", "estimate.grid.outputs=[512]",
    "eval.compare=[{name: uniform-2, method: uniform, bits: 2}, {name: uniform-8, method: uniform, bits: 8}]",
    "reparam.integer=null",
)  # fmt: skip
TO_EXPORT = ("reparam", "profile", "losses", "assign", "quantize", "export")
CPU = torch.device("cpu")


def context_of(out: Path, *settings: str, model: str = "bundled:tiny-moe-vit") -> Context:
    recipe = load_recipe(RECIPE, [*QUICK, *settings])
    return Context(recipe=recipe, model_name=model, out=out, reporter=Reporter(quiet=True))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Context:
    integer = "reparam.integer={vectors: 1, schemes: false}"
    context = context_of(tmp_path_factory.mktemp("image") / "run", "export.verify=false", integer)
    pipeline.run(context)
    return context


def test_the_bundled_model_is_right_of_nearly_all_digits_that_it_has_not_seen(whole: Context) -> None:
    original = evaluate.load(whole).row(evaluate.ORIGINAL)
    assert original is not None
    assert original.accuracy is not None
    assert original.accuracy >= 0.975
    assert original.accuracy_stderr == pytest.approx(np.sqrt(original.accuracy * (1 - original.accuracy) / 359))
    assert original.logit_error == 0
    assert original.perplexity is None
    assert evaluate.load(whole).images == 360


def test_rows_are_measured_on_logits_and_fewer_bits_cost_more(whole: Context) -> None:
    rows = {row["name"]: row for row in results.final_rows(whole)}
    errors = {name: row["logit_error"] for name, row in rows.items()}
    assert 0 < errors["uniform-8"] < errors["optimal-3.35"] < errors["uniform-2"] < 0.5
    assert all(row["cross_entropy"] < 0.2 for row in rows.values())
    assert evaluate.load(whole).export_logit_error < 1e-5
    assert rows["optimal-3.35"]["expert_bytes"] < rows["original"]["expert_bytes"] / 4


def test_effects_are_those_on_an_image_not_on_its_positions(whole: Context) -> None:
    by_layer, by_expert = load_effects(whole), load_expert_effects(whole)
    assert by_layer is not None
    assert by_expert is not None
    assert (by_layer.tokens, by_expert.tokens, by_expert.measured) == (16, 16, 3)
    assert all(value > 0 for value in by_layer.divergence)


def test_every_position_of_an_image_counts_and_as_prefill(whole: Context) -> None:
    found = profile.load(whole)
    assert found.tokens.tolist() == [[17, 0]] * 64
    assert all(int(counts.sum()) == 64 * 17 * 2 for counts in found.counts)
    assert all(int(counts[:, 1].sum()) == 0 for counts in found.counts)
    assert found.corpus == ("digits",)


@pytest.mark.full
@pytest.mark.fresh_process
def test_the_checkpoint_loads_with_the_auto_class_and_verifies_in_a_fresh_process(whole: Context) -> None:
    directory = whole.directory("export")
    packed = AutoModelForImageClassification.from_pretrained(directory, dtype=torch.float32).eval()
    images = whole.text.evaluation
    assert isinstance(images, ImageSequences)
    with torch.no_grad():
        logits = packed(images.pixels).logits
    row = evaluate.load(whole).row("optimal-3.35")
    assert row is not None
    assert float((logits.argmax(-1) == images.labels).double().mean()) == pytest.approx(row.accuracy)
    verdict = verify.verify(directory, verify.Options(), Reporter(quiet=True))
    assert not verdict.problems
    assert [layer.how for layer in verdict.layers] == ["experts", "experts"]
    card = (directory / "README.md").read_text()
    assert "AutoModelForImageClassification.from_pretrained" in card
    assert "logit error" in card
    assert read_manifest(directory).layers[0].biased


def test_it_continues_no_text(whole: Context) -> None:
    with pytest.raises(ModelError, match="an image classifier continues no text"):
        generate(whole.directory("export"), "words", max_new_tokens=1, temperature=0, seed=0, device="cpu")


def test_the_report_shows_what_was_measured(whole: Context) -> None:
    page = (whole.directory("report") / "report.html").read_text()
    assert "Size against logit error" in page
    assert "cross-entropy, over original" in page
    assert re.search(r"Counted on [\d,]+ positions of 64 images, the top 2 experts a position\.", page)
    assert "of calibration text" not in page
    assert "perplexity, over original" not in page
    assert "8 norms folded into 10 weights, 8 with zero points" in page
    found = read_report(whole.directory("reparam")).tasks["task-0"]
    assert f'<td class="number">{formats.share(found.integer.logit_error)}</td>' in page
    assert read_record(whole.directory("reparam"), "reparam").digest in page
    rows = inspect(whole.directory("eval") / "eval.json")["rows"]
    assert all("logit_error" in row for row in rows)


def test_the_copied_recipe_runs_again_and_nothing_is_made_twice(whole: Context) -> None:
    again = Context(
        recipe=load_recipe(whole.out / "recipe.yaml"),
        model_name=whole.model_name,
        out=whole.out,
        reporter=Reporter(quiet=True),
    )
    assert [outcome.stage for outcome in pipeline.run(again) if not outcome.skipped] == []


@pytest.mark.full
def test_a_streamed_run_gives_the_same_figures(whole: Context, tmp_path: Path) -> None:
    context = context_of(tmp_path / "run", "export.verify=false", "stream=always", "eval.compare=[]")
    pipeline.run(context, (*TO_EXPORT, "eval"))
    found, wanted = (evaluate.load(one).row("optimal-3.35") for one in (context, whole))
    assert found is not None
    assert wanted is not None
    assert (found.logit_error, found.cross_entropy) == (wanted.logit_error, wanted.cross_entropy)


@pytest.mark.full
def test_a_dequantized_copy_is_verified_by_the_moeq_that_brings_the_model(tmp_path: Path) -> None:
    context = context_of(tmp_path / "run", "export.formats=[dequantized]", "losses.expert_effects.experts=1")
    pipeline.run(context, TO_EXPORT)
    plain = loading.load_model(
        context_of(tmp_path, "reparam=null", model=str(tmp_path / "run" / "checkpoint-dequantized")).model.source,
        torch.float32,
        CPU,
    )
    packed = load_checkpoint(context.directory("export"), torch.float32, CPU)
    images = context.text.evaluation
    assert isinstance(images, ImageSequences)
    with torch.no_grad():
        torch.testing.assert_close(plain(images.pixels).logits, packed(images.pixels).logits, rtol=1e-3, atol=1e-3)


def test_the_plan_knows_the_work_of_images(tmp_path: Path) -> None:
    found = make_plan(context_of(tmp_path / "run"), probe=False)
    assert error_of(found) is None
    assert found.model["top_k"] == 2
    sizes = Sizes(context_of(tmp_path / "run").given())
    assert sizes.calibration == Text(sequences=64, length=17, batch=64, whole=1437 * 17)
    assert sizes.evaluation == Text(sequences=360, length=17, batch=128, whole=360 * 17)
    assert sizes.tasks is None


@pytest.mark.parametrize(
    ("setting", "error", "says"),
    [
        ("eval.perplexity.sequences=3", RecipeError, "an image classifier has no perplexity"),
        ("eval.tasks=[moeq_continuation]", RecipeError, "an image classifier runs no tasks"),
        ("eval.low_precision=[{bits: 2}]", RecipeError, "an image classifier has no curves of perplexity"),
        ("eval.translation={source: a.tsv}", RecipeError, "an image classifier translates nothing"),
        ("assign.statistics=decode", RecipeError, "images have no decode positions"),
        ("estimate.popularity=trace", RecipeError, "images have no decode steps"),
        ("corpus.source=text.jsonl", CorpusError, "the model takes images"),
        ("corpus.sequences=5000", CorpusError, "1437 images to calibrate on, 5000 are wanted"),
        ("eval.images.images=5000", CorpusError, "360 images to be measured on, 5000 are wanted"),
    ],
)
def test_what_images_have_not_is_refused_before_anything_is_written(
    tmp_path: Path, setting: str, error: type[MoeqError], says: str
) -> None:
    more = ("profile.trace=true",) if "trace" in setting else ()
    context = context_of(tmp_path / "run", setting, *more)
    with pytest.raises(error, match=says) as caught:
        pipeline.run(context)
    assert "\n" not in str(caught.value)
    assert not context.out.exists()


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        (["corpus.source=digits"], CorpusError, "digits are images, the model reads text"),
        (["corpus.source=bundled", "eval.images={}"], RecipeError, "the model reads text, no images"),
    ],
)
def test_images_are_not_given_to_a_language_model(
    tmp_path: Path, tiny_mixtral: Path, settings: list[str], error: type[MoeqError], says: str
) -> None:
    context = context_of(tmp_path / "run", "corpus.sequence_length=64", *settings, model=str(tiny_mixtral))
    with pytest.raises(error, match=says):
        pipeline.run(context)


def test_a_set_that_was_not_split_needs_another_to_be_measured_on(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Any] = {
        "images": torch.randint(0, 17, (32, 8, 8), generator=generator, dtype=torch.uint8),
        "labels": torch.randint(0, 10, (32,), generator=generator),
    }
    path = tmp_path / "own.safetensors"
    save_file(tensors, path)
    settings = (f"corpus.source={path}", "corpus.sequences=32")
    with pytest.raises(CorpusError, match="there is nothing left to be measured on"):
        pipeline.run(context_of(tmp_path / "run", *settings))
    context = context_of(tmp_path / "run", *settings, "eval.images.source=digits", "eval.images.images=40")
    pipeline.run(context, ("reparam", "profile"))
    assert profile.load(context).corpus == ("own.safetensors",)
    assert json.loads((context.out / "profile" / "stage.json").read_text())["summary"]["tokens"] == 32 * 17
