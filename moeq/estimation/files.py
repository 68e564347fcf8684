"""What `moeq estimate` without a run writes: estimate.json and its schema, the page, and its drawings."""

from __future__ import annotations

from pathlib import Path

from moeq.artifacts.files import make_directory, write_json, write_text
from moeq.errors import RecipeError
from moeq.estimator.document import EstimateDocument
from moeq.reporting.estimate_page import render

NAME = "estimate.json"
SCHEMA = "estimate.schema.json"
PAGE = "estimate.html"


def check_out(out: Path) -> None:
    """RecipeError for a directory that a run lies in, whose files it would be mixed up with."""
    if (out / "recipe.yaml").is_file():
        raise RecipeError("a run lies in it", where=f"--out {out}", do="choose another --out")


def write_document(out: Path, found: EstimateDocument) -> dict[str, Path]:
    """Write estimate.json, its JSON Schema and the page, each at once; returns what is where."""
    check_out(out)
    make_directory(out)
    paths = {"page": out / PAGE, "estimate": out / NAME}
    write_json(out / SCHEMA, EstimateDocument.model_json_schema())
    write_json(paths["estimate"], found.model_dump(mode="json"))
    write_text(paths["page"], render(found))
    return paths
