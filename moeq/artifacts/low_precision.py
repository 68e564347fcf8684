"""LowPrecisionReport: perplexity against the share of every layer's experts at a low width (low_precision.json)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from moeq.artifacts.files import write_json
from moeq.artifacts.stage import Frozen, read_model

SCHEMA_VERSION = 1
NAME = "low_precision.json"
REMEDY = "run `moeq eval` again"
COLDEST, HOTTEST, RANDOM = "coldest", "hottest", "random"


class Point(Frozen):
    """share: of each layer that was asked for; low_experts: experts at the low width, of all layers."""

    share: float
    low_experts: int
    perplexity: float


class Curve(Frozen):
    """order: which experts go to the low width first; number: of a random order."""

    order: Literal["coldest", "hottest", "random"]
    number: int | None
    points: tuple[Point, ...]


class Sweep(Frozen):
    """One pair of widths: the others of a layer's experts have `high_bits`, 16 as in the checkpoint."""

    low_bits: int
    high_bits: int
    quantizer: str
    experts: int
    sequences: int
    tokens: int
    curves: tuple[Curve, ...]


class LowPrecisionReport(Frozen):
    """The sweeps of a run, in the recipe's order."""

    schema_version: int = SCHEMA_VERSION
    sweeps: tuple[Sweep, ...]


def write_sweeps(path: Path, report: LowPrecisionReport) -> None:
    write_json(path, report.model_dump(mode="json"))


def read_sweeps(path: Path) -> LowPrecisionReport:
    return read_model(path, LowPrecisionReport, SCHEMA_VERSION, remedy=REMEDY)
