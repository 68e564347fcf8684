"""Coverage: what the profile says, losses finds; text grows until the experts are covered, and losses follows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from corpora import read_documents
from tiny_models import save_tiny
from tiny_vision import save_image, vision_model, vision_processor

from moeq import pipeline
from moeq.artifacts.trace import NAME as TRACE
from moeq.artifacts.trace import read_trace
from moeq.errors import ArtifactError
from moeq.models import corpus
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages import profile
from moeq.stages.context import Context

SMALL = (
    "corpus.sequences=8", "corpus.sequence_length=16", "corpus.batch_size=8", "losses.group_size=16",
    "losses.bits=[1, 2, 3, 4]", "losses.methods=[rtn]", "losses.per_projection=false", "assign.quantizer=rtn",
    "eval.compare=[]", "eval.perplexity=null",
)  # fmt: skip
GROW = ("profile.min_tokens=40", "corpus.until_covered={share: 1.0, max_sequences: 512}")


def context(model: Path, out: Path, *overrides: str) -> Context:
    recipe = load_recipe(None, [*SMALL, *overrides])
    return Context(recipe=recipe, model_name=str(model), out=out, reporter=Reporter(quiet=True))


def table(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "profile" / "profile.json").read_text())
    return found


def tokens_of_experts(out: Path) -> dict[tuple[int, int], int]:
    """Calibration tokens of every expert, as the loss table has them."""
    rows = pq.read_table(out / "losses" / "losses.parquet").to_pylist()
    return {(row["layer"], row["expert"]): row["calibration_tokens"] for row in rows}


@pytest.mark.cases(2)
@pytest.mark.parametrize("overrides", [(), ("losses.min_tokens=30",), ("losses.min_tokens=5", "profile.min_tokens=37")])
def test_the_profile_counts_what_losses_finds(tiny_mixtral: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    one = context(tiny_mixtral, tmp_path, *overrides)
    outcome = pipeline.run(one, ("profile", "losses"))[0]
    limit = one.recipe.profile.min_tokens or one.recipe.losses.min_tokens
    below = {place for place, tokens in tokens_of_experts(tmp_path).items() if tokens < limit}
    found = table(tmp_path)
    assert found["coverage"]["min_tokens"] == limit
    assert found["coverage"]["experts_below"] == len(below)
    assert outcome.record.summary["share_of_experts_below_min_tokens"] == len(below) / 10
    assert found["coverage"]["share_below"] == pytest.approx(len(below) / 10)
    for index, layer in enumerate(found["layers"]):
        assert layer["experts_below_min_tokens"] == sum(place[0] == index for place in below)
    assert found["corpus"] == ["bundled"]
    assert found["sequences"] == 8


def test_text_grows_until_the_experts_are_covered_and_losses_uses_it(tiny_mixtral: Path, tmp_path: Path) -> None:
    grown = context(tiny_mixtral, tmp_path / "grown", *GROW)
    pipeline.run(grown, ("profile", "losses"))
    found = table(tmp_path / "grown")
    assert found["coverage"]["experts_below"] == 0
    assert found["sequences"] in (16, 32, 64, 128, 256)
    assert min(tokens_of_experts(tmp_path / "grown").values()) >= 40
    fixed = context(tiny_mixtral, tmp_path / "fixed")
    pipeline.run(fixed, ("profile", "losses"))
    assert min(tokens_of_experts(tmp_path / "fixed").values()) < 40, "without growth they would not be"
    first = profile.load(grown).tokens[:8]
    assert first.tolist() == profile.load(fixed).tokens.tolist()
    assert (profile.load(grown).counts[0][:8] == profile.load(fixed).counts[0]).all()
    again = context(tiny_mixtral, tmp_path / "grown", *GROW)
    assert all(outcome.skipped for outcome in pipeline.run(again, ("profile", "losses")))


def test_growth_in_passes_counts_what_one_pass_does(tiny_mixtral: Path, tmp_path: Path) -> None:
    grown = context(tiny_mixtral, tmp_path / "grown", *GROW)
    pipeline.run(grown, ("profile",))
    found = profile.load(grown)
    whole = profile.count_part(grown, grown.text.grown_calibration).profile
    assert (found.tokens == whole.tokens).all()
    for mine, wanted in zip(found.counts, whole.counts, strict=True):
        assert (mine == wanted).all()


def test_the_maximum_and_the_end_of_the_text_end_it(
    tiny_mixtral: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ("profile.min_tokens=100000", "corpus.until_covered={max_sequences: 20}")
    one = context(tiny_mixtral, tmp_path / "most", *overrides)
    one.reporter = Reporter()
    pipeline.run(one, ("profile",))
    assert table(tmp_path / "most")["sequences"] == 20
    said = capsys.readouterr().err
    assert "8 sequences: 0.0% of 10 experts saw at least 100000 calibration tokens" in said
    assert "20 sequences: 0.0%" in said
    assert "not covered: the maximum or the end of the text is reached" in said
    (tmp_path / "text.txt").write_text("some words to count " * 100)
    short = context(tiny_mixtral, tmp_path / "short", *overrides[:1], f"corpus.source={tmp_path / 'text.txt'}",
                    "corpus.until_covered={max_sequences: 4096}")  # fmt: skip
    pipeline.run(short, ("profile",))
    available = len(corpus.Pool(read_documents(short.text.calibration_sources, corpus.Fields(), None),
                                short.model.tokenizer, length=16))  # fmt: skip
    assert table(tmp_path / "short")["sequences"] == available


def test_losses_alone_needs_the_profile_only_when_the_text_grows(tiny_mixtral: Path, tmp_path: Path) -> None:
    assert not pipeline.run_alone(context(tiny_mixtral, tmp_path / "a"), "losses").skipped
    with pytest.raises(ArtifactError, match="profile: this stage has not been run; run `moeq profile`"):
        pipeline.run_alone(context(tiny_mixtral, tmp_path / "b", *GROW), "losses")
    pipeline.run_alone(context(tiny_mixtral, tmp_path / "b", *GROW), "profile")
    assert not pipeline.run_alone(context(tiny_mixtral, tmp_path / "b", *GROW), "losses").skipped
    with pytest.raises(ArtifactError, match="made of other sequences; run `moeq profile` again"):
        pipeline.run_alone(context(tiny_mixtral, tmp_path / "b", *GROW, "corpus.shuffle=true"), "losses")


def test_what_decides_the_text_decides_the_stages(tiny_mixtral: Path, tmp_path: Path) -> None:
    """Moving a file does not matter; what is in it, its order and, when shuffled, the seed do."""
    rows = [{"text": f"number {n} of some lines about nothing much " * 4} for n in range(40)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "elsewhere").mkdir()
    shutil.copyfile(tmp_path / "text.jsonl", tmp_path / "elsewhere" / "text.jsonl")

    def skipped(*overrides: str) -> bool:
        one = context(tiny_mixtral, tmp_path / "run", *overrides)
        return pipeline.run(one, ("profile",))[0].skipped

    source = f"corpus.source={tmp_path / 'text.jsonl'}"
    assert not skipped(source)
    assert skipped(source)
    assert skipped(f"corpus.source={tmp_path / 'elsewhere' / 'text.jsonl'}")
    assert skipped(source, "seed=3")
    assert not skipped(source, "corpus.shuffle=true")
    assert not skipped(source, "corpus.shuffle=true", "seed=3")
    assert skipped(source, "corpus.shuffle=true", "seed=3")
    copied = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert copied["corpus"]["source"] == str(tmp_path / "text.jsonl")
    (tmp_path / "text.jsonl").write_text(json.dumps(rows[0]) + "\n" + "".join(json.dumps(row) + "\n" for row in rows))
    assert not skipped(source, "corpus.shuffle=true", "seed=3")


def test_experts_that_are_never_chosen_stay_uncovered(tmp_path: Path) -> None:
    """More text cannot help them: the pass ends at the maximum, with the share that there is."""
    model = save_tiny(tmp_path / "model", "qwen3_moe", num_experts=7, num_experts_per_tok=1)
    one = context(
        model, tmp_path / "run", "profile.min_tokens=1", "corpus.until_covered={share: 1.0, max_sequences: 32}"
    )
    with torch.no_grad():
        gate = one.model.module.get_submodule(one.model.layers[0].name.replace("experts", "gate"))
        gate.weight.zero_()
    pipeline.run(one, ("profile",))
    found = table(tmp_path / "run")
    assert found["sequences"] == 32
    assert found["layers"][0]["experts_below_min_tokens"] == 6


def test_a_vision_model_is_profiled_on_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded from disk as any model; its processor is given, since the family's video part needs torchvision."""
    processor = vision_processor()
    vision_model().save_pretrained(tmp_path / "model")
    processor.tokenizer.save_pretrained(tmp_path / "model")
    processor.image_processor.save_pretrained(tmp_path / "model")
    for number in range(4):
        save_image(tmp_path / f"{number}.png", number, (24 + 8 * number, 24))
    rows: list[dict[str, str]] = [{"image": f"{number}.png", "text": f"picture {number}"} for number in range(4)]
    rows += [{"text": "words " * (4 + number)} for number in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(corpus, "load_processor", lambda *_: processor)
    options = (f"corpus.source={tmp_path / 'rows.jsonl'}", "corpus.packed=false", "corpus.sequence_length=64",
               "profile.trace=true")  # fmt: skip
    one = context(tmp_path / "model", tmp_path / "run", *options)
    pipeline.run(one, ("profile", "losses"))
    trace = read_trace(one.directory("profile") / TRACE)
    image = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    assert trace.images is not None
    assert trace.images.tolist() == (one.text.calibration.ids[one.text.calibration.mask] == image).int().tolist()
    assert 0 < trace.images.sum() < trace.num_tokens
    found = profile.load(one)
    assert found.tokens.sum() == int(one.text.calibration.mask.sum())
    for counts in found.counts:
        assert (counts.sum((1, 2)) == 3 * found.tokens.sum(1)).all(), "three experts a token, no pads"
    same = context(tmp_path / "model", tmp_path / "run", *options)
    assert all(outcome.skipped for outcome in pipeline.run(same, ("profile", "losses")))
    save_image(tmp_path / "2.png", 17, (40, 24))
    changed = context(tmp_path / "model", tmp_path / "run", *options)
    assert not any(outcome.skipped for outcome in pipeline.run(changed, ("profile", "losses")))
