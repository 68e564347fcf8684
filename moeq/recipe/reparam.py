"""The section `reparam`: norms folded into linears and, of vision transformers, the forward in whole numbers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from moeq.recipe.choices import Denominator, Dropping, Ends, Softmax
from moeq.recipe.types import Section


class IntegerSection(Section):
    """The integer forward of a vision transformer (paper 004, 3.2 and 4.3), written beside the folded checkpoint.

    Patch embedding, routers and head keep 8-bit weights where the others have fewer.
    """

    weights: int = Field(8, ge=2, le=8, description="bits, symmetric, a scale an output")
    activations: int = Field(8, ge=3, le=8, description="bits, symmetric, a scale a tensor; reparam.bits")
    attention: int = Field(4, ge=2, le=8, description="bits of the softmax")
    softmax: Softmax = Field(
        "log-sqrt2", description="how its numerators are quantized: to powers of sqrt(2), to powers of 2, or evenly"
    )
    denominator: Denominator = Field(
        "quantized", description="of the softmax: the sum of the quantized numerators, or of the exact ones"
    )
    dropping: Dropping = Field(
        "calibrated", description="the code of a log softmax that counts as 0: as calibration chooses, or as printed"
    )
    range: Ends = Field("minmax", description="of activations in calibration")
    percentile: float = Field(99.99, gt=50, le=100, description="range: percentile of magnitudes")
    calibration: int = Field(32, ge=1, le=4096, description="images that ranges are measured on")
    vectors: int = Field(4, ge=1, le=1024, description="images whose every value is written")
    schemes: bool = Field(True, description="also evaluate the schemes of the paper's Table 1")

    @model_validator(mode="after")
    def _check(self) -> IntegerSection:
        _check_range(self)
        return self


class W8A8Section(Section):
    """The folded language model in int8 as a checkpoint of compressed-tensors, written beside it: weights by output
    channel, inputs of linears by one static scale, behind a folded norm the fold's.

    experts: `int8` quantizes their weights too, and their inputs token by token as they come, which is the only form
    that vLLM takes of experts; `plain` leaves them as the fold has them, which vLLM on CPUs and transformers load.
    """

    experts: Literal["int8", "plain"] = Field("int8", description="int8, inputs token by token; or plain")


class ReparamSection(Section):
    """Norms folded into the linears that they feed, so that one static scale serves what they give (paper 004, 3.1).

    norms: `blocks` are those of the repeated layers; `all` also those around them; or patterns of module paths, such
    as `model.layers.*.input_layernorm`. The model computes the same; the folded checkpoint takes its place in a run.
    """

    bits: int = Field(8, ge=2, le=16, description="width of the activations")
    range: Ends = Field("minmax", description="ends of a channel's range in calibration")
    percentile: float = Field(99.99, gt=50, le=100, description="range: percentile leaves out more than this on a side")
    samples: int = Field(32, ge=1, description="sequences of the calibration corpus, at most corpus.sequences")
    norms: Literal["blocks", "all"] | list[str] = Field("blocks", description="blocks, all, or patterns of paths")
    bias: Literal["auto", False] = Field(
        "auto", description="auto: zero points too, where a norm and all that it feeds have biases; false: only scales"
    )
    dtype: Literal["auto", "float32"] = Field("auto", description="of what is stored; auto: as the checkpoint's")
    compare: bool = Field(True, description="perplexity with activations and weights of 8 bits, with and without it")

    integer: IntegerSection | None = Field(
        None, description="of vision transformers: the forward in whole numbers, with test vectors; {}: as by default"
    )
    w8a8: W8A8Section | None = Field(
        None, description="of language models: also written in int8, for vLLM (compressed-tensors); {}: as by default"
    )

    @model_validator(mode="after")
    def _check(self) -> ReparamSection:
        if self.norms == []:
            raise ValueError("norms must name at least one pattern")
        _check_range(self)
        if self.integer is not None and self.integer.activations != self.bits:
            own = self.integer.activations
            raise ValueError(
                f"integer.activations is {own}, the norms are folded for {self.bits}; set reparam.bits to {own}, too"
            )
        if self.w8a8 is not None and self.bits != 8:
            raise ValueError(f"w8a8 has inputs of 8 bits, the norms are folded for {self.bits}; set reparam.bits to 8")
        return self


def _check_range(section: IntegerSection | ReparamSection) -> None:
    """ValueError for a percentile that nothing is cut at."""
    if section.range == "minmax" and section.percentile != 99.99:
        raise ValueError("percentile needs range: percentile")
