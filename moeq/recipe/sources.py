"""Sources of text as recipes name them: a word, a path, a hub dataset, or a mapping with fields, weight and name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
    model_validator,
)

from moeq.bounded import shown
from moeq.errors import RecipeError, is_utf8, name_trouble
from moeq.folders import expanded
from moeq.recipe.types import Section

BUNDLED = "bundled"  # of texts: the part that moeq brings along
DIGITS = "digits"  # images with labels
HUB = "hub:"
HUB_DATASET = re.compile(
    r"hub:(?P<name>[\w][\w.-]*(?:/[\w][\w.-]*)?)(?:@(?P<revision>[^@:\s]+))?"
    r"(?::(?P<config>[^@:\s]*))?(?::(?P<split>[^@:\s]+))?"
)
PLAIN_TEXT = re.compile(r".*\.txt(\.(gz|zst|bz2))?", re.DOTALL)  # which has no rows, and so no fields
SUFFIX = re.compile(r"\.(txt|jsonl?|parquet|safetensors)(\.(gz|zst|bz2))?$")
SAYS_NOTHING = re.compile(
    r"(train|training|test|testing|dev|eval|valid|val|validation|data|dataset|datasets|text|texts|corpus|default|part|"
    r"shard|split|file|raw|files|jsonl|parquet)?([-_]?\d+)?([-_]of[-_]\d+)?",
    re.IGNORECASE,
)
PART = re.compile(r"(?P<literal>\{\{|\}\}|[^{}]+)|\{(?P<field>[^{}]*)\}|(?P<brace>[{}])")


def template_parts(template: str) -> list[tuple[str, bool]]:
    """A template as (text, whether it is the name of a field), in order; nothing of it is ever evaluated.

    ValueError for a brace without its other one, and for what is not the name of a field.
    """
    parts = []
    for match in PART.finditer(template):
        name = match["field"]
        if match["brace"]:
            raise ValueError(
                f"template {shown(template)}: a brace without its other one; write {{{{ or }}}} for a brace"
            )
        if name is None:
            parts.append(({"{{": "{", "}}": "}"}.get(match["literal"], match["literal"]), False))
        elif not name.strip() or re.search(r"[\[\]!:]", name) or not all(name.split(".")):
            what = f"template {shown(template)}: {shown(f'{{{name}}}')} is no field"
            raise ValueError(f"{what}; write {{field}}, or {{outer.inner}} for one within another")
        else:
            parts.append((name, True))
    return parts


class SourceSection(Section):
    """One source of text with settings of its own; what it does not say is as the section around it has it.

    A row is read in one of three ways: `field` holds its text; `template` makes its text of several fields, such as
    `"{question}\\n{answer}"` (`{outer.inner}` is a field within a field, `{{` a brace); or the fields of a conversation
    are named.

    weight: the source's share of the sequences against the other sources', 1 where only others name one. With weights,
    sequences are divided between sources, and each source's share evenly between its domains; without any, evenly
    between all domains, whichever source they are of. A source with too little text for its share leaves the rest to
    the others, and is named in one line.
    """

    path: str = Field(min_length=1, description="bundled, a file, or hub:ORG/NAME")
    name: str | None = Field(
        None, min_length=1, max_length=80, description="what reports call it; none: the file, its folder or dataset"
    )
    field: str | None = Field(None, min_length=1, description="field of a row that holds text; none: text_field")
    template: str | None = Field(
        None, min_length=1, max_length=10_000, description="text of a row, made of its {fields}"
    )
    prompt_field: str | None = Field(None, min_length=1, description="field of a row that holds the user's turn")
    response_field: str | None = Field(None, min_length=1, description="field of a row that holds the answer to it")
    messages_field: str | None = Field(None, min_length=1, description="field of a row that holds a conversation")
    weight: float | None = Field(
        None, gt=0, le=1_000_000, description="share of the sequences, against the other sources'"
    )

    @property
    def converses(self) -> bool:
        """Whether it names fields of conversations."""
        return any((self.prompt_field, self.response_field, self.messages_field))

    @property
    def names_fields(self) -> bool:
        """Whether it says how a row is read."""
        return self.converses or self.field is not None or self.template is not None

    @model_validator(mode="after")
    def _check(self) -> SourceSection:
        if sum([self.field is not None, self.template is not None, self.converses]) > 1:
            raise ValueError(f"{shown(self.path)}: give field, template, or the fields of a conversation, not several")
        if self.names_fields and PLAIN_TEXT.fullmatch(self.path):
            raise ValueError(f"{shown(self.path)} is plain text, which has no fields; leave them out")
        if self.template is not None and not any(is_field for _, is_field in template_parts(self.template)):
            raise ValueError(f"template {shown(self.template)} names no field; write for example {{text}}")
        return self

    @model_serializer(mode="wrap")
    def _given(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Only what is said: a recipe that lies in a run is read by people."""
        return {name: value for name, value in handler(self).items() if value is not None}


def _check_source(value: Any) -> Any:
    """Hub datasets are written as they should be; what else a source names is seen when it is opened."""
    for entry in value if isinstance(value, list) else [value]:
        name = entry.get("path") if isinstance(entry, dict) else entry
        if isinstance(name, str) and name.startswith(HUB) and HUB_DATASET.fullmatch(name) is None:
            raise ValueError(
                f"{shown(name)} is not a hub dataset; write hub:ORG/NAME, or hub:ORG/NAME@REVISION:CONFIG:SPLIT"
            )
    return value


def _kind(value: Any) -> str:
    """Which branch of a union a value belongs to; names that end so are left out of where an error is."""
    if isinstance(value, dict | SourceSection):
        return "SourceSection"
    return "ListSection" if isinstance(value, list) else "NameSection"


if TYPE_CHECKING:  # mypy takes no union of variables
    OneSource = str | SourceSection
    TextSource = str | SourceSection | list[str] | list[str | SourceSection]
else:
    Name, Mapped = Annotated[str, Tag("NameSection")], Annotated[SourceSection, Tag("SourceSection")]
    OneSource = Annotated[Name | Mapped, Discriminator(_kind)]
    TextSource = Annotated[
        Name | Mapped | Annotated[list[OneSource], Field(min_length=1), Tag("ListSection")],
        Discriminator(_kind),
        BeforeValidator(_check_source),
    ]
ImageSource = Annotated[str | list[str], BeforeValidator(_check_source)]


def each_source(source: TextSource) -> list[SourceSection]:
    """Every source that is named; a plain string is one that says nothing of its own. RecipeError for a name that is
    no UTF-8."""
    listed = source if isinstance(source, list) else [source]
    for one in listed:
        if not is_utf8(one):
            what, do = name_trouble(one, "rename it")
            raise RecipeError(what, where=str(one), do=do)
    return [SourceSection(path=one) if isinstance(one, str) else one for one in listed]


def is_weighted(source: TextSource) -> bool:
    """Whether sequences are divided between sources by their weights, not evenly between domains."""
    return any(one.weight is not None for one in each_source(source))


def source_text(source: TextSource) -> str:
    """What messages call a source or a list of them."""
    if isinstance(source, list):
        names = [one if isinstance(one, str) else one.path for one in source]
        return names[0] if len(names) == 1 else str(names)
    return source if isinstance(source, str) else source.path


def source_name(path: str) -> str:
    """What people call a source: a dataset's name, a file's without its kind.

    Of a file whose name says nothing (train, test-00000-of-00002), the folder that it lies in, or the one above.
    """
    hub = HUB_DATASET.fullmatch(path)
    if hub is not None:
        config = hub["config"] or ""
        return hub["name"] if SAYS_NOTHING.fullmatch(config) else f"{hub['name']}, {config}"
    if path in (BUNDLED, DIGITS):
        return path
    own, *above = _parts(path)
    return next((name for name in (own, *above) if not SAYS_NOTHING.fullmatch(name)), own)


def naming_part(path: str) -> str:
    """The end of a path that tells `source_name` as much as the whole: a file, and folders where it says nothing."""
    if path in (BUNDLED, DIGITS) or path.startswith(HUB):
        return path
    whole = PurePath(expanded(path).absolute())
    saying = [SAYS_NOTHING.fullmatch(name) is None for name in _parts(path)]
    return str(PurePath(*whole.parts[-1 - saying.index(True) :])) if any(saying) else whole.name


def _parts(path: str) -> list[str]:
    """A file's name without its kind, and those of the two folders above."""
    whole = PurePath(expanded(path).absolute())
    return [SUFFIX.sub("", whole.name), *(folder.name for folder in list(whole.parents)[:2])]


def domain_names(domains: Iterable[str], source: TextSource) -> dict[str, str]:
    """{domain, as artifacts have it: what reports call it}, no two alike.

    A domain that a plain file gave its name to, which may say nothing, is called by `source_name`; so is a hub dataset.
    """
    files: dict[str, list[str]] = {}
    for one in each_source(source):
        if one.name is None and not one.path.startswith(HUB) and one.path not in (BUNDLED, DIGITS):
            files.setdefault(SUFFIX.sub("", PurePath(one.path).name), []).append(source_name(one.path))
    names = {}
    for domain in domains:
        hub = HUB_DATASET.fullmatch(f"{HUB}{domain}") if "/" in domain and ":" in domain else None
        names[domain] = (
            source_name(f"{HUB}{domain}") if hub else " and ".join(dict.fromkeys(files.get(domain, [domain])))
        )
    called = list(names.values())
    return {domain: name if called.count(name) == 1 else domain for domain, name in names.items()}
