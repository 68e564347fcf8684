"""How precision follows the workload (paper 001, DynaExq), as `eval.dynamic` and `--dynamic` take it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from moeq.recipe.types import Bytes, Section
from moeq_kernels.widths import WIDTHS

Count = Annotated[int, Field(le=2**31 - 1)]
Width = Annotated[int, Field(ge=min(WIDTHS), le=max(WIDTHS))]


class DynamicSection(Section):
    """Paper 001 (DynaExq): a budget, two widths, and how often and how surely experts change between them."""

    memory: Bytes | None = Field(
        None,
        description="all that the model needs of the device; none: what the checkpoint's own assignment takes for its "
        "experts, and what else is needed",
    )
    high: Width | None = Field(None, description="code bits, 16: as in the checkpoint; none: of the first pair there")
    low: Width | None = Field(None, description="the same; pairs are 4 and 2, 16 and 4, 8 and 4, then any")
    host: Bytes = Field(1 << 30, description="of copies that are kept beside the device")
    period: Count = Field(128, ge=1, description="forward passes between decisions")
    ema: float = Field(0.99, ge=0, lt=1, description="what a pass leaves of an expert's hotness")
    threshold: float = Field(
        0.5,
        ge=0,
        allow_inf_nan=False,
        description="hotness that high precision takes, as a share of its last expert's when it began",
    )
    certainty: float = Field(
        4.0,
        ge=0,
        allow_inf_nan=False,
        description="standard deviations by which an expert must be hotter than the one whose place it takes",
    )
    transient: Count = Field(4, ge=1, description="experts that may be in transit at once")
    tokens: Count | None = Field(
        None,
        ge=0,
        description="whose keys and values the budget has room for, of all sequences; none: as many as a command runs",
    )
    copies: Literal["beside", "between"] | None = Field(
        None,
        description="made in a thread beside forward passes, or between them, so that the same tokens give the same "
        "decisions; none: as the command has it, between in an evaluation",
    )
    busy: float = Field(0.25, gt=0, le=1, description="share of a processor's time that copies beside may take")
    planes: bool = Field(
        True, description="where low precision is the leading bits of high precision, only the others are brought"
    )
    prefetch: Count = Field(
        4,
        ge=0,
        description="versions read ahead of a decision, at most, by which experts follow which in the profile's trace",
    )

    @model_validator(mode="after")
    def _check(self) -> DynamicSection:
        for name, bits in (("high", self.high), ("low", self.low)):
            if bits is not None and bits not in WIDTHS:
                raise ValueError(f"{name} must be one of {', '.join(map(str, WIDTHS))}, not {bits}")
        if self.high is not None and self.low is not None and self.low >= self.high:
            raise ValueError(f"low must be below high: low is {self.low}, high {self.high}")
        return self
