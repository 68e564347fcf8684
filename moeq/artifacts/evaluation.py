"""EvalReport: perplexity and tasks, or answers to images, of the original and of every assignment (eval.json)."""

from __future__ import annotations

from pathlib import Path

from pydantic import AliasChoices, Field

from moeq.artifacts.assignment import Assignment
from moeq.artifacts.files import write_json
from moeq.artifacts.stage import Frozen, read_model

SCHEMA_VERSION = 1
NAME = "eval.json"
SAMPLES = "samples.json"  # every item of every variant, beside it
REMEDY = "run `moeq eval` again"


class Change(Frozen):
    """A measure minus the first one's on the same items: 95 % interval and two-sided p of a paired bootstrap."""

    difference: float
    low: float
    high: float
    p: float
    stderr: float
    items: int
    resamples: int
    seed: int


class EvalRow(Frozen):
    """One evaluated variant. `assignment` is None for the original; accuracy is the mean over tasks, with its error.

    changes: {task, average or perplexity: how it differs from the original's}.

    bits_per_weight: stored for a weight of the routed experts, scales and zero points counted (None: written before
    moeq did); code_bits: of their codes alone, None for the original.

    expert_bytes, other_bytes: of the tensors of the routed experts, and of everything else (None: written before moeq
    counted them); checkpoint_bytes: of all files of the checkpoint, what `assign.size` limits. Of image classifiers
    alone: cross_entropy in nats an image, and logit_error, ||z - z0|| / ||z0|| against the original's logits; `tasks`
    then has the accuracy by domain.
    """

    name: str
    exported: bool
    assignment: Assignment | None
    expert_bytes: int
    other_bytes: int | None = None
    checkpoint_bytes: int | None = None
    bits_per_weight: float | None = None
    code_bits: float | None = Field(None, validation_alias=AliasChoices("code_bits", "average_bits"))
    perplexity: float | None
    perplexity_by_domain: dict[str, float]
    accuracy: float | None
    accuracy_stderr: float | None = None
    tasks: dict[str, dict[str, float]]
    changes: dict[str, Change] = Field({})
    cross_entropy: float | None = None
    logit_error: float | None = None

    def image_figures(self) -> dict[str, float]:
        """What only image classifiers have, by name; nothing of language models."""
        figures = {"cross_entropy": self.cross_entropy, "logit_error": self.logit_error}
        return {name: value for name, value in figures.items() if value is not None}

    @property
    def total_bytes(self) -> int | None:
        """Of all tensors of the checkpoint."""
        return None if self.other_bytes is None else self.expert_bytes + self.other_bytes

    @property
    def whole_bytes(self) -> int | None:
        """Of the checkpoint's files; where nobody counted them, of its tensors."""
        return self.total_bytes if self.checkpoint_bytes is None else self.checkpoint_bytes

    def stored_bits(self, weights: int) -> float | None:
        """Mean bits that a weight of the whole checkpoint takes, scales counted."""
        return None if self.total_bytes is None else 8 * self.total_bytes / weights


class Score(Frozen):
    """A score with its interval of 95 %, and how far it is from the baseline's (None: it is the baseline)."""

    score: float
    low: float
    high: float
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None


class TranslationScore(Frozen):
    """BLEU and chrF (0 to 100) of one variant with a number of beams."""

    name: str
    beams: int
    bleu: Score
    chrf: Score


class Translation(Frozen):
    """Translation quality of every variant; signatures: how sacrebleu counted."""

    sentences: int
    baseline: str
    signatures: dict[str, str]
    scores: tuple[TranslationScore, ...]


class EvalReport(Frozen):
    """`export_logit_error`: relative error of the exported checkpoint's logits against the dequantized weights'.

    tokens: that perplexity was measured on; images: that a classifier was measured on.
    """

    schema_version: int = SCHEMA_VERSION
    rows: tuple[EvalRow, ...]
    tokens: int
    images: int = 0
    export_logit_error: float
    translation: Translation | None = None  # where the recipe asks for it

    def row(self, name: str) -> EvalRow | None:
        return next((row for row in self.rows if row.name == name), None)


def write_eval(path: Path, report: EvalReport) -> None:
    write_json(path, report.model_dump(mode="json"))


def read_eval(path: Path) -> EvalReport:
    return read_model(path, EvalReport, SCHEMA_VERSION, remedy=REMEDY)
