"""Recipes are read from YAML; an error names the file, the line, the key and the nearest known key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from moeq.arguments import checked
from moeq.bounded import Yaml, YamlError, parse_yaml, read_yaml, shortened, shown
from moeq.bundled.preset_files import preset_of
from moeq.errors import RecipeError, hint, missing
from moeq.recipe.assign import TIMES, budget_keys, owners
from moeq.recipe.choices import BEST
from moeq.recipe.earlier import RECORDED, as_called_today, key_now, read_earlier
from moeq.recipe.recipe import Recipe
from moeq.recipe.types import Section
from moeq.recipe.wording import MOST_CHARACTERS, refusal_of
from moeq.registry import ALLOCATORS, QUANTIZERS
from moeq.runtimes import OF_FOLDED, ONNX, W8A8

SET = "--set"  # where a key stands that no file has
YAML_ADVICE = "correct that line, or quote the value"


@checked
def load_recipe(given: str | Path | Mapping[str, Any] | None, overrides: str | Sequence[str] = ()) -> Recipe:
    """Read a recipe, a file or its keys (None: all defaults), and apply `key=value` overrides (dotted, YAML values).

    A budget that is given replaces the recipe's own, a method the keys that it does not read. Raises RecipeError naming
    file, line, key and the nearest known key.
    """
    overrides = [overrides] if isinstance(overrides, str) else overrides
    given = Path(given) if isinstance(given, str) else given
    if isinstance(given, Mapping):
        return _recipe_of(parse_yaml("{}"), "recipe", overrides, _copied(given))
    read = parse_yaml("{}") if given is None else _read(given)
    return _recipe_of(read, _place(given), overrides)


def _copied(value: Any, *path: str) -> Any:
    """What keys hold, in mappings and lists that may be changed; RecipeError for what can be read only once."""
    if isinstance(value, Mapping):
        return {key: _copied(one, *path, str(key)) for key, one in value.items()}
    if isinstance(value, list):
        return [_copied(one, *path, str(number)) for number, one in enumerate(value)]
    if isinstance(value, Iterator):
        raise RecipeError(f"{'.'.join(path)} is {shown(value)}", where="recipe", do="give a list")
    return value


def written_methods(path: Path, overrides: Sequence[str]) -> list[str] | None:
    """losses.methods as a recipe's file with `key=value` overrides has it, the rest unchecked; None: not quantizers."""
    losses = with_overrides(_read(path).value, overrides, _place(path)).get("losses", {})
    methods = losses.get("methods", Recipe().losses.methods) if isinstance(losses, dict) else None
    known = isinstance(methods, list) and all(name in QUANTIZERS.names() for name in methods)
    return methods if known else None


def _is_recorded(path: Path) -> bool:
    with path.open(encoding="utf-8") as stream:
        return stream.readline().rstrip() == RECORDED


def parse_recipe(text: str) -> Recipe:
    """The recipe that a text is; RecipeError as `load_recipe` raises it."""
    return _recipe_of(parse_yaml(text), "recipe", ())


def _recipe_of(read: Yaml, where: str, overrides: Sequence[str], given: dict[str, Any] | None = None) -> Recipe:
    """read: what the file holds, for its lines; given: what it says, where it is no file."""
    data = with_overrides(read.value if given is None else given, overrides, where)
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise _explain(error, data, read, where, overrides) from None


def with_overrides(data: Any, overrides: Sequence[str], where: str) -> dict[str, Any]:
    """A raw recipe with `key=value` overrides, before it is validated: the mapping itself, changed."""
    data = {} if data is None else data
    if not isinstance(data, dict):
        raise RecipeError("a recipe is a mapping of keys to values", where=where, do="`moeq init` writes one")
    read_earlier(data, where)
    for override in overrides:
        _apply(data, override)
        read_earlier(data, f"--set {shown(override)}")
    _drop_replaced(data, overrides)
    _drop_quantizers(data, overrides)
    _of_folded(data)
    return data


def _of_folded(data: dict[str, Any]) -> None:
    """Have export.formats' names of what `moeq reparam` makes be the keys that they stand for."""
    export = data.get("export")
    formats = export.get("formats") if isinstance(export, dict) else None
    if not isinstance(export, dict) or not isinstance(formats, list):
        return
    asked = [name for name in OF_FOLDED if name in formats]
    if asked:
        export["formats"] = [name for name in formats if name not in asked]
    if ONNX in asked:
        export["onnx"] = True
    if W8A8 in asked:
        section = data["reparam"] = {} if data.get("reparam") is None else data["reparam"]
        if isinstance(section, dict) and section.get("w8a8") is None:
            section["w8a8"] = {}


def _place(path: Path | None) -> str:
    """What a recipe is called in messages."""
    if path is None:
        return "defaults"
    preset = preset_of(path)
    return str(path) if preset is None else f"preset {preset}"


def _drop_replaced(data: dict[str, Any], overrides: Sequence[str]) -> None:
    """Nulls for what overrides take the place of in `assign`: other budgets, the other limit of time, and keys that a
    method does not read."""
    section, method = data.get("assign"), None
    if not isinstance(section, dict):
        return
    given: set[str] = set()
    for key in (one.partition("=")[0].strip() for one in overrides):
        if key == "assign":  # the whole section, whatever was given of it before
            given.clear()
        elif key.startswith("assign."):
            given.add(key_now(key).removeprefix("assign."))
    given -= {key for key in given if section.get(key) is None}  # what is null takes no place
    if "method" in given:
        method = section["method"]
    for key in set(section) - given:
        of_another = method in ALLOCATORS.names() and owners(key) and method not in owners(key)
        if of_another or any(key in alike and given & {*alike} for alike in (budget_keys(), TIMES)):
            section[key] = None


def _drop_quantizers(data: dict[str, Any], overrides: Sequence[str]) -> None:
    """Where overrides say losses.methods, assignments no longer name a quantizer that is none of them."""
    given = {key_now(one.partition("=")[0].strip()) for one in overrides}
    losses = data.get("losses")
    methods = losses.get("methods") if isinstance(losses, dict) else None
    if not isinstance(methods, list) or "losses.methods" not in given:
        return
    sections = [] if {"assign", "assign.quantizer"} & given else [data.get("assign")]
    compared = data.get("eval", {}).get("compare") if isinstance(data.get("eval"), dict) else None
    if isinstance(compared, list) and not {"eval", "eval.compare"} & given:
        sections += compared
    for section in sections:
        if isinstance(section, dict) and section.get("quantizer", BEST) not in (*methods, BEST):
            del section["quantizer"]


def _read(path: Path) -> Yaml:
    """What a file holds, by the names that its keys have today."""
    try:
        read = read_yaml(path)
        if _is_recorded(path):
            as_called_today(read.value)
        return read
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
        raise RecipeError("is not key=value", where=option, do="write for example --set assign.bits_per_weight=2.5")
    *parents, leaf = key_now(key.strip()).split(".")
    here = data
    for parent in parents:
        step = here.setdefault(parent, {})
        if step is None:  # a section that is off, which a key of its own switches on
            step = here[parent] = {}
        if not isinstance(step, dict):
            raise RecipeError(f"{shortened(parent)} is not a section", where=option, do="name a key of a section")
        here = step
    try:
        here[leaf] = parse_yaml(value).value
    except YamlError as error:
        raise RecipeError(f"the value is not YAML ({error})", where=option, do="quote it") from None


def _explain(error: ValidationError, data: Any, read: Yaml, where: str, overrides: Sequence[str]) -> RecipeError:
    """The first validation error as one line with its place in the file."""
    found = refusal_of(error, data)
    key = ".".join(map(str, found.path))
    line = read.line(found.path)
    names = [key_now(override.partition("=")[0].strip()) for override in overrides]
    if any(f"{name}.".startswith(f"{key}.") or key.startswith(f"{name}.") for name in names):
        place = SET
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
