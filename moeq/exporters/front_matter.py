"""What every model card begins with, and how names of others stand in one.

A card says what the checkpoint was made of: its base model, licence and language are carried over from the card of the
source, which anybody may have written. It is read within bounds, as text, and what is taken of it is quoted or escaped:
a name cannot end the front matter, add keys to it, or become markup.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from moeq.bounded import is_hub_id
from moeq.models.source import ModelSource, check_part
from moeq.runtime.checkpoint import CARD as CARD
from moeq.version import __version__

HEAD_BYTES = 1 << 16  # of a card that are looked at
FRONT_BYTES = 1 << 15  # of front matter
MOST_EVENTS, MOST_DEPTH = 4096, 16
MOST_VALUES = 200  # of a list, as of languages
NAME_CHARACTERS, LINK_CHARACTERS = 200, 500
_FRONT = re.compile(r"\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", re.DOTALL)
RELATIONS = ("adapter", "finetune", "merge", "quantized")  # that the hub knows
_NULL = {"", "~", "null", "Null", "NULL"}
_MARKUP = re.compile(r"[\\`*\[\]<>|#~&!]|(?<![^\W_])_|_(?![^\W_])|:(?=//)|(?<=www)\.|@")
_BASE_MODEL = re.compile(r"^base_model(_relation)?:.*\n([ \t]*-.*\n)*", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a source's card says of it; relation: what it is of its base model; problem: why it could not be read, where
    it is there."""

    base_model: tuple[str, ...] = ()
    relation: str | None = None
    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    language: tuple[str, ...] = ()
    problem: str | None = None

    def said(self) -> str | None:
        """One line where nothing could be carried over from a card that is there, or None."""
        if self.problem is None:
            return None
        return f"{CARD} of the model cannot be read ({self.problem}): its licence and language are not carried over"


def read_origin(directory: Path) -> Origin:
    """What the card in a model's directory says; ModelError where it is a link that leads out of it, or no file."""
    path = directory / CARD
    if not path.is_file():
        return Origin()
    check_part(directory, CARD)
    try:
        with path.open("rb") as stream:
            front = _FRONT.match(stream.read(HEAD_BYTES).decode("utf-8", errors="replace"))
        values = {} if front is None else top_level(front[1])
    except OSError as error:
        return Origin(problem=str(error.strerror))
    except (ValueError, yaml.YAMLError) as error:
        return Origin(problem=" ".join(str(error).split())[:NAME_CHARACTERS])

    def one(key: str, most: int) -> str | None:
        value = values.get(key)
        return one_line(value, most) or None if isinstance(value, str) else None

    def several(key: str) -> tuple[str, ...]:
        value = values.get(key, [])
        names = (one_line(each, NAME_CHARACTERS) for each in ([value] if isinstance(value, str) else value))
        return tuple(name for name in names if name)[:MOST_VALUES]

    relation = one("base_model_relation", NAME_CHARACTERS)
    return Origin(
        base_model=several("base_model"),
        relation=relation if relation in RELATIONS else None,
        license=one("license", NAME_CHARACTERS),
        license_name=one("license_name", NAME_CHARACTERS),
        license_link=one("license_link", LINK_CHARACTERS),
        language=several("language"),
    )


def top_level(text: str) -> dict[str, str | list[str]]:
    """Keys of front matter whose value is a text or a list of texts, each as it is written (`no` is Norwegian).

    Nothing is built of what is nested deeper. ValueError for more than is read: bytes, values, nesting, aliases;
    yaml.YAMLError for what is no YAML.
    """
    if len(text.encode()) > FRONT_BYTES:
        raise ValueError(f"front matter of more than {FRONT_BYTES} bytes")
    values: dict[str, str | list[str]] = {}
    key: str | None = None
    depth = 0
    for number, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
        if number > MOST_EVENTS:
            raise ValueError(f"front matter of more than {MOST_EVENTS} values")
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("front matter with aliases")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MOST_DEPTH:
                raise ValueError(f"front matter nested more than {MOST_DEPTH} deep")
            if depth == 1 and not isinstance(event, yaml.MappingStartEvent):
                raise ValueError("front matter that is no mapping")
            if depth == 2 and key is None:
                raise ValueError("front matter with keys that are no text")
            if depth == 2 and isinstance(event, yaml.SequenceStartEvent) and key is not None:
                values[key] = []
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
            key = None if depth == 1 else key
        elif isinstance(event, yaml.ScalarEvent):
            key = _place(values, key, depth, event)
    return values


def _place(values: dict[str, str | list[str]], key: str | None, depth: int, event: yaml.ScalarEvent) -> str | None:
    """Put a scalar where it belongs; returns the key that waits for its value."""
    if depth == 1 and key is None:
        return str(event.value)
    said = not (event.implicit[0] and event.value in _NULL)
    listed = values.get(key) if key is not None else None
    if depth == 1 and key is not None:
        if said:
            values[key] = event.value
        return None
    if depth == 2 and isinstance(listed, list) and said:
        listed.append(event.value)
    return key


def front_matter(name: str, library: str, origin: Origin, *, converted: bool = False) -> list[str]:
    """The lines that the hub reads, marks included.

    name: the model that was quantized. The base model is named where it has a name on the hub, this one or that of its
    own card: the hub refuses names that are none of its own, or takes them for somebody else's. converted: the card is
    of a packed checkpoint, which is to its base model what it was, whatever format it is in now.
    """
    base = on_the_hub([name]) or on_the_hub(one_line(model, NAME_CHARACTERS) for model in origin.base_model)
    languages = list(origin.language)
    front = {
        "library_name": library,
        "base_model": base[0] if len(base) == 1 else base or None,
        "base_model_relation": ((converted and origin.relation) or "quantized") if base else None,
        "license": origin.license,
        "license_name": origin.license_name,
        "license_link": origin.license_link,
        "language": languages[0] if len(languages) == 1 else languages or None,
        "tags": ["moeq", "mixture-of-experts", "quantized"],
    }
    said = {key: value for key, value in front.items() if value is not None}
    text = yaml.safe_dump(said, sort_keys=False, allow_unicode=True, width=1 << 20, default_flow_style=None)
    return ["---", *text.splitlines(), "---"]


def on_the_hub(names: Iterable[str]) -> list[str]:
    """Those of the names that a model on the hub can have."""
    return [name for name in names if is_hub_id(name)]


def published(card: str, name: str, branch: str | None) -> str:
    """A card as it stands on the hub: loaded by its name there, without base models that are none of the hub's."""
    there = f'"{name}"' if branch is None else f'"{name}", revision="{branch}"'
    for loads in ("from_pretrained", "LLM", " = load"):
        card = card.replace(f'{loads}("THIS_DIRECTORY"', f"{loads}({there}")
    card = card.replace('GPTQModel.load("THIS_DIRECTORY"', f'GPTQModel.load("{name}"')
    front = _FRONT.match(card)
    if front is None:
        return card
    named = top_level(front[1]).get("base_model", [])
    bases = [named] if isinstance(named, str) else named
    kept = front[1] if on_the_hub(bases) == bases else _BASE_MODEL.sub("", front[1] + "\n").rstrip("\n")
    return card[: front.start(1)] + kept + card[front.end(1) :]


def loading_lines(card: str) -> list[str]:
    """The lines of Python by which a published card says that its checkpoint is loaded; none where files come first."""
    block = re.search(r"^```python\n(.*?)^```$", card, re.MULTILINE | re.DOTALL)
    return [] if block is None or "THIS_DIRECTORY" in block[1] else block[1].splitlines()


def one_line(text: str, most: int) -> str:
    """Text without control, formatting and line-ending characters, at most so many characters."""
    plain = "".join(" " if unicodedata.category(letter)[0] in "CZ" else letter for letter in text[: 4 * most])
    return " ".join(plain.split())[:most]


def markdown(text: object) -> str:
    """Text on one line in which nothing is markup: neither a link, a table's border, emphasis nor HTML."""
    return _MARKUP.sub(lambda mark: f"\\{mark[0]}", one_line(str(text), LINK_CHARACTERS))


def code_lines(digests: Mapping[str, str]) -> Iterator[str]:
    """What a card says of code of the original model's own that came along."""
    if digests:
        yield ""
        yield "Code of the original model, trusted by who made this checkpoint; `trust_remote_code=True` runs it:"
        yield ""
        yield from (f"- {markdown(name)}, SHA-256 {digest}" for name, digest in sorted(digests.items()))


def folded_card(source: ModelSource) -> str:
    """The card of a copy of a model with folded norms."""
    lines = [
        *front_matter(source.name, "transformers", read_origin(source.path)),
        f"# {markdown(source.name)}, norms folded by moeq {__version__}",
        "",
    ]
    return "\n".join(lines)
