"""The section `losses`: how experts are quantized, and how much of what that costs is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, create_model, model_validator

from moeq.recipe.choices import Bits, Quantizer
from moeq.recipe.types import Bytes, Section, check_group_size, check_named
from moeq.registry import QUANTIZERS
from moeq_kernels.widths import Encoding


class LayerEffectsSection(Section):
    """What quantizing one layer's experts alone does to the model's output, on held-out calibration sequences."""

    bits: Bits = Field(2, description="width that is measured")
    sequences: int | None = Field(
        None,
        ge=1,
        description="held-out sequences it is measured on; none: 16, fewer where as many layers would take longer than "
        "a pass over the calibration text",
    )


class ExpertEffectsSection(Section):
    """What quantizing one expert alone does to the model's output, on held-out calibration sequences.

    Experts are measured one by one, those from which most is expected first, until the time or the number is reached;
    the others are filled in by a fit. A later run with the same inputs keeps what was measured, and goes on where more
    is allowed.
    """

    bits: Bits = Field(2, description="width that is measured")
    sequences: int = Field(16, ge=1, description="held-out sequences it is measured on")
    seconds: float | None = Field(
        None, gt=0, description="time to spend, over all runs of the same inputs; none: no limit"
    )
    experts: int | None = Field(None, ge=1, description="most experts to measure: a limit without a clock; none: all")


class _LossesSection(Section):
    bits: list[Bits] = Field([1, 2, 3, 4, 8], description="widths of the replicas")
    methods: list[Quantizer] = Field(["gptq", "rtn"], description="how replicas are made")
    group_size: int = Field(128, ge=-1, description="inputs that share a scale, 8 or more; -1: whole rows")
    symmetric: bool = Field(False, description="grids without zero points")
    symmetric_range: Literal["even", "narrow", "full"] = Field(
        "even",
        description="what scale a largest magnitude m has on a symmetric grid of 8 (4) bits. even: m/127.5 (m/7.5); "
        "narrow: m/127 (m/7), codes -127 to 127; full: m/128 (m/8), codes -128 to 127",
    )
    nested: bool = Field(
        False, description="codes of 2 and 3 bits are the leading bits of the 4-bit ones, chosen for all three at once"
    )
    clip: Literal["minmax", "mse"] = Field(
        "mse",
        description="ends of the grids: least and largest weight, or the part of that range with the least error of "
        "rounding (gptq: weighted by what an input counts once later ones have made up for it)",
    )
    damping: float = Field(
        0.01, gt=0, le=1, description="gptq: share of the Hessian's mean diagonal that is added to it"
    )
    act_order: bool = Field(False, description="GPTQ: columns by falling activation energy, grids of the groups static")
    hessian_weighting: Literal["none", "squared"] = Field(
        "squared",
        description="what a token counts in gptq's Hessians and signround's error. none: as much as every other; "
        "squared: its squared routing weight, which its error counts in the layer's output",
    )
    borrow_tokens: float = Field(64, ge=0, description="lambda: tokens' worth of the layer's Hessian mixed in")
    min_tokens: int = Field(16, ge=1, description="fewer own tokens than this is reported as a fallback")
    tokens: Literal["routed", "all"] = Field("routed", description="all: every expert calibrates on all tokens")
    heldout_fraction: float = Field(0.25, gt=0, le=0.5, description="share of sequences kept for measuring")
    max_measured_tokens: int = Field(2048, ge=1, description="held-out tokens an expert is measured on")
    per_projection: bool = Field(True, description="also measure each projection alone")
    working_memory: Bytes | None = Field(
        None, description="bound for the tensors of one batch of experts; none: 2 GiB, or 40 % of what a GPU has free"
    )
    layer_effects: LayerEffectsSection | None = Field(
        None, description="also measure what each layer alone does to the output, for assign.layer_weighting"
    )

    expert_effects: ExpertEffectsSection | None = Field(
        None, description="also measure what single experts do to the output, for assign.loss_weighting: effect"
    )

    @model_validator(mode="after")
    def _check_losses(self) -> _LossesSection:
        if self.symmetric_range != "even" and not self.symmetric:
            raise ValueError(f"symmetric_range: {self.symmetric_range} needs symmetric: true")
        others = [method for method in self.methods if QUANTIZERS.get(method).encoding is not None]
        if others and len(self.methods) > 1:
            raise ValueError(f"methods: {others[0]} stores other codes than a grid's, and cannot go with others")
        alone = ["act_order"] * self.act_order + [name for name in self.methods if not QUANTIZERS.get(name).nested]
        if self.nested and alone:
            raise ValueError(f"nested cannot go with {' and '.join(alone)}")
        check_group_size(self.group_size)
        check_named("bits", self.bits)
        check_named("methods", self.methods)
        for refusal in [QUANTIZERS.get(method).refusal(self) for method in self.methods]:
            if refusal is not None:
                raise ValueError(refusal)
        for name, effects in (("layer_effects", self.layer_effects), ("expert_effects", self.expert_effects)):
            if effects is not None and effects.bits not in self.bits:
                raise ValueError(f"{name}: {effects.bits} bits is not among losses.bits")
        return self

    @property
    def encoding(self) -> Encoding:
        """How the codes of replicas stand for values."""
        own = QUANTIZERS.get(self.methods[0]).encoding
        return Encoding.of(self) if own is None else own(self)

    def symmetry(self) -> bool | Literal["narrow", "full"]:
        """The kind of grid, as the numerics take it."""
        return self.symmetric if self.symmetric_range == "even" else self.symmetric_range


if TYPE_CHECKING:  # mypy takes no class of bases that are not known
    LossesSection = _LossesSection
else:
    _OWN = dict.fromkeys(quantizer.settings for quantizer in QUANTIZERS)
    LossesSection = create_model("LossesSection", __base__=(*_OWN, _LossesSection), __module__=__name__)
