"""A run whose model and text are on the hub: pinned, the same again, offline and from its own recipe."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from models.hub_server import COMMIT, Hub, serving

from moeq import pipeline
from moeq.artifacts.stage import read_record
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages.context import Context

SMALL = ("corpus.sequences=6", "corpus.sequence_length=24", "eval.perplexity.sequences=2", "model=org/tiny",
         "eval.perplexity.sequence_length=24", "eval.perplexity.source=hub:org/words::test")  # fmt: skip
PINNED = f"hub:org/words@{COMMIT}:default"


@pytest.fixture
def hub(tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder = tmp_path / "words"
    folder.mkdir()
    for split in ("train", "test"):
        rows = [{"text": f"{split} {n} " + "some words of it " * (n % 7)} for n in range(60)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with serving(tmp_path / "cache", monkeypatch) as hub:
        hub.repositories |= {"org/tiny": tiny_mixtral, "datasets/org/words": folder}
        yield hub


def run(out: Path, *overrides: str, recipe: Path | None = None) -> tuple[Context, bool]:
    loaded = load_recipe(recipe, overrides)
    context = Context(recipe=loaded, model_name=str(loaded.model), out=out, reporter=Reporter(quiet=True))
    return context, pipeline.run(context, ("profile",))[0].skipped


def test_commits_are_pinned_and_a_run_repeats(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    out = tmp_path / "run"
    context, skipped = run(out, *SMALL, "corpus.source=[bundled, 'hub:org/words']")
    assert not skipped
    assert read_record(out / "profile", "profile").model.revision == COMMIT
    assert json.loads((out / "profile" / "profile.json").read_text())["corpus"] == ["bundled", f"{PINNED}:train"]
    assert "org/words:default:train" in context.text.calibration.domains
    copied = yaml.safe_load((out / "recipe.yaml").read_text())
    assert (copied["model"], copied["revision"]) == ("org/tiny", COMMIT)
    assert copied["corpus"]["source"] == ["bundled", f"{PINNED}:train"]
    assert copied["eval"]["perplexity"]["source"] == f"{PINNED}:test"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.requests)
    assert run(out, *SMALL, "corpus.source=[bundled, 'hub:org/words']")[1]
    assert run(out, recipe=out / "recipe.yaml")[1]
    assert len(hub.requests) == asked


def test_evaluation_text_comes_from_the_hub_too(hub: Hub, tmp_path: Path) -> None:
    context, _ = run(tmp_path / "run", *SMALL, "corpus.source=hub:org/words")
    assert context.text.evaluation is not None
    assert context.text.evaluation.domains == ("org/words:default:test",) * 2
    first = context.model.tokenizer.decode(context.text.evaluation.ids[0].tolist(), skip_special_tokens=True)
    assert first.startswith("test 0")
