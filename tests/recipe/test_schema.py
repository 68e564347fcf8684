"""The JSON Schema of recipes: what is a recipe fits it, what is none does not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moeq.bounded import read_yaml
from moeq.bundled.preset_files import preset_names, preset_path
from moeq.cli import app
from moeq.recipe import Recipe
from moeq.recipe.recipe import recipe_schema

RECIPES = Path(__file__).parents[2] / "recipes"
SCHEMA = recipe_schema()
TYPES = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool,
    "null": type(None),
}  # fmt: skip
BOUNDS = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "exclusiveMaximum": lambda value, bound: value < bound,
}
LENGTHS = {"minLength": "minimum", "maxLength": "maximum", "minItems": "minimum"}
SAID = {"$schema", "$defs", "title", "description", "default"}


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value fits a schema: the words that ours is made of, and no other."""
    return all(_fits(value, word, meant, schema) for word, meant in schema.items() if word not in SAID)


def _fits(value: Any, word: str, meant: Any, schema: dict[str, Any]) -> bool:
    if word == "$ref":
        return fits(value, SCHEMA["$defs"][meant.removeprefix("#/$defs/")])
    if word == "type":
        return isinstance(value, TYPES[meant]) and (meant == "boolean" or not isinstance(value, bool))
    if word == "anyOf":
        return any(fits(value, one) for one in meant)
    if word == "oneOf":
        return sum(fits(value, one) for one in meant) == 1
    if word in ("enum", "const"):
        return any(value == one and type(value) is type(one) for one in (meant if word == "enum" else [meant]))
    if word == "items":
        return all(fits(one, meant) for one in value) if isinstance(value, list) else True
    if word in ("properties", "required", "additionalProperties") and not isinstance(value, dict):
        return True
    if word == "properties":
        return all(fits(one, meant[key]) for key, one in value.items() if key in meant)
    if word == "required":
        return set(meant) <= set(value)
    if word == "additionalProperties":
        others = [one for key, one in value.items() if key not in schema.get("properties", {})]
        return all(meant is not False and fits(one, meant) for one in others)
    if word in LENGTHS:
        return not isinstance(value, list if word == "minItems" else str) or BOUNDS[LENGTHS[word]](len(value), meant)
    if word == "pattern":
        return not isinstance(value, str) or re.search(meant, value) is not None
    return not isinstance(value, int | float) or BOUNDS[word](value, meant)


@pytest.mark.parametrize(
    "path", [*sorted(RECIPES.glob("*.yaml")), *map(preset_path, preset_names())], ids=lambda path: path.stem
)
def test_every_recipe_fits_and_none_with_a_key_misspelt(path: Path) -> None:
    data = read_yaml(path).value
    assert fits(data, SCHEMA)
    for section in ("corpus", "losses", "assign", "eval"):
        if section in data:
            key = next(iter(data[section]))
            wrong = {f"{one}x" if one == key else one: value for one, value in data[section].items()}
            assert not fits(data | {section: wrong}, SCHEMA), (section, key)
    assert not fits(data | {"modle": "x"}, SCHEMA)


@pytest.mark.parametrize(
    ("key", "value", "right"),
    [
        ("losses", {"bits": [1, 2]}, True),
        ("losses", {"bits": [5]}, False),
        ("losses", {"methods": ["magic"]}, False),
        ("assign", {"size": "12GiB"}, True),
        ("assign", {"size": "1.5e3 MiB"}, True),
        ("assign", {"size": "12 parsecs"}, False),
        ("assign", {"size": 1234}, True),
        ("assign", {"bits_per_weight": 2.5}, True),
        ("assign", {"bits_per_weight": "5/2"}, True),
        ("assign", {"bits_per_weight": "many"}, False),
        ("assign", {"alpha": 1.5}, False),
        ("assign", {"speed": 20}, True),
        ("assign", {"speed": "20 tok/s"}, True),
        ("assign", {"speed": "fast"}, False),
        ("assign", {"speed": 0}, False),
        ("assign", {"hot_bits": 4, "method": "budget"}, True),
        ("eval", {"compare": [{"name": "a", "method": "uniform", "bits": 2}]}, True),
        ("eval", {"compare": [{"method": "uniform"}]}, False),
        ("corpus", {"source": ["a.txt", "bundled"]}, True),
        ("reparam", None, True),
        ("recipe_version", 2, False),
    ],
)
def test_types_names_and_bounds_are_in_it(key: str, value: Any, right: bool) -> None:
    assert fits({key: value}, SCHEMA) is right


def test_a_whole_recipe_as_it_is_understood_fits() -> None:
    assert fits(Recipe().model_dump(mode="json"), SCHEMA)


def test_it_is_printed_as_a_document_with_what_editors_show() -> None:
    printed = json.loads(CliRunner().invoke(app, ["recipe", "--schema"]).stdout)
    assert printed == SCHEMA
    assert printed["$schema"].endswith("2020-12/schema")
    without = [
        (name, key)
        for name, section in printed["$defs"].items()
        for key, said in section["properties"].items()
        if "description" not in said and "$ref" not in said
    ]
    assert without == []
    assert printed["$defs"]["CorpusSection"]["properties"]["sequences"]["default"] == 128
