"""ReparamReport: what was folded into what, by which ranges, and what it changed (reparam.json and its schema)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from moeq.artifacts.files import write_json
from moeq.artifacts.stage import Frozen, read_model
from moeq.recipe import Ends

SCHEMA_VERSION = 1
NAME = "reparam.json"
SCHEMA = "reparam.schema.json"
REMEDY = "run `moeq reparam` again"


class ConsumerRow(Frozen):
    """A parameter that the norm feeds: axis of the norm's channels; bias: the parameter that took the shift back."""

    weight: str
    axis: int
    bias: str | None


class NormRow(Frozen):
    """A folded norm. scale: s~, what its output is quantized by; r1, r2, low, high: least and largest of its channels.

    low and high are the ends of the channels' ranges in calibration. why: why scales alone were folded; None:
    asymmetric.
    """

    path: str
    kind: Literal["LayerNorm", "RMSNorm"]
    eps: float
    plus_one: bool
    mode: Literal["asymmetric", "scale-only"]
    why: str | None
    scale: float
    r1: tuple[float, float]
    r2: tuple[float, float]
    low: tuple[float, float]
    high: tuple[float, float]
    consumers: tuple[ConsumerRow, ...]


class ErrorRow(Frozen):
    """Relative error of logits against the original, in float32; left_out: sequences whose routing met a tie."""

    error: float
    sequences: int
    left_out: int
    changed_tokens: int


class PerplexityRow(Frozen):
    """Perplexity of the original, and of W8A8 with static scales before and after the fold.

    w8a8_written: of the checkpoint that reparam.w8a8 writes, None where it writes none.
    """

    original: float
    w8a8: float
    w8a8_folded: float
    w8a8_written: float | None = None
    tokens: int


class ReparamReport(Frozen):
    """left: {norm: why} of norms that were not folded; float32: before anything is rounded; stored: as written."""

    schema_version: int = SCHEMA_VERSION
    bits: int
    range: Ends
    percentile: float | None
    samples: int
    tokens: int
    dtype: str
    norms: tuple[NormRow, ...]
    left: dict[str, str]
    float32: ErrorRow
    stored: ErrorRow
    perplexity: PerplexityRow | None


def write_reparam(directory: Path, report: ReparamReport) -> None:
    """Write reparam.json and its schema."""
    write_json(directory / SCHEMA, ReparamReport.model_json_schema())
    write_json(directory / NAME, report.model_dump(mode="json"))


def read_reparam(directory: Path) -> ReparamReport:
    """Read reparam.json; ArtifactError when it is missing or damaged."""
    return read_model(directory / NAME, ReparamReport, SCHEMA_VERSION, remedy=REMEDY)
