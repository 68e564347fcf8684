"""Text to sequences: shares of domains, packing, padding, determinism."""

import json
import resource
from pathlib import Path
from typing import Any

import pytest
from corpora import make_sequences, read_documents

from moeq.bundled import bundled_path
from moeq.errors import CorpusError, PlanError
from moeq.models import corpus
from moeq.models.loading import load_tokenizer
from moeq.models.source import open_source


@pytest.fixture(scope="module")
def tokenizer() -> object:
    return load_tokenizer(open_source("bundled:tiny-mixtral"))


def documents(part: str) -> list[corpus.Document]:
    return read("bundled", corpus.Fields(), None, part)


def read(source: object, fields: corpus.Fields, tokenizer: object, part: str = "calibration") -> list[corpus.Document]:
    return read_documents(corpus.open_sources(str(source), part), fields, tokenizer)


def test_domains_get_equal_shares_and_tokens_repeat(tokenizer: object) -> None:
    make = lambda: make_sequences(documents("calibration"), tokenizer, length=64, count=31)  # noqa: E731
    first, second = make(), make()
    assert first.digest() == second.digest()
    assert sorted(first.domains.count(domain) for domain in set(first.domains)) == [10, 10, 11]
    assert first.mask.all()


def test_a_limit_of_addresses_is_told_before_a_tokenizer_ends_the_process(
    tokenizer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = [corpus.Document(text="A text that no other test has.", domain="")]
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (taken + (100 << 20), -1))
    with pytest.raises(PlanError, match=r"^ulimit -v: out of memory: .* are taken where text is read; raise"):
        corpus.documents.encode(some, tokenizer)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (taken + (1 << 30), -1))
    assert corpus.documents.encode(some, tokenizer)


def test_calibration_and_evaluation_share_no_sequence(tokenizer: object) -> None:
    rows = [
        {tuple(row) for row in make_sequences(documents(part), tokenizer, length=32, count=None).ids.tolist()}
        for part in ("calibration", "evaluation")
    ]
    assert all(rows)
    assert not rows[0] & rows[1]


@pytest.mark.parametrize(
    ("part", "settings", "digest"),
    [
        ("calibration", {"length": 256, "count": 256}, "f8788eee215459529f09f7f6"),
        ("calibration", {"length": 48, "count": 12, "packed": False}, "125cdc2b621fdc0689b3b752"),
        ("evaluation", {"length": 256, "count": None}, "1942eab14e11bab105e00fc6"),
    ],
)
def test_the_bundled_tokens_stay_what_they_are(
    tokenizer: object, part: str, settings: dict[str, Any], digest: str
) -> None:
    assert make_sequences(documents(part), tokenizer, **settings).digest().startswith(digest)


def test_a_seed_decides_the_order_of_documents_and_nothing_else(tokenizer: object) -> None:
    def shuffled(seed: int | None) -> list[corpus.Document]:
        return read_documents(corpus.open_sources("bundled", "calibration"), corpus.Fields(), None, seed=seed)

    plain, first, again, other = (shuffled(seed) for seed in (None, 3, 3, 4))
    assert first == again
    assert plain != first != other
    key = lambda document: (document.domain, document.text)  # noqa: E731
    assert sorted(plain, key=key) == sorted(first, key=key) == sorted(other, key=key)


def test_growing_text_begins_with_what_is_taken_without_growth(tokenizer: object) -> None:
    pool = corpus.Pool(documents("calibration"), tokenizer, length=64)
    available = len(pool)
    chunks = list(pool.chunks(12, 100))
    assert [len(chunk) for chunk in chunks] == [12, 12, 24, 48, 4]
    assert chunks[0].digest() == make_sequences(documents("calibration"), tokenizer, length=64, count=12).digest()
    assert len(pool) == available - 100
    grown = corpus.join(chunks)
    assert grown.ids.shape == (100, 64)
    assert [tuple(row) for row in grown.ids[12:24].tolist()] == [tuple(row) for row in chunks[1].ids.tolist()]
    everything = list(corpus.Pool(documents("calibration"), tokenizer, length=64).chunks(12, 10**6))
    assert sum(map(len, everything)) == available
    rows = [tuple(row) for chunk in everything for row in chunk.ids.tolist()]
    whole = make_sequences(documents("calibration"), tokenizer, length=64, count=None)
    assert sorted(rows) == sorted(tuple(row) for row in whole.ids.tolist()), "none twice, none left out"


def test_chunks_of_unpacked_documents_are_padded_to_one_width(tokenizer: object) -> None:
    rows = [corpus.Document(text="word " * (n + 2), domain="d") for n in range(8)]
    chunks = list(corpus.Pool(rows, tokenizer, length=32, packed=False).chunks(2, 8))
    grown = corpus.join(chunks)
    assert grown.mask.sum() == sum(int(chunk.mask.sum()) for chunk in chunks)
    assert grown.ids.shape[1] == max(chunk.ids.shape[1] for chunk in chunks)
    assert (grown.ids[~grown.mask] == 2).all()


def test_a_short_domain_leaves_its_share_to_the_others(tokenizer: object) -> None:
    few = [document for document in documents("calibration") if document.domain != "math"]
    few += [document for document in documents("calibration") if document.domain == "math"][:4]
    found = make_sequences(few, tokenizer, length=64, count=90)
    shares = {domain: found.domains.count(domain) for domain in set(found.domains)}
    assert sum(shares.values()) == 90
    assert shares["math"] < 20 < shares["python"]
    assert abs(shares["python"] - shares["prose"]) <= 1


def test_unpacked_documents_are_padded_and_masked(tokenizer: object) -> None:
    texts = ["def f():", "a longer document than the first one, it goes on", "x"]
    rows = [corpus.Document(text=text, domain="d") for text in texts]
    found = make_sequences(rows, tokenizer, length=8, count=None, packed=False)
    assert found.ids.shape == (3, 8)
    assert found.mask.sum(1).tolist()[1] == 8
    assert (found.ids[~found.mask] == 2).all()


def test_local_files_of_every_kind(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "a.txt").write_text("plain text")
    (tmp_path / "b.jsonl").write_text(json.dumps({"body": "json text", "domain": "own"}) + "\n\n")
    pq.write_table(pa.table({"body": ["parquet text"]}), tmp_path / "c.parquet")
    with pa.output_stream(str(tmp_path / "d.jsonl.gz"), compression="gzip") as stream:
        stream.write(b'{"body": "gzipped \xe2\x80\xa8 text"}\n')
    with pa.output_stream(str(tmp_path / "e.jsonl.zst"), compression="zstd") as stream:
        stream.write(b'{"body": "more text"}\n')
    found = [
        document
        for name in ("a.txt", "b.jsonl", "c.parquet", "d.jsonl.gz", "e.jsonl.zst")
        for document in read(tmp_path / name, corpus.Fields(text="body"), None)
    ]
    assert [(d.text, d.domain) for d in found] == [
        ("plain text", "a"), ("json text", "own"), ("parquet text", "c"), ("gzipped \u2028 text", "d"),
        ("more text", "e"),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl", "a.jsonl.gz"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str) -> None:
    import pyarrow as pa

    written = "some text\n" if ".txt" in name else '{"text": "some text\\n"}'
    with pa.output_stream(str(tmp_path / name), compression="gzip" if name.endswith("gz") else None) as stream:
        stream.write(f"\ufeff{written}".encode())
    assert [document.text for document in read(tmp_path / name, corpus.Fields(), None)] == ["some text\n"]


def test_too_little_text_says_how_much_there_is(tokenizer: object) -> None:
    rows = [corpus.Document(text="word " * 300, domain="d")]
    with pytest.raises(CorpusError, match=r"too short: \d+ sequences of 32 tokens, 1000 are wanted"):
        make_sequences(rows, tokenizer, length=32, count=1000)


def test_bundled_paths_exist() -> None:
    assert bundled_path("corpus/evaluation.jsonl").is_file()
