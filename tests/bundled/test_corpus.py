"""The bundled model and corpus: what the README says, no overlap, sound four-way items."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections import Counter
from pathlib import Path
from typing import Any

import build_corpus
import pytest
from math_problems import load_templates

from moeq.bundled import BUNDLED_NAMES, bundled_path
from moeq.errors import ArtifactError, CorpusError

DOMAINS = {"python", "prose", "math"}
SPLITS = ("calibration", "evaluation")


def read_rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in bundled_path(f"corpus/{name}.jsonl").read_text("utf-8").splitlines()]


def long_lines(rows: list[dict[str, Any]]) -> set[str]:
    return {line.strip() for row in rows for line in row["text"].splitlines() if len(line.strip()) > 60}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(bundled_path("tiny-mixtral"))


@pytest.fixture(scope="module")
def items() -> list[dict[str, Any]]:
    return read_rows("continuation_4way")


def test_sha256_in_readme() -> None:
    text = bundled_path("README.md").read_text("utf-8")
    listed = {name: digest for digest, name in re.findall(r"(?m)^([0-9a-f]{64})  (\S+)$", text)}
    root = bundled_path("README.md").parent
    folders = ("corpus", "tiny-mixtral", "tiny-moe-vit", "tiny-moe-vit-65")
    on_disk = [p for folder in folders for p in (root / folder).rglob("*") if p.is_file()]
    assert {p.relative_to(root).as_posix() for p in on_disk} <= listed.keys()
    for name, digest in listed.items():
        assert hashlib.sha256((root / name).read_bytes()).hexdigest() == digest, name


def test_bundled_path() -> None:
    assert all(bundled_path(name).exists() for name in BUNDLED_NAMES)
    for unknown in ("corpus/calibration.json", "../errors.py", "zzz", ""):
        with pytest.raises(ArtifactError, match="bundles no"):
            bundled_path(unknown)


@pytest.mark.parametrize("split", SPLITS)
def test_rows_and_balance(split: str) -> None:
    path = bundled_path(f"corpus/{split}.jsonl")
    assert path.read_bytes().isascii()
    rows = read_rows(split)
    assert all(row.keys() == {"text", "domain", "source"} and row["text"].isascii() for row in rows)
    assert len({row["text"] for row in rows}) == len(rows)
    size = Counter[str]()
    for row in rows:
        size[row["domain"]] += len(row["text"])
    assert size.keys() == DOMAINS
    assert max(size.values()) < 1.05 * min(size.values())
    assert not any(re.search(r"copyright|licen[cs]e|all rights reserved", row["text"], re.IGNORECASE) for row in rows)


def test_splits_share_no_text() -> None:
    calibration, evaluation = map(read_rows, SPLITS)
    assert not long_lines(calibration) & long_lines(evaluation)
    assert not {row["source"] for row in calibration} & {row["source"] for row in evaluation}
    build_corpus.check_rows({"calibration": calibration, "evaluation": evaluation}, set())


@pytest.mark.parametrize("planted", ["x" * 61, "short line\n" * 6])
def test_check_finds_shared_text(planted: str) -> None:
    rows = [{"text": f"{own}\n{planted}\n", "domain": "prose", "source": own} for own in ("one", "two")]
    with pytest.raises(CorpusError, match="shared"):
        build_corpus.check_rows({"calibration": rows[:1], "evaluation": rows[1:]}, set())
    with pytest.raises(CorpusError, match="training"):
        build_corpus.check_rows({"calibration": [], "evaluation": rows[1:]}, build_corpus.fingerprints(planted))


@pytest.mark.parametrize("split", SPLITS)
def test_math_is_right(split: str) -> None:
    rows = [row for row in read_rows(split) if row["domain"] == "math"]
    assert {row["source"].split()[-1] for row in rows} == {template.name for template in load_templates(split)}
    for row in rows:
        assert not re.search(r"[][{}|]", row["text"]), "an unfilled template"
        calculations = re.findall(r"([^\s]+) ?= ?\$?<<([^=]+)=(\d+)>>(\d+)", row["text"])
        for _, expression, inside, outside in calculations:
            assert re.fullmatch(r"[\d+*/-]+", expression)
            assert eval(expression) == int(inside) == int(outside)
        assert row["text"].endswith(f"\n#### {calculations[-1][3]}\n")


def test_items_count_and_gold_balance(items: list[dict[str, Any]]) -> None:
    assert Counter(item["domain"] for item in items) == dict.fromkeys(DOMAINS, 100)
    assert Counter((item["domain"], item["gold"]) for item in items) == {(d, g): 25 for d in DOMAINS for g in range(4)}
    assert all(len(set(item["choices"])) == 4 for item in items)
    assert len({item["context"] for item in items}) == len(items)


def test_items_tokenize_apart_and_together(items: list[dict[str, Any]], tokenizer: Any) -> None:
    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    for item in items:
        context = encode(item["context"])
        assert len(context) == 64
        assert not item["context"][-1].isspace()
        for choice in item["choices"]:
            assert choice[0].isspace()
            ids = encode(choice)
            assert len(ids) == 16
            assert encode(item["context"] + choice) == context + ids


def test_gold_is_right(items: list[dict[str, Any]]) -> None:
    documents = {domain: [r["text"] for r in read_rows("evaluation") if r["domain"] == domain] for domain in DOMAINS}
    for item in items:
        follows = [any(item["context"] + c in text for text in documents[item["domain"]]) for c in item["choices"]]
        assert follows == [place == item["gold"] for place in range(4)]
        assert all(any(c in text for text in documents[item["domain"]]) for c in item["choices"])


def test_dataset_for_lm_eval(items: list[dict[str, Any]]) -> None:
    from moeq.bundled.continuation_dataset import load

    assert load(version=1.0)["validation"].to_list() == items


def test_refuses_other_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "python_version", lambda: "3.12.0")
    with pytest.raises(CorpusError, match=r"CPython 3\.11\.7"):
        build_corpus.build(tmp_path, None)
    assert not list(tmp_path.iterdir())


@pytest.mark.full
@pytest.mark.skipif(platform.python_version() != build_corpus.PYTHON_VERSION, reason="the text is CPython 3.11.7's")
def test_rebuild_gives_the_frozen_files(tmp_path: Path) -> None:
    assert build_corpus.main([str(tmp_path), "--no-training-check"]) == 0
    for name in (*SPLITS, "continuation_4way"):
        assert (tmp_path / f"{name}.jsonl").read_bytes() == bundled_path(f"corpus/{name}.jsonl").read_bytes()
