"""Native checkpoints of every kind that a runtime may be given to serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moeq import pipeline
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages.context import Context

BASE: dict[str, Any] = {
    "device": "cpu", "corpus": {"sequences": 8, "sequence_length": 48, "batch_size": 4}, "export": {"verify": False},
    "eval": {"compare": []},
}  # fmt: skip
RECIPES: dict[str, dict[str, Any]] = {
    "a width for every matrix": {
        "losses": {"bits": [1, 2, 3, 4, 8], "methods": ["rtn"], "group_size": 32},
        "assign": {"method": "optimal", "code_bits": 2.5, "granularity": "projection", "quantizer": "rtn"},
    },
    "trellis codes": {
        "losses": {"bits": [1, 2, 3, 4, 8], "methods": ["trellis"], "trellis_states": 256},
        "assign": {"method": "optimal", "code_bits": 2.5, "granularity": "projection"},
    },
    "nested": {
        "losses": {"methods": ["gptq"], "group_size": 32, "symmetric": True, "nested": True},
        "assign": {"method": "optimal", "code_bits": 3.0},
    },
    "packed attention": {
        "losses": {"methods": ["rtn"], "group_size": -1},
        "others": {"attention": 4, "group_size": 16},
        "assign": {"method": "optimal", "code_bits": 2.5, "quantizer": "rtn"},
    },
    "packed embeddings": {
        "losses": {"methods": ["rtn"], "group_size": 32},
        "others": {"embeddings": 8, "head": 3, "group_size": 16},
        "assign": {"method": "optimal", "code_bits": 2.5, "quantizer": "rtn"},
    },
    "everything": {  # as the qualities do
        "losses": {"methods": ["rtn"], "group_size": 32},
        "others": dict.fromkeys(("attention", "dense", "shared", "embeddings", "head"), 8)
        | {"method": "rtn", "symmetric": True},
        "assign": {"method": "optimal", "code_bits": 2.5, "quantizer": "rtn"},
    },
    "tied embeddings": {
        "losses": {"methods": ["rtn"], "group_size": 32},
        "others": {"embeddings": 4, "head": 4, "group_size": 16},
        "assign": {"method": "optimal", "code_bits": 2.5, "quantizer": "rtn"},
    },
}
STAGES = ("profile", "losses", "assign", "quantize", "export")


def export(folder: Path, model: Path, recipe: dict[str, Any]) -> Path:
    context = Context(
        recipe=load_recipe(BASE | recipe), model_name=str(model), out=folder, reporter=Reporter(quiet=True)
    )
    pipeline.run(context, STAGES)
    return context.directory("export")
