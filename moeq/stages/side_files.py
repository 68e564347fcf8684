"""What the stages that write checkpoints say of files that do not go along."""

from __future__ import annotations

from typing import Any

from rich.markup import escape

from moeq.exporters.front_matter import read_origin
from moeq.models.side_files import find_side_files
from moeq.models.source import ModelSource
from moeq.stages.context import Context


def say_left_behind(context: Context, source: ModelSource) -> None:
    """Name code and other files of a model that its checkpoint will not have, and a card that cannot be read.

    Raises ModelError for what cannot go along: links that lead out of the directory, settings that are no JSON.
    """
    sides = find_side_files(source.path, source.config, context.recipe.trust_remote_code)
    for line in (sides.said(), read_origin(source.path).said()):
        if line is not None:
            context.reporter.say(f"  {escape(line)}")


def code_of(context: Context) -> dict[str, Any] | None:
    """What of a model's own code goes along; None for one without, whose checkpoints are the same either way."""
    source = context.source
    sides = find_side_files(source.path, source.config, context.recipe.trust_remote_code)
    if not sides.code and not sides.entries:
        return None
    return {"code": sides.code_digests(), "entries_left_out": list(sides.entries)}
