"""Text of any size: places are chosen first, and only what lies around them is read into memory and tokenized."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from corpora import make_sequences, read_documents

from moeq.errors import CorpusError
from moeq.models import corpus
from moeq.models.corpus import places, streams
from moeq.models.corpus.documents import encode
from moeq.models.loading import load_tokenizer
from moeq.models.source import open_source

LENGTH = 32
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "many", "small", "words"]
PEAK = """
import resource, sys
from moeq.models import corpus
from moeq.models.loading import load_tokenizer
from moeq.models.source import open_source
tokenizer = load_tokenizer(open_source("bundled:tiny-mixtral"))
tokenizer("warm")
for path in sys.argv[1:]:
    sources = corpus.open_sources(path, "calibration")
    corpus.sources_digest(sources)
    pool = corpus.open_text(sources, corpus.Fields(), tokenizer, length=128, first=64, most=64)
    assert len(pool.take(64)) == 64
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


class Counting:
    """A tokenizer that counts the characters that it is given."""

    def __init__(self) -> None:
        self.inner = load_tokenizer(open_source("bundled:tiny-mixtral"))
        self.characters = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, texts: list[str], **options: Any) -> Any:
        self.characters += sum(map(len, texts))
        return self.inner(texts, **options)


@pytest.fixture
def counting() -> Counting:
    return Counting()


def line(number: int) -> str:
    return " ".join([f"line {number}", *(WORDS[(number + step) % len(WORDS)] for step in range(12))])


def write(path: Path, size: int, domains: int = 2) -> Path:
    """About `size` bytes of lines, no two alike; as rows, in domains that have a hundredth of the one before."""
    number = 0

    def rows() -> Iterator[bytes]:
        nonlocal number
        written = 0
        while written < size:
            lines = [line(number + step) for step in range(4)]
            domain = next((one for one in reversed(range(domains)) if number // 4 % 100**one == 0), 0)
            row = {"text": "\n".join(lines), "domain": f"d{domain}"}
            found = "".join(f"{one}\n" for one in lines) if ".txt" in path.name else json.dumps(row) + "\n"
            written += len(found)
            number += 4
            yield found.encode()

    if path.suffix == ".gz":
        with gzip.open(path, "wb", compresslevel=1) as stream:
            stream.writelines(rows())
    elif path.suffix == ".zst":
        import pyarrow as pa

        with pa.output_stream(str(path), compression="zstd") as stream:
            for row in rows():
                stream.write(row)
    else:
        with path.open("wb") as stream:
            stream.writelines(rows())
    return path


def opened(path: Path | list[Path], tokenizer: Any, first: int = 16, **options: Any) -> corpus.TextRows:
    names = [str(one) for one in path] if isinstance(path, list) else str(path)
    options = {"most": first, "length": LENGTH} | options
    fields = options.pop("fields", corpus.Fields())
    return corpus.open_text(
        corpus.open_sources(names, "calibration"), fields, tokenizer, first=first, **options
    )  # fmt: skip


@pytest.mark.full
def test_memory_does_not_follow_the_size_of_the_file(tmp_path: Path) -> None:
    """200 MB of plain text, and 30 MB of what must be read as a stream, after less than 1 MB of it; one process."""
    small, large = [], []
    for name, size in (("a.txt", 200), ("b.jsonl", 30), ("c.txt.gz", 30), ("d.jsonl.zst", 30)):
        small.append(write(tmp_path / f"small-{name}", 900_000))
        large.append(write(tmp_path / name, 2 << 20))
        part = large[-1].read_bytes()
        with large[-1].open("ab") as stream:  # compressed files of several members are read on
            stream.writelines(part for _ in range(size // 2 - 1))
    command = [sys.executable, "-c", PEAK, *map(str, [*small, *large])]
    peaks = [int(peak) for peak in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]
    assert len(peaks) == 8
    assert max(peaks) - peaks[3] < 32 << 20


@pytest.mark.full
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz"])
def test_how_many_tokens_there_are_is_known_from_a_sample(name: str, tmp_path: Path, counting: Counting) -> None:
    path = write(tmp_path / name, 2 << 20)
    pool = opened(path, counting)
    assert isinstance(pool, places.Places)
    documents = read_documents(corpus.open_sources(str(path), "calibration"), corpus.Fields(), counting.inner)
    there = sum(map(len, encode(documents, counting.inner)))
    assert pool.tokens() == pytest.approx(there, rel=0.1)
    pool.take(16)
    assert opened(path, counting).tokens() == pool.tokens() == pytest.approx(there, rel=0.1)


@pytest.mark.cases(1)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz"])
def test_the_tokenizer_is_given_what_is_taken_and_a_sample(
    name: str, packed: bool, tmp_path: Path, counting: Counting
) -> None:
    if name == "a.txt" and not packed:
        paths = [write(tmp_path / f"{number}.txt", 80_000) for number in range(16)]
    else:
        paths = [write(tmp_path / name, 3 << 20)]
    found = opened(paths, counting, packed=packed).take(16)
    assert len(found) == 16
    sample = places.SAMPLE * len(paths) * 3
    assert counting.characters < sample + 16 * LENGTH * 16, "some bytes a token"


def test_small_text_is_tokenized_whole(tmp_path: Path, counting: Counting) -> None:
    path = write(tmp_path / "a.jsonl", 200_000)
    pool = opened(path, counting)
    assert type(pool) is corpus.Pool
    documents = read_documents(corpus.open_sources(str(path), "calibration"), corpus.Fields(), None)
    assert counting.characters == sum(len(one.text) for one in documents)
    same = make_sequences(documents, counting.inner, length=LENGTH, count=16)
    assert pool.take(16).digest() == same.digest()


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz"])
def test_places_lie_evenly_in_equal_shares_and_none_twice(name: str, tmp_path: Path, counting: Counting) -> None:
    path = write(tmp_path / name, 3 << 20)
    pool = opened(path, counting, 16, most=4096, length=64)
    assert type(pool) is corpus.Places
    chunks = list(pool.chunks(16, 200))
    assert [len(chunk) for chunk in chunks] == [16, 16, 32, 64, 72]
    again = list(opened(path, counting, 16, most=4096, length=64).chunks(16, 200))
    assert [chunk.digest() for chunk in chunks] == [chunk.digest() for chunk in again]
    everything = corpus.join(chunks)
    assert everything.ids.shape == (200, 64)
    assert everything.mask.all()
    assert len({tuple(row) for row in everything.ids.tolist()}) == 200
    texts = [counting.decode(row, skip_special_tokens=True) for row in chunks[0].ids.tolist()]
    if ".txt" in name:
        at = [int(re.findall(r"line (\d+) ", text)[0]) for text in texts]
        lines = streams.read_text(path).count("\n")
        assert max(abs(place / lines - number / 16) for number, place in enumerate(at)) < 0.02
        assert all(text[0].isspace() or text.startswith("line ") for text in texts), "begun at a word"
    else:
        assert Counter(chunks[0].domains) == {"d0": 8, "d1": 8}, "though d1 has a hundredth of the text"


def test_the_first_place_begins_behind_a_byte_order_mark(tmp_path: Path, counting: Counting) -> None:
    path = write(tmp_path / "a.txt", 3 << 20)
    path.write_bytes("\ufeff".encode() + path.read_bytes())
    first = opened(path, counting).take(4).ids[0]
    plain = corpus.encoded([corpus.Document(text=line(0) + "\n" + line(1), domain="", ends=False)], counting)
    assert first.tolist() == next(plain)[1][:LENGTH]


@pytest.mark.parametrize("blank", range(3))
def test_a_blank_piece_of_a_long_text_is_part_of_it(
    blank: int, tmp_path: Path, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First, in the middle and last: the document begins and ends, once, and has all of its characters."""
    monkeypatch.setattr(streams, "AT_ONCE", 64)
    lines = [line(number)[:60].ljust(63) + "\n" for number in range(3)]
    lines[blank] = "\n" * 64
    path = tmp_path / "text.txt"
    path.write_text("".join(lines))
    (source,) = corpus.open_sources(str(path), "calibration")
    found = list(corpus.documents_of(source, corpus.Fields(), counting))
    assert "".join(document.text for document in found) == "".join(lines)
    assert [document.begins for document in found] == [True] + [False] * (len(found) - 1)
    assert [document.ends for document in found] == [False] * (len(found) - 1) + [True]
    assert len(found) > 1


@pytest.mark.full
def test_a_seed_draws_the_places(tmp_path: Path, counting: Counting) -> None:
    path = write(tmp_path / "a.jsonl", 3 << 20)
    found = {seed: opened(path, counting, seed=seed).take(16).digest() for seed in (None, 1, 2)}
    assert len(set(found.values())) == 3
    assert found[1] == opened(path, counting, seed=1).take(16).digest()


@pytest.mark.full
def test_what_takes_most_of_the_text_takes_all_that_is_there(tmp_path: Path, counting: Counting) -> None:
    path = write(tmp_path / "a.txt", 5 << 18)
    text = path.read_text()
    there = len(counting.inner(text, add_special_tokens=False)["input_ids"]) // LENGTH
    found = opened(path, counting, there - 8).take(there - 8)
    assert len({tuple(row) for row in found.ids.tolist()}) == there - 8
    with pytest.raises(CorpusError, match=rf"too short: \d+ sequences of {LENGTH} tokens, {2 * there} are wanted"):
        opened(path, counting, 2 * there).take(2 * there)


def test_far_too_little_text_is_refused_without_the_tokenizer(tmp_path: Path, counting: Counting) -> None:
    path = write(tmp_path / "a.txt", 3 << 20)
    with pytest.raises(CorpusError, match=r"too short: \d+ sequences of 32 tokens, 900000 are wanted"):
        opened(path, counting, 900_000)
    assert counting.characters <= places.SAMPLE


def test_places_with_too_few_tokens_are_replaced(tmp_path: Path, counting: Counting) -> None:
    """A wide desert in the middle of the text, in which hundreds of characters make one token."""
    path = write(tmp_path / "a.txt", 2 << 20)
    text = path.read_text()
    path.write_text(text[: len(text) // 2] + "\n" * (1 << 19) + text[len(text) // 2 :])
    found = opened(path, counting, 32).take(32)
    assert found.ids.shape == (32, LENGTH)
    assert found.mask.all()


def test_damage_is_named_where_it_lies(tmp_path: Path, counting: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", 3 << 20)
    rows = path.read_text().splitlines()
    path.write_text("\n".join([*rows[:9000], '{"body": 1}', *rows[9000:]]))
    with pytest.raises(CorpusError, match=r"a.jsonl, row 9001: no text field 'text'"):
        opened(path, counting)
    bad = write(tmp_path / "b.txt", 3 << 20)
    data = bytearray(bad.read_bytes())
    data[::50] = b"\xff" * len(data[::50])
    bad.write_bytes(data)
    with pytest.raises(CorpusError, match=r"b.txt: cannot be read as UTF-8"):
        opened(bad, counting).take(16)
    cut = write(tmp_path / "c.txt.gz", 3 << 20)
    cut.write_bytes(cut.read_bytes()[:-1000])
    with pytest.raises(CorpusError, match=r"c.txt.gz: cannot be"):
        opened(cut, counting).take(16)
    monkeypatch.setattr(streams, "LONGEST_ROW", 1000)
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": "word " * 1000}))
    with pytest.raises(CorpusError, match=r"d.jsonl, row 1: longer than"):
        opened(tmp_path / "d.jsonl", counting).take(1)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["bomb.txt.gz", "bomb.jsonl.gz", "bomb.txt.zst"])
def test_a_compressed_file_has_a_bound(
    name: str, tmp_path: Path, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 MB in some kilobytes: refused in one line, long before the end."""
    import pyarrow as pa

    monkeypatch.setattr(streams, "FREE_BYTES", 4 << 20)
    path = tmp_path / name
    kind = streams.COMPRESSED[path.suffix]
    with pa.output_stream(str(path), compression=kind) as stream:
        for _ in range(16):
            stream.write(b'{"text": "a word"}\n' * ((1 << 20) // 19))
    with pytest.raises(CorpusError, match=r"over .* in a compressed file of .*give it decompressed"):
        opened(path, counting)


def test_progress_is_shown_of_what_takes_long(
    tmp_path: Path, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "SHOWN_BYTES", 1 << 20)
    seen: dict[str, list[int]] = {}

    @contextmanager
    def bar(title: str, total: int) -> Iterator[Any]:
        steps = seen.setdefault(title, [total, 0])

        def advance() -> None:
            steps[1] += 1

        yield advance

    path = write(tmp_path / "a.jsonl", 3 << 20)
    corpus.sources_digest(corpus.open_sources(str(path), "calibration"), bar)
    opened(path, counting, bar=bar).take(16)
    assert set(seen) == {"hashing text", "counting text", "reading text"}
    assert all(0 <= total - steps <= 1 for total, steps in (seen["hashing text"], seen["counting text"]))
    assert 1 <= seen["reading text"][1] <= 3, "up to the last place"
