"""The sizes of a model and of the work that a recipe gives it, from configuration and headers alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from moeq.errors import CorpusError
from moeq.estimator import geometry_from_config
from moeq.evaluation.harness import task_requests
from moeq.models import corpus, loading
from moeq.models.experts import ExpertLayer
from moeq.models.streaming import blocks_of
from moeq.stages.context import Context

SAMPLE_CHARACTERS = 1 << 16  # of each file, tokenized to learn how many characters a token stands for
SAMPLE_BYTES = 1 << 20


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
    block_parameters: tuple[int, ...]  # weights of every decoder block
    expert_parameters: int  # weights of all routed experts
    resident_parameters: int  # weights outside the blocks
    expert_keys: frozenset[str]  # tensors on disk that hold routed experts

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
        return self.dtype != self.source_dtype


def model_sizes(context: Context) -> ModelSizes:
    """Read the sizes; ModelError for what a run refuses, with its line."""
    skeleton, layers = context.described
    keys = loading.expert_keys(context.source, skeleton, layers)
    blocks = blocks_of(skeleton, layers)
    by_block = [_weights(skeleton.get_submodule(path)) for path in blocks]
    headers = context.source.tensors
    disk = sum(header.bytes for header in headers.values())
    experts_disk = sum(headers[key].bytes for key in keys)
    geometry = geometry_from_config(
        context.source.config,
        num_moe_layers=len(layers),
        num_experts=layers[0].num_experts,
        expert_intermediate_size=layers[0].intermediate_size,
        non_expert_parameters=0,
    )
    embeddings: Any = skeleton.get_input_embeddings()  # type: ignore[operator]
    return ModelSizes(
        layers=tuple(layers),
        top_k=geometry.top_k,
        hidden_size=geometry.hidden_size,
        num_heads=geometry.num_attention_heads,
        head_dim=geometry.head_dim,
        vocabulary=int(embeddings.weight.shape[0]),
        tensors=len(headers),
        disk=disk,
        experts_disk=experts_disk,
        source_dtype=loading.source_dtype(context.source),
        dtype=context.dtype,
        block_parameters=tuple(by_block),
        expert_parameters=sum(layer.num_experts * layer.parameters_per_expert for layer in layers),
        resident_parameters=_weights(skeleton) - sum(by_block),
        expert_keys=frozenset(keys),
    )


def _weights(module: nn.Module) -> int:
    """Number of weights; tied ones count once."""
    return sum(parameter.numel() for parameter in module.parameters())


@dataclass(frozen=True, kw_only=True)
class Text:
    """Sequences of `length` tokens in batches of `batch`; `whole`: tokens of all of the text that is tokenized."""

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

    Raises CorpusError for files that are missing or unreadable or for sequences longer than the model's positions,
    EvaluationError for unknown tasks.
    """
    section = context.recipe.corpus
    context.check_length(section.sequence_length, "corpus.sequence_length")
    per_token = []
    tokens, ratio = _text_tokens(context, context.calibration_files, section.text_field)
    per_token.append(ratio)
    calibration = Text(
        sequences=section.sequences, length=section.sequence_length, batch=section.batch_size, whole=tokens
    )
    perplexity = context.recipe.eval.perplexity
    evaluation = None
    if perplexity is not None:
        context.check_length(perplexity.sequence_length, "eval.perplexity.sequence_length")
        files = corpus.corpus_files(perplexity.source, "evaluation")
        tokens, ratio = _text_tokens(context, files, perplexity.text_field)
        per_token.append(ratio)
        length = perplexity.sequence_length
        count = perplexity.sequences if perplexity.sequences is not None else max(1, tokens // length)
        evaluation = Text(sequences=count, length=length, batch=perplexity.batch_size, whole=tokens)
    return Work(calibration=calibration, evaluation=evaluation, tasks=_tasks(context, min(per_token)))


def _tasks(context: Context, characters_per_token: float) -> Tasks | None:
    section = context.recipe.eval
    if not section.tasks:
        return None
    requests = task_requests(context.task_manager, section.tasks, section.limit)
    if not requests:
        return None
    lengths = [characters / characters_per_token for characters, _ in requests]
    config = context.source.config
    positions = (config.get("text_config") or config).get("max_position_embeddings") or max(lengths)
    lengths = [min(length, positions) for length in lengths]
    return Tasks(
        requests=len(lengths),
        mean_tokens=sum(lengths) / len(lengths),
        most_tokens=int(max(lengths)) + 1,
        steps=sum(max(1, generated) for _, generated in requests) / len(requests),
        batch=section.batch_size,
    )


def _text_tokens(context: Context, files: list[Path], field: str) -> tuple[int, float]:
    """About how many tokens the files hold, and characters a token, from a sample of each file."""
    characters = tokens = 0.0
    for path in files:
        size, sample = _sample(path, field)
        found = sum(map(len, context.tokenizer(sample, add_special_tokens=False, verbose=False)["input_ids"]))
        length = sum(map(len, sample))
        if not length or not found:
            raise CorpusError("no text in it", where=str(path), do="give files with text")
        characters += size
        tokens += size * found / length
    return int(tokens), characters / tokens


def _sample(path: Path, field: str) -> tuple[float, list[str]]:
    """About how many characters of text a file holds, and evenly spaced pieces of its beginning."""
    try:
        texts, share = _parquet(path, field) if path.suffix == ".parquet" else _lines(path, field)
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise CorpusError(f"cannot be read ({error})", where=str(path), do="check the file and text_field") from None
    length = sum(map(len, texts))
    step = max(1, length // SAMPLE_CHARACTERS)
    return length / share, texts[::step] or texts[:1]


def _lines(path: Path, field: str) -> tuple[list[str], float]:
    """Texts at the beginning of a .txt or .jsonl file, and which share of the file they are."""
    with path.open("rb") as stream:
        raw = stream.read(SAMPLE_BYTES)
    size = path.stat().st_size
    if path.suffix == ".txt":
        text = raw.decode("utf-8", errors="ignore")
        pieces = [text[start : start + 4096] for start in range(0, len(text), 4096)]
        return pieces, len(raw) / max(1, size)
    lines = raw.splitlines()
    if len(raw) < size and len(lines) > 1:
        lines = lines[:-1]  # cut in the middle
    used = sum(len(line) + 1 for line in lines)
    return [str(json.loads(line)[field]) for line in lines if line.strip()], min(1.0, used / max(1, size))


def _parquet(path: Path, field: str) -> tuple[list[str], float]:
    """The first rows' texts and which share of all rows they are."""
    file = pq.ParquetFile(path)
    first = next(file.iter_batches(batch_size=256, columns=[field]), None)
    texts = [] if first is None else [str(text) for text in first[field].to_pylist()]
    return texts, len(texts) / max(1, file.metadata.num_rows)
