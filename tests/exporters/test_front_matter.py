"""Model cards: what is carried over from the source's own, and names that stay names whatever stands in them."""

from __future__ import annotations

import json
import os
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from made_sources import MadeSource, save_model
from markdown_it import MarkdownIt

from moeq.errors import ModelError
from moeq.exporters import write
from moeq.exporters.foreign import WriteOptions
from moeq.exporters.front_matter import FRONT_BYTES, Origin, front_matter, markdown, read_origin, top_level
from moeq.models.source import open_source

HOSTILE = (
    'x"\n---\n# owned\n<script>alert(1)</script> | [a](javascript:b) `c` **d** \u202etxt https://e.f\r\nlicense: mit'
)
README = """---
license: other
license_name: "their own: 1.0"
license_link: LICENSE
language:
- en
- no
- [nested]
base_model: some/base
datasets: [a/b]
model-index:
- name: x
  results: [{task: {type: y}}]
---
# A model

---
license: mit
---
"""


def parsed(lines: list[str]) -> dict[str, Any]:
    """Front matter as the hub reads it: between the first two lines of three dashes."""
    text = "\n".join(lines)
    assert text.startswith("---\n")
    found = yaml.safe_load(text.split("\n---", 1)[0])
    assert isinstance(found, dict)
    return found


def origin_of(text: str, folder: Path) -> Origin:
    (folder / "README.md").write_text(text, "utf-8", newline="")
    return read_origin(folder)


def test_licence_language_and_base_model_are_carried_over(tmp_path: Path) -> None:
    assert read_origin(tmp_path) == Origin()
    found = origin_of(README, tmp_path)
    assert found == Origin(
        base_model=("some/base",),
        license="other",
        license_name="their own: 1.0",
        license_link="LICENSE",
        language=("en", "no"),
    )
    assert parsed(front_matter("local", "transformers", found)) == {
        "library_name": "transformers",
        "base_model": "some/base",
        "base_model_relation": "quantized",
        "license": "other",
        "license_name": "their own: 1.0",
        "license_link": "LICENSE",
        "language": ["en", "no"],  # Norwegian, not false
        "tags": ["moeq", "mixture-of-experts", "quantized"],
    }
    assert parsed(front_matter("org/model", "transformers", found))["base_model"] == "org/model"
    assert not {"base_model", "base_model_relation"} & set(parsed(front_matter("local", "transformers", Origin())))
    assert origin_of(README.replace("\n", "\r\n"), tmp_path) == found
    assert origin_of("# no front matter\n---\nlicense: mit\n---\n", tmp_path) == Origin()
    assert origin_of("---\nlicense: null\nlanguage: ~\nbase_model: []\n---\n", tmp_path) == Origin()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a: &x [1]\nb: *x", "aliases"),
        ("a: " + "[" * 40 + "]" * 40, "nested more than 16 deep"),
        ("a: [" + "1, " * 5000 + "]", "more than 4096 values"),
        ("a: " + "x" * (FRONT_BYTES + 1), f"more than {FRONT_BYTES} bytes"),
        ("- a\n- b", "no mapping"),
        ("? [a]\n: b", "no text"),
        ("a: 'b", "while scanning"),
        ("a: !!python/object/apply:os.system ['true']\n\tb: c", "while scanning"),
    ],
)
def test_what_cannot_be_read_is_said_and_nothing_is_built_of_it(text: str, what: str, tmp_path: Path) -> None:
    found = origin_of(f"---\n{text}\nlicense: mit\n---\n", tmp_path)
    assert found.license is None
    said = found.said()
    assert said is not None
    assert what in said
    assert "\n" not in said
    assert "licence and language are not carried over" in said


def test_tags_of_python_are_text(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    found = origin_of(f"---\nlicense: !!python/object/apply:os.mkdir ['{marker}']\nlanguage: fr\n---\n", tmp_path)
    assert found.language == ("fr",)
    assert not marker.exists()


def test_a_card_that_is_a_link_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("---\nlicense: mine\n---\n")
    folder = tmp_path / "model"
    folder.mkdir()
    os.symlink(tmp_path / "secret", folder / "README.md")
    with pytest.raises(ModelError, match="leads out of the directory"):
        read_origin(folder)


@given(st.text(max_size=60), st.text(max_size=60))
@example(HOSTILE, HOSTILE)
@example("---", "...")
@example("no", "1.0")
def test_names_cannot_leave_their_place_in_the_front_matter(name: str, other: str) -> None:
    origin = Origin(license=other, license_link=other, language=(other, name), base_model=(name, other))
    for lines in (front_matter(name, "transformers", origin), front_matter(name, "transformers", Origin())):
        assert lines[0] == lines[-1] == "---"
        assert not any(line.startswith(("---", "...")) for line in lines[1:-1])
        found = parsed(lines)
        assert set(found) <= {
            "library_name", "base_model", "base_model_relation", "license", "license_link", "language", "tags",
        }  # fmt: skip
        assert found["library_name"] == "transformers"
        assert found["tags"] == ["moeq", "mixture-of-experts", "quantized"]
        back = top_level("\n".join(lines[1:-1]))
        assert back["library_name"] == "transformers"


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


@given(st.text(max_size=60))
@example(HOSTILE)
@example("__init__ & a_b &amp; ~~x~~ www.evil.com #1 @someone \\| $x$")
def test_names_are_text_in_headings_and_tables(name: str) -> None:
    found = Tags()
    renderer = MarkdownIt("gfm-like", {"linkify": False})
    found.feed(renderer.render(f"# {markdown(name)} end\n\n| a | b |\n|---|---|\n| x{markdown(name)}x | y |\n"))
    rows = ["h1", "table", "thead", "tr", "th", "th", "tbody", "tr", "td", "td"]
    assert found.tags == rows
    assert " ".join(found.text.split()).count("end") >= 1


def test_both_kinds_of_cards_hold_against_hostile_names(tmp_path: Path) -> None:
    """The card of a converted checkpoint, whose source's card and name are somebody else's."""
    model = save_model(tmp_path / "model", "mixtral")
    source = MadeSource(model, lambda layer, expert, projection: 4, group_size=16, symmetric=True)
    (model / "README.md").write_text(f"---\n{yaml.safe_dump({'license': HOSTILE, 'language': HOSTILE})}---\n")
    write("dequantized", source, tmp_path / "out", WriteOptions(model_name=HOSTILE))
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    lines = card.splitlines()
    assert lines.count("---") == 2
    found = parsed(lines[: lines.index("---", 1) + 1])
    assert found["license"] == found["language"]
    assert found["license"] != "mit"
    assert "base_model" not in found
    tags = Tags()
    tags.feed(MarkdownIt("gfm-like", {"linkify": False}).render(card.split("\n---\n", 1)[1]))
    assert not {"script", "a", "strong", "h2"} & set(tags.tags)


def test_the_hubs_own_reader_reads_it(tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    lines = front_matter(HOSTILE, "transformers", Origin(license="apache-2.0", language=("en",)))
    data = ModelCard("\n".join([*lines, "# x", ""])).data.to_dict()
    assert data["license"] == "apache-2.0"
    assert data["language"] == "en"
    assert data["library_name"] == "transformers"


def test_a_native_card_carries_them_too(tiny_mixtral: Path, tmp_path: Path) -> None:
    from moeq.artifacts.manifest import PlacementManifest
    from moeq.stages import model_card

    model = shutil.copytree(tiny_mixtral, tmp_path / "model")
    (model / "README.md").write_text(README)
    manifest = PlacementManifest.model_validate(
        {
            "model": {"name": HOSTILE, "digest": "0" * 64},
            "assignment": {"name": HOSTILE, "method": HOSTILE, "parameters": {HOSTILE: HOSTILE}},
            "layout": {"name": "x", "version": 1, "group_size": 64, "symmetric": True},
            "layers": [],
            "totals": {
                "placed_expert_bytes": 0, "other_replica_bytes": 0, "non_expert_bytes": 0, "guard_bytes": 0,
                "bytes_by_tier": {},
            },
            "inputs": {},
            "code": [{"file": HOSTILE.split("\n")[0] + "|<b>.py", "sha256": "0" * 64, "origin": "model"}],
        }
    )  # fmt: skip
    config = open_source(str(model)).config | {"model_type": HOSTILE}
    figures = [{"name": HOSTILE, "bits_per_weight": 16.0, "expert_bytes": 1, "perplexity": 2.0, "accuracy": None}]
    card = model_card.render(manifest, json.loads(json.dumps(config)), figures, read_origin(model))
    lines = card.splitlines()
    assert lines.count("---") == 2
    found = parsed(lines[: lines.index("---", 1) + 1])
    assert (found["license"], found["license_name"], found["language"]) == ("other", "their own: 1.0", ["en", "no"])
    assert found["base_model"] == "some/base"
    tags = Tags()
    tags.feed(MarkdownIt("gfm-like", {"linkify": False}).render(card.split("\n---\n", 1)[1]))
    assert not {"script", "a", "strong", "h2", "b"} & set(tags.tags)
    assert tags.tags.count("table") == 2
    assert tags.tags.count("h1") == 1
