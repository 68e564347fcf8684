"""Datasets on the hub: which files are a split's, only as much as is needed, pinned, and the same offline."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import make_sequences, read_documents
from models.hub_server import COMMIT, TOKEN, Hub, serving

from moeq.errors import CorpusError
from moeq.models import corpus
from moeq.models.corpus.hub_datasets import choose_files
from moeq.models.loading import load_tokenizer
from moeq.models.source import open_source

CARD = """---
configs:
- config_name: en
  default: true
  data_files:
  - split: train
    path: en/c4-train.*.json.gz
  - split: validation
    path: en/c4-validation.*.json.gz
- config_name: all
  data_files: "**/*.json.gz"
---
# C4
"""
C4 = ["README.md", "de/x.json.gz", "en/c4-train.00000-of-00002.json.gz", "en/c4-train.00001-of-00002.json.gz",
      "en/c4-validation.00000-of-00001.json.gz"]  # fmt: skip
PLAIN = ["README.md", "data/train-00000-of-00002-abc.parquet", "data/train-00001-of-00002-abc.parquet",
         "data/test_sft-00000-of-00001.parquet", "dataset_infos.json", "train.jsonl"]  # fmt: skip
CONVERTED = ["wiki/train/0000.parquet", "wiki/train/0001.parquet", "wiki/test/0000.parquet", "other/train/0000.parquet"]


@pytest.mark.parametrize(
    ("files", "readme", "config", "split", "part", "wanted"),
    [
        (C4, CARD, None, None, "calibration", ("en", "train", C4[2:4])),
        (C4, CARD, None, None, "evaluation", ("en", "validation", C4[4:])),
        (C4, CARD, "all", "train", "evaluation", ("all", "train", C4[1:])),
        (C4, "", "en", "validation", "calibration", ("en", "validation", C4[4:])),
        (C4, "---\nconfigs: 3\n---\n", "de", None, "calibration", ("de", "train", C4[1:2])),
        (PLAIN, "# no front matter", None, None, "calibration", ("default", "train", PLAIN[1:3])),
        (PLAIN, "", None, "test_sft", "calibration", ("default", "test_sft", PLAIN[3:4])),
        (CONVERTED, "", "wiki", None, "calibration", ("wiki", "train", CONVERTED[:2])),
        (CONVERTED, "", "wiki", None, "evaluation", ("wiki", "test", CONVERTED[2:3])),
        (["a.txt", "b.txt"], "", None, None, "calibration", ("default", "train", ["a.txt", "b.txt"])),
    ],
)
def test_files_of_a_split(
    files: list[str], readme: str, config: str | None, split: str | None, part: str, wanted: tuple[str, str, list[str]]
) -> None:
    chosen = choose_files(files, readme, config, split, part, where="hub:x/y")
    assert (chosen.config, chosen.split, list(chosen.files)) == wanted


@pytest.mark.parametrize(
    ("files", "config", "split", "part", "message"),
    [
        (
            CONVERTED,
            None,
            None,
            "calibration",
            r"which configuration \(there are: other, wiki\); write hub:ORG/NAME:CONFIG",
        ),
        (CONVERTED, "wikis", None, "calibration", r"no configuration 'wikis' \(there are: other, wiki\)"),
        (
            CONVERTED,
            "wiki",
            "dev",
            "calibration",
            r"no split 'dev' \(there are: test, train\); write hub:ORG/NAME:wiki:SP",
        ),
        (CONVERTED, "other", None, "evaluation", r"no split for evaluation \(there are: train\)"),
        (["README.md", "a.bin"], None, None, "calibration", r"no Parquet, JSON or text files .*@refs/convert/parquet"),
    ],
)
def test_choices_that_are_not_clear(
    files: list[str], config: str | None, split: str | None, part: str, message: str
) -> None:
    with pytest.raises(CorpusError, match=f"hub:x/y: {message}"):
        choose_files(files, "", config, split, part, where="hub:x/y")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(open_source("bundled:tiny-mixtral"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Three shards of 300 documents; rows name a domain, which a hub dataset's do not decide."""
    folder = tmp_path / "dataset"
    (folder / "data").mkdir(parents=True)
    for shard in range(3):
        texts = [f"document {shard} {row} " + "some words of it " * (row % 7) for row in range(300)]
        table = pa.table({"text": texts, "domain": texts})
        pq.write_table(table, folder / "data" / f"train-{shard:05d}-of-00003.parquet", row_group_size=50)
    (folder / "data" / "test-00000-of-00001.jsonl").write_text(json.dumps({"text": "test " * 50}) + "\n")
    (folder / "data" / "huge.bin").write_bytes(b"x")
    with serving(tmp_path / "cache", monkeypatch) as hub:
        hub.repositories["datasets/org/words"] = folder
        yield hub


def read(tokenizer: Any, need: corpus.Need | None, seed: int | None = None, source: str = "hub:org/words") -> Any:
    opened = corpus.open_sources(source, "calibration")
    return opened, read_documents(opened, corpus.Fields(), tokenizer, need=need, seed=seed)


def test_only_what_is_needed_is_read_and_downloaded(hub: Hub, tokenizer: Any) -> None:
    (source,), documents = read(tokenizer, corpus.Need(sequences=10, length=32))
    assert hub.fetched() == {"data/train-00000-of-00003.parquet"}
    assert 5 < len(documents) < 200
    assert {document.domain for document in documents} == {"org/words:default:train"}
    found = make_sequences(documents, tokenizer, length=32, count=10)
    assert len(found) == 10
    with pytest.raises(CorpusError, match="too short"):
        make_sequences(documents[:-1], tokenizer, length=32, count=10)
    assert source.name == f"hub:org/words@{COMMIT}:default:train"


def test_unpacked_documents_are_counted_and_more_files_follow(hub: Hub, tokenizer: Any) -> None:
    _, documents = read(tokenizer, corpus.Need(sequences=310, length=32, packed=False))
    assert len(documents) == 310
    assert documents[-1].text.startswith("document 1 9 ")
    assert len(hub.fetched()) == 2


def test_a_pinned_dataset_is_read_offline_and_gives_the_same(
    hub: Hub, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    need = corpus.Need(sequences=10, length=32)
    opened, documents = read(tokenizer, need)
    name = corpus.pinned("hub:org/words", opened)
    assert corpus.pinned(["bundled", "hub:org/words"], [*corpus.open_sources("bundled", "calibration"), *opened]) == [
        "bundled", name,
    ]  # fmt: skip
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for source in (name, "hub:org/words@main"):
        again, same = read(tokenizer, need, source=source)
        assert same == documents
        assert corpus.sources_digest(again) == corpus.sources_digest(opened)
    with pytest.raises(CorpusError, match=r"org/other: .*not in the cache"):
        read(tokenizer, need, source="hub:org/other")


def test_a_seed_decides_files_and_rows(hub: Hub, tokenizer: Any) -> None:
    need = corpus.Need(sequences=10, length=32)
    first, again, other = (read(tokenizer, need, seed)[1] for seed in (1, 1, 2))
    assert first == again != other
    texts = [document.text for document in first]
    assert texts != sorted(texts)


def test_errors_name_the_dataset_and_the_row(hub: Hub, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated.add("datasets/org/words")
    with pytest.raises(
        CorpusError, match=r"org/words: gated \(401\).*accept the licence at .*/datasets/org/words.*HF_TOKEN"
    ):
        read(tokenizer, corpus.Need(sequences=1, length=32))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(CorpusError, match="no revision 'v9' on the hub"):
        read(tokenizer, None, source="hub:org/words@v9")
    opened = corpus.open_sources("hub:org/words", "calibration")
    need = corpus.Need(sequences=1, length=32)
    with pytest.raises(CorpusError, match=r"train-00000-of-00003.parquet, row 1: no text field 'body'"):
        read_documents(opened, corpus.Fields(text="body"), tokenizer, need=need)
    with pytest.raises(CorpusError, match="may have no end; say how many"):
        read_documents(opened, corpus.Fields(), tokenizer)
