"""Files that others wrote, within bounds: regular files up to a size, YAML up to a depth and a number of values.

What is read here is refused before it can hang or fill memory. Errors are ValueErrors of one line; the rooms that know
the file turn them into theirs.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

YAML_BYTES = 1 << 20  # the largest text of YAML that is read: a thousand times what people write by hand
YAML_NODES = 100_000  # scalars, lists and mappings in it
YAML_DEPTH = 32
SCALAR_CHARACTERS = 1 << 16
SHOWN = 80  # characters of what stood there, in a message
WHOLE_BITS = 63
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")  # tabs and ends of lines may stand in text
WHOLE = re.compile(r"[-+]?(?:0b[01]+|0x[0-9a-f]+|0[0-7]*|[1-9][0-9]*)")
CORE = "tag:yaml.org,2002:"
SCALAR_TAGS = {f"{CORE}{name}" for name in ("null", "bool", "int", "float")}
CONTAINER_TAGS = {None, f"{CORE}map", f"{CORE}seq"}
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's parser, ten times as fast, where PyYAML has it
_NO_KEY = object()
DIGITS = 9  # of a whole number that is given, at most
LARGEST = 10**DIGITS - 1
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)


def is_number(text: str, digits: int = DIGITS) -> bool:
    """Whether a text is a whole number of so many decimal digits at most: other scripts' are none that int() takes."""
    return text.isascii() and text.isdigit() and len(text) <= digits


def is_hub_id(name: object) -> bool:
    """Whether a name is one that the hub gives: ORG/NAME."""
    return _HUB_ID.fullmatch(str(name)) is not None


def read_bounded(path: Path, most: int) -> bytes:
    """A regular file's bytes; ValueError when it is larger than `most` or no regular file, OSError as reading does.

    Pipes, devices and folders are refused at once: opening does not wait for a writer.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a regular file")
        if status.st_size > most:
            raise ValueError(f"{status.st_size} bytes, at most {most} are read")
        with open(descriptor, "rb", closefd=False) as stream:
            return stream.read(status.st_size)
    finally:
        os.close(descriptor)


def shortened(text: str, most: int = SHOWN) -> str:
    """A text that fits into a message, without control characters."""
    text = CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text[: most + 1])
    return text if len(text) <= most else f"{text[: most - 3]}..."


def shown(value: Any) -> str:
    """A value as Python writes it, short enough for a message."""
    return shortened(repr(value))


class YamlError(ValueError):
    """Text that is not YAML, or more than is read of it; line: where, from 1, None where that cannot be said."""

    def __init__(self, what: str, line: int | None = None) -> None:
        super().__init__(shortened(what, 200))
        self.line = line

    def at(self, file: str) -> str:
        """The file with the line."""
        return file if self.line is None else f"{file}, line {self.line}"


@dataclass(frozen=True, kw_only=True)
class Yaml:
    """What a text holds, and on which line each of its values begins: {path of keys and list indices: line}."""

    value: Any
    lines: Mapping[tuple[str, ...], int]

    def line(self, path: Sequence[str | int | None]) -> int | None:
        """The line of a value, of the nearest one around it when it is not there itself; None: of nothing there."""
        parts = tuple(map(str, path))
        around = (parts[:end] for end in range(len(parts), 0, -1))
        return next((self.lines[part] for part in around if part in self.lines), None)


def read_yaml(path: Path) -> Yaml:
    """`parse_yaml` of a regular file; OSError as reading does."""
    return parse_yaml(read_bounded(path, YAML_BYTES))


def parse_yaml(text: str | bytes, *, most: int = YAML_BYTES) -> Yaml:
    """One document of plain YAML in UTF-8: mappings of text keys, lists, text, numbers, true, false and null.

    most: bytes; more nodes than a tenth of them are not read either. Whole numbers have 64 bits, others are finite;
    dates and numbers to base 60 are text, and none is to base 8. Raises YamlError for aliases, merge keys, tags of
    types beyond these, a second document, a key that is there twice, control characters, and nesting or text beyond the
    bounds.
    """
    try:
        text = text.decode() if isinstance(text, bytes) else text
        size = len(text.encode())
    except UnicodeError:
        raise YamlError("not UTF-8 text") from None
    if size > most:
        raise YamlError(f"{size} bytes, at most {most} are read")
    builder = _Builder(nodes_left=most * YAML_NODES // YAML_BYTES)
    try:
        for event in yaml.parse(text, Loader=LOADER):
            builder.add(event)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        raise YamlError(what, None if mark is None else mark.line + 1) from None
    return Yaml(value=builder.root, lines=builder.lines)


@dataclass
class _Open:
    """A list or mapping that has not ended yet; key: of the value that comes next in a mapping."""

    values: Any
    path: tuple[str, ...]
    key: Any = _NO_KEY


@dataclass
class _Builder:
    """Values from libyaml's events, one after the other: nothing is built that the bounds do not allow."""

    nodes_left: int
    root: Any = None
    lines: dict[tuple[str, ...], int] = field(default_factory=dict)
    documents: int = 0
    open: list[_Open] = field(default_factory=list)

    def add(self, event: Any) -> None:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise YamlError(f"aliases such as *{event.anchor} are not read: write out what it stands for", line)
        if isinstance(event, yaml.DocumentStartEvent):
            self.documents += 1
            if self.documents > 1:
                raise YamlError("a second document, expected one", line)
        elif isinstance(event, yaml.ScalarEvent):
            self._place(_scalar(event, line), line)
        elif isinstance(event, yaml.SequenceStartEvent | yaml.MappingStartEvent):
            self._begin(event, line)
        elif isinstance(event, yaml.SequenceEndEvent | yaml.MappingEndEvent):
            self.open.pop()

    def _begin(self, event: Any, line: int) -> None:
        if event.tag not in CONTAINER_TAGS:
            raise YamlError(f"tag {event.tag} is not read", line)
        if len(self.open) == YAML_DEPTH:
            raise YamlError(f"nested more than {YAML_DEPTH} deep", line)
        if self.open and isinstance(self.open[-1].values, dict) and self.open[-1].key is _NO_KEY:
            raise YamlError("a list or mapping as a key: keys are text", line)
        values: Any = {} if isinstance(event, yaml.MappingStartEvent) else []
        path = self._place(values, line)
        self.open.append(_Open(values, path))

    def _place(self, value: Any, line: int) -> tuple[str, ...]:
        """Put a value where the events have come to; its path. A key's line is that of its value."""
        self.nodes_left -= 1
        if self.nodes_left < 0:
            raise YamlError("more values than are read", line)
        if not self.open:
            self.root = value
            return ()
        around = self.open[-1]
        if isinstance(around.values, list):
            path = (*around.path, str(len(around.values)))
            around.values.append(value)
        elif around.key is _NO_KEY:
            if value in around.values:
                raise YamlError(f"key {value!r} is there twice", line)
            around.key, path = value, (*around.path, str(value))
        else:
            around.values[around.key] = value
            around.key, path = _NO_KEY, (*around.path, str(around.key))
            return path
        self.lines[path] = line
        return path


def _scalar(event: Any, line: int) -> Any:
    """The value of a scalar as YAML 1.1 has it, but for `_whole`, within the bounds."""
    text = event.value
    if len(text) > SCALAR_CHARACTERS:
        raise YamlError(f"a text of {len(text)} characters, at most {SCALAR_CHARACTERS} are read", line)
    control = CONTROL.search(text)
    if control is not None:
        raise YamlError(f"a control character (U+{ord(control[0]):04X})", line)
    tag = event.tag
    if tag in (None, "!"):
        tag = _RESOLVER.resolve(yaml.ScalarNode, text, event.implicit)  # type: ignore[no-untyped-call]
        if tag == f"{CORE}merge":
            raise YamlError("merge keys (<<) are not read: write out what is merged", line)
        if tag not in SCALAR_TAGS:
            return text
    elif tag == f"{CORE}str":
        return text
    elif tag not in SCALAR_TAGS:
        raise YamlError(f"tag {tag} is not read", line)
    try:
        return _VALUES[tag.removeprefix(CORE)](text)
    except (ValueError, KeyError):
        raise YamlError(f"not {_KINDS[tag.removeprefix(CORE)]}: {shortened(text, 40)}", line) from None


def _whole(text: str) -> int | str:
    """A whole number, one that begins with 0 to base 10, too; numbers to base 60 (1:30) stay text: as all mean them."""
    if ":" in text:
        return text
    plain = text.replace("_", "").lower()
    if WHOLE.fullmatch(plain) is None or len(plain) > WHOLE_BITS + 3:
        raise ValueError
    digits = plain.lstrip("+-")
    value = int(digits, 10 if digits.isdigit() else 0)
    if value >= 2**WHOLE_BITS:
        raise ValueError
    return -value if plain.startswith("-") else value


def _real(text: str) -> float | str:
    """A finite number; those to base 60 stay text."""
    if ":" in text:
        return text
    value = float(text.replace("_", ""))
    if not math.isfinite(value):
        raise ValueError
    return value


_RESOLVER = Resolver()
_VALUES: dict[str, Any] = {
    "null": lambda text: None,
    "bool": lambda text: SafeConstructor.bool_values[text.lower()],
    "int": _whole,
    "float": _real,
}
_KINDS = {"null": "null", "bool": "true or false", "int": "a whole number of 64 bits", "float": "a finite number"}
