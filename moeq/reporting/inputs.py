"""What the report is made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moeq.analysis.routing import RoutingAnalysis
from moeq.artifacts.assignment import Assignment
from moeq.artifacts.bench import Bench
from moeq.artifacts.evaluation import EvalReport, EvalRow
from moeq.artifacts.gates import Gate
from moeq.artifacts.losses import LossTable
from moeq.artifacts.low_precision import LowPrecisionReport
from moeq.artifacts.manifest import PlacementManifest
from moeq.artifacts.non_experts import OtherTable
from moeq.artifacts.profile import Coverage, ExpertProfile
from moeq.artifacts.sensitivities import SensitivityTable
from moeq.artifacts.tuned import Tuned
from moeq.assigners.report import Point
from moeq.estimator.geometry import is_toy
from moeq.estimator.result import Estimate
from moeq.integers.artifacts.integer_report import IntegerReport
from moeq.integers.artifacts.reparam import ReparamReport


@dataclass(frozen=True, kw_only=True)
class Loads:
    """A runtime, and why it does not load the checkpoint as it is; None: it does."""

    name: str
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class TradeOff:
    """An assignment of the run's measurements: its size, its objective, and decode tokens a second of one sequence by
    the estimator on some hardware under a policy. command: what makes it; None: it is the run's own."""

    bits_per_weight: float
    expert_bytes: int
    objective: float
    tokens_per_second: float
    hardware: str
    policy: str
    command: str | None


@dataclass(frozen=True, kw_only=True)
class SpeedInputs:
    """The estimate of every assignment, the exported one first.

    decode_speedups: {assignment: {baseline: speed-up of the decode step at the grid's first batch}}.
    """

    geometry: Mapping[str, Any]
    geometry_is_the_models: bool
    hardware: str
    popularity: str
    estimates: tuple[Estimate, ...]
    decode_speedups: Mapping[str, Mapping[str, float]]

    @property
    def tells(self) -> bool:
        """Whether speed-ups say anything: not of a model so small that its own sizes leave nothing to wait for."""
        return not (self.geometry_is_the_models and is_toy(self.geometry))


@dataclass(frozen=True, kw_only=True)
class Refined:
    """What quantize.refine did: experts that training changed, of how many below 16 bits, and the steps a layer."""

    changed: int
    quantized: int
    iterations: int


@dataclass(frozen=True, kw_only=True)
class ReportInputs:
    """The artifacts of one run. recipe_text: the recipe as it was run; digests: {stage: digest of what it wrote}.

    refined: None where quantize.refine was off; weights: how many the whole checkpoint has; loads: every runtime that
    moeq writes for; domains, labels: what people read for a domain or a row, where it is not its name.
    """

    profile: ExpertProfile
    coverage: Coverage
    losses: LossTable
    sensitivities: SensitivityTable
    weights: int
    assignment: Assignment
    evaluation: EvalReport
    manifest: PlacementManifest
    speed: SpeedInputs
    recipe_text: str
    digests: Mapping[str, str]
    refined: Refined | None = None
    tuned: Tuned | None = None  # what quantize.tune did
    others: OtherTable | None = None  # modules outside of the experts that are packed too
    routing: RoutingAnalysis | None = None  # of the trace, where one was recorded
    low_precision: LowPrecisionReport | None = None  # where the recipe asks for it
    reparam: ReparamReport | None = None  # where norms were folded first
    loads: Sequence[Loads] = ()
    gates: tuple[Gate, ...] = ()  # of the recipe, with what the run came to
    edited: bool = False  # the assignment, by hand
    mixed: Mapping[str, str] = field(default_factory=dict)  # {stage: one before that has another result since}
    domains: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    bench: Bench | None = None  # of this checkpoint, where one lies in the run
    left: str | None = None  # of the model, in no checkpoint
    around: Sequence[Point] = ()  # what the assignment stands among, by what losses predict
    trade_offs: Sequence[TradeOff] = ()  # with their speed, too; the fastest first
    integer: IntegerReport | None = None  # where the folded model was made a forward in whole numbers

    def label(self, name: str) -> str:
        """What people read for a row."""
        return self.labels.get(name, name)

    @property
    def original(self) -> EvalRow | None:
        return next((row for row in self.evaluation.rows if row.assignment is None), None)

    @property
    def exported(self) -> EvalRow | None:
        return next((row for row in self.evaluation.rows if row.exported), None)

    @property
    def classifies(self) -> bool:
        """Whether the model is an image classifier, measured by its answers and its logits."""
        return any(row.logit_error is not None for row in self.evaluation.rows)

    @property
    def own_estimate(self) -> Estimate | None:
        """The estimate of the exported assignment."""
        name = self.assignment.name
        return next((estimate for estimate in self.speed.estimates if estimate.placement == name), None)
