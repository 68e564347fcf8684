"""How much text, how many images and which tasks a recipe lets the model read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moeq.bundled import bundled_path
from moeq.evaluation.batching import MOST_ROWS
from moeq.evaluation.harness import task_requests
from moeq.models.corpus import ImageSet
from moeq.models.corpus.labelled import Part
from moeq.models.corpus.streams import read_text
from moeq.recipe import CorpusSection, PerplexitySection
from moeq.stages.context import Context

SAMPLE = 1 << 16  # characters of the bundled text that tell how many make a token


@dataclass(frozen=True, kw_only=True)
class Text:
    """Sequences of at most `length` tokens in batches of `batch`; `whole`: tokens of all that they are taken from.

    Of images, the positions that the model sees of one are its tokens. Of requests of tasks, which differ in length:
    `characters` of all, and `steps`, passes of a batch, more than one where they generate.
    """

    sequences: int
    length: int
    batch: int
    whole: int
    characters: int = 0
    steps: float = 1

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    @property
    def batches(self) -> float:
        return -(-self.sequences // self.batch) * self.steps

    @property
    def batch_tokens(self) -> int:
        """Tokens of a batch of the longest."""
        return min(self.batch, self.sequences) * self.length

    @property
    def mean_tokens(self) -> float:
        """Tokens of a batch, where sequences differ in length."""
        return min(self.batch, self.sequences) * min(self.whole, self.tokens) / self.sequences


def calibration_text(context: Context) -> Text:
    """Text that grows until experts are covered counts at its largest. CorpusError for what cannot be read."""
    section, text = context.recipe.corpus, context.text
    most = section.sequences if section.until_covered is None else section.until_covered.max_sequences
    if context.model.takes_images:
        _ = text.perplexity  # which may be asked for in vain
        return _images(context, text.calibration_images, "train", most, section.batch_size)
    return _text(context, "calibration", section, most)


def evaluation_text(context: Context) -> Text | None:
    """What perplexity is measured on, or images; None where the recipe wants none."""
    section, wanted = context.text.perplexity, context.text.test_images
    if context.model.takes_images:
        return _images(context, context.text.evaluation_images, "test", wanted.images, wanted.batch_size)
    return None if section is None else _text(context, "evaluation", section, section.sequences)


def _text(context: Context, part: str, section: CorpusSection | PerplexitySection, wanted: int | None) -> Text:
    """Of a hub dataset there is as much as is wanted: nothing of it is downloaded here."""
    length, text = section.sequence_length, context.text
    whole = text.tokens_there(part) if text.lies_here(part) else (wanted or 1) * length
    return Text(sequences=wanted or max(1, whole // length), length=length, batch=section.batch_size, whole=whole)


def _images(context: Context, sets: Sequence[ImageSet], part: Part, wanted: int | None, batch: int) -> Text:
    length, there = context.model.image_task.positions, sum(len(images.part(part)) for images in sets)
    return Text(sequences=min(wanted or there, there), length=length, batch=batch, whole=there * length)


def tasks(context: Context) -> Text | None:
    """The requests that the recipe's tasks make; EvaluationError for unknown tasks."""
    section, config = context.recipe.eval, context.model.source.config
    if not section.tasks or not (requests := task_requests(context.text.task_manager, section.tasks, section.limit)):
        return None
    sample = read_text(bundled_path("corpus/evaluation.jsonl"))[:SAMPLE]
    per_token = len(sample) / len(context.model.tokenizer(sample, add_special_tokens=False, verbose=False)["input_ids"])
    positions = (config.get("text_config") or config).get("max_position_embeddings") or float("inf")
    lengths = [min(characters / per_token, positions) for characters, _ in requests]
    return Text(
        sequences=len(requests),
        length=int(max(lengths)) + 1,
        batch=MOST_ROWS if section.batch_size == "auto" else section.batch_size,
        whole=int(sum(lengths)),
        characters=sum(characters for characters, _ in requests),
        steps=sum(max(1, generated) for _, generated in requests) / len(requests),
    )
