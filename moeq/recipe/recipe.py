"""A whole recipe: its sections, what they ask of one another, and their JSON Schema."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, Literal

from pydantic import Field, model_validator

from moeq.recipe.assign import DEFAULT_QUANTIZER, AssignSection, with_budget_of
from moeq.recipe.choices import BEST
from moeq.recipe.corpus import CorpusSection, ProfileSection
from moeq.recipe.estimate import EstimateSection
from moeq.recipe.eval import EvalSection, compared_by_default
from moeq.recipe.gates import GatesSection
from moeq.recipe.losses import LossesSection
from moeq.recipe.non_experts import OthersSection
from moeq.recipe.quantize import ExportSection, QuantizeSection
from moeq.recipe.reparam import ReparamSection
from moeq.recipe.types import Section, repeats
from moeq.registry import QUANTIZERS

MOST_THREADS = 4096
DIALECT = "https://json-schema.org/draft/2020-12/schema"


class Recipe(Section):
    """A whole run."""

    recipe_version: Literal[1] = Field(1, description="of this reference")
    name: str = Field(
        "run", max_length=80, pattern=r"^\w[\w.+-]*$", description="what the run and its assignment are called"
    )
    model: str | None = Field(
        None, description="directory, hub id, bundled:tiny-mixtral or bundled:tiny-moe-vit; --model overrides it"
    )
    revision: str | None = Field(None, description="hub revision: branch, tag or commit")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="type that the model computes in; auto: as the checkpoint's, but float32 for float16 on a CPU",
    )
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="auto, cpu, cuda or cuda:N; auto: a GPU where there is one",
    )
    stream: Literal["auto", "always", "never"] = Field(
        "auto", description="read decoder layers from disk as they run; auto: when the model is over a third of memory"
    )
    threads: int | None = Field(None, ge=1, le=MOST_THREADS, description="CPU threads; none: all cores")
    workers: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="processes that quantize experts side by side in losses, with `threads` threads each (without: 1), "
        "while the model runs on, and that share the text of profile and of effects and the variants of eval; "
        "on GPUs each has one to itself; none: one a GPU where there are several and `device` names none of them, else "
        "the run's own process alone",
    )
    engine: str = Field(
        "processes",
        pattern=r"^(processes|ray(:\S+)?)$",
        description="where workers are: processes of this machine; ray: a local Ray cluster, or that of $RAY_ADDRESS; "
        "ray:ADDRESS: the cluster there",
    )
    seed: int = Field(0, ge=0, le=2**63 - 1, description="decides everything that is drawn")
    trust_remote_code: bool = Field(False, description="run Python code that the checkpoint brings along")
    store: str | None = Field(
        None,
        min_length=1,
        description="folder of the replica store, which runs may share; none: $MOEQ_STORE, or the run's own",
    )
    mirror: str | None = Field(
        None,
        min_length=1,
        description="address in an object store (s3://BUCKET/FOLDER) that has a copy of the run directory: what it has "
        "is brought at the start, what is made is sent, replicas while they are made",
    )
    corpus: CorpusSection = CorpusSection()
    reparam: ReparamSection | None = Field(
        None, description="fold norms into linears first and go on with the folded model; {}: as defaults have it"
    )
    profile: ProfileSection = ProfileSection()
    losses: LossesSection = LossesSection()
    others: OthersSection = OthersSection()
    assign: AssignSection = Field(default_factory=AssignSection)
    quantize: QuantizeSection = QuantizeSection()
    export: ExportSection = ExportSection()
    eval: EvalSection = Field(default_factory=EvalSection)
    estimate: EstimateSection = EstimateSection()
    gates: GatesSection = GatesSection()

    @model_validator(mode="before")
    @classmethod
    def _hand_down(cls, given: Any) -> Any:
        """What an assignment has that names none: the only method of losses.methods and, compared, assign's budget."""
        if not isinstance(given, dict):
            return given
        losses, assign, evaluation = (given.get(key, {}) for key in ("losses", "assign", "eval"))
        methods = losses.get("methods") if isinstance(losses, dict) else None
        only, own = {}, dict(given)
        if isinstance(methods, list) and len(methods) == 1 and methods != [DEFAULT_QUANTIZER]:
            only = {"quantizer": methods[0]}
        if isinstance(assign, dict) and only:
            own["assign"] = only | assign
        if isinstance(evaluation, dict) and (only or "compare" in evaluation):
            compared = evaluation.get("compare", compared_by_default())
            budget = assign if isinstance(assign, dict) else {}
            if isinstance(compared, list):
                compared = [only | with_budget_of(budget, one) if isinstance(one, dict) else one for one in compared]
            own["eval"] = evaluation | {"compare": compared}
        return own

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        every = [("assign", self.assign), *((f"eval.compare {c.name}", c) for c in self.eval.compare)]
        for where, section in every:
            self._check_assign(where, section)
        if self.estimate.popularity == "trace" and not (self.profile.trace and self.estimate.geometry == "model"):
            raise ValueError("estimate.popularity trace needs profile.trace: true and estimate.geometry: model")
        for index, sweep in enumerate(self.eval.low_precision):
            where = f"eval.low_precision {index}"
            if self.eval.perplexity is None:
                raise ValueError(f"{where}: it needs eval.perplexity")
            self._check_widths(where, {sweep.bits, sweep.high_bits} - {16})
            self._check_quantizer(where, sweep.quantizer)
        self._check_dynamic()
        sized = [where for where, section in every if section.size is not None]
        if sized and self.quantize.replicas == "all":
            what = f"{sized[0]}: size is that of the checkpoint, which has every width with quantize.replicas all"
            raise ValueError(f"{what}; use expert_bytes")
        fixed = [method for method in self.losses.methods if not QUANTIZERS.get(method).trained]
        if fixed and (self.quantize.refine or self.quantize.tune):
            what = f"{fixed[0]} cannot go with quantize.refine and quantize.tune, which train scales of 16 bits"
            raise ValueError(f"losses.methods: {what}; set them to null")
        if self.quantize.refine is not None:
            self._check_refine()
        if self.quantize.tune is not None and self.losses.nested:
            raise ValueError("losses.nested cannot go with quantize.tune, which changes the scales of a width alone")
        self._check_gates()
        if self.export.onnx and (self.reparam is None or self.reparam.integer is None):
            raise ValueError("export.onnx needs reparam.integer, the integer forward that it is of")
        if repeats([self.name, "original", *(c.name for c in self.eval.compare)]):
            raise ValueError("eval.compare: every assignment needs a name of its own (not original, not the recipe's)")
        return self

    def _check_assign(self, where: str, section: AssignSection) -> None:
        """What an assignment, the recipe's own or one that is compared, asks of losses."""
        self._check_quantizer(where, section.quantizer)
        self._check_widths(where, section.named() - {16})
        if section.layer_weighting is not None and self.losses.layer_effects is None:
            raise ValueError(f"{where}: layer_weighting measured needs losses.layer_effects")
        if section.granularity == "projection" and not self.losses.per_projection:
            raise ValueError(f"{where}: granularity projection needs losses.per_projection: true")
        if section.loss_weighting == "effect" and self.losses.expert_effects is None:
            raise ValueError(f"{where}: loss_weighting effect needs losses.expert_effects")
        missing = sorted(set(section.allocator.widths) - set(self.losses.bits))
        if section.selector and missing:
            raise ValueError(f"{where}: {section.method} needs {missing} in losses.bits too")

    @property
    def drops(self) -> bool:
        """Whether some assignment may drop experts, for which losses measure what each one answers."""
        return any(section.drop for section in (self.assign, *self.eval.compare))

    @property
    def says_what_follows(self) -> bool:
        """Whether the checkpoint says which experts follow which."""
        return self.quantize.replicas == "all" and self.profile.trace

    def _check_dynamic(self) -> None:
        """Precision that follows the workload needs replicas of every expert at both widths."""
        if self.eval.dynamic and self.quantize.replicas != "all":
            raise ValueError("eval.dynamic needs quantize.replicas: all, so that every expert has both widths")
        for index, section in enumerate(self.eval.dynamic):
            widths = {bits for bits in (section.high, section.low) if bits is not None}
            self._check_widths(f"eval.dynamic {index}", widths - {16})

    def _check_quantizer(self, where: str, quantizer: str | None) -> None:
        if quantizer not in (None, BEST, *self.losses.methods):
            raise ValueError(f"{where}: quantizer {quantizer} is not among losses.methods")

    def _check_widths(self, where: str, widths: Set[int]) -> None:
        foreign = sorted(widths - set(self.losses.bits))
        if foreign:
            these = f"{', '.join(map(str, foreign))} bits {'is' if len(foreign) == 1 else 'are'}"
            raise ValueError(f"{where}: {these} not among losses.bits")

    def _check_gates(self) -> None:
        """Gates on what is not measured."""
        if self.eval.perplexity is None and self.gates.of_text():
            raise ValueError(f"gates.{self.gates.of_text()[0]} needs eval.perplexity, which measures it")
        if self.estimate.figures is not None and self.gates.any():
            raise ValueError("gates are of a run, and estimate.figures has cases without one; leave the gates out")

    def _check_refine(self) -> None:
        if self.losses.nested:
            raise ValueError("losses.nested cannot go with quantize.refine, which trains a width alone")
        if self.losses.symmetric_range != "even":
            raise ValueError("losses.symmetric_range cannot go with quantize.refine, which trains even grids")
        if self.assign.granularity == "projection" and 16 in (self.assign.widths or ()):
            raise ValueError("assign.widths with 16 and granularity projection cannot go with quantize.refine")

    def hardware_of(self, section: AssignSection) -> str | None:
        """Whose NDP latency a section of assignment asks for: its own, else the estimate's; None: nobody's."""
        if section.hardware is None and section.ndp_latency_ms is None and section.speed is None:
            return None
        return section.hardware or self.estimate.hardware


def recipe_schema() -> dict[str, Any]:
    """Every key with its type, default and meaning, by which editors complete; a key that there is not is refused."""
    schema = Recipe.model_json_schema()
    return {"$schema": DIALECT, "title": "moeq recipe"} | {key: schema[key] for key in schema if key != "title"}
