"""How much text, how many images and which tasks a recipe lets the model read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moeq.bundled import bundled_path
from moeq.evaluation.batching import MOST_ROWS
from moeq.evaluation.harness import task_requests
from moeq.models.corpus import ImageSet, LocalFile
from moeq.models.corpus.labelled import Part
from moeq.models.corpus.streams import read_text
from moeq.stages.context import Context

SAMPLE = 1 << 16  # characters of the bundled text that tell how many make a token


@dataclass(frozen=True, kw_only=True)
class Text:
    """Sequences of `length` tokens in batches of `batch`; `whole`: tokens of all of the text that they are taken from.

    Of images, the positions that the model sees of one are its tokens.
    """

    sequences: int
    length: int
    batch: int
    whole: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    @property
    def batches(self) -> int:
        return -(-self.sequences // self.batch)

    @property
    def batch_tokens(self) -> int:
        return min(self.batch, self.sequences) * self.length


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """Requests of the lm-eval tasks: their number, characters, mean and largest length in tokens, how many go together.

    `passes`: through the model, of which a batch takes more than one where tasks generate.
    """

    requests: int
    characters: int
    mean_tokens: float
    most_tokens: int
    passes: float
    batch: int


def calibration_text(context: Context) -> Text:
    """Text that grows until experts are covered counts at its largest. CorpusError for what cannot be read."""
    section, text = context.recipe.corpus, context.text
    most = section.sequences if section.until_covered is None else section.until_covered.max_sequences
    if context.takes_images:
        _ = text.perplexity  # which may be asked for in vain
        return _images(context, text.calibration_images, "train", most, section.batch_size)
    length = section.sequence_length
    return Text(
        sequences=most, length=length, batch=section.batch_size, whole=_there(context, "calibration", most * length)
    )


def evaluation_text(context: Context) -> Text | None:
    """What perplexity is measured on, or images; None where the recipe wants none."""
    if context.takes_images:
        wanted = context.text.test_images
        return _images(context, context.text.evaluation_images, "test", wanted.images, wanted.batch_size)
    section = context.text.perplexity
    if section is None:
        return None
    length = section.sequence_length
    whole = _there(context, "evaluation", (section.sequences or 1) * length)
    count = max(1, whole // length) if section.sequences is None else section.sequences
    return Text(sequences=count, length=length, batch=section.batch_size, whole=whole)


def _images(context: Context, sets: Sequence[ImageSet], part: Part, wanted: int | None, batch: int) -> Text:
    length, there = context.image_task.positions, sum(len(one.part(part)) for one in sets)
    return Text(sequences=min(wanted or there, there), length=length, batch=batch, whole=there * length)


def _there(context: Context, part: str, wanted: int) -> int:
    """About how many tokens there are; of a hub dataset as many as are wanted, nothing of it is downloaded here."""
    sources = context.text.calibration_sources if part == "calibration" else context.text.evaluation_sources
    local = all(isinstance(source, LocalFile) for source in sources)
    return context.text.tokens_there(part) if local else wanted


def tasks(context: Context) -> Tasks | None:
    """The requests that the recipe's tasks make; EvaluationError for unknown tasks."""
    section, config = context.recipe.eval, context.source.config
    if not section.tasks or not (found := task_requests(context.task_manager, section.tasks, section.limit)):
        return None
    sample = read_text(bundled_path("corpus/evaluation.jsonl"), SAMPLE)
    per_token = len(sample) / len(context.tokenizer(sample, add_special_tokens=False, verbose=False)["input_ids"])
    lengths = [characters / per_token for characters, _ in found]
    positions = (config.get("text_config") or config).get("max_position_embeddings") or max(lengths)
    lengths = [min(length, positions) for length in lengths]
    batch = MOST_ROWS if section.batch_size == "auto" else section.batch_size
    return Tasks(
        requests=len(found),
        characters=sum(characters for characters, _ in found),
        mean_tokens=sum(lengths) / len(found),
        most_tokens=int(max(lengths)) + 1,
        passes=-(-len(found) // batch) * sum(max(1, generated) for _, generated in found) / len(found),
        batch=batch,
    )
