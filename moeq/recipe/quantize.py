"""The sections `quantize` and `export`: what is made of an assignment, and the formats that it is written in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, create_model, model_serializer

from moeq.recipe.choices import Format, Native
from moeq.recipe.types import Bytes, Section
from moeq.registry import EXPORTERS
from moeq.runtimes import NATIVE


class RefineSection(Section):
    """Codes, scales and zero points of a layer's experts learned together, from the replicas that were chosen."""

    iterations: int = Field(200, ge=1, description="steps of training a layer")
    working_memory: Bytes | None = Field(
        None, description="bound for the tensors of the experts trained at once; none: 2 GiB, or 40 % of a GPU's free"
    )


class QuantizeSection(Section):
    refine: RefineSection | None = Field(
        None, description="train the placed experts of every layer together; {}: with 200 iterations; none: as stored"
    )
    replicas: Literal["placed", "all"] = Field(
        "placed", description="all: also every other stored width of every expert, for runtimes that place by context"
    )


class _ExportSection(Section):
    format: Native = Field(NATIVE, description="what is always written")
    formats: list[Format] = Field([], description="runtimes that it is written for, too, each as checkpoint-RUNTIME")
    widen: bool = Field(False, description="codes that a runtime cannot read go into wider ones, same values")
    verify: bool = Field(True, description="load what was written in a fresh process and compare it with its weights")
    max_shard: Bytes = Field(5 * 10**9, description="largest size of a shard of non-expert weights")

    @model_serializer(mode="wrap")
    def _given(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without keys of formats' own that are not given: a digest then does not hang on which packages there are."""
        kept = {*_ExportSection.model_fields, *self.model_fields_set}
        return {key: value for key, value in handler(self).items() if key in kept}


if TYPE_CHECKING:  # mypy takes no class of bases that are not known
    ExportSection = _ExportSection
else:
    _OWN = dict.fromkeys(exporter.settings for exporter in EXPORTERS if exporter.settings is not None)
    ExportSection = create_model("ExportSection", __base__=(*_OWN, _ExportSection), __module__=__name__)
