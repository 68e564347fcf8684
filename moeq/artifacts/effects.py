"""LayerEffects: what quantizing one layer's experts alone does to the model's output (layer_effects.json).

`divergence`: the mean Kullback-Leibler divergence, in nats a token, of the output's distribution from the exact one
when all experts of this layer, and no others, are at `bits` by `method`.
"""

from __future__ import annotations

from pathlib import Path

from moeq.artifacts.files import write_json
from moeq.artifacts.stage import Frozen, read_model

SCHEMA_VERSION = 1
NAME = "layer_effects.json"
REMEDY = "run `moeq losses` again"


class LayerEffects(Frozen):
    schema_version: int = SCHEMA_VERSION
    bits: int
    method: str
    sequences: int
    tokens: int
    divergence: tuple[float, ...]


def write_effects(directory: Path, effects: LayerEffects) -> None:
    write_json(directory / NAME, effects.model_dump(mode="json"))


def read_effects(directory: Path) -> LayerEffects | None:
    """The measured effects; None where the recipe asked for none. ArtifactError when they are damaged."""
    path = directory / NAME
    return read_model(path, LayerEffects, SCHEMA_VERSION, remedy=REMEDY) if path.is_file() else None
