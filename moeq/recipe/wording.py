"""What pydantic refuses, in words of ours: what is wrong with a value, and what to give instead."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from moeq.bounded import shortened, shown
from moeq.errors import nearest

MOST_CHARACTERS = 400  # of a key, and of what a validator says
NAMES = "letters, digits, _ . + and -"
PATTERNS = {
    r"^(auto|cpu|cuda(:\d+)?)$": "auto, cpu, cuda or cuda:NUMBER",
    r"^[\w.+-]+$": NAMES,
    r"^(processes|ray(:\S+)?)$": "processes, ray or ray:ADDRESS",
    r"^\w[\w.+-]*$": f"{NAMES}, the first a letter or a digit",
}
WANTED = {  # by type of error: what would do, filled in with the error's own figures
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "a mapping of keys to values",
    "enum": "{expected}",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "{ge} or more",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a smaller number",
    "int_type": "a whole number",
    "is_instance_of": "a mapping of keys to values",
    "less_than": "a number below {lt}",
    "less_than_equal": "{le} or less",
    "list_type": "a list",
    "literal_error": "{expected}",
    "mapping_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "multiple_of": "a multiple of {multiple_of}",
    "none_required": "null",
    "set_type": "a list",
    "string_sub_type": "text",
    "string_too_long": "at most {max_length} characters",
    "string_too_short": "at least {min_length} characters",
    "string_type": "text",
    "string_unicode": "text",
    "too_long": "at most {max_length} entries",
    "too_short": "at least {min_length} of them",
    "tuple_type": "a list",
    "union_tag_invalid": "text or a mapping of keys to values",
}
VERBS = ("is", "must", "needs", "cannot", "belongs", "goes", "has")
ADVICE = (  # by what a validator says that has no advice of its own
    (r"cannot go with|goe?s? without|leave", "leave one of them out"),
    (r"is not among|in losses\.bits too", "add it there, or choose another"),
    (r"belongs to", "leave it out"),
    (r"name of its own|twice", "name each of them once"),
    (r"needs", "give what it needs, or leave it out"),
    (r"", "see what it takes in docs/recipe.md"),
)
NEAR = 0.6  # how alike a choice must be to be meant
OWN = ("value_error", "assertion_error")  # what our own validators say
UNKNOWN = "extra_forbidden"
NO_NAME = "invalid_key"


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """path: of the key; what is wrong with it, in words that go behind its name; do: what to give; unknown: whether
    there is no such key."""

    path: tuple[str | int | None, ...]
    what: str
    do: str | None = None
    unknown: bool = False

    def sentence(self) -> str:
        """What is wrong, the key named once."""
        parts, what = [part if isinstance(part, str) else in_short(part) for part in self.path], self.what
        key, leaf = shortened(".".join(parts), MOST_CHARACTERS), parts[-1] if parts else ""
        if leaf and re.match(rf"{re.escape(leaf)}[ :.]", what):
            what = what[len(leaf) :]
        if not key:
            return what
        if what.startswith((" ", ":", ".", ",")):
            return f"{key}{what}"
        return f"{key} {what}" if what.split(" ")[0] in VERBS else f"{key}: {what}"


def refusal_of(error: ValidationError, data: Any) -> Refusal:
    """The first thing that is wrong with data; of a value that may be of several types all that it may be."""
    every = [(path_in(data, one), one) for one in error.errors()]
    path, first = every[0]
    inside = [(where, one) for where, one in every if where[: len(path)] == path and len(where) > len(path)]
    if inside and first["type"].endswith("_type"):  # of the types that it may have one was meant, and is wrong inside
        path, first = inside[0]
    same = [one for where, one in every if where == path]
    if first["type"] == UNKNOWN:
        return Refusal(path=path, what="is a key that is not known", unknown=True)
    if first["type"] == "missing":
        return Refusal(path=path, what="is missing", do="add it")
    if first["type"] == NO_NAME:
        path = (*path_in(data, {**first, "loc": first["loc"][:-1]}), first["input"])
        return Refusal(path=path, what="is no key: keys are text", do="write the name of one")
    own = next((one for one in same if one["type"] in OWN), None)
    if own is not None:
        return _named(path, _own_words(own), data)
    given = first.get("input")
    choices = [choice for one in same for choice in _choices(one)]
    close = nearest(given, choices, NEAR) if isinstance(given, str) else None
    wanted = dict.fromkeys(_wanted(one) for one in same)
    do = f"did you mean {close!r}?" if close else f"give {' or '.join(wanted)}"
    return Refusal(path=path, what=f"is {in_short(given)}", do=do)


def in_short(value: Any) -> str:
    """A value in a message: as it was written, or what it is."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "a mapping of keys to values" if value else "an empty mapping"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    return shown(value)


def path_in(data: Any, error: ErrorDetails) -> tuple[str | int, ...]:
    """The path of an error as data has it, without the types of which pydantic tried one after another."""
    path: list[str | int] = []
    parts = error["loc"]
    for place, part in enumerate(parts):
        if _has(data, part):
            data = data[part]
        elif error["type"] != "missing" or place < len(parts) - 1:
            continue
        path.append(part)
    return tuple(path)


def _has(data: Any, part: str | int) -> bool:
    return part in data if isinstance(data, Mapping) else isinstance(data, list) and part in range(len(data))


def _named(path: tuple[str | int, ...], said: str, data: Any) -> Refusal:
    """What a validator of a section says, which begins with the name of one of its keys or is about all of them."""
    for part in path:
        data = data[part]
    word = said.split()[0].rstrip(":,") if said else ""
    if isinstance(data, Mapping) and word in data:
        path, said, data = (*path, word), said[len(word) :], data[word]
    what, do = _advised(said, data)
    return Refusal(path=path, what=what, do=do)


def _advised(said: str, given: Any) -> tuple[str, str]:
    """What a validator says, taken apart into what is wrong and what to do about it."""
    what, semicolon, do = said.rpartition("; ")
    if semicolon:
        return what, do
    text = said.strip()
    wanted = re.fullmatch(r"must be ([^:]*)", text) or re.fullmatch(r"must lie between (\S+ and \S+), not .*", text)
    if wanted is not None and not isinstance(given, Mapping):
        between = "a number between " if text.startswith("must lie") else ""
        return f"is {in_short(given)}", f"give {between}{wanted[1]}"
    return said, next(do for pattern, do in ADVICE if re.search(pattern, said))


def _wanted(error: ErrorDetails) -> str:
    kind, figures = error["type"], error.get("ctx", {})
    if kind == "string_pattern_mismatch":
        return PATTERNS.get(figures["pattern"], f"text like {figures['pattern']}")
    words = {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in figures.items()}
    if "expected" in words:
        words["expected"] = re.sub(r"\b(True|False)\b", lambda found: found[0].lower(), words["expected"])
    return WANTED.get(kind, "another value").format(**words)


def _choices(error: ErrorDetails) -> list[str]:
    """The names among which a value has to be, where it has."""
    if error["type"] not in ("literal_error", "enum"):
        return []
    listed = str(error["ctx"]["expected"]).replace(" or ", ", ").split(", ")
    return [name.strip("'\"") for name in listed if name.startswith(("'", '"'))]


def _own_words(error: ErrorDetails) -> str:
    said = error["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return shortened(said, MOST_CHARACTERS)
