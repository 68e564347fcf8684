"""EvalReport: perplexity and task scores of the original and of every assignment, side by side (eval.json)."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from moeq.artifacts.assignment import Assignment
from moeq.artifacts.files import write_json
from moeq.artifacts.stage import read_model

SCHEMA_VERSION = 1
NAME = "eval.json"
SAMPLES = "samples.json"  # every item of every variant, beside it
REMEDY = "run `moeq eval` again"


class Change(BaseModel):
    """A measure minus the original's on the same items: 95 % interval and two-sided p of a paired bootstrap."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    difference: float
    low: float
    high: float
    p: float
    stderr: float
    items: int
    resamples: int
    seed: int


class EvalRow(BaseModel):
    """One evaluated variant. `assignment` is None for the original; accuracy is the mean over tasks, with its error.

    changes: {task, average or perplexity: how it differs from the original's}.

    other_bytes: of everything but the routed experts (None: written before moeq counted them).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    exported: bool
    assignment: Assignment | None
    expert_bytes: int
    other_bytes: int | None = None
    average_bits: float | None
    perplexity: float | None
    perplexity_by_domain: dict[str, float]
    accuracy: float | None
    accuracy_stderr: float | None = None
    tasks: dict[str, dict[str, float]]
    changes: dict[str, Change] = {}

    @property
    def total_bytes(self) -> int | None:
        """Of the whole checkpoint."""
        return None if self.other_bytes is None else self.expert_bytes + self.other_bytes

    def stored_bits(self, weights: int) -> float | None:
        """Mean bits that a weight of the whole checkpoint takes, scales counted."""
        return None if self.total_bytes is None else 8 * self.total_bytes / weights


class EvalReport(BaseModel):
    """`export_logit_error`: relative error of the exported checkpoint's logits against the dequantized weights'."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_version: int = SCHEMA_VERSION
    rows: tuple[EvalRow, ...]
    tokens: int
    export_logit_error: float

    def row(self, name: str) -> EvalRow | None:
        return next((row for row in self.rows if row.name == name), None)


def write_eval(path: Path, report: EvalReport) -> None:
    write_json(path, report.model_dump(mode="json"))


def read_eval(path: Path) -> EvalReport:
    return read_model(path, EvalReport, SCHEMA_VERSION, remedy=REMEDY)
