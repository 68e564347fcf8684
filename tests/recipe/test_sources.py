"""Sources of text in recipes: what a mapping may say, what is refused when it is read, what reports call a source."""

from __future__ import annotations

import json

import pytest

from moeq.errors import RecipeError
from moeq.recipe import SourceSection, domain_names, load_recipe, naming_part, source_name, source_text, template_parts


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("corpus.source={path: a.jsonl, fild: b}", "unknown key 'corpus.source.fild'; did you mean 'field'"),
        ("corpus.source=5", r"corpus.source is 5; give text"),
        ("corpus.source=[a.jsonl, 5]", r"corpus.source.1 is 5; give text"),
        ("corpus.source=[]", "an empty list; give at least 1 of them"),
        ("corpus.source={path: 'hub:a b'}", "'hub:a b' is not a hub dataset"),
        ("corpus.source={path: a.jsonl, weight: 0}", "give a number above 0"),
        ("corpus.source={path: a.jsonl, weight: -1}", "give a number above 0"),
        ("corpus.source={path: a.jsonl, field: a, template: '{b}'}", "give field, template, or the fields of a conv"),
        ("corpus.source={path: a.jsonl, template: '{b}', prompt_field: p}", "not several"),
        ("corpus.source={path: a.txt.gz, field: b}", "'a.txt.gz' is plain text, which has no fields"),
        ("corpus.source={path: a.jsonl, template: '{b'}", "a brace without its other one"),
        ("corpus.source={path: a.jsonl, template: 'b}'}", "a brace without its other one"),
        ("corpus.source={path: a.jsonl, template: '{b!r}'}", r"'\{b!r\}' is no field; write \{field\}"),
        ("corpus.source={path: a.jsonl, template: '{b:>9999999999}'}", "is no field"),
        ("corpus.source={path: a.jsonl, template: '{b[0]}'}", "is no field"),
        ("corpus.source={path: a.jsonl, template: '{b..c}'}", "is no field"),
        ("corpus.source={path: a.jsonl, template: '{}'}", "is no field"),
        (
            "corpus.source={path: a.jsonl, template: 'always {{the}} same'}",
            r"names no field; write for example \{text\}",
        ),
        ("eval.perplexity.source={path: a.jsonl, messages_field: m}", "measured on text; give field or template"),
        ("eval.perplexity.source={path: a.jsonl, weight: 2}", "shares of a number of sequences; set sequences"),
        ("eval.images.source={path: a}", "eval.images.source"),
    ],
)
def test_what_a_source_may_not_say_is_refused(override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        load_recipe(None, [override])
    assert "Section" not in str(caught.value)


def test_sources_are_kept_as_they_were_written() -> None:
    """Nothing is filled in: a recipe without mappings is dumped, and digested, as it always was."""
    written = ["bundled", {"path": "qa.jsonl", "template": "{q}\n{a.b}", "weight": 2.0}, "hub:org/name"]
    source = load_recipe(None, ['corpus.source=[bundled, {path: qa.jsonl, template: "{q}\\n{a.b}", weight: 2}, '
                                "'hub:org/name']"]).corpus.source  # fmt: skip
    assert (
        load_recipe(None, [f"corpus.source={json.dumps(written)}"]).model_dump(mode="json")["corpus"]["source"]
        == written
    )
    assert source_text(source) == "['bundled', 'qa.jsonl', 'hub:org/name']"
    assert source_text(source[1:2]) == "qa.jsonl", "as --text gives it"
    assert load_recipe(None, ["corpus.source=a.txt"]).model_dump(mode="json")["corpus"]["source"] == "a.txt"


def test_templates_are_text_and_names() -> None:
    assert template_parts("{{{a}}}: {b.c}\n") == [
        ("{", False), ("a", True), ("}", False), (": ", False), ("b.c", True), ("\n", False)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/data/gsm8k/train.jsonl", "gsm8k"),
        ("/data/gsm8k/data/train-00000-of-00002.parquet", "gsm8k"),
        ("/data/books.txt.gz", "books"),
        ("/data/code-train.jsonl.zst", "code-train"),
        ("/data/train.jsonl", "train"),
        ("hub:org/words", "org/words"),
        ("hub:org/words@main:default:train", "org/words"),
        ("hub:org/words@main:en:train", "org/words, en"),
        ("bundled", "bundled"),
    ],
)
def test_a_source_has_a_name_that_says_something(path: str, name: str) -> None:
    assert source_name(path) == name


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("/a/gsm8k/train.jsonl", "gsm8k/train.jsonl"),
        ("/a/gsm8k/train/part-00.parquet", "gsm8k/train/part-00.parquet"),
        ("/a/code.jsonl", "code.jsonl"),
        ("/data/train/test.jsonl", "test.jsonl"),
        ("bundled", "bundled"),
        ("hub:org/w@1:a:train", "hub:org/w@1:a:train"),
    ],
)
def test_the_end_of_a_path_names_a_source_as_the_whole_does(path: str, part: str) -> None:
    assert naming_part(path) == part
    neutral = part if part == path else f"/0/texts/1/{part}"
    assert source_name(neutral) == source_name(path)


def test_domains_are_called_by_their_sources() -> None:
    source = ["/a/gsm8k/train.jsonl", "/a/code.jsonl", SourceSection(path="/b/x.jsonl", name="test"), "hub:org/w"]
    domains = ["train", "code", "test", "math", "org/w:default:train"]
    assert domain_names(domains, source) == {
        "train": "gsm8k", "code": "code", "test": "test", "math": "math", "org/w:default:train": "org/w"
    }  # fmt: skip
    assert domain_names(["train"], ["/a/x/train.jsonl", "/a/y/train.jsonl"]) == {"train": "x and y"}
    clash = domain_names(["train", "x"], ["/a/x/train.jsonl", "/a/x.jsonl"])
    assert clash == {"train": "train", "x": "x"}, "no two alike"
