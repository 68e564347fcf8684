"""Assignment: the tier and the width of every expert (assignment.json).

JSON that can be read, edited and compared; `bits` 16 means left as in the checkpoint. The published JSON Schema is
`Assignment.model_json_schema()` (written beside the file as assignment.schema.json).
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from moeq.artifacts.files import write_json
from moeq.artifacts.stage import read_model

SCHEMA_VERSION = 1
FULL = 16
WIDTHS = (1, 2, 3, 4, 8, FULL)
Tier = Literal["gpu", "ndp", "host", "disk"]
REMEDY = "mend the file or run `moeq assign` again"


class ExpertChoice(BaseModel):
    """quantizer: the method whose replica at `bits` is taken; None: as the parameter `quantizer` says."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    tier: Tier
    bits: int
    quantizer: str | None = None
    importance: float = Field(ge=0)

    @field_validator("bits")
    @classmethod
    def _known_width(cls, bits: int) -> int:
        if bits not in WIDTHS:
            raise ValueError(f"bits must be one of {WIDTHS}")
        return bits


class LayerAssignment(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    experts: tuple[ExpertChoice, ...]


class Assignment(BaseModel):
    """Every expert's tier and width, and how they were decided."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_version: int = SCHEMA_VERSION
    name: str
    method: str
    parameters: dict[str, Any] = {}
    group_size: int
    symmetric: bool = False
    nested: bool = False
    layers: tuple[LayerAssignment, ...]

    def bits(self) -> list[np.ndarray]:
        """Width of every expert, one int array [E] a layer."""
        return [np.array([choice.bits for choice in layer.experts]) for layer in self.layers]

    def hot(self) -> list[np.ndarray]:
        """Which experts live on the GPU, one bool array [E] a layer."""
        return [np.array([choice.tier == "gpu" for choice in layer.experts]) for layer in self.layers]

    def average_bits(self, tier: Tier | None = None) -> Fraction | None:
        """Mean width (codes only) of the experts of one tier, or of all; None when there are none."""
        chosen = [c.bits for layer in self.layers for c in layer.experts if tier is None or c.tier == tier]
        return Fraction(sum(chosen), len(chosen)) if chosen else None

    def widths(self) -> list[int]:
        return sorted({choice.bits for layer in self.layers for choice in layer.experts})


def write_assignment(path: Path, assignment: Assignment) -> None:
    """Write assignment.json and its JSON Schema beside it."""
    write_json(path.with_suffix(".schema.json"), Assignment.model_json_schema())
    write_json(path, assignment.model_dump(mode="json"))


def read_assignment(path: Path) -> Assignment:
    """Read and validate an assignment; ArtifactError naming the file and the place."""
    return read_model(path, Assignment, SCHEMA_VERSION, remedy=REMEDY)
