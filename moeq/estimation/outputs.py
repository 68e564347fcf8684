"""What `moeq estimate` without a run writes: estimate.json and its schema, the page, and a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moeq.artifacts.files import make_directory, write_json, write_text
from moeq.artifacts.places import ELSEWHERE, refuse_artifacts
from moeq.artifacts.stage import RECORD
from moeq.errors import RecipeError
from moeq.estimation.questions import Question
from moeq.estimator.cases import EstimateDocument
from moeq.folders import RECIPE_COPY

NAME = "estimate.json"
SCHEMA = "estimate.schema.json"
PAGE = "estimate.html"
TIMELINE = "timeline.json"


def is_run(out: Path) -> bool:
    """Whether a run lies in a directory: its recipe, or what a stage that was run alone left there."""
    return (out / RECIPE_COPY).is_file() or any((out / stage / RECORD).is_file() for stage in ("profile", "assign"))


def check_out(out: Path) -> None:
    """RecipeError for a directory of a run, a model or a checkpoint, whose files these would be mixed up with."""
    if is_run(out):
        raise RecipeError("a run lies in it", where=f"--out {out}", do=ELSEWHERE)
    refuse_artifacts(out)


def write_document(out: Path, document: EstimateDocument, questions: Sequence[Question]) -> dict[str, Path]:
    """Write estimate.json, its JSON Schema, the page and the timeline, each at once; returns what is where."""
    from moeq.reporting.estimate_page import render

    check_out(out)
    make_directory(out)
    paths = {"page": out / PAGE, "estimate": out / NAME, "timeline": out / TIMELINE}
    write_json(out / SCHEMA, EstimateDocument.model_json_schema())
    write_json(paths["estimate"], document.model_dump(mode="json"))
    write_json(paths["timeline"], _timeline(document, questions))
    write_text(paths["page"], render(document))
    return paths


def _timeline(document: EstimateDocument, questions: Sequence[Question]) -> dict[str, Any]:
    """A decode step of every drawn policy at the smallest batch; of several cases, each is named."""
    from moeq.reporting.chrome_trace import chrome_trace

    several = len(questions) > 1
    drawn = {
        f"{question.name}: {policy}" if several else policy: intervals
        for question in questions
        for policy, intervals in question.timelines().items()
    }
    what = "one decode step, at the smallest batch of the grid"
    about = {"what": what, "name": document.name, "routing": document.routing, "hardware": document.hardware}
    return chrome_trace(drawn, about | {"moeq": document.moeq_version})
