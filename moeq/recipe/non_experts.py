"""The section `others`: widths of what is not a routed expert."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from moeq.recipe.choices import OtherBits
from moeq.recipe.types import Section, check_group_size
from moeq.registry import QUANTIZERS

if TYPE_CHECKING:  # mypy takes no Literal of a table
    Method = str
else:
    Method = Literal[tuple(quantizer.name for quantizer in QUANTIZERS if quantizer.linear is not None)]


class OthersSection(Section):
    """Widths of what is not a routed expert, by class of module; none: full precision. Routers and norms keep theirs.

    attention: token mixers of decoder layers (attention, linear attention, Mamba); dense: feed-forward parts of layers
    without experts; shared: shared experts, and what else every token passes in layers with experts; embeddings: the
    table of input tokens; head: the projection to logits. Where embeddings and head are one tensor, both have the same.
    """

    attention: OtherBits | None = Field(None, description="width of token mixers")
    dense: OtherBits | None = Field(None, description="width of feed-forward parts of layers without experts")
    shared: OtherBits | None = Field(None, description="width of shared experts")
    embeddings: OtherBits | None = Field(None, description="width of the table of input tokens")
    head: OtherBits | None = Field(None, description="width of the projection to logits")
    method: Method = Field("gptq", description="embeddings are always rounded row by row (rtn)")
    group_size: int | None = Field(None, ge=-1, description="none: losses.group_size")
    symmetric: bool = Field(False, description="grids without zero points")
    damping: float | None = Field(None, gt=0, le=1, description="none: losses.damping")

    @model_validator(mode="after")
    def _check(self) -> OthersSection:
        check_group_size(self.group_size)
        return self

    def widths(self) -> dict[str, int]:
        """{class: bits} of the classes that are quantized."""
        widths_by_class = {name: getattr(self, name) for name in ("attention", "dense", "shared", "embeddings", "head")}
        return {name: bits for name, bits in widths_by_class.items() if bits is not None}
