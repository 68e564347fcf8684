"""Sources with settings of their own in a run: its keys, its recipe, what it says, and what the plan counts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from moeq import pipeline
from moeq.errors import CorpusError, MissingError
from moeq.planning.plan import make_plan
from moeq.preflight import check_texts
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages import workers
from moeq.stages.context import Context

SMALL = ("corpus.sequences=8", "corpus.sequence_length=16", "corpus.batch_size=8", "eval.perplexity=null",
         "eval.compare=[]")  # fmt: skip


def context(model: Path, out: Path, source: Any, *overrides: str) -> Context:
    recipe = load_recipe(None, [*SMALL, f"corpus.source={json.dumps(source)}", *overrides])
    return Context(recipe=recipe, model_name=str(model), out=out, reporter=Reporter())


@pytest.fixture
def qa(tmp_path: Path) -> Path:
    rows = [{"q": f"how much is {n} and {n}?", "a": {"text": f"it is {2 * n} or so"}} for n in range(60)]
    (tmp_path / "qa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "qa.jsonl"


@pytest.mark.full
def test_what_a_source_says_decides_the_stages(tiny_mixtral: Path, tmp_path: Path, qa: Path) -> None:
    def skipped(source: Any, *overrides: str) -> bool:
        return pipeline.run(context(tiny_mixtral, tmp_path / "run", source, *overrides), ("profile",))[0].skipped

    source = {"path": str(qa), "template": "{q}\n{a.text}"}
    assert not skipped(["bundled", source])
    assert skipped(["bundled", source])
    copied = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert copied["corpus"]["source"] == ["bundled", source]
    assert skipped(copied["corpus"]["source"])
    assert not skipped(["bundled", source | {"template": "{q} {a.text}"}])
    assert not skipped(["bundled", source | {"weight": 3}])
    assert not skipped([{"path": "bundled", "weight": 2}, source | {"weight": 3}])
    assert not skipped([{"path": "bundled", "weight": 2}, source | {"weight": 3, "name": "questions"}])
    assert json.loads((tmp_path / "run/profile/profile.json").read_text())["corpus"] == ["bundled", "questions"]


def test_weights_decide_the_sequences_and_what_is_short_is_said_once(
    tiny_mixtral: Path, tmp_path: Path, qa: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = [{"path": str(qa), "template": "{q}\n{a.text}", "weight": 3}, "bundled"]
    one = context(tiny_mixtral, tmp_path / "run", source)
    assert Counter(domain == "qa" for domain in one.text.calibration.domains) == {True: 6, False: 2}
    many = context(tiny_mixtral, tmp_path / "run", source, "corpus.sequences=800")
    plan = make_plan(many, probe=False)
    assert plan.stages
    there = Counter(many.text.calibration.domains)["qa"]
    said = " ".join(capsys.readouterr().err.split())
    assert there < 600
    assert said.count(f"corpus.source: qa.jsonl has {there} of the 600 sequences that are its share by weight") == 1


def test_evaluation_text_may_be_weighed_and_templated(tiny_mixtral: Path, tmp_path: Path, qa: Path) -> None:
    settings = {"sequences": 6, "sequence_length": 16, "source": [
        {"path": str(qa), "template": "{q} {a.text}", "name": "sums"}, {"path": "bundled", "weight": 2}]}  # fmt: skip
    one = context(tiny_mixtral, tmp_path / "run", "bundled", f"eval.perplexity={json.dumps(settings)}")
    assert one.text.evaluation is not None
    assert one.text.evaluation.domains[:2] == ("sums", "sums")
    assert "sums" not in one.text.evaluation.domains[2:]


def test_files_of_mappings_are_looked_for_first(tmp_path: Path) -> None:
    recipe = load_recipe(None, [f"corpus.source=[bundled, {{path: {tmp_path / 'no.jsonl'}, weight: 2}}]"])
    with pytest.raises(MissingError, match=r"no.jsonl: no such file"):
        check_texts(recipe.corpus.source)


def test_images_take_no_mappings(tmp_path: Path) -> None:
    one = context(Path("bundled:tiny-moe-vit"), tmp_path / "run", {"path": "digits", "weight": 2})
    with pytest.raises(CorpusError, match="images have no fields, weights or names; give the path alone"):
        _ = one.text.calibration


def test_text_that_is_edited_meanwhile_is_called_after_what_was_read(
    tiny_mixtral: Path, tmp_path: Path, qa: Path
) -> None:
    def opened() -> Context:
        source = json.dumps([{"path": str(qa), "template": "{q} {a.text}"}])
        settings = f"eval.perplexity={{sequences: 6, sequence_length: 16, source: {source}}}"
        return context(tiny_mixtral, tmp_path / "run", json.loads(source), settings)

    before = {part: opened().text.digest(part) for part in ("calibration", "evaluation")}
    one = opened()
    one.text.check(before)
    qa.write_text(qa.read_text().replace("how much", "what"))
    assert {part: one.text.digest(part) for part in before} == before
    assert all(opened().text.digest(part) != digest for part, digest in before.items())
    with pytest.raises(CorpusError, match=r"corpus .*qa\.jsonl.*: changed since the run began; run the same command"):
        pipeline.run(one, ("profile",))  # whose record would name the files as they are now
    worker = workers.Opened.of(one).context()
    with pytest.raises(CorpusError, match=r"eval\.perplexity .*qa\.jsonl.*: changed since the run began"):
        _ = worker.text.evaluation
    assert not pipeline.run(opened(), ("profile",))[0].skipped
