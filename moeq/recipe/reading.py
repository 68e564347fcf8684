"""Recipes are read from YAML; an error names the file, the line, the key and the nearest known key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from moeq.bounded import Yaml, YamlError, parse_yaml, read_yaml, shortened, shown
from moeq.errors import RecipeError, hint, missing
from moeq.recipe.earlier import key_now, read_earlier
from moeq.recipe.recipe import Recipe
from moeq.recipe.types import Section
from moeq.recipe.wording import MOST_CHARACTERS, refusal_of

YAML_ADVICE = "correct that line, or quote the value"


def load_recipe(path: Path | None, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe (None: all defaults) and apply `key=value` overrides (dotted keys, YAML values).

    Raises RecipeError naming file, line, key and the nearest known key.
    """
    where = "defaults" if path is None else str(path)
    read = parse_yaml("{}") if path is None else _read(path)
    data = {} if read.value is None else read.value
    if not isinstance(data, dict):
        raise RecipeError("a recipe is a mapping of keys to values", where=where, do="see recipes/demo.yaml")
    read_earlier(data, where)
    for override in overrides:
        _apply(data, override)
        read_earlier(data, f"--set {shown(override)}")
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise _explain(error, data, read, where, overrides) from None


def _read(path: Path) -> Yaml:
    try:
        return read_yaml(path)
    except YamlError as error:
        raise RecipeError(f"not valid YAML: {error}", where=error.at(str(path)), do=YAML_ADVICE) from None
    except FileNotFoundError:
        raise missing(path, "give the path of a YAML recipe") from None
    except (OSError, ValueError) as error:
        raise RecipeError(f"cannot be read ({error})", where=str(path), do="give the path of a YAML recipe") from None


def _apply(data: dict[str, Any], override: str) -> None:
    """Set one dotted key=value in the raw recipe."""
    key, equals, value = override.partition("=")
    option = f"--set {shown(override)}"
    if not equals or not key:
        raise RecipeError(f"{option} is not key=value", do="write for example --set assign.bits_per_weight=2.5")
    *parents, leaf = key_now(key.strip()).split(".")
    here = data
    for parent in parents:
        step = here.setdefault(parent, {})
        if not isinstance(step, dict):
            raise RecipeError(f"{option}: {shortened(parent)} is not a section", do="name a key of a section")
        here = step
    try:
        here[leaf] = parse_yaml(value).value
    except YamlError as error:
        raise RecipeError(f"{option}: the value is not YAML ({error})", do="quote it") from None


def _explain(error: ValidationError, data: Any, read: Yaml, where: str, overrides: Sequence[str]) -> RecipeError:
    """The first validation error as one line with its place in the file."""
    found = refusal_of(error, data)
    key = ".".join(map(str, found.path))
    line = read.line(found.path)
    names = [key_now(override.partition("=")[0].strip()) for override in overrides]
    if any(f"{name}.".startswith(f"{key}.") or key.startswith(f"{name}.") for name in names):
        place = "--set"
    else:
        place = f"{where}, line {line}" if line else where
    if found.unknown:
        what = f"unknown key {shortened(key, MOST_CHARACTERS)!r}"
        return RecipeError(
            what, where=place, do=hint(str(found.path[-1]), _known_keys(found.path[:-1]), "known keys here: ")
        )
    return RecipeError(found.sentence(), where=place, do=found.do)


def _known_keys(path: Sequence[Any]) -> list[str]:
    """Keys that the section at `path` takes."""
    section: type[Section] = Recipe
    for key in path:
        if isinstance(key, str):  # of a list's entries the list itself says what they are
            section = next(_sections(section.model_fields[key].annotation))
    return sorted(section.every_key())


def _sections(annotation: Any) -> Iterator[type[Section]]:
    """The sections that the type of a key is made of."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for part in get_args(annotation):
        yield from _sections(part)
