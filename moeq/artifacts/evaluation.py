"""EvalReport: perplexity and tasks, or answers to images, of the original and of every assignment (eval.json)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, Field

from moeq.artifacts.assignment import Assignment
from moeq.artifacts.files import write_json
from moeq.artifacts.stage import Frozen, read_model

SCHEMA_VERSION = 1
NAME = "eval.json"
SAMPLES = "samples.json"  # every item of every variant, beside it
REMEDY = "run `moeq eval` again"


class Change(Frozen):
    """A measure minus the first one's on the same items, with its interval of 95 % and two-sided p.

    p is of this difference alone, adjusted_p after Holm over all differences of the measure in one table. Too few
    items have neither interval nor p: fewest_items is then how many it takes. effective_items: how many independent
    ones say as much; degrees_of_freedom: of Student's t. Where resamples are named an earlier version wrote it: by a
    bootstrap of independent items, with a seed.
    """

    difference: float
    low: float | None
    high: float | None
    p: float | None
    adjusted_p: float | None = None
    stderr: float | None
    items: int
    effective_items: float | None = None
    degrees_of_freedom: float | None = None
    fewest_items: int | None = None
    resamples: int | None = None
    seed: int | None = None

    @property
    def shown_p(self) -> float | None:
        """What tables show."""
        return self.p if self.adjusted_p is None else self.adjusted_p


class Divergence(Frozen):
    """How far a variant's distributions of the next token are from those of `base`, over all tokens that are scored.

    kl: of the variant's from the base's, in nats, mean over tokens; change: of the true token's probability, the
    variant's minus the base's, and rms_change the root of its mean square; same_top: share of tokens whose likeliest
    token is the same; top5_overlap: mean share of the base's five likeliest among the variant's. Percentiles by name,
    "0" the least and "100" the largest. Standard errors are over items: windows or documents.

    kept: how many of the vocabulary's logits were kept of every token (None: all), rest: the mean probability of the
    others. `kl` and its percentiles are then the least that they can be, those called `_most` the most.
    """

    base: str
    tokens: int
    kl: float
    kl_stderr: float | None
    kl_percentiles: dict[str, float]
    same_top: float
    same_top_stderr: float | None
    top5_overlap: float
    top5_overlap_stderr: float | None
    change: float
    change_stderr: float | None
    rms_change: float
    rms_change_stderr: float | None
    change_percentiles: dict[str, float]
    kept: int | None = None
    rest: float = 0.0
    kl_most: float | None = None
    kl_percentiles_most: dict[str, float] = Field({})

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Divergence:
        """From a row's figures, beside which its items stand; KeyError or ValueError for what are none."""
        return cls(**{name: row[name] for name in cls.model_fields})


class Flips(Frozen):
    """Answers to the same items that the first was right about and this one is not, and the other way round."""

    items: int
    lost: int
    gained: int


class EvalRow(Frozen):
    """One evaluated variant. `assignment` is None for the original; accuracy is the mean over tasks, with its error.

    changes: {task, average or perplexity: how it differs from the original's}; flips: {task: answers that flipped};
    divergence: of the next token's distributions from the original's (None: the original, no text was measured, or
    written before moeq measured it).

    bits_per_weight: stored for a weight of the routed experts, scales and zero points counted (None: written before
    moeq did); code_bits: of their codes alone, None for the original.

    expert_bytes, other_bytes: of the tensors of the routed experts, and of everything else (None: written before moeq
    counted them); checkpoint_bytes: of all files of the checkpoint, what `assign.size` limits. Of image classifiers
    alone: cross_entropy in nats an image, and logit_error, ||z - z0|| / ||z0|| against the original's logits; `tasks`
    then has the accuracy by domain.

    dynamic: of the exported checkpoint with precision that followed the workload, what happened (`DynamicMoE.summary`);
    such a row has no assignment, and expert_bytes are those of its pools.
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
    flips: dict[str, Flips] = Field({})
    divergence: Divergence | None = None
    dynamic: dict[str, Any] | None = None
    cross_entropy: float | None = None
    logit_error: float | None = None

    def image_figures(self) -> dict[str, float]:
        """What only image classifiers have, by name; nothing of language models."""
        figures = {"cross_entropy": self.cross_entropy, "logit_error": self.logit_error}
        return {name: value for name, value in figures.items() if value is not None}

    def divergence_figures(self) -> dict[str, float | None]:
        """What short tables show of the divergence, by name; nothing of image classifiers."""
        found = self.divergence
        names = () if self.logit_error is not None else ("kl", "kl_stderr", "same_top")
        return {name: None if found is None else getattr(found, name) for name in names}

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
    """A score with its interval of 95 % (None: of too few sentences), and how far it is from the baseline's.

    difference None: it is the baseline.
    """

    score: float
    low: float | None
    high: float | None
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
    """Rows of fixed precision as they were before there was another."""
    written = report.model_dump(mode="json")
    for row in written["rows"]:
        if row["dynamic"] is None:
            del row["dynamic"]
    write_json(path, written)


def read_eval(path: Path) -> EvalReport:
    return read_model(path, EvalReport, SCHEMA_VERSION, remedy=REMEDY)
