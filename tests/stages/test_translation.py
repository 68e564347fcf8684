"""A Switch Transformer that learned a toy language, through paper 002's Table 2."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import sacrebleu
import torch

from moeq import pipeline, results
from moeq.artifacts.evaluation import Translation
from moeq.errors import EvaluationError
from moeq.planning.plan import make_plan
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.recipe.labels import labels
from moeq.runtime.checkpoint import load_checkpoint
from moeq.stages import evaluate
from moeq.stages.context import Context
from moeq.terminal import print_final

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "paper-002-table2.yaml"
STEPS, SENTENCES, TOKENS = 120, 24, 8


def cipher() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cipher", ROOT / "benchmarks" / "cipher.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def context(model: Path, out: Path, *overrides: str) -> Context:
    folder = model.parent
    text = (
        f"eval.translation.source={folder / 'source.txt'}", f"eval.translation.target={folder / 'target.txt'}",
        f"eval.translation.max_new_tokens={TOKENS}", f"corpus.source={folder / 'source.txt'}", "corpus.sequences=8",
        "corpus.sequence_length=8", "estimate.grid={inputs: [16], outputs: [16]}", "export.verify=false",
    )  # fmt: skip
    recipe = load_recipe(RECIPE, [*text, *overrides])
    return Context(recipe=recipe, model_name=str(model), out=out, reporter=Reporter(quiet=True))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Context:
    folder = tmp_path_factory.mktemp("translation")
    model, _, _ = cipher().save(folder, STEPS, SENTENCES)
    found = context(model, folder / "run")
    pipeline.run(found)
    return found


def scores(one: Context) -> Translation:
    found = evaluate.load(one).translation
    assert found is not None
    return found


def bleu(one: Context, model: torch.nn.Module, beams: int) -> float:
    """BLEU of a model, sentence after sentence, without padding."""
    folder = Path(one.model_name).parent
    sources, references = ((folder / name).read_text("utf-8").splitlines() for name in ("source.txt", "target.txt"))
    texts = []
    for source in sources:
        ids = one.model.tokenizer(source, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            (found,) = model.generate(ids, num_beams=beams, max_new_tokens=TOKENS, do_sample=False)  # type: ignore[operator]
        texts.append(one.model.tokenizer.decode(found, skip_special_tokens=True))
    return float(sacrebleu.corpus_bleu(texts, [references]).score)


def test_every_variant_is_scored_as_its_model_translates(finished: Context) -> None:
    found = {(one.name, one.beams): one for one in scores(finished).scores}
    assert set(found) == {(name, beams) for name in ("original", "int4", "int8") for beams in (1, 2)}
    assert found["original", 1].bleu.score > 20
    original = finished.model.module
    packed = load_checkpoint(finished.directory("export"), finished.model.dtype, finished.model.device)
    assert found["original", 1].bleu.score == pytest.approx(bleu(finished, original, 1))
    assert found["original", 2].bleu.score == pytest.approx(bleu(finished, original, 2))
    assert found["int4", 2].bleu.score == pytest.approx(bleu(finished, packed, 2))
    for beams in (1, 2):
        int8, chrf = found["int8", beams], found["original", beams].chrf
        assert int8.chrf.difference == pytest.approx(int8.chrf.score - chrf.score)


def test_every_translation_is_kept(finished: Context) -> None:
    lines = (finished.directory("eval") / "translations.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["source"] for row in rows] == (Path(finished.model_name).parent / "source.txt").read_text().splitlines()
    for one in scores(finished).scores:
        texts = [row["translations"][one.name][str(one.beams)] for row in rows]
        found = sacrebleu.corpus_bleu(texts, [[row["reference"] for row in rows]]).score
        assert found == pytest.approx(one.bleu.score)


def test_the_grids_are_the_papers(finished: Context) -> None:
    """Symmetric, one scale a channel, no zero points."""
    layout = json.loads((finished.directory("export") / "placement.json").read_text("utf-8"))["layout"]
    assert layout["group_size"] == -1
    assert layout["symmetric"] is True


def test_the_page_and_the_summary_have_the_table(finished: Context) -> None:
    page = (finished.directory("report") / "report.html").read_text("utf-8")
    assert '<section id="translation">' in page
    assert f"{labels(finished.recipe)['int8']}, beam 2" in page
    summary = json.loads((finished.directory("eval") / "stage.json").read_text("utf-8"))["summary"]["translation"]
    assert summary["int4, beam 1"]["bleu"] == scores(finished).scores[2].bleu.score
    assert "bleu_difference" not in summary["original, beam 1"]


def test_the_end_of_a_run_prints_the_scores(finished: Context, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = pipeline.run(finished)
    assert all(outcome.skipped for outcome in outcomes)
    print_final(results.final_rows(finished), {}, outcomes)
    lines = capsys.readouterr().out.splitlines()
    one = scores(finished).scores[-1]
    assert f"int8, beam 2: BLEU {one.bleu.score:.2f} ({one.bleu.difference:+.3f}), " in "\n".join(lines)
    assert any(line.startswith("original, beam 1: BLEU") and "(" not in line for line in lines)


def test_other_text_is_translated_again_and_moved_text_is_not(finished: Context) -> None:
    folder = Path(finished.model_name).parent
    (folder / "moved.txt").write_bytes((folder / "source.txt").read_bytes())
    moved = context(Path(finished.model_name), finished.out, f"eval.translation.source={folder / 'moved.txt'}")
    assert pipeline.run(moved, ("eval",))[0].skipped
    recipe = load_recipe(finished.out / "recipe.yaml")
    assert recipe.eval.translation is not None
    assert recipe.eval.translation.source == str(folder / "moved.txt")
    lines = (folder / "source.txt").read_text("utf-8").splitlines()
    (folder / "moved.txt").write_text("".join(f"{line}\n" for line in reversed(lines)))
    assert not pipeline.run(moved, ("eval",))[0].skipped
    assert scores(moved).scores[0].bleu.score < 20, "the references are of other sentences now"


def test_a_decoder_is_refused_before_anything_is_written(finished: Context, tiny_mixtral: Path, tmp_path: Path) -> None:
    folder = Path(finished.model_name).parent
    options = [f"eval.translation={{source: {folder / 'source.txt'}, target: {folder / 'target.txt'}}}",
               "corpus.sequence_length=16", "eval.perplexity=null"]  # fmt: skip
    one = Context(
        recipe=load_recipe(None, options),
        model_name=str(tiny_mixtral),
        out=tmp_path / "run",
        reporter=Reporter(quiet=True),
    )
    for made in (lambda: make_plan(one, probe=False), lambda: pipeline.run(one)):
        with pytest.raises(EvaluationError, match="translation needs an encoder-decoder"):
            made()
    assert not (tmp_path / "run" / "profile").exists()
