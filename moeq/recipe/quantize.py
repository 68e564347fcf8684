"""The sections `quantize` and `export`: what is made of an assignment, and the formats that it is written in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, create_model, model_serializer, model_validator

from moeq.recipe.choices import Format, Native
from moeq.recipe.types import Bytes, Section, repeats
from moeq.registry import EXPORTERS
from moeq.runtimes import NATIVE


class RefineSection(Section):
    """Codes, scales and zero points of a layer's experts learned together, from the replicas that were chosen; of
    trellis codes the scales alone."""

    iterations: int = Field(200, ge=1, description="steps of training a layer")
    working_memory: Bytes | None = Field(
        None, description="bound for the tensors of the experts trained at once; none: 2 GiB, or 40 % of a GPU's free"
    )


class TuneSection(Section):
    """Scales of all placed experts trained at once, codes fixed, on what the whole model answers: the divergence of its
    next tokens from the original's on calibration text. Sequences that losses held out decide when it is best; where
    none is better than the start beyond chance, the start is kept. A model that does not fit in memory, and is
    streamed, is trained layer by layer instead, on what the layer's experts add up to, as quantize.refine does."""

    steps: int = Field(96, ge=1, description="steps of training")
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        0.005, description="most that a step changes a scale by, as a share of it"
    )
    batch_size: int = Field(8, ge=1, description="sequences of a step")
    sequences: int | None = Field(
        None, ge=2, description="calibration sequences that it has, more are better; none: those of corpus.sequences"
    )
    working_memory: Bytes | None = Field(
        None, description="bound for activations and logits at once; none: 2 GiB, or 40 % of a GPU's free"
    )


class QuantizeSection(Section):
    refine: RefineSection | None = Field(
        None, description="train the placed experts of every layer together; {}: with 200 iterations; none: as stored"
    )
    tune: TuneSection | None = Field(
        None, description="train the scales of all placed experts on the whole model's output; {}: in 96 steps"
    )
    replicas: Literal["placed", "all"] = Field(
        "placed", description="all: also every other stored width of every expert, for runtimes that place by context"
    )

    @property
    def trains(self) -> bool:
        """Whether placed experts are other ones than those of the store."""
        return self.refine is not None or self.tune is not None


class _ExportSection(Section):
    format: Native = Field(NATIVE, description="what is always written")
    formats: list[Format] = Field([], description="runtimes that it is written for, too, each as checkpoint-RUNTIME")
    onnx: bool = Field(False, description="also the integer forward (reparam.integer) as onnx/model.onnx")
    widen: bool = Field(False, description="codes that a runtime cannot read go into wider ones, same values")
    verify: bool = Field(True, description="load what was written in a fresh process and compare it with its weights")
    max_shard: Bytes = Field(5 * 10**9, description="largest size of a shard of non-expert weights")

    @model_validator(mode="after")
    def _check_formats(self) -> _ExportSection:
        if repeats(self.formats):
            raise ValueError("formats must name none twice")
        return self

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
