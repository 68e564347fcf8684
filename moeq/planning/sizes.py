"""The sizes of a model and of the work that a recipe gives it, from configuration and headers alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from moeq.artifacts.reading import parse_record
from moeq.errors import CorpusError
from moeq.estimator import geometry_from_config
from moeq.evaluation.batching import MOST_ROWS
from moeq.evaluation.harness import task_requests
from moeq.models import loading
from moeq.models.corpus import ImageSet, Source
from moeq.models.corpus.labelled import Part
from moeq.models.corpus.rows import kind_of
from moeq.models.corpus.sources import LocalFile
from moeq.models.corpus.streams import COMPRESSED
from moeq.models.experts import ExpertLayer
from moeq.models.streaming import blocks_of
from moeq.models.weights import is_dequantized
from moeq.stages.checkpoint_size import CheckpointSize
from moeq.stages.context import Context
from moeq.stages.estimate import config_values
from moeq.stages.non_expert_sizes import Others

SAMPLE_CHARACTERS = 1 << 16  # of each file, tokenized to learn how many characters a token stands for
SAMPLE_BYTES = 1 << 20
COMPRESSION = 4  # of compressed text, taken
HUB_CHARACTERS = 4  # a token, of text that is not here yet, taken


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes in bytes. On disk: `disk`, `experts_disk`, `tensors` (their number); in memory, in the dtype that computes:
    `whole`, `resident` (outside the decoder blocks), the largest block and the experts of the largest MoE layer.
    """

    layers: tuple[ExpertLayer, ...]
    top_k: int
    hidden_size: int
    num_heads: int
    head_dim: int
    vocabulary: int
    tensors: int
    disk: int
    experts_disk: int
    source_dtype: torch.dtype
    dtype: torch.dtype
    unpacks: bool  # the checkpoint is FP8 or MXFP4
    block_parameters: tuple[int, ...]  # weights of every decoder block
    expert_parameters: int  # weights of all routed experts
    resident_parameters: int  # weights outside the blocks
    expert_keys: frozenset[str]  # tensors on disk that hold routed experts
    others: Others  # what else is packed
    checkpoint: CheckpointSize  # of what is exported

    @property
    def whole(self) -> int:
        return (sum(self.block_parameters) + self.resident_parameters) * self.dtype.itemsize

    @property
    def resident(self) -> int:
        return self.resident_parameters * self.dtype.itemsize

    @property
    def largest_block(self) -> int:
        return max(self.block_parameters) * self.dtype.itemsize

    @property
    def largest_experts(self) -> int:
        return max(layer.num_experts * layer.parameters_per_expert for layer in self.layers) * self.dtype.itemsize

    @property
    def other_block_parameters(self) -> int:
        """Weights of the decoder blocks that are not routed experts: attention, routers, norms, dense parts."""
        return sum(self.block_parameters) - self.expert_parameters

    @property
    def casts(self) -> bool:
        """Whether weights are converted while they are read: to another dtype, or from FP8 and MXFP4."""
        return self.dtype != self.source_dtype or self.unpacks


def model_sizes(context: Context) -> ModelSizes:
    """Read the sizes; ModelError for what a run refuses, with its line."""
    skeleton, layers = context.model.skeleton, context.model.layers
    keys = loading.expert_keys(context.model.source, skeleton, layers)
    blocks = blocks_of(skeleton)
    by_block = [_weights(skeleton.get_submodule(path)) for path in blocks]
    headers = context.model.source.tensors
    disk = sum(header.bytes for header in headers.values())
    experts_disk = sum(headers[key].bytes for key in keys)
    geometry = geometry_from_config(
        config_values(skeleton, layers[0].kind.top_k),
        num_moe_layers=len(layers),
        num_experts=layers[0].num_experts,
        expert_intermediate_size=layers[0].intermediate_size,
        non_expert_parameters=0,
    )
    if context.model.takes_images:
        vocabulary = context.model.image_task.labels
    else:
        embeddings: Any = skeleton.get_input_embeddings()  # type: ignore[operator]
        vocabulary = int(embeddings.weight.shape[0])
    return ModelSizes(
        layers=tuple(layers),
        top_k=geometry.top_k,
        hidden_size=geometry.hidden_size,
        num_heads=geometry.num_attention_heads,
        head_dim=geometry.head_dim,
        vocabulary=vocabulary,
        tensors=len(headers),
        disk=disk,
        experts_disk=experts_disk,
        source_dtype=loading.source_dtype(context.model.source),
        dtype=context.model.dtype,
        unpacks=is_dequantized(context.model.source),
        block_parameters=tuple(by_block),
        expert_parameters=sum(layer.num_experts * layer.parameters_per_expert for layer in layers),
        resident_parameters=_weights(skeleton) - sum(by_block),
        expert_keys=frozenset(keys),
        others=Others(context),
        checkpoint=CheckpointSize(context),
    )


def _weights(module: nn.Module) -> int:
    """Number of weights; tied ones count once."""
    return sum(parameter.numel() for parameter in module.parameters())


@dataclass(frozen=True, kw_only=True)
class Text:
    """Sequences of `length` tokens in batches of `batch`; `whole`: tokens of all of the text that is tokenized.

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
    """Requests of the lm-eval tasks: their number, mean and largest length in tokens, and how many go together.

    `steps`: forward passes of one batch, more than 1 where tasks generate.
    """

    requests: int
    mean_tokens: float
    most_tokens: int
    steps: float
    batch: int

    @property
    def batches(self) -> int:
        return -(-self.requests // self.batch)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the recipe lets the model do; `evaluation` and `tasks` are None where it asks for none."""

    calibration: Text
    evaluation: Text | None
    tasks: Tasks | None


def work_sizes(context: Context) -> Work:
    """Measure text by its bytes and a tokenized sample of it, tasks by their requests.

    Text that grows until experts are covered counts at its largest. Raises CorpusError for files that are missing or
    unreadable or for sequences longer than the model's positions, EvaluationError for unknown tasks.
    """
    section = context.recipe.corpus
    most = section.sequences if section.until_covered is None else section.until_covered.max_sequences
    if context.model.takes_images:
        return _image_work(context, most)
    context.text.check_length(section.sequence_length, "corpus.sequence_length")
    wanted = most * section.sequence_length
    fields = (section.text_field, section.messages_field)
    tokens, ratio = _text_tokens(context, context.text.calibration_sources, fields, wanted)
    calibration = Text(sequences=most, length=section.sequence_length, batch=section.batch_size, whole=tokens)
    perplexity = context.text.perplexity
    evaluation = None
    if perplexity is not None:
        length = perplexity.sequence_length
        context.text.check_length(length, "eval.perplexity.sequence_length")
        wanted = (perplexity.sequences or 0) * length
        tokens, other = _text_tokens(context, context.text.evaluation_sources, (perplexity.text_field,), wanted)
        ratio = min(ratio, other)
        count = perplexity.sequences if perplexity.sequences is not None else max(1, tokens // length)
        evaluation = Text(sequences=count, length=length, batch=perplexity.batch_size, whole=tokens)
    return Work(calibration=calibration, evaluation=evaluation, tasks=_tasks(context, ratio))


def _image_work(context: Context, most: int) -> Work:
    """The images that there are, and as many of them as the recipe takes."""
    _ = context.text.perplexity  # which may be asked for in vain
    section, tests, length = context.recipe.corpus, context.text.test_images, context.model.image_task.positions

    def text(sets: Sequence[ImageSet], part: Part, wanted: int | None, batch: int) -> Text:
        there = sum(len(one.part(part)) for one in sets)
        count = there if wanted is None else min(wanted, there)
        return Text(sequences=count, length=length, batch=batch, whole=there * length)

    return Work(
        calibration=text(context.text.calibration_images, "train", most, section.batch_size),
        evaluation=text(context.text.evaluation_images, "test", tests.images, tests.batch_size),
        tasks=None,
    )


def _tasks(context: Context, characters_per_token: float) -> Tasks | None:
    section = context.recipe.eval
    if not section.tasks:
        return None
    requests = task_requests(context.text.task_manager, section.tasks, section.limit)
    if not requests:
        return None
    lengths = [characters / characters_per_token for characters, _ in requests]
    config = context.model.source.config
    positions = (config.get("text_config") or config).get("max_position_embeddings") or max(lengths)
    lengths = [min(length, positions) for length in lengths]
    return Tasks(
        requests=len(lengths),
        mean_tokens=sum(lengths) / len(lengths),
        most_tokens=int(max(lengths)) + 1,
        steps=sum(max(1, generated) for _, generated in requests) / len(requests),
        batch=MOST_ROWS if section.batch_size == "auto" else section.batch_size,
    )


def _text_tokens(
    context: Context, sources: Sequence[Source], fields: tuple[str, ...], wanted: int
) -> tuple[int, float]:
    """About how many tokens are read, and characters a token, from a sample of each file.

    Of a hub dataset as many tokens are read as are wanted; nothing of it is downloaded here.
    """
    characters = tokens = 0.0
    for source in sources:
        if not isinstance(source, LocalFile):
            tokens += wanted
            characters += wanted * HUB_CHARACTERS
            continue
        size, sample = _sample(source.path, fields)
        found = sum(map(len, context.model.tokenizer(sample, add_special_tokens=False, verbose=False)["input_ids"]))
        length = sum(map(len, sample))
        if not length or not found:
            raise CorpusError("no text in it", where=source.name, do="give files with text")
        characters += size
        tokens += size * found / length
    return int(tokens), characters / tokens


def _sample(path: Path, fields: tuple[str, ...]) -> tuple[float, list[str]]:
    """About how many characters of text a file holds, and evenly spaced pieces of its beginning."""
    try:
        texts, share = _parquet(path, fields) if kind_of(path.name) == ".parquet" else _beginning(path, fields)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise CorpusError(f"cannot be read ({error})", where=str(path), do="check the file") from None
    length = sum(map(len, texts))
    step = max(1, length // SAMPLE_CHARACTERS)
    return length / share, texts[::step] or texts[:1]


def _beginning(path: Path, fields: tuple[str, ...]) -> tuple[list[str], float]:
    """Texts at the beginning of a .txt, .json or .jsonl file, and which share of the file they are."""
    packed = path.suffix in COMPRESSED
    with pa.input_stream(str(path), compression="detect" if packed else None) as stream:
        raw: bytes = stream.read(SAMPLE_BYTES)
    size = path.stat().st_size * (COMPRESSION if packed and len(raw) == SAMPLE_BYTES else 1)
    size = max(size, len(raw)) if len(raw) == SAMPLE_BYTES else len(raw)
    lines = raw.splitlines()
    if kind_of(path.name) == ".txt" or raw.lstrip().startswith(b"["):
        text = raw.decode("utf-8", errors="ignore")
        return [text[start : start + 4096] for start in range(0, len(text), 4096)], len(raw) / max(1, size)
    if len(raw) < size and len(lines) > 1:
        lines = lines[:-1]  # cut in the middle
    used = sum(len(line) + 1 for line in lines)
    texts = [_text_of(parse_record(line.decode()), fields) for line in lines if line.strip()]
    return texts, min(1.0, used / max(1, size))


def _parquet(path: Path, fields: tuple[str, ...]) -> tuple[list[str], float]:
    """The first rows' texts and which share of all rows they are."""
    with pq.ParquetFile(path) as file:
        there = [field for field in fields if field in file.schema_arrow.names]
        first = next(file.iter_batches(batch_size=256, columns=there or None), None)
        rows = [] if first is None else first.to_pylist()
        return [_text_of(row, fields) for row in rows], len(rows) / max(1, file.metadata.num_rows)


def _text_of(row: Any, fields: tuple[str, ...]) -> str:
    """A row's text; of conversations, the JSON of it stands for what a chat template makes."""
    found = next((row[field] for field in fields if field in row), row) if isinstance(row, dict) else row
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)
