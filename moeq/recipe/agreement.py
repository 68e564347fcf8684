"""Options beside `--set` of the same key: equal values are fine, of two others neither is taken silently."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from moeq.bounded import YamlError, parse_yaml, shown
from moeq.errors import RecipeError
from moeq.options import RunOptions
from moeq.recipe.earlier import key_now
from moeq.recipe.reading import SET, load_recipe, with_overrides


def changes_of(asked: RunOptions) -> list[str]:
    """What options change of a recipe; RecipeError where --set gives a key another value than an option of its own.

    Of a section it counts alone whether it is off.
    """
    changes = asked.changes()
    given = asked.key_values(changes) if asked.set_ else {}
    for override in asked.set_:
        said = with_overrides({}, [override], SET)
        for key, (option, value) in given.items():
            there, found = _at(said, key)
            if there and _meant(key, json.dumps(found, default=str)) != _meant(key, value):
                where, do = f"{SET} {shown(override)}", "give one of them"
                raise RecipeError(f"says otherwise than {option}", where=where, do=do)
    return changes


def _at(data: Any, key: str) -> tuple[bool, Any]:
    """Whether a dotted key stands in nested mappings, and its value."""
    for part in key_now(key).split("."):
        if not isinstance(data, Mapping) or part not in data:
            return False, None
        data = data[part]
    return True, data


def _meant(key: str, value: str) -> Any:
    """A value as a recipe understands it, or as it is where it is none of one by itself; {} of a section."""
    try:
        found = _at(load_recipe(None, [f"{key}={value}"]).model_dump(mode="json"), key)[1]
    except RecipeError:
        try:
            found = parse_yaml(value).value
        except YamlError:  # refused where it is put into the recipe
            return value
    if isinstance(found, list) and len(found) == 1:  # as the one in it, for a source of text
        return found[0]
    return {} if isinstance(found, Mapping) else found
