"""The section `eval`: what every assignment is measured on, and which are measured beside the recipe's own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from moeq.recipe.assign import NamedAssignSection
from moeq.recipe.choices import Bits, OtherBits, QuantizerOrBest
from moeq.recipe.dynamic import DynamicSection
from moeq.recipe.sources import BUNDLED, ImageSource, TextSource, each_source, is_weighted
from moeq.recipe.types import Section, repeats

Examples = Annotated[int, Field(ge=0)]


class LowPrecisionSection(Section):
    """Perplexity while more and more experts of every layer go to a low width: coldest first, hottest first, random."""

    bits: Bits = Field(2, description="the low width")
    high_bits: Literal[OtherBits, 16] = Field(16, description="the others' width; 16: as in the checkpoint")
    shares: list[Annotated[float, Field(ge=0, le=1)]] = Field(
        [eighth / 8 for eighth in range(9)], min_length=1, description="of each layer's experts at the low width"
    )
    seeds: int = Field(3, ge=0, le=100, description="random orders beside those by activation counts of the profile")
    quantizer: QuantizerOrBest | None = Field(None, description="none: assign.quantizer")
    sequences: int | None = Field(None, ge=1, description="of eval.perplexity, evenly spaced; none: all")

    @model_validator(mode="after")
    def _check(self) -> LowPrecisionSection:
        if self.bits >= self.high_bits:
            raise ValueError(f"bits is {self.bits}, not below high_bits ({self.high_bits})")
        if repeats(self.shares):
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
    batch_size: int = Field(16, ge=1, description="lines translated at once")
    tokenize: Literal["13a", "intl", "zh", "char", "none"] = Field("13a", description="sacrebleu's tokenizer of BLEU")
    resamples: int = Field(1000, ge=100, le=100_000, description="of the bootstrap, for the intervals")

    @model_validator(mode="after")
    def _check(self) -> TranslationSection:
        if repeats(self.beams):
            raise ValueError("beams must name none twice")
        return self


class PerplexitySection(Section):
    source: TextSource = Field(BUNDLED, description="as corpus.source; bundled: the evaluation part")
    text_field: str = Field("text", description="field of a row that holds text")
    sequences: int | None = Field(None, ge=1, description="none: all of the text")
    sequence_length: int = Field(512, ge=2, description="tokens of a window")
    batch_size: int = Field(16, ge=1, description="windows at once")

    @model_validator(mode="after")
    def _check(self) -> PerplexitySection:
        talking = [one.path for one in each_source(self.source) if one.converses]
        if talking:
            raise ValueError(f"source {talking[0]}: perplexity is measured on text; give field or template")
        if self.sequences is None and is_weighted(self.source):
            raise ValueError("source: weights are shares of a number of sequences; set sequences")
        return self


class TestImagesSection(Section):
    """What an image classifier is measured on."""

    source: ImageSource | None = Field(None, description="digits or files; none: the test part of corpus.source")
    images: int | None = Field(None, ge=1, description="none: all")
    batch_size: int = Field(128, ge=1, description="images at once")


def compared_by_default() -> list[dict[str, Any]]:
    """What is compared where a recipe names nothing."""
    return [{"method": "uniform", "name": f"uniform-{bits}", "bits": bits} for bits in (4, 3, 2)]


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
    num_fewshot: Examples | dict[str, Examples] | None = Field(
        None, description="examples in a task's contexts, or {task: examples}; none: the task's own number"
    )
    chat_template: bool = Field(False, description="items of tasks as turns of a conversation, by the chat template")
    batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        16, description="requests of tasks at once; auto: as many as free memory takes"
    )
    compare: list[NamedAssignSection] = Field(
        default_factory=lambda: [NamedAssignSection.of(**one) for one in compared_by_default()],
        description="assignments measured beside the original and the recipe's own",
    )
    low_precision: list[LowPrecisionSection] = Field(
        [], description="perplexity against the share of experts at a low width, a curve for each pair of widths"
    )
    dynamic: list[DynamicSection] = Field(
        [],
        description="also measure the checkpoint with precision that follows the workload, a row each; needs "
        "quantize.replicas: all",
    )
    translation: TranslationSection | None = Field(
        None, description="also translate with every assignment (encoder-decoders alone)"
    )

    @model_validator(mode="after")
    def _check(self) -> EvalSection:
        foreign = sorted(set(self.num_fewshot) - set(self.tasks)) if isinstance(self.num_fewshot, dict) else []
        if foreign:
            raise ValueError(f"num_fewshot: {foreign[0]} is not among tasks")
        if repeats([one.model_dump_json() for one in self.dynamic]):
            raise ValueError("dynamic must name none twice")
        return self

    def how_tasks_are_asked(self) -> dict[str, Any]:
        """What decides the items of the tasks."""
        return self.model_dump(mode="json", include={"tasks", "num_fewshot", "chat_template", "limit"})
