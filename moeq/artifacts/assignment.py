"""Assignment: the tier and the width of every expert, or of each of its matrices (assignment.json).

JSON that can be read, edited and compared; `bits` 16 means left as in the checkpoint, 0 dropped: nothing of the expert
is stored, and whatever it is given, it adds nothing. The published JSON Schema is
`Assignment.model_json_schema()` (written beside the file as assignment.schema.json).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from moeq.artifacts.files import write_json
from moeq.artifacts.stage import Frozen, read_model
from moeq_kernels.widths import DROPPED as DROPPED
from moeq_kernels.widths import FULL as FULL
from moeq_kernels.widths import WIDTHS as WIDTHS
from moeq_kernels.widths import Encoding
from moeq_kernels.widths import Width as Width
from moeq_kernels.widths import width_of as width_of

SCHEMA_VERSION = 1
MIXED = -1  # stands for the width of a replica whose matrices have several, where a replica is named by its width
MIXED_NAME, DROPPED_NAME = "mixed", "dropped"
EXPERT_WIDTHS = (DROPPED, *WIDTHS)  # of an expert; no matrix is dropped by itself
Tier = Literal["gpu", "ndp", "host", "disk"]
EDITED = "by hand: not all of it is what the method found within the budget"  # said where an assignment is told of
REMEDY = "correct the file or make it anew: run `moeq assign --force`"


def matrix_widths(widths: Width) -> tuple[int, ...]:
    """The widths that an expert's matrices have, one of each matrix where they differ."""
    return (widths,) if isinstance(widths, int) else tuple(widths.values())


def join_widths(widths: Mapping[str, int]) -> Width:
    """The width of an expert whose matrices have these: one number where all are equal."""
    return next(iter(widths.values())) if len(set(widths.values())) == 1 else widths


def mean_width(widths: Width) -> Fraction:
    """Code bits of an expert on average; its matrices have equally many weights."""
    every = matrix_widths(widths)
    return Fraction(sum(every), len(every))


def count_widths(experts: Iterable[Width]) -> dict[str, int]:
    """{width: number of experts} by rising width, 0 as `dropped`; those whose matrices differ last, as `mixed`."""
    counts = Counter(widths if isinstance(widths, int) else MIXED for widths in experts)
    mixed = counts.pop(MIXED, 0)
    named = {DROPPED_NAME if bits == DROPPED else str(bits): counts[bits] for bits in sorted(counts)}
    return named | ({MIXED_NAME: mixed} if mixed else {})


def count_matrices(experts: Iterable[Width]) -> dict[str, dict[str, int]]:
    """{projection: {width: number of matrices}} of the experts whose matrices differ in width."""
    counts_by_projection: dict[str, Counter[int]] = {}
    for widths in experts:
        for projection, bits in ({} if isinstance(widths, int) else widths).items():
            counts_by_projection.setdefault(projection, Counter())[bits] += 1
    return {name: {str(bits): counts[bits] for bits in sorted(counts)} for name, counts in counts_by_projection.items()}


class ExpertChoice(Frozen):
    """quantizer: the method whose replica at `bits` is taken; None: as the parameter `quantizer` says.

    projections: the width of every matrix where they differ; `bits` is then the widest of them, and matrices of other
    widths are of the method that the parameter `quantizer` says.
    """

    tier: Tier
    bits: int
    projections: dict[str, int] | None = None
    quantizer: str | None = None
    importance: float = Field(ge=0)

    @field_validator("bits")
    @classmethod
    def _known_width(cls, bits: int) -> int:
        if bits not in EXPERT_WIDTHS:
            raise ValueError(f"bits must be one of {EXPERT_WIDTHS}")
        return bits

    @model_validator(mode="after")
    def _check_projections(self) -> ExpertChoice:
        if self.projections is None:
            return self
        for name, bits in self.projections.items():
            if bits not in WIDTHS:
                raise ValueError(f"{name} has {bits} bits, must be one of {WIDTHS}")
        widths = set(self.projections.values())
        if len(widths) < 2:
            raise ValueError("projections must have several widths; where all are equal, `bits` alone says it")
        if self.bits != max(widths):
            raise ValueError(f"bits is {self.bits}, must be the widest of the projections, {max(widths)}")
        return self

    @model_serializer(mode="wrap")
    def _without_absent(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Files of experts of one width are as they were before projections had their own."""
        dumped: dict[str, Any] = dump(self)
        if self.projections is None:
            dumped.pop("projections", None)
        return dumped

    @property
    def widths(self) -> Width:
        """One width for all matrices, or that of each."""
        return self.bits if self.projections is None else self.projections

    @property
    def is_dropped(self) -> bool:
        return self.bits == DROPPED

    @property
    def key(self) -> int:
        """What the placed replica is called among an expert's: its width, or MIXED; DROPPED: there is none."""
        return self.bits if self.projections is None else MIXED


class LayerAssignment(Frozen):
    name: str
    experts: tuple[ExpertChoice, ...]


class Assignment(Frozen):
    """Every expert's tier and width, and how they were decided."""

    schema_version: int = SCHEMA_VERSION
    name: str
    method: str
    parameters: dict[str, Any] = Field({})
    group_size: int
    symmetric: bool = False
    nested: bool = False
    state_bits: int = 0
    codebook: str = ""
    layers: tuple[LayerAssignment, ...]

    @property
    def encoding(self) -> Encoding:
        """How the codes of packed experts stand for values."""
        return Encoding.of(self)

    @property
    def is_mixed(self) -> bool:
        """Whether the matrices of some expert differ in width."""
        return any(choice.key == MIXED for layer in self.layers for choice in layer.experts)

    @property
    def drops(self) -> bool:
        """Whether some expert is dropped."""
        return any(choice.is_dropped for layer in self.layers for choice in layer.experts)

    def bits(self) -> list[np.ndarray]:
        """Width of every expert, of its widest matrix where they differ; one int array [E] a layer."""
        return [np.array([choice.bits for choice in layer.experts]) for layer in self.layers]

    def mean_bits(self) -> list[np.ndarray]:
        """Code bits of every expert on average, one float array [E] a layer."""
        return [np.array([float(mean_width(choice.widths)) for choice in layer.experts]) for layer in self.layers]

    def expert_widths(self) -> list[list[Width]]:
        """Width of every expert of every layer: a number, or {projection: bits} where its matrices differ."""
        return [[choice.widths for choice in layer.experts] for layer in self.layers]

    def hot(self) -> list[np.ndarray]:
        """Which experts live on the GPU, one bool array [E] a layer."""
        return [np.array([choice.tier == "gpu" for choice in layer.experts]) for layer in self.layers]

    def code_bits(self, tier: Tier | None = None) -> Fraction | None:
        """Mean bits of the codes of the experts of one tier, or of all; None when there are none."""
        chosen = [c.widths for layer in self.layers for c in layer.experts if tier is None or c.tier == tier]
        return sum(map(mean_width, chosen), Fraction(0)) / len(chosen) if chosen else None

    def widths(self) -> list[int]:
        """All widths that some matrix has, rising."""
        return sorted(
            {bits for layer in self.layers for choice in layer.experts for bits in matrix_widths(choice.widths)}
        )


def write_assignment(path: Path, assignment: Assignment) -> None:
    """Write assignment.json and its JSON Schema beside it."""
    write_json(path.with_suffix(".schema.json"), Assignment.model_json_schema())
    written = assignment.model_dump(mode="json")
    if not assignment.codebook:  # which came later
        del written["codebook"]
    write_json(path, written)


def read_assignment(path: Path) -> Assignment:
    """Read and validate an assignment; ArtifactError naming the file and the place."""
    return read_model(path, Assignment, SCHEMA_VERSION, remedy=REMEDY)
