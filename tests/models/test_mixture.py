"""Sources with fields, templates and weights of their own: what is read of a row, and who gives which share."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from corpora import read_documents
from hypothesis import given, settings
from hypothesis import strategies as st
from models.hub_server import Hub, serving

from moeq.errors import CorpusError
from moeq.models import corpus
from moeq.models.corpus.fields import filled
from moeq.models.loading import load_tokenizer
from moeq.models.source import open_source
from moeq.recipe import Recipe, SourceSection

LENGTH = 16
ROW = {"question": "What is {answer}?", "answer": "4", "n": 3, "ok": True, "in": {"er": "deep", "list": ["a", "b"]}}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(open_source("bundled:tiny-mixtral"))


def write(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines(word: str, count: int, field: str = "text") -> list[dict[str, str]]:
    """Rows without a run of words that another has."""
    return [{field: " ".join(f"{word}{number * step}" for step in (1, 3, 7, 11, 13, 17))} for number in range(count)]


def opened(sources: list[Any], tokenizer: Any, first: int, most: int | None = None, **options: Any) -> corpus.TextRows:
    named: Any = Recipe.model_validate({"corpus": {"source": sources}}).corpus.source
    return corpus.open_corpus(
        corpus.open_sources(named, "calibration"), options.pop("fields", corpus.Fields()), tokenizer,
        first=first, most=most or first, length=LENGTH, **options,
    )  # fmt: skip


# --- rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{question}\n{answer}", "What is {answer}?\n4"),
        ("{{{answer}}} {n} {ok}", "{4} 3 true"),
        ("{in.er}, {in.list.1}", "deep, b"),
    ],
)
def test_a_template_writes_fields_as_they_stand(template: str, text: str) -> None:
    assert filled(template, ROW, "here") == text


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{body}", r"'body' of the template is not in it \(there are: question, answer, n, ok, in\)"),
        ("{in.er.__class__}", "'in.er.__class__' of the template is not in it"),
        ("{question.__class__.__mro__}", "is not in it"),
        ("{in.list.7}", "is not in it"),
        ("{in.list.-1}", "is not in it"),
        ("{in}", r"'in' of the template is no text but dict \(er, list\); name one of it, such as \{in.er\}"),
        ("{in.list}", r"no text but list \(2 of them\)"),
    ],
)
def test_a_field_that_a_row_lacks_is_refused(template: str, message: str, tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "qa.jsonl", [ROW])
    sources = corpus.open_sources(SourceSection(path=str(path), template=template), "calibration")
    with pytest.raises(CorpusError, match=message) as caught:
        read_documents(sources, corpus.Fields(), tokenizer)
    assert str(caught.value).startswith(f"{path}, row 1: ")


def test_a_field_that_is_null_is_refused() -> None:
    with pytest.raises(CorpusError, match="row 2: field 'a' of the template is null"):
        filled("{a}", {"a": None}, "row 2")


def test_every_source_is_read_by_its_own_fields(tmp_path: Path, tokenizer: Any) -> None:
    """Beside the bundled text and a plain file, which mean the section's."""
    body = write(tmp_path / "body.jsonl", [{"body": "a body", "text": "not this"}])
    pair = write(tmp_path / "qa.jsonl", [{"q": "two and two", "a": "four"}])
    plain = write(tmp_path / "plain.jsonl", [{"words": "plain words"}])
    sources: Any = [
        SourceSection(path=str(body), field="body"), SourceSection(path=str(pair), template="{q}: {a}"), str(plain)
    ]  # fmt: skip
    found = read_documents(corpus.open_sources(sources, "calibration"), corpus.Fields(text="words"), tokenizer)
    assert [document.text for document in found] == ["a body", "two and two: four", "plain words"]
    with pytest.raises(CorpusError, match="no text field 'words'"):
        read_documents(
            corpus.open_sources([*sources, "bundled"], "calibration"), corpus.Fields(text="words"), tokenizer
        )
    both = read_documents(corpus.open_sources(["bundled", *sources[:2]], "calibration"), corpus.Fields(), tokenizer)
    assert {document.domain for document in both} >= {"math", "prose", "python", "body", "qa"}


def test_a_source_of_conversations_goes_through_the_chat_template(tmp_path: Path) -> None:
    speaker = load_tokenizer(open_source("bundled:tiny-mixtral"))
    speaker.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    path = write(tmp_path / "chat.jsonl", [{"q": "two?", "a": "2", "text": "not this"}])
    source = SourceSection(path=str(path), prompt_field="q", response_field="a")
    (found,) = read_documents(corpus.open_sources(source, "calibration"), corpus.Fields(), speaker)
    assert (found.text, found.rendered) == ("[user] two?[assistant] 2", True)


def test_a_source_is_called_by_its_name_or_by_its_folder(tmp_path: Path, tokenizer: Any) -> None:
    """A plain file keeps the domain that it always had: keys of stages hold it."""
    path = write(tmp_path / "gsm8k" / "train.jsonl", lines("x", 1))
    named: list[Any] = [str(path), SourceSection(path=str(path)), SourceSection(path=str(path), name="mathematics")]
    for source, domain in zip(named, ("train", "gsm8k", "mathematics"), strict=True):
        (found,) = read_documents(corpus.open_sources(source, "calibration"), corpus.Fields(), tokenizer)
        assert found.domain == domain


def test_digests_hold_what_a_source_says_and_nothing_of_plain_ones(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "x", "body": "y"}])
    moved = write(tmp_path / "b" / "a.jsonl", [{"text": "x", "body": "y"}])

    def digest(source: Any) -> str:
        return corpus.sources_digest(corpus.open_sources(source, "calibration"))

    plain = digest(str(path))
    assert plain == digest(SourceSection(path=str(path))) == digest(SourceSection(path=str(moved), name="a"))
    others = [{"field": "body"}, {"template": "{body}"}, {"weight": 2}, {"weight": 1}, {"name": "c"}]
    assert len({plain, *(digest(SourceSection(path=str(path), **more)) for more in others)}) == 6


def test_the_same_bytes_as_plain_text_have_another_digest(tmp_path: Path) -> None:
    of_rows = [write(tmp_path / folder / "talk.jsonl", [{"text": "x"}]) for folder in "ab"]
    plain = tmp_path / "talk.txt"
    plain.write_bytes(of_rows[0].read_bytes())
    digests = [corpus.sources_digest(corpus.open_sources(str(path), "calibration")) for path in (*of_rows, plain)]
    assert digests[0] == digests[1] != digests[2]


# --- shares -------------------------------------------------------------------------------------------------------


@given(weights=st.lists(st.integers(1, 9), min_size=1, max_size=5), times=st.integers(0, 20))
def test_shares_that_come_out_even_are_met(weights: list[int], times: int) -> None:
    count = sum(weights) * times
    assert corpus.apportion([float(weight) for weight in weights], count) == [weight * times for weight in weights]


@settings(deadline=None)
@given(
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=5), chunks=st.lists(st.integers(0, 60), max_size=5),
    data=st.data(),
)  # fmt: skip
def test_shares_add_up_and_chunks_come_to_what_is_given_at_once(
    weights: list[float], chunks: list[int], data: st.DataObject
) -> None:
    there = data.draw(st.lists(st.integers(0, 80), min_size=len(weights), max_size=len(weights)))
    taken = [0] * len(weights)
    for count in chunks:
        left = [whole - gone for whole, gone in zip(there, taken, strict=True)]
        given = corpus.apportion(weights, count, taken, left)
        assert sum(given) == min(count, sum(left))
        assert all(0 <= some <= most for some, most in zip(given, left, strict=True))
        taken = [before + more for before, more in zip(taken, given, strict=True)]
    assert taken == corpus.apportion(weights, sum(chunks), left=list(there))


@pytest.mark.cases(1)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("rows", [300, 16_000])
def test_weights_are_shares_of_the_sequences(
    rows: int, seed: int | None, packed: bool, tmp_path: Path, tokenizer: Any
) -> None:
    """Of files that are tokenized whole, and of those where places are chosen first; a domain counts for nothing."""
    large = write(tmp_path / "large.jsonl", lines("large", rows))
    small = write(tmp_path / "small.jsonl", [{"domain": f"d{n % 2}", **row} for n, row in enumerate(lines("s", 300))])
    assert (large.stat().st_size > 1 << 20) == (rows == 16_000)
    said: list[str] = []
    sources = [{"path": str(large), "weight": 3}, str(small)]
    found = opened(sources, tokenizer, 40, packed=packed, seed=seed, say=said.append).take(40)
    assert Counter(found.domains) == {"large": 30, "d0": 5, "d1": 5}
    again = opened(sources, tokenizer, 40, packed=packed, seed=seed).take(40)
    assert (found.digest(), said) == (again.digest(), [])
    assert opened(sources, tokenizer, 40, packed=packed, seed=4).take(40).digest() != found.digest()
    assert len({tuple(row) for row in found.ids.tolist()}) == 40


def test_text_that_grows_keeps_the_shares_and_begins_the_same(tmp_path: Path, tokenizer: Any) -> None:
    paths = [write(tmp_path / f"{name}.jsonl", lines(name, 400)) for name in "ab"]
    sources = [{"path": str(paths[0]), "weight": 0.75}, {"path": str(paths[1]), "weight": 0.25}]
    chunks = list(opened(sources, tokenizer, 6, 50).chunks(6, 50))
    assert [len(chunk) for chunk in chunks] == [6, 6, 12, 24, 2]
    totals = [Counter(corpus.join(chunks[: end + 1]).domains) for end in range(len(chunks))]
    assert [total["a"] for total in totals] == [5, 9, 18, 36, 38]
    assert chunks[0].digest() == opened(sources, tokenizer, 6).take(6).digest()
    rows = [tuple(row) for chunk in chunks for row in chunk.ids.tolist()]
    assert len(set(rows)) == 50, "none twice"


@pytest.mark.parametrize("rows", [400, 16_000])
def test_a_source_with_too_little_is_named_once_and_the_others_fill_its_share(
    rows: int, tmp_path: Path, tokenizer: Any
) -> None:
    few = write(tmp_path / "few.jsonl", lines("few", 8))
    many = write(tmp_path / "many.jsonl", lines("many", rows))
    said: list[str] = []
    pool = opened([{"path": str(few), "weight": 1}, str(many)], tokenizer, 40, 120, say=said.append)
    chunks = list(pool.chunks(40, 120))
    there = Counter(chunks[0].domains)["few"]
    assert 4 < there < 20
    assert Counter(corpus.join(chunks).domains) == {"few": there, "many": 120 - there}
    assert said == [
        f"few.jsonl has {there} of the 20 sequences that are its share by weight; the other sources fill it"
    ]


def test_what_all_sources_together_lack_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    paths = [write(tmp_path / f"{name}.jsonl", lines(name, 3)) for name in "ab"]
    sources = [{"path": str(paths[0]), "weight": 2}, str(paths[1])]
    with pytest.raises(CorpusError, match=r"too short: \d+ sequences of 16 tokens, 100 are wanted"):
        opened(sources, tokenizer, 100).take(100)
    empty = write(tmp_path / "empty.jsonl", [])
    with pytest.raises(CorpusError, match=r"empty.jsonl: no text in it"):
        opened([sources[0], {"path": str(empty)}], tokenizer, 2)


def test_a_weight_that_comes_to_nothing_is_said(tmp_path: Path, tokenizer: Any) -> None:
    paths = [write(tmp_path / f"{name}.jsonl", lines(name, 30)) for name in "ab"]
    said: list[str] = []
    pool = opened([{"path": str(paths[0]), "weight": 0.01}, str(paths[1])], tokenizer, 4, say=said.append)
    assert set(pool.take(4).domains) == {"b"}
    assert said == ["a.jsonl has a weight too small for one of 4 sequences"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for shard in range(4):
        write(tmp_path / "dataset" / f"train-{shard}.jsonl", lines(f"hub {shard}", 60, "body"))
    with serving(tmp_path / "cache", monkeypatch) as hub:
        hub.repositories["datasets/org/words"] = tmp_path / "dataset"
        yield hub


def test_a_hub_dataset_is_read_as_far_as_its_share_and_further_where_others_end(
    hub: Hub, tmp_path: Path, tokenizer: Any
) -> None:
    many = write(tmp_path / "many.jsonl", lines("many", 400))
    dataset = {"path": "hub:org/words", "field": "body", "weight": 1}
    found = opened([{"path": str(many), "weight": 3}, dataset], tokenizer, 40).take(40)
    assert Counter(found.domains) == {"many": 30, "org/words:default:train": 10}
    assert hub.fetched() == {"train-0.jsonl"}
    few = write(tmp_path / "few.jsonl", lines("few", 8))
    said: list[str] = []
    found = opened([{"path": str(few), "weight": 3}, dataset], tokenizer, 160, say=said.append).take(160)
    shares = Counter(found.domains)
    assert shares["few"] + shares["org/words:default:train"] == 160
    assert shares["org/words:default:train"] > 40
    assert said[0].startswith(f"few.jsonl has {shares['few']} of the 120 ")
    (pinned,) = corpus.pinned([dataset], corpus.open_sources([SourceSection(**dataset)], "calibration"))  # type: ignore[arg-type]
    assert pinned["path"].startswith("hub:org/words@")
    assert pinned["field"] == "body"


def test_fields_of_plain_text_on_the_hub_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "train.txt").write_text("some words " * 50)
    source = SourceSection(path="hub:org/plain", field="body")
    with serving(tmp_path / "cache", monkeypatch) as hub:
        hub.repositories["datasets/org/plain"] = tmp_path / "plain"
        assert corpus.open_sources("hub:org/plain", "calibration")
        with pytest.raises(CorpusError, match="hub:org/plain: its files are plain text, which has no fields"):
            corpus.open_sources(source, "calibration")
