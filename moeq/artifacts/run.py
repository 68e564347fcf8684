"""Where a run keeps what: the folders of its stages, its recipe, its replicas; known without the stages' own code."""

from __future__ import annotations

import os
from pathlib import Path

from moeq.folders import CHECKPOINT, expanded
from moeq.folders import RECIPE_COPY as RECIPE_COPY
from moeq.recipe import Recipe

STORE = "store"
STORE_VARIABLE = "MOEQ_STORE"
FOLDED = "checkpoint"  # within reparam: the model with folded norms
STAGES = ("reparam", "profile", "losses", "assign", "quantize", "export", "eval", "estimate", "report")
DIRECTORIES = {"export": CHECKPOINT}  # stages whose directory is not called like the stage
EDITABLE = {"assign": frozenset({"assignment.json"})}  # files of a stage that people may change by hand
MAKES = {  # files that every finished stage has, whatever its record says
    "reparam": frozenset({"reparam.json", f"{FOLDED}/config.json"}),
    "profile": frozenset({"profile.json"}),
    "losses": frozenset({"losses.parquet"}),
    "assign": frozenset({"assignment.json"}),
    "quantize": frozenset({"quantizers.json"}),
    "export": frozenset({"placement.json", "config.json"}),
    "eval": frozenset({"eval.json"}),
    "estimate": frozenset({"estimate.json"}),
    "report": frozenset({"report.html"}),
}
OLDER = (".parts", "replicas")  # of losses: what schema version 1 kept in the stage's directory


def store_folder(recipe: Recipe, out: Path) -> Path:
    """Where a run of this recipe in `out` keeps replicas."""
    chosen = recipe.store or os.environ.get(STORE_VARIABLE)
    return expanded(chosen) if chosen else out / STORE
