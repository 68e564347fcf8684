"""The checkpoint that valid inputs are of."""

from __future__ import annotations

from pathlib import Path

from tiny_models import save_tiny

from moeq import pipeline
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages.context import Context

SMALL = (
    "corpus.sequences=6",
    "corpus.sequence_length=32",
    "losses.group_size=16",
    "losses.bits=[1,2,4]",
    "eval.compare=[]",
    "assign={method: uniform, bits: 2}",
)


def exported(folder: Path, model: Path | None = None) -> Path:
    """A checkpoint of a tiny model, in moeq's own format."""
    name = save_tiny(folder / "mixtral", "mixtral") if model is None else model
    recipe = load_recipe(None, SMALL)
    context = Context(recipe=recipe, model_name=str(name), out=folder / "run", reporter=Reporter(quiet=True))
    pipeline.run(context, ("profile", "losses", "assign", "quantize", "export"))
    return context.directory("export")
