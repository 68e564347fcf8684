"""IntegerReport: how an integer forward does beside the float model and other schemes (integer.json, its schema)."""

from __future__ import annotations

from pathlib import Path

from moeq.artifacts.files import write_json
from moeq.artifacts.stage import Frozen, read_model
from moeq.recipe import Denominator, Softmax

SCHEMA_VERSION = 1
NAME = "integer.json"
SCHEMA = "integer.schema.json"
REMEDY = "run `moeq reparam` again"


class QualityRow(Frozen):
    """accuracy: a share; cross_entropy in nats; logit_error: ||z - z0|| / ||z0|| of the float model's z0."""

    accuracy: float
    cross_entropy: float
    logit_error: float


class SchemeRow(Frozen):
    """A scheme of paper 004's Table 1 with its quality; widths: W/A/Attn in bits."""

    name: str
    widths: str
    accuracy: float
    cross_entropy: float
    logit_error: float


class DroppedRow(Frozen):
    """The first code of a block's log softmax that counts as 0 (null: none), as chosen and in the printed form.

    error, printed_error: relative, of attention's outputs over the calibration images, with the one and the other.
    """

    block: str
    dropped_from: int | None
    error: float
    printed_dropped_from: int | None
    printed_error: float


class IntegerFigures(Frozen):
    """What was measured of one integer forward.

    integer: of the forward in whole numbers; folded: of the float model that it was made of; real_factors: of
    simulation with the real numbers that multipliers and shifts stand for, from which `differing_code_share` of the
    codes differ and the logits by `logit_error_of_factors`. description_error: relative, of the logits of the
    description that was lowered. schemes: None where they were not wanted. dropped: of every block, () where the
    softmax is uniform.
    """

    widths: str
    softmax: Softmax
    denominator: Denominator
    calibration_images: int
    images: int
    description_error: float
    integer: QualityRow
    folded: QualityRow
    real_factors: QualityRow
    equal_to_simulation: bool
    differing_code_share: float
    differing_code_share_first: float
    logit_error_of_factors: float
    saturated_code_share: float
    saturated_residuals: int
    vectors: int
    replay: str
    schemes: tuple[SchemeRow, ...] | None
    dropped: tuple[DroppedRow, ...] = ()


class IntegerReport(Frozen):
    """tasks: {"task-0": figures} and so on, of models with several tasks one each."""

    schema_version: int = SCHEMA_VERSION
    tasks: dict[str, IntegerFigures]


def write_report(directory: Path, report: IntegerReport) -> None:
    """Write integer.json and its schema."""
    write_json(directory / SCHEMA, IntegerReport.model_json_schema())
    write_json(directory / NAME, report.model_dump(mode="json"))


def read_report(directory: Path) -> IntegerReport:
    """Read integer.json; ArtifactError when it is missing or damaged."""
    return read_model(directory / NAME, IntegerReport, SCHEMA_VERSION, remedy=REMEDY)
