"""Values put into the text of a recipe, so that its comments and its order stay: presets as recipes of one's own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

import yaml

from moeq.bounded import parse_yaml

KEY = re.compile(r"(?P<indent> *)(?P<key>\w+):(?P<value>.*?)(?P<comment>\s+#.*)?$")
RATIONAL_KEYS = ("bits_per_weight", "code_bits")  # of what assigns
STEP = 2  # spaces by which a section's keys stand further right
Path = tuple[str, ...]


def as_yaml(recipe: Mapping[str, Any]) -> str:
    """The text of a whole recipe; a budget that is exact as a decimal is written as one: 2.5, not 5/2."""
    return yaml.safe_dump(in_decimals(recipe), sort_keys=False, allow_unicode=True)


def in_decimals(value: Any, key: str = "") -> Any:
    """A recipe, or a part of it under a key, whose exact budgets are decimals where they can be."""
    if isinstance(value, Mapping):
        return {name: in_decimals(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [in_decimals(inner) for inner in value]
    if key not in RATIONAL_KEYS or not isinstance(value, str):
        return value
    exact, shown = Fraction(value), float(Fraction(value))
    return (int(exact) if exact.denominator == 1 else shown) if Fraction(repr(shown)) == exact else value


def with_values(text: str, wanted: Mapping[str, Any]) -> str:
    """A recipe's text that holds what `wanted`, a raw recipe, holds; nulls of `assign` are left out.

    Keys stand one a line, those of sections two spaces further right, as in moeq's presets.
    """
    for path, value in _differences(parse_yaml(text).value, wanted):
        text = _put(text.splitlines(), path, value)
    return text


def _differences(before: Mapping[str, Any], after: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """(path, value) of what is not alike, as deep as both are mappings."""
    for key, value in after.items():
        old = before.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and old and set(old) <= set(value):
            yield from _differences(old, value, (*path, key))
        elif key not in before or old != value:
            yield (*path, key), value


def _put(lines: list[str], path: Path, value: Any) -> str:
    """The text with one value in its place, or behind its section's last key."""
    found = _lines_of(lines, path)
    if found is None:
        return _added(lines, path, value)
    first, last = found
    if path[0] == "assign" and value is None:
        lines[first:last] = []
    else:
        match = KEY.fullmatch(lines[first])
        assert match is not None, lines[first]
        line = f"{match['indent']}{match['key']}: {_flow(value)}"
        if match["comment"]:  # where the others begin, as far as the value leaves room
            line = f"{line:<{match.start('comment') + len(match['comment']) - len(match['comment'].lstrip())}}"
            line = f"{line.rstrip() + ' ' if line.rstrip() == line else line}{match['comment'].lstrip()}"
        lines[first:last] = [line]
    return "\n".join(lines) + "\n"


def _added(lines: list[str], path: Path, value: Any) -> str:
    """The text with a key that was not there; sections around it that are not there come with it."""
    if path[0] == "assign" and value is None:
        return "\n".join(lines) + "\n"
    around = _lines_of(lines, path[:-1]) if len(path) > 1 else (0, len(lines))
    if around is None:
        return _added(lines, path[:-1], {path[-1]: value})
    place = around[1]
    new = [f"{' ' * STEP * (len(path) - 1)}{path[-1]}: {_flow(value)}"]
    if len(path) == 1 and isinstance(value, dict) and value:
        new = ["", f"{path[0]}:", *(f"{' ' * STEP}{key}: {_flow(one)}" for key, one in value.items())]
    elif len(path) == 1 and (model := _lines_of(lines, ("model",))) is not None:
        place = model[1]
    lines[place:place] = new
    return "\n".join(lines) + "\n"


def _lines_of(lines: list[str], path: Path) -> tuple[int, int] | None:
    """From which line to before which a key stands with all that belongs to it; None where it has no line."""
    first, last = 0, len(lines)
    for depth, key in enumerate(path):
        indent = STEP * depth
        starts = [
            number
            for number in range(first, last)
            if (match := KEY.fullmatch(lines[number])) and match["key"] == key and len(match["indent"]) == indent
        ]
        if not starts:
            return None
        first = starts[0]
        inner = (number for number in range(first + 1, last) if _begins(lines[number], indent))
        last = next(inner, last)
        while not lines[last - 1].strip():
            last -= 1
        if depth < len(path) - 1:
            first += 1
    return starts[0], last


def _begins(line: str, indent: int) -> bool:
    """Whether a line is one of another key, no further right than that."""
    return bool(line.strip()) and len(line) - len(line.lstrip()) <= indent


def _flow(value: Any) -> str:
    """A value on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**9)
    return text.removesuffix("\n").removesuffix("\n...")
