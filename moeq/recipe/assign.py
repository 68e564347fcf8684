"""The section `assign`, also the shape of an entry of `eval.compare`: how bits and places are decided."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal

from pydantic import Field, model_validator

from moeq.recipe.choices import ALLOCATORS, AllocatorName, Bits, BitsOrFull, Metric, QuantizerOrBest, Target
from moeq.recipe.types import Bytes, Rational, Section, check_named

DEFAULT_METHOD, DEFAULT_AVERAGE_BITS, DEFAULT_QUANTIZER = "prefix-split", 2, "gptq"
_ALL_BUDGETS = {key for allocator in ALLOCATORS.values() for key in allocator.budgets}


def _either(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


class AssignSection(Section):
    """How bits and places are decided; also the shape of an entry of eval.compare."""

    method: AllocatorName = DEFAULT_METHOD
    bits: BitsOrFull | None = Field(None, description="uniform: the width")
    average_bits: Rational | None = Field(
        None, description="budget: mean width of the experts on NDP; prefix-split: 1 to 4"
    )
    expert_bytes: Bytes | None = Field(
        None, description="budget: bytes of all experts, with scales, zero points and experts in full precision"
    )
    size: Bytes | None = Field(None, description="budget: bytes of the whole checkpoint, every file of its directory")
    widths: list[BitsOrFull] | None = Field(
        None,
        description="frequency, mopeq, optimal: widths to choose from; none: losses.bits (frequency: those around the "
        "budget; mopeq: 2, 3, 4)",
    )
    scope: Literal["layer", "model"] | None = Field(
        None, description="what a budget or a clustering spans; none: model for optimal, layer for frequency and mopeq"
    )
    granularity: Literal["expert", "projection", "layer"] | None = Field(
        None,
        description="optimal: what has one width; projection: every matrix of an expert (needs losses.per_projection); "
        "none: expert, or what the target takes",
    )
    ndp_latency_ms: float | None = Field(
        None,
        gt=0,
        description="optimal: a limit beside the budget, on the expected milliseconds a decoded token that the "
        "near-data side spends on experts",
    )
    hardware: str | None = Field(
        None,
        description="a preset's name or the path of a hardware YAML file, whose NDP latency is shown; none: "
        "estimate.hardware where ndp_latency_ms is set",
    )
    metric: Metric | None = Field(None, description="mopeq; none: hybrid")
    trace: Literal["closed", "rademacher", "gaussian"] | None = Field(
        None, description="mopeq: the Hessian trace in closed form (none), or sampled as paper 003 does"
    )
    trace_samples: int | None = Field(None, ge=1, description="mopeq: samples of a matrix; none: 32")
    hot_bits: BitsOrFull | None = Field(None, description="budget: width of hot experts; none: 4")
    cold_bits: Bits | None = Field(None, description="budget: width of cold experts; none: 2")
    transient_bytes: Bytes | None = Field(None, description="budget: kept free for experts that change their width")
    ema: float | None = Field(None, ge=0, lt=1, description="budget: what warm-up hotness keeps a sequence; none: 0.9")
    warmup_sequences: int | None = Field(None, ge=1, description="budget: sequences of the warm-up; none: all")
    target: Target | None = Field(None, description="runtime that must be able to load the assignment")
    gpu_experts: int = Field(0, ge=0, description="K: experts a layer kept on the GPU in full precision")
    alpha: float = Field(0.5, ge=0, le=1, description="importance = alpha*P~ + (1-alpha)*W~")
    selector: bool = Field(True, description="false: paper 000's ablation without the bit-width selector")
    loss_weighting: Literal["mass", "squared", "effect", "none"] = Field(
        "mass",
        description="mass: losses times the expert's share of the routing weight; squared: errors times squared "
        "routing weights; effect: what the expert alone does to the output (losses.expert_effects); none: losses as "
        "paper 000 prints them",
    )
    layer_weighting: Literal["measured"] | None = Field(
        None, description="measured: layers count by losses.layer_effects; none: all alike"
    )
    normalization: Literal["sum", "max"] = Field("sum", description="what ~ divides by")
    statistics: Literal["all", "prefill", "decode"] = Field("all", description="which positions' routing counts")
    quantizer: QuantizerOrBest = Field(
        DEFAULT_QUANTIZER,
        description="whose losses decide and whose replicas are used; best: of each expert and width, the method of "
        "losses.methods with the lowest held-out loss",
    )

    @model_validator(mode="before")
    @classmethod
    def _default_average(cls, data: Any) -> Any:
        if (
            not isinstance(data, dict)
            or data.get("method", DEFAULT_METHOD) != DEFAULT_METHOD
            or _ALL_BUDGETS & set(data)
        ):
            return data
        return {"average_bits": DEFAULT_AVERAGE_BITS} | data

    @model_validator(mode="after")
    def _check(self) -> AssignSection:
        budgets = ALLOCATORS[self.method].budgets
        for name in type(self).model_fields:
            methods = [method for method, one in ALLOCATORS.items() if name in (*one.budgets, *one.keys)]
            if methods and self.method not in methods and getattr(self, name) is not None:
                takes = f"; {self.method} takes {_either(budgets)}" if budgets and name in _ALL_BUDGETS else ""
                raise ValueError(f"{name} belongs to {_either(methods)}{takes}")
        given = [name for name in budgets if getattr(self, name) is not None]
        if budgets and not given:
            raise ValueError(f"method {self.method} needs {_either(budgets)}")
        if len(given) > 1:
            raise ValueError(f"one budget is enough: give {_either(given)}")
        if self.widths is not None:
            check_named("widths", self.widths)
        if self.method == "budget" and (self.hot_bits or 4) < (self.cold_bits or 2):
            raise ValueError("hot_bits must not be below cold_bits")
        if self.loss_weighting == "effect" and self.layer_weighting is not None:
            raise ValueError("loss_weighting effect compares layers by itself: it goes without layer_weighting")
        if self.ndp_latency_ms is not None and self.scope == "layer":
            raise ValueError("ndp_latency_ms is one limit for all layers: it needs scope model")
        return self._check_average()

    def _check_average(self) -> AssignSection:
        average = None if self.average_bits is None else Fraction(self.average_bits)
        low, high = (1, 4) if self.method == "prefix-split" else (min(self.widths or [1]), max(self.widths or [16]))
        if average is not None and not low <= average <= high:
            raise ValueError(f"average_bits must lie between {low} and {high}, not {self.average_bits}")
        if not self.selector and (average is None or average not in (1, 2, 3, 4)):
            raise ValueError("selector off gives every NDP expert the same width: average_bits must be 1, 2, 3 or 4")
        return self

    def named_widths(self) -> set[int]:
        """Widths below 16 that the section names."""
        named = {self.bits, *(self.widths or ())}
        if self.method == "budget":
            named |= {self.hot_bits or 4, self.cold_bits or 2}
        if self.method == "mopeq" and self.widths is None:
            named |= {2, 3, 4}
        return {width for width in named if width is not None and width < 16}


class NamedAssignSection(AssignSection):
    name: str = Field(min_length=1, max_length=40, pattern=r"^[\w.+-]+$")
