"""Recipes: YAML validated by pydantic; an error names the file, the line, the key and the nearest known key."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from moeq.bounded import Yaml, YamlError, parse_yaml, read_yaml, shortened, shown
from moeq.errors import RecipeError, nearest

DEFAULT_AVERAGE_BITS = 2
BEST = "best"  # quantizer: the method with the lowest loss
HUB = "hub:"
MESSAGE_CHARACTERS = 400  # of what a validator says
MOST = 2**63 - 1
BUNDLED = "bundled"  # of texts: the part that moeq brings along
DIGITS = "digits"  # images with labels
LARGEST_LENGTH, LARGEST_BATCH, MOST_POINTS = 4_194_304, 4096, 1000  # of an estimate's grid: within memory and time
HUB_DATASET = re.compile(
    r"hub:(?P<name>[\w][\w.-]*(?:/[\w][\w.-]*)?)(?:@(?P<revision>[^@:\s]+))?"
    r"(?::(?P<config>[^@:\s]*))?(?::(?P<split>[^@:\s]+))?"
)
SIZE = re.compile(r"([0-9.]{1,24})\s{0,8}([A-Za-z]{0,24})")
RATIONAL = re.compile(
    r"\s*[-+]?[0-9_.]{1,24}(?:[eE][-+]?[0-9]{1,2})?(?:/[0-9]{1,24})?\s*"
)  # 1e999999999 is a number, too
_SIZES = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip


def _parse_bytes(value: Any) -> Any:
    match = SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        return value
    unit = match[2].upper()
    if unit not in _SIZES:
        raise ValueError(f"unknown unit {match[2]!r}; use B, KB, MB, GB, TB, KiB, MiB, GiB or TiB")
    return int(float(match[1]) * _SIZES[unit])


def _parse_rational(value: Any) -> str:
    """2.5, "2.5" and "5/2" all become "5/2": exact, since floats err in budgets."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("must be a number such as 2.5 or 5/2")
    try:
        if RATIONAL.fullmatch(str(value)) is None:
            raise ValueError
        return str(Fraction(str(value)))
    except (ValueError, ZeroDivisionError):
        raise ValueError("must be a number such as 2.5 or 5/2") from None


Bytes = Annotated[int, BeforeValidator(_parse_bytes), Field(gt=0, le=MOST)]
Rational = Annotated[str, BeforeValidator(_parse_rational)]


def _fits(value: Any) -> bool:
    """Whether whole numbers, those of lists and mappings included, are of 64 bits."""
    if isinstance(value, list | dict):
        return all(map(_fits, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int) or -MOST <= value <= MOST


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        """Whole numbers that were written as text have no bound of their own."""
        for name in type(self).model_fields:
            if not _fits(getattr(self, name)):
                raise ValueError(f"{name} is larger than 64 bits hold")
        return self


def _check_source(value: Any) -> Any:
    """Hub datasets are written as they should be; what else a source names is seen when it is opened."""
    for name in [value] if isinstance(value, str) else value if isinstance(value, list) else []:
        if isinstance(name, str) and name.startswith(HUB) and HUB_DATASET.fullmatch(name) is None:
            raise ValueError(
                f"{shown(name)} is not a hub dataset; write hub:ORG/NAME, or hub:ORG/NAME@REVISION:CONFIG:SPLIT"
            )
    return value


TextSource = Annotated[str | list[str], BeforeValidator(_check_source)]


class CoverageSection(Section):
    """How far the calibration text grows for the sake of rarely chosen experts."""

    share: float = Field(0.99, gt=0, le=1, description="share of experts that must see profile.min_tokens tokens")
    max_sequences: int = Field(2048, ge=1, le=1_000_000, description="where it ends, covered or not")


class CorpusSection(Section):
    """Calibration text, cut into sequences of tokens.

    source: `bundled`, paths of .txt, .jsonl or .parquet files (also .jsonl.gz and .jsonl.zst), hub datasets, or a list
    of them. A hub dataset is written `hub:ORG/NAME`, followed where needed by `@REVISION` (branch, tag or commit; it is
    pinned to its commit), `:CONFIG` and `:SPLIT`: `hub:allenai/c4@main:en:train`, `hub:ORG/NAME::validation`. Without a
    split, train is taken. Only as many of its files are downloaded, and as many rows read, as `sequences` need. Of
    files with over a MiB of text, places are chosen first, evenly in every domain, and only those are tokenized.

    A row is text (`text_field`), a conversation (`messages_field`: a list of role and content, or of from and value)
    or a prompt and its response; conversations go through the tokenizer's chat template. chat_template: `auto` takes
    the text where a row has it and a conversation otherwise; true takes only conversations; false only text. A row with
    an image (a path relative to its file, or {bytes, path} as the hub writes it into Parquet) goes through the model's
    own processor and is a sequence of its own.

    Image classifiers calibrate on `digits` (scikit-learn's; `bundled` means the same) or on .safetensors files with
    `images`, `labels` and, where only some are to calibrate, row numbers `train` and `test`; where the model has an
    image processor also on .jsonl and .parquet files whose rows hold an image and a label, and on folders of a folder
    of images for each label. `sequences` are images, their length is the model's, what concerns text is not read.

    until_covered: the profile goes on with more sequences, doubling them, until `share` of the experts have seen
    profile.min_tokens calibration tokens; losses then uses the same sequences.
    """

    source: TextSource = Field(
        "bundled", description="bundled, files, hub:ORG/NAME, or a list of them; of images digits or files"
    )
    text_field: str = Field("text", description="field of a row that holds text")
    messages_field: str = Field("messages", description="field of a row that holds a conversation")
    prompt_field: str = Field("prompt", description="field of a row that holds the user's turn")
    response_field: str = Field("response", description="field of a row that holds the answer to the prompt")
    label_field: str = Field("label", description="of image classifiers: field of a row that holds its label")
    image_field: str | None = Field("image", description="field of a row that holds its image or images; none: ignored")
    chat_template: Literal["auto", True, False] = Field("auto", description="whether rows are conversations")
    shuffle: bool = Field(
        False,
        description="draw documents (of large text, places) in an order that the seed decides, not in the files' order",
    )
    sequences: int = Field(128, ge=1, le=1_000_000)
    sequence_length: int = Field(512, ge=2, le=1_000_000)
    batch_size: int = Field(16, ge=1, description="sequences in one forward pass")
    packed: bool = Field(True, description="join documents and cut; false: one document a sequence, padded")
    until_covered: CoverageSection | None = Field(None, description="more sequences until the experts are covered")

    @model_validator(mode="after")
    def _check(self) -> CorpusSection:
        if self.until_covered is not None and self.until_covered.max_sequences < self.sequences:
            raise ValueError(
                f"until_covered.max_sequences is {self.until_covered.max_sequences}, below sequences ({self.sequences})"
            )
        return self


class IntegerSection(Section):
    """The integer forward of a vision transformer (paper 004, 3.2 and 4.3), written beside the folded checkpoint.

    Patch embedding, routers and head keep 8-bit weights where the others have fewer.
    """

    weights: int = Field(8, ge=2, le=8, description="bits, symmetric, a scale an output")
    activations: int = Field(8, ge=3, le=8, description="bits, symmetric, a scale a tensor; reparam.bits")
    attention: int = Field(4, ge=2, le=8, description="bits of the softmax")
    softmax: Literal["log-sqrt2", "log2", "uniform"] = "log-sqrt2"
    denominator: Literal["quantized", "exact"] = Field(
        "quantized", description="of the softmax: the sum of the quantized numerators, or of the exact ones"
    )
    range: Literal["minmax", "percentile"] = Field("minmax", description="of activations in calibration")
    percentile: float = Field(99.99, gt=50, le=100, description="range: percentile of magnitudes")
    calibration: int = Field(32, ge=1, le=4096, description="images that ranges are measured on")
    vectors: int = Field(4, ge=1, le=1024, description="images whose every value is written")
    schemes: bool = Field(True, description="also evaluate the schemes of the paper's Table 1")


class ReparamSection(Section):
    """Norms folded into the linears that they feed, so that one static scale serves what they give (paper 004, 3.1).

    norms: `blocks` are those of the repeated layers; `all` also those around them; or patterns of module paths, such
    as `model.layers.*.input_layernorm`. The model computes the same; the folded checkpoint takes its place in a run.
    """

    bits: int = Field(8, ge=2, le=16, description="width of the activations")
    range: Literal["minmax", "percentile"] = Field("minmax", description="ends of a channel's range in calibration")
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

    @model_validator(mode="after")
    def _check(self) -> ReparamSection:
        if self.norms == []:
            raise ValueError("norms must name at least one pattern")
        if self.range == "minmax" and "percentile" in self.model_fields_set and self.percentile != 99.99:
            raise ValueError("percentile needs range: percentile")
        if self.integer is not None and self.integer.activations != self.bits:
            raise ValueError(f"integer.activations is {self.integer.activations}, the norms are folded for {self.bits}")
        return self


class ProfileSection(Section):
    prefill_fraction: float = Field(
        0.5, gt=0, lt=1, description="share of each sequence counted as prefill; of images all positions are"
    )
    min_tokens: int | None = Field(
        None, ge=1, description="an expert with fewer calibration tokens is not covered; none: losses.min_tokens"
    )
    trace: bool = Field(
        False, description="also record which experts every token chose, in profile/trace.safetensors for the estimate"
    )


class LayerEffectsSection(Section):
    """What quantizing one layer's experts alone does to the model's output, on held-out calibration sequences."""

    bits: Literal[1, 2, 3, 4, 8] = 2
    sequences: int = Field(16, ge=1, description="held-out sequences it is measured on")


class ExpertEffectsSection(Section):
    """What quantizing one expert alone does to the model's output, on held-out calibration sequences.

    Experts are measured one by one, those from which most is expected first, until the time or the number is reached;
    the others are filled in by a fit. A later run with the same inputs keeps what was measured, and goes on where more
    is allowed.
    """

    bits: Literal[1, 2, 3, 4, 8] = 2
    sequences: int = Field(16, ge=1, description="held-out sequences it is measured on")
    seconds: float | None = Field(
        None, gt=0, description="time to spend, over all runs of the same inputs; none: no limit"
    )
    experts: int | None = Field(None, ge=1, description="most experts to measure: a limit without a clock; none: all")


class LossesSection(Section):
    bits: list[Literal[1, 2, 3, 4, 8]] = [1, 2, 3, 4, 8]
    methods: list[Literal["gptq", "rtn", "signround"]] = ["gptq", "rtn"]
    group_size: int = Field(128, ge=-1)
    symmetric: bool = False
    symmetric_range: Literal["even", "narrow", "full"] = Field(
        "even",
        description="what scale a largest magnitude m has on a symmetric grid of 8 (4) bits. even: m/127.5 (m/7.5); "
        "narrow: m/127 (m/7), codes -127 to 127; full: m/128 (m/8), codes -128 to 127",
    )
    nested: bool = Field(
        False, description="codes of 2 and 3 bits are the leading bits of the 4-bit ones, chosen for all three at once"
    )
    clip: Literal["minmax", "mse"] = Field(
        "minmax",
        description="ends of the grids: least and largest weight, or the part of that range with the least error of "
        "rounding (gptq: weighted by what an input counts once later ones have made up for it)",
    )
    damping: float = Field(0.01, gt=0, le=1)
    act_order: bool = Field(False, description="GPTQ: columns by falling activation energy, grids of the groups static")
    signround_iterations: int = Field(200, ge=1, description="signround: steps of training, an expert and width")
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
    def _check(self) -> LossesSection:
        if self.symmetric_range != "even" and not self.symmetric:
            raise ValueError(f"symmetric_range: {self.symmetric_range} needs symmetric: true")
        if self.nested and (self.act_order or "signround" in self.methods):
            raise ValueError("nested cannot go with act_order or signround")
        if self.symmetric_range != "even" and "signround" in self.methods:
            raise ValueError(
                f"symmetric_range: {self.symmetric_range} cannot go with signround, which trains even grids"
            )
        if self.group_size == 0 or (0 < self.group_size < 8):
            raise ValueError("group_size must be -1 (whole rows) or at least 8")
        for name in ("bits", "methods"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ValueError(f"{name} must name at least one value and none twice")
        for name, effects in (("layer_effects", self.layer_effects), ("expert_effects", self.expert_effects)):
            if effects is not None and effects.bits not in self.bits:
                raise ValueError(f"{name}: {effects.bits} bits is not among losses.bits")
        return self

    def symmetry(self) -> bool | Literal["narrow", "full"]:
        """The kind of grid, as the numerics take it."""
        return self.symmetric if self.symmetric_range == "even" else self.symmetric_range


_ALL_BUDGETS = ("bits", "average_bits", "expert_bytes", "size")
BUDGETS: dict[str, tuple[str, ...]] = {  # what says how much a method may spend
    "uniform": ("bits", "expert_bytes", "size"),
    "frequency": ("average_bits", "expert_bytes", "size"),
    "prefix-split": ("average_bits", "expert_bytes", "size"),
    "mopeq": (),
    "optimal": ("average_bits", "expert_bytes", "size"),
    "budget": ("expert_bytes", "size"),
}
_BELONGS: dict[str, tuple[str, ...]] = {  # the methods that read a key
    **{name: tuple(method for method, takes in BUDGETS.items() if name in takes) for name in _ALL_BUDGETS},
    "widths": ("frequency", "mopeq", "optimal"),
    "scope": ("frequency", "mopeq", "optimal"),
    **dict.fromkeys(("granularity", "ndp_latency_ms"), ("optimal",)),
    **dict.fromkeys(("metric", "trace", "trace_samples"), ("mopeq",)),
    **dict.fromkeys(("hot_bits", "cold_bits", "transient_bytes", "ema", "warmup_sequences"), ("budget",)),
}


def _either(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


class AssignSection(Section):
    """How bits and places are decided; also the shape of an entry of eval.compare."""

    method: Literal["uniform", "frequency", "prefix-split", "mopeq", "optimal", "budget"] = "prefix-split"
    bits: Literal[1, 2, 3, 4, 8, 16] | None = Field(None, description="uniform: the width")
    average_bits: Rational | None = Field(
        None, description="budget: mean width of the experts on NDP; prefix-split: 1 to 4"
    )
    expert_bytes: Bytes | None = Field(
        None, description="budget: bytes of all experts, with scales, zero points and experts in full precision"
    )
    size: Bytes | None = Field(None, description="budget: bytes of the whole checkpoint, every file of its directory")
    widths: list[Literal[1, 2, 3, 4, 8, 16]] | None = Field(
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
    metric: Literal["frequency", "hessian", "hybrid"] | None = Field(None, description="mopeq; none: hybrid")
    trace: Literal["closed", "rademacher", "gaussian"] | None = Field(
        None, description="mopeq: the Hessian trace in closed form (none), or sampled as paper 003 does"
    )
    trace_samples: int | None = Field(None, ge=1, description="mopeq: samples of a matrix; none: 32")
    hot_bits: Literal[1, 2, 3, 4, 8, 16] | None = Field(None, description="budget: width of hot experts; none: 4")
    cold_bits: Literal[1, 2, 3, 4, 8] | None = Field(None, description="budget: width of cold experts; none: 2")
    transient_bytes: Bytes | None = Field(None, description="budget: kept free for experts that change their width")
    ema: float | None = Field(None, ge=0, lt=1, description="budget: what warm-up hotness keeps a sequence; none: 0.9")
    warmup_sequences: int | None = Field(None, ge=1, description="budget: sequences of the warm-up; none: all")
    target: Literal["moeq", "transformers", "vllm", "gptqmodel", "auto-round", "llama.cpp"] | None = Field(
        None, description="runtime that must be able to load the assignment"
    )
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
    quantizer: Literal["gptq", "rtn", "signround", "best"] = Field(
        "gptq",
        description="whose losses decide and whose replicas are used; best: of each expert and width, the method of "
        "losses.methods with the lowest held-out loss",
    )

    @model_validator(mode="before")
    @classmethod
    def _default_average(cls, data: Any) -> Any:
        budgets = {"bits", "average_bits", "expert_bytes", "size"}
        if isinstance(data, dict) and data.get("method", "prefix-split") == "prefix-split" and not budgets & set(data):
            return {"average_bits": DEFAULT_AVERAGE_BITS} | data
        return data

    @model_validator(mode="after")
    def _check(self) -> AssignSection:
        budgets = BUDGETS[self.method]
        for name, methods in _BELONGS.items():
            if getattr(self, name) is not None and self.method not in methods:
                takes = f"; {self.method} takes {_either(budgets)}" if budgets and name in _ALL_BUDGETS else ""
                raise ValueError(f"{name} belongs to {_either(methods)}{takes}")
        given = [name for name in budgets if getattr(self, name) is not None]
        if budgets and not given:
            raise ValueError(f"method {self.method} needs {_either(budgets)}")
        if len(given) > 1:
            raise ValueError(f"one budget is enough: give {_either(given)}")
        if self.widths is not None and (not self.widths or len(set(self.widths)) != len(self.widths)):
            raise ValueError("widths must name at least one value and none twice")
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


Width = Literal[2, 3, 4, 8] | None


class OthersSection(Section):
    """Widths of what is not a routed expert, by class of module; none: full precision. Routers and norms keep theirs.

    attention: token mixers of decoder layers (attention, linear attention, Mamba); dense: feed-forward parts of layers
    without experts; shared: shared experts, and what else every token passes in layers with experts; embeddings: the
    table of input tokens; head: the projection to logits. Where embeddings and head are one tensor, both have the same.
    """

    attention: Width = None
    dense: Width = None
    shared: Width = None
    embeddings: Width = None
    head: Width = None
    method: Literal["gptq", "rtn"] = Field("gptq", description="embeddings are always rounded row by row (rtn)")
    group_size: int | None = Field(None, ge=-1, description="none: losses.group_size")
    symmetric: bool = False
    damping: float | None = Field(None, gt=0, le=1, description="none: losses.damping")

    @model_validator(mode="after")
    def _check(self) -> OthersSection:
        if self.group_size is not None and self.group_size != -1 and self.group_size < 8:
            raise ValueError("group_size must be -1 (whole rows) or at least 8")
        return self

    def widths(self) -> dict[str, int]:
        """{class: bits} of the classes that are quantized."""
        found = {name: getattr(self, name) for name in ("attention", "dense", "shared", "embeddings", "head")}
        return {name: bits for name, bits in found.items() if bits is not None}


class NamedAssignSection(AssignSection):
    name: str = Field(min_length=1, max_length=40, pattern=r"^[\w.+-]+$")


class RefineSection(Section):
    """SignRound of a whole layer at the assigned widths, from the replicas that were chosen, layer after layer."""

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


class ExportSection(Section):
    format: Literal["moeq"] = "moeq"
    formats: list[Literal["auto-round", "gptq", "compressed-tensors", "gguf", "dequantized"]] = Field(
        [], description="written beside it, each as checkpoint-FORMAT"
    )
    widen: bool = Field(False, description="codes that a format's runtime cannot read go into wider ones, same values")
    verify: bool = Field(True, description="load what was written in a fresh process and compare it with its weights")
    max_shard: Bytes = Field(5 * 10**9, description="largest size of a shard of non-expert weights")


class LowPrecisionSection(Section):
    """Perplexity while more and more experts of every layer go to a low width: coldest first, hottest first, random."""

    bits: Literal[1, 2, 3, 4, 8] = Field(2, description="the low width")
    high_bits: Literal[2, 3, 4, 8, 16] = Field(16, description="the others' width; 16: as in the checkpoint")
    shares: list[Annotated[float, Field(ge=0, le=1)]] = Field(
        [eighth / 8 for eighth in range(9)], min_length=1, description="of each layer's experts at the low width"
    )
    seeds: int = Field(3, ge=0, le=100, description="random orders beside those by activation counts of the profile")
    quantizer: Literal["gptq", "rtn", "signround", "best"] | None = Field(None, description="none: assign.quantizer")
    sequences: int | None = Field(None, ge=1, description="of eval.perplexity, evenly spaced; none: all")

    @model_validator(mode="after")
    def _check(self) -> LowPrecisionSection:
        if self.bits >= self.high_bits:
            raise ValueError(f"bits is {self.bits}, not below high_bits ({self.high_bits})")
        if len(set(self.shares)) != len(self.shares):
            raise ValueError("shares must name none twice")
        return self


class TranslationSection(Section):
    """BLEU and chrF of an encoder-decoder on parallel text: two files of lines, or one .tsv or .jsonl file of pairs."""

    source: str = Field(description="file of source lines; .tsv, .jsonl: of pairs")
    target: str | None = Field(None, description="file of reference lines, one for every source line; none: pairs")
    source_field: str = Field("source", description="of a row of pairs; .tsv: in its first line, else column 1")
    target_field: str = Field("target", description="of a row of pairs; .tsv: in its first line, else column 2")
    prefix: str = Field("", description="put before every source line, such as `translate English to German: `")
    sentences: int | None = Field(None, ge=1, description="the first so many pairs; none: all")
    beams: list[Annotated[int, Field(ge=1, le=64)]] = Field([1, 2], min_length=1, description="1: greedy")
    max_new_tokens: int = Field(128, ge=1, description="longest translation")
    batch_size: int = Field(16, ge=1)
    tokenize: Literal["13a", "intl", "zh", "char", "none"] = Field("13a", description="sacrebleu's tokenizer of BLEU")
    resamples: int = Field(1000, ge=100, le=100_000, description="of the bootstrap, for the intervals")

    @model_validator(mode="after")
    def _check(self) -> TranslationSection:
        if len(set(self.beams)) != len(self.beams):
            raise ValueError("beams must name none twice")
        return self


class PerplexitySection(Section):
    source: TextSource = "bundled"
    text_field: str = "text"
    sequences: int | None = Field(None, ge=1, description="none: all of the text")
    sequence_length: int = Field(512, ge=2)
    batch_size: int = Field(16, ge=1)


class TestImagesSection(Section):
    """What an image classifier is measured on."""

    source: TextSource | None = Field(None, description="digits or files; none: the test part of corpus.source")
    images: int | None = Field(None, ge=1, description="none: all")
    batch_size: int = Field(128, ge=1)


class EvalSection(Section):
    perplexity: PerplexitySection | None = Field(
        PerplexitySection(), description="of language models; image classifiers have none"
    )
    images: TestImagesSection | None = Field(
        None,
        description="of image classifiers alone: accuracy, cross-entropy, logit error; none: the section's defaults",
    )
    tasks: list[str] = Field([], description="lm-eval task names, or moeq_continuation (bundled)")
    include_path: str | None = Field(None, description="folder with lm-eval task YAML files")
    limit: int | None = Field(None, ge=1, description="items a task; none: all")
    num_fewshot: Annotated[int, Field(ge=0)] | dict[str, Annotated[int, Field(ge=0)]] | None = Field(
        None, description="examples in a task's contexts, or {task: examples}; none: the task's own number"
    )
    chat_template: bool = Field(False, description="items of tasks as turns of a conversation, by the chat template")
    batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        16, description="requests of tasks at once; auto: as many as free memory takes"
    )
    compare: list[NamedAssignSection] = Field(
        [NamedAssignSection(name=f"uniform-{bits}", method="uniform", bits=bits) for bits in (4, 3, 2)],
        description="assignments measured beside the original and the recipe's own",
    )
    low_precision: list[LowPrecisionSection] = Field(
        [], description="perplexity against the share of experts at a low width, a curve for each pair of widths"
    )
    translation: TranslationSection | None = Field(
        None, description="also translate with every assignment (encoder-decoders alone)"
    )

    @model_validator(mode="after")
    def _check(self) -> EvalSection:
        foreign = sorted(set(self.num_fewshot) - set(self.tasks)) if isinstance(self.num_fewshot, dict) else []
        if foreign:
            raise ValueError(f"num_fewshot: {foreign[0]} is not among tasks")
        return self

    def how_tasks_are_asked(self) -> dict[str, Any]:
        """What decides the items of the tasks."""
        return self.model_dump(mode="json", include={"tasks", "num_fewshot", "chat_template", "limit"})


class GridSection(Section):
    inputs: list[Annotated[int, Field(ge=1, le=LARGEST_LENGTH)]] = [128, 512, 2048]
    outputs: list[Annotated[int, Field(ge=1, le=LARGEST_LENGTH)]] = [512, 2048]
    batches: list[Annotated[int, Field(ge=1, le=LARGEST_BATCH)]] = [1]

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

    figure: Literal["decode", "end_to_end", "ndp"]
    over: str | None = Field(None, description="baseline, as the estimate names it: monde_bwrule, monde_opt, hobbit")
    low: float = Field(gt=0)
    high: float = Field(gt=0)
    only_largest: bool = False
    source: str = Field(min_length=1, description="where it is stated")

    @model_validator(mode="after")
    def _check(self) -> StatedSection:
        if self.low > self.high:
            raise ValueError(f"low is {self.low:g}, above high ({self.high:g})")
        if (self.figure == "ndp") != (self.over is None):
            raise ValueError("decode and end_to_end need over, ndp has none")
        return self


class CaseSection(Section):
    """One model with uniform widths: `gpu_experts` of a layer in FP16 on the GPU, the others at `bits`."""

    name: str = Field(min_length=1, max_length=80)
    geometry: str = Field(description="name of a known geometry, such as mixtral-8x7b")
    bits: float = Field(ge=1, le=16)
    gpu_experts: int = Field(ge=0)
    stated: list[StatedSection] = []


class FiguresSection(Section):
    """Cases that `moeq estimate RECIPE` estimates from sizes alone, beside what a publication states of them.

    miss_beyond: share of a stated figure by which an estimate may differ before it is named as a miss.
    """

    group_size: int = Field(128, ge=1, description="weights that share a scale")
    policies: list[str] | None = Field(
        None, description="policies beside the context-aware placement and both MoNDE baselines; none: all that can run"
    )
    miss_beyond: float = Field(0.05, gt=0, lt=1)
    cases: list[CaseSection] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> FiguresSection:
        names = [case.name for case in self.cases]
        if len(set(names)) != len(names):
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
    context: int = Field(1024, ge=1)
    grid: GridSection = GridSection()
    figures: FiguresSection | None = Field(
        None, description="cases without a checkpoint, estimated by `moeq estimate RECIPE` alone"
    )


class Recipe(Section):
    """A whole run."""

    recipe_version: Literal[1] = 1
    name: str = Field("run", max_length=80, pattern=r"^\w[\w.+-]*$")
    model: str | None = Field(
        None, description="directory, hub id, bundled:tiny-mixtral or bundled:tiny-moe-vit; --model overrides it"
    )
    revision: str | None = Field(None, description="hub revision: branch, tag or commit")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    stream: Literal["auto", "always", "never"] = Field(
        "auto", description="read decoder layers from disk as they run; auto: when the model is over a third of memory"
    )
    threads: int | None = Field(None, ge=1, description="CPU threads; none: all cores")
    seed: int = Field(0, ge=0)
    trust_remote_code: bool = Field(False, description="run Python code that the checkpoint brings along")
    store: str | None = Field(
        None,
        min_length=1,
        description="folder of the replica store, which runs may share; none: $MOEQ_STORE, or the run's own",
    )
    corpus: CorpusSection = CorpusSection()
    reparam: ReparamSection | None = Field(
        None, description="fold norms into linears first and go on with the folded model; {}: as defaults have it"
    )
    profile: ProfileSection = ProfileSection()
    losses: LossesSection = LossesSection()
    others: OthersSection = OthersSection()
    assign: AssignSection = AssignSection()
    quantize: QuantizeSection = QuantizeSection()
    export: ExportSection = ExportSection()
    eval: EvalSection = EvalSection()
    estimate: EstimateSection = EstimateSection()

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        every = [("assign", self.assign), *((f"eval.compare {c.name}", c) for c in self.eval.compare)]
        for where, section in every:
            if section.quantizer not in (BEST, *self.losses.methods):
                raise ValueError(f"{where}: quantizer {section.quantizer} is not among losses.methods")
            foreign = sorted(section.named_widths() - set(self.losses.bits))
            if foreign:
                raise ValueError(f"{where}: {', '.join(map(str, foreign))} bits is not among losses.bits")
            if section.layer_weighting is not None and self.losses.layer_effects is None:
                raise ValueError(f"{where}: layer_weighting measured needs losses.layer_effects")
            if section.granularity == "projection" and not self.losses.per_projection:
                raise ValueError(f"{where}: granularity projection needs losses.per_projection: true")
            if section.loss_weighting == "effect" and self.losses.expert_effects is None:
                raise ValueError(f"{where}: loss_weighting effect needs losses.expert_effects")
            missing = sorted({1, 2, 3, 4} - set(self.losses.bits))
            if section.method == "prefix-split" and section.selector and missing:
                raise ValueError(f"{where}: prefix-split needs {missing} in losses.bits too")
        if self.estimate.popularity == "trace" and not (self.profile.trace and self.estimate.geometry == "model"):
            raise ValueError("estimate.popularity trace needs profile.trace: true and estimate.geometry: model")
        self._check_low_precision()
        sized = [where for where, section in every if section.size is not None]
        if sized and self.quantize.replicas == "all":
            raise ValueError(
                f"{sized[0]}: size is that of the checkpoint, which has every width with quantize.replicas all; use "
                "expert_bytes"
            )
        if self.losses.nested and self.quantize.refine is not None:
            raise ValueError("losses.nested cannot go with quantize.refine, which trains a width alone")
        if self.losses.symmetric_range != "even" and self.quantize.refine is not None:
            raise ValueError("losses.symmetric_range cannot go with quantize.refine, which trains even grids")
        if self.quantize.refine and self.assign.granularity == "projection" and 16 in (self.assign.widths or ()):
            raise ValueError("assign.widths with 16 and granularity projection cannot go with quantize.refine")
        names = [self.name, "original", *(c.name for c in self.eval.compare)]
        if len(set(names)) != len(names):
            raise ValueError("eval.compare: every assignment needs a name of its own (not original, not the recipe's)")
        return self

    def _check_low_precision(self) -> None:
        for index, section in enumerate(self.eval.low_precision):
            where = f"eval.low_precision {index}"
            if self.eval.perplexity is None:
                raise ValueError(f"{where}: it needs eval.perplexity")
            foreign = sorted({section.bits, section.high_bits} - {16, *self.losses.bits})
            if foreign:
                raise ValueError(f"{where}: {', '.join(map(str, foreign))} bits is not among losses.bits")
            if section.quantizer not in (None, BEST, *self.losses.methods):
                raise ValueError(f"{where}: quantizer {section.quantizer} is not among losses.methods")


def load_recipe(path: Path | None, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe (None: all defaults) and apply `key=value` overrides (dotted keys, YAML values).

    Raises RecipeError naming file, line, key and the nearest known key.
    """
    where = "defaults" if path is None else str(path)
    read = parse_yaml("{}") if path is None else _read(path)
    data = {} if read.value is None else read.value
    if not isinstance(data, dict):
        raise RecipeError("a recipe is a mapping of keys to values", where=where, do="see recipes/demo.yaml")
    for override in overrides:
        _apply(data, override)
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise _explain(error, read, where, overrides) from None


def _read(path: Path) -> Yaml:
    try:
        return read_yaml(path)
    except YamlError as error:
        raise RecipeError(f"not valid YAML: {error}", where=error.at(str(path)), do="mend the recipe") from None
    except FileNotFoundError:
        raise RecipeError("no such recipe", where=str(path), do="give the path of a YAML recipe") from None
    except (OSError, ValueError) as error:
        raise RecipeError(f"cannot be read ({error})", where=str(path), do="give the path of a YAML recipe") from None


def _apply(data: dict[str, Any], override: str) -> None:
    """Set one dotted key=value in the raw recipe."""
    key, equals, value = override.partition("=")
    option = f"--set {shown(override)}"
    if not equals or not key:
        raise RecipeError(f"{option} is not key=value", do="write for example --set assign.average_bits=2.5")
    *parents, leaf = key.strip().split(".")
    here = data
    for parent in parents:
        step = here.setdefault(parent, {})
        if not isinstance(step, dict):
            raise RecipeError(f"{option}: {shortened(parent)} is not a section", do="name a key of a section")
        here = step
    try:
        here[leaf] = parse_yaml(value).value
    except YamlError as error:
        raise RecipeError(f"{option}: the value is not YAML ({error})", do="quote it") from None


def _explain(error: ValidationError, read: Yaml, where: str, overrides: Sequence[str]) -> RecipeError:
    """The first validation error as one line with its place in the file."""
    first = error.errors()[0]
    path = [part for part in first["loc"] if not (isinstance(part, str) and part.endswith("Section"))]
    key = shortened(".".join(map(str, path)), MESSAGE_CHARACTERS)
    line = read.line(path)
    names = [override.partition("=")[0].strip() for override in overrides]
    if any(f"{name}.".startswith(f"{key}.") or key.startswith(f"{name}.") for name in names):
        place = f"--set {key}"
    else:
        place = f"{where}, line {line}" if line else where
    if first["type"] == "extra_forbidden":
        known = _known_keys(path[:-1])
        guess = nearest(str(path[-1]), known)
        hint = f"did you mean {guess!r}?" if guess else f"known keys here: {', '.join(known)}"
        return RecipeError(f"unknown key {key!r}", where=place, do=hint)
    message = shortened(first["msg"].removeprefix("Value error, "), MESSAGE_CHARACTERS)
    given = first.get("input")
    had = f" (given {shown(given)})" if isinstance(given, str | int | float | bool) else ""
    return RecipeError(f"{key or 'recipe'}: {message}{had}", where=place, do="mend the value")


def _known_keys(path: Sequence[Any]) -> list[str]:
    """Keys that the section at `path` takes."""
    schema: dict[str, Any] = Recipe.model_json_schema()
    definitions = schema.get("$defs", {})
    for part in path:
        choices = [schema, *schema.get("anyOf", [])]
        if isinstance(part, int):
            step: dict[str, Any] = next((c["items"] for c in choices if "items" in c), {})
        else:
            step = next((c["properties"][part] for c in choices if part in c.get("properties", {})), {})
        options = [step, *step.get("anyOf", []), *step.get("allOf", [])]
        reference = next((o["$ref"] for o in options if "$ref" in o), None)
        schema = definitions[reference.rsplit("/", 1)[-1]] if reference else step
    return sorted(schema.get("properties", {}))
