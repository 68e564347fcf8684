"""The section `estimate`: hardware, the grid of lengths, and figures that publications state."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from moeq.recipe.types import Section, repeats

LARGEST_LENGTH, LARGEST_BATCH, MOST_POINTS = 4_194_304, 4096, 1000  # of the grid: within memory and time
Length = Annotated[int, Field(ge=1, le=LARGEST_LENGTH)]


class GridSection(Section):
    inputs: list[Length] = Field([128, 512, 2048], min_length=1, description="lengths of the prompt")
    outputs: list[Length] = Field([512, 2048], min_length=1, description="tokens generated")
    batches: list[Annotated[int, Field(ge=1, le=LARGEST_BATCH)]] = Field(
        [1], min_length=1, description="sequences at once"
    )

    @model_validator(mode="after")
    def _check(self) -> GridSection:
        points = len(self.inputs) * len(self.outputs) * len(self.batches)
        if points > MOST_POINTS:
            raise ValueError(f"{points} points, give at most {MOST_POINTS}")
        return self


class StatedSection(Section):
    """What a publication states of a case: a range over the grid, or one number (low and high alike).

    figure: decode and end_to_end are speed-ups over the baseline `over`; ndp is how much faster the near-data side is
    than with experts in FP16. only_largest: the publication gives the best figure of its grid ("up to").
    """

    figure: Literal["decode", "end_to_end", "ndp"] = Field(description="what is stated")
    over: str | None = Field(None, description="baseline, as the estimate names it: monde_bwrule, monde_opt, hobbit")
    low: float = Field(gt=0, description="least that is stated")
    high: float = Field(gt=0, description="most that is stated")
    only_largest: bool = Field(False, description="whether it is the best of the grid")
    source: str = Field(min_length=1, description="where it is stated")

    @model_validator(mode="after")
    def _check(self) -> StatedSection:
        if self.low > self.high:
            raise ValueError(f"low is {self.low:g}, above high ({self.high:g})")
        if (self.figure == "ndp") != (self.over is None):
            raise ValueError("decode and end_to_end need over, ndp has none")
        return self


class SizesSection(Section):
    """Sizes of a model that has no name here; keys and values are those of grouped queries in every MoE layer."""

    num_layers: Annotated[int, Field(ge=1, description="MoE layers")]
    hidden_size: Annotated[int, Field(ge=1, description="of the residual stream")]
    intermediate_size: Annotated[int, Field(ge=1, description="of one expert")]
    num_experts: Annotated[int, Field(ge=1, description="experts a layer")]
    top_k: Annotated[int, Field(ge=1, description="experts that a token takes")]
    num_attention_heads: Annotated[int, Field(ge=1, description="query heads")]
    num_key_value_heads: Annotated[int, Field(ge=1, description="heads of keys and values")]
    head_dim: Annotated[int, Field(ge=1, description="size of a head")]
    non_expert_parameters: Annotated[int, Field(ge=0, description="weights of all but the routed experts")]
    matrices_per_expert: int = Field(3, ge=1, description="3 with a gate, 2 without")


class CaseSection(Section):
    """One model with uniform widths: `gpu_experts` of a layer in FP16 on the GPU, the others at `bits`."""

    name: str = Field(min_length=1, max_length=80, description="of the row")
    geometry: str | SizesSection = Field(description="name of a known geometry, such as mixtral-8x7b, or its sizes")
    bits: float = Field(ge=1, le=16, description="width of the experts off the GPU")
    gpu_experts: int = Field(ge=0, description="FP16 experts a layer on the GPU")
    stated: list[StatedSection] = Field([], description="figures that a publication gives of it")


class FiguresSection(Section):
    """Cases that `moeq estimate RECIPE` estimates from sizes alone, beside what a publication states of them.

    miss_beyond: share of a stated figure by which an estimate may differ before it is named as a miss.
    """

    group_size: int = Field(128, ge=1, description="weights that share a scale")
    policies: list[str] | None = Field(
        None, description="policies beside the context-aware placement and both MoNDE baselines; none: all that can run"
    )
    miss_beyond: float = Field(0.05, gt=0, lt=1, description="share of a stated figure, as said above")
    cases: list[CaseSection] = Field(min_length=1, description="what is estimated")

    @model_validator(mode="after")
    def _check(self) -> FiguresSection:
        if repeats([case.name for case in self.cases]):
            raise ValueError("every case needs a name of its own")
        return self


class EstimateSection(Section):
    hardware: str = Field("paper-ctxmoe", description="a preset's name or the path of a hardware YAML file")
    geometry: str | list[str] = Field(
        "model",
        description="model: this checkpoint's own; or mixtral-8x7b, mixtral-8x22b; of several, the first that has as "
        "many experts a layer as the model",
    )
    popularity: Literal["uniform", "profile", "trace"] = Field(
        "uniform",
        description="which experts are chosen: all alike; as often as calibration counted them; or step by step as "
        "profile.trace recorded it (needs geometry: model)",
    )
    context: int = Field(1024, ge=1, description="tokens of keys and values at a decode step")
    grid: GridSection = GridSection()
    figures: FiguresSection | None = Field(
        None, description="cases without a checkpoint, estimated by `moeq estimate RECIPE` alone"
    )
