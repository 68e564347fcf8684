"""The JSON Schema of recipes, by which editors complete and check keys."""

from __future__ import annotations

from typing import Any

from moeq.recipe.recipe import Recipe

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def recipe_schema() -> dict[str, Any]:
    """Every key with its type, default and meaning; a key that there is not is refused."""
    schema = Recipe.model_json_schema()
    return {"$schema": DIALECT, "title": "moeq recipe"} | {key: schema[key] for key in schema if key != "title"}
