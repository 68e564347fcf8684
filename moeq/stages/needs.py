"""What stages need, from sizes alone: what is in memory at their fullest moments, files, bytes read, seconds.

Every stage says it in a function `needs`, which `order.STAGES` names; planning/ adds up. Here is what several share.
Files of tensors are exact; of others the bytes of a row were measured on runs of the bundled models.

What is held, and where the code holds it:
- a walk (models/walk.py): of every token its residual and the experts' input, since all batches stop there, and the
  inputs of one layer with the pieces that they are joined from; of a loop also what its layers were given before;
- a streamed model (models/streaming.py): what is not in a decoder block, one block, two thirds of its experts again
  while they are stacked, all of it once more where the dtype changes;
- what a batch's activations leave in the allocator's heap, until it is asked to return it: when a streamed block is
  read or dropped, and after each stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from operator import mul
from typing import Any

import torch
from torch import nn

from moeq.artifacts.assignment import FULL, Width, width_of
from moeq.models import loading
from moeq.models.declared import is_dequantized
from moeq.models.experts import ExpertLayer
from moeq.models.streaming import blocks_of
from moeq.models.visits import visits
from moeq.stages.checkpoint_size import CheckpointSize
from moeq.stages.context import Context
from moeq.stages.expert_bytes import expert_bytes
from moeq.stages.foreseen import foreseen_widths
from moeq.stages.geometry import dense_geometry, first_geometry
from moeq.stages.non_expert_sizes import Others
from moeq.stages.text_sizes import Text, calibration_text, evaluation_text, tasks
from moeq_kernels.packed import packed_shapes

Moment = Mapping[str, float]  # {what: bytes} of what is in memory at once
APART = "checkpoint in its target's process"
ON_DEVICE: dict[str, str | None] = {  # what lies where the model computes, and what makes it less
    "model": "stream: always", "resident weights": None, "decoder block": None, "experts being stacked": None,
    "activations of a batch": "a smaller batch_size", "stopped batches": "fewer corpus.sequences",
    "inputs of a layer": "fewer corpus.sequences", "tokens in float32": "fewer corpus.sequences",
    "batch of experts": "a smaller losses.working_memory", "packed replicas of a layer": None,
    "sums over inputs of other modules": None, "codes of a layer": None,
    "outputs that are compared": "a smaller losses.working_memory", "one expert, dequantized": None,
    "experts in training": "a smaller quantize.refine.working_memory",
    "units of codes": "quantize.tune: null", "scales in training": None, "gradients of a layer": None,
    "activations and logits for gradients": "a smaller quantize.tune.working_memory",
    "exported checkpoint": "run the stages before eval alone", "stopped texts": "fewer eval.perplexity.sequences",
    "logits": "a smaller eval.perplexity.batch_size", "logits of tasks": "a smaller eval.batch_size",
    "logits in float64": None, "resident weights, twice": None, "decoder block in float32": None,
    "stopped samples": "fewer reparam.samples",
}  # fmt: skip
LEVERS = ON_DEVICE | {  # and of what lies in the machine's memory, wherever the model is
    "model while it is read": "stream: always", "weights that were replaced": "stream: always",
    "text": "a smaller corpus", "heap of activations": "a smaller batch_size", APART: "export.verify: false",
    "experts beside the device": "a smaller host in eval.dynamic",
    "batches of experts of workers": "fewer workers, or a smaller losses.working_memory", "workers": "fewer workers",
    "models of workers": "fewer workers",
    "layers handed to workers": "fewer corpus.sequences", "reference in float32": "export.verify: false",
    "scored tokens": "fewer eval.perplexity.sequences", "images": "fewer eval.images.images",
}  # fmt: skip
STORED_ROW = 160  # bytes of one row of the loss table as Arrow columns
ASSIGNED = 2500  # bytes of one expert of an assignment as objects
HEAP_MOST = 2**30  # of freed memory in the heap; larger blocks go back to the system at once
STATES = 3  # hidden states a token that a stopped batch keeps: residual, the experts' input, a copy between them
SUMMED, MESSAGES = 4, 5  # more of them where residuals are by attention, and in a loop of such layers
CAPTURED = 4  # copies of a layer's inputs while they are joined and looked through, two of them for absolute values
PASSES = 40  # elementwise operations over the hidden states in a decoder layer: norms, rotary, residuals, softmax
CALLS = 2e-3  # seconds that Python and small kernels take in one decoder layer and batch
EXPERT_CALLS = 1e-4  # and for one expert of it
PACKED_CALLS = 1e-3  # and for one packed expert, unpacked in a batch or replaced in place
LIBRARY = 3.0  # seconds of loading the model's classes, the tokenizer and, for eval, lm-eval


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How fast this machine is, by the clock or in processor time.

    matrix_flops: operations a second of products in the computing dtype, a batch of tokens wide; expert_seconds: one
    expert's forward on its share of a batch; elementwise_bytes: bytes a second of a pass over the hidden states;
    losses_flops: operations a second of `losses` (replicas, losses, packing, float32); dequantized_weights: weights a
    second; bytes a second of reading the checkpoint from the disk and again from the page cache, of writing and of
    hashing.
    """

    matrix_flops: float
    expert_seconds: float
    elementwise_bytes: float
    losses_flops: float
    dequantized_weights: float
    read_bytes: float
    cached_bytes: float
    write_bytes: float
    hash_bytes: float


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What one stage needs.

    moments: its fullest ones; files: bytes of what it leaves, by name, its record apart; read: bytes beside its own
    files, which it hashes; linked: bytes of files that it shares with an earlier stage; store: files in the replica
    store; temporary: bytes on the disk that are gone when it ends; seconds: beside writing and hashing its files.
    """

    moments: Sequence[Moment]
    files: dict[str, int]
    seconds: Callable[[Rates], float]
    read: float = 0
    linked: int = 0
    temporary: int = 0
    store: dict[str, int] = field(default_factory=dict)


class Sizes:
    """What is known of a run before it begins: its model from configuration and headers, its work from the recipe.

    dense: also of a model without experts, of which only the fold of norms is planned.

    Bytes on the disk: disk, experts_disk, walked (that a pass over a streamed model reads). In memory, in the dtype
    that computes: whole, resident (outside the decoder blocks), largest_block, token (a hidden state).
    `..._parameters` are numbers of weights, experts and tensors numbers of theirs. ModelError for what a run refuses;
    text is read when it is first asked for, with the errors of the run.
    """

    def __init__(self, context: Context, *, dense: bool = False) -> None:
        self.context, self.recipe, self.source = context, context.recipe, context.model.source
        self.streams, self.device, self.images = context.model.streams, context.model.device, context.model.takes_images
        self.gpu = self.device.type == "cuda"
        skeleton, layers = context.model.described
        self.layers = layers if dense else context.model.layers
        headers, keys = self.source.tensors, context.model.expert_keys
        self.tensors = len(headers)
        self.disk = sum(header.bytes for header in headers.values())
        self.experts_disk = sum(headers[key].bytes for key in keys)
        self.source_dtype, self.dtype = loading.source_dtype(self.source), context.model.dtype
        self.casts = self.dtype != self.source_dtype or is_dequantized(self.source)
        blocks = blocks_of(skeleton)
        self.block_parameters = [_weights(skeleton.get_submodule(path)) for path in blocks]
        self.block_visits = [visits(skeleton, path) for path in blocks]
        weights = _weights(skeleton)
        within = {weight for path in blocks for weight in skeleton.get_submodule(path).parameters()}
        self.resident_parameters = weights - sum(weight.numel() for weight in within)  # blocks may share theirs
        again = self._visited(self.block_parameters) - sum(self.block_parameters)
        self.walked = self.disk + self.disk * again // weights
        self.residual_states = _residual_states(skeleton.config, self.block_visits)
        self.experts = sum(layer.num_experts for layer in self.layers)
        self.expert_parameters = sum(layer.num_experts * layer.parameters_per_expert for layer in self.layers)
        self.geometry = first_geometry(skeleton, self.layers) if self.layers else dense_geometry(skeleton)
        embeddings: Any = None if self.images else skeleton.get_input_embeddings()  # type: ignore[operator]
        self.vocabulary = context.model.image_task.labels if embeddings is None else int(embeddings.weight.shape[0])
        width = self.dtype.itemsize
        self.whole = weights * width
        self.resident, self.largest_block = self.resident_parameters * width, max(self.block_parameters) * width
        self.token = self.geometry.hidden_size * width  # bytes of one hidden state
        in_place = not (self.gpu or self.casts or self.images or self.source.is_remote)
        self.mapped = _words(skeleton) * width if in_place else 0

    def _visited(self, numbers: Sequence[int]) -> int:
        """A sum over decoder blocks in which each counts as often as a token goes through it."""
        return sum(map(mul, numbers, self.block_visits))

    @cached_property
    def most_visits(self) -> int:
        """How many times a token goes through the layer of experts that it goes through most often."""
        return max((layer.visits for layer in self.layers), default=1)

    @property
    def layer_tokens(self) -> int:
        """Inputs of the experts of a layer over the calibration text: its tokens, at every visit."""
        return int(self.calibration.tokens * self.most_visits)

    @cached_property
    def largest(self) -> ExpertLayer:
        """The layer whose experts have most weights."""
        return max(self.layers, key=lambda layer: layer.num_experts * layer.parameters_per_expert)

    @cached_property
    def others(self) -> Others:
        return Others(self.context)

    @cached_property
    def checkpoint(self) -> CheckpointSize:
        return CheckpointSize(self.context)

    @cached_property
    def calibration(self) -> Text:
        return calibration_text(self.context)

    @cached_property
    def evaluation(self) -> Text | None:
        return evaluation_text(self.context)

    @cached_property
    def tasks(self) -> Text | None:
        return tasks(self.context)

    @cached_property
    def widths(self) -> list[list[list[Any]]]:
        """Widths of every expert by every assignment, the recipe's own first."""
        return [foreseen_widths(self.checkpoint, section) for _, section in self.checkpoint.sections]

    @cached_property
    def placed(self) -> list[int]:
        """Bytes of all experts by every assignment."""
        return [
            sum(self.expert_bytes(layer, bits) for layer, own in zip(self.layers, widths, strict=True) for bits in own)
            for widths in self.widths
        ]

    def expert_bytes(self, layer: ExpertLayer, bits: Width) -> int:
        """Stored bytes of one expert."""
        return expert_bytes(layer, bits, self.recipe.losses.encoding, self.source_dtype.itemsize)

    def scales(self) -> int:
        """Scales of all placed experts."""
        encoding, total = self.recipe.losses.encoding, 0
        for layer, widths in zip(self.layers, self.widths[0], strict=True):
            for bits in widths:
                for name in layer.projections:
                    if (width := width_of(bits, name)) != FULL:
                        shapes = packed_shapes(*layer.shape(name), width, encoding.at(width))
                        total += prod(shapes["scales"][0])
        return total

    def loss_rows(self) -> int:
        """Rows of the loss table."""
        section = self.recipe.losses
        parts = [layer.num_experts * len(layer.projections) for layer in self.layers if section.per_projection]
        return len(section.methods) * len(section.bits) * (self.experts + sum(parts))

    # --- memory --------------------------------------------------------------------------------------------------

    def model(self) -> Moment:
        """What a stage holds of the model before it reads a block; `words` beside it where logits are asked for."""
        held = {"resident weights": self.resident} if self.streams else {"model": self.whole}
        return {what: size - self.mapped for what, size in held.items()}

    def words(self) -> Moment:
        """Embeddings and head that lie in the mapped file: read where logits are made, else a few rows of them."""
        return {"embeddings and head": self.mapped}

    def loading(self) -> Moment:
        """The model, or its next block, while it is being read."""
        read = self.largest_block if self.streams else self.whole - self.mapped
        stacked = 2 * self.largest.num_experts * self.largest.parameters_per_expert * self.dtype.itemsize / 3
        stacked += read if self.casts else 0
        if self.streams:
            return {**self.held(), "experts being stacked": stacked}
        return {**(self.model() if self.gpu else {}), "model while it is read": read + stacked}

    def held(self) -> Moment:
        """The model, or its resident parts and a block."""
        return {**self.model(), **({"decoder block": self.largest_block} if self.streams else {})}

    def stopped(self, copies: float, inputs: float = 0, *, kept: bool = True) -> Moment:
        """All batches stopped in a layer, with hidden states of every token, and copies of what goes into the layer;
        with what the layers of a loop were given at earlier visits, and those joined; kept: hidden states, too."""
        tokens, beside = self.calibration.tokens, 12 * self.geometry.top_k + 16
        earlier = sum(layer.visits - 1 for layer in self.layers)
        inputs = max(inputs, 1 + self.most_visits) if inputs > 1 and earlier and kept else inputs
        captured = tokens * (inputs * self.token + beside) if inputs else 0
        captured += tokens * earlier * (kept * self.token + beside)
        copies += copies / STATES * self.residual_states
        return {"stopped batches": tokens * copies * self.token, "inputs of a layer": captured}

    def activations(self, tokens: float) -> float:
        """Bytes of one batch inside one decoder layer."""
        inner, hidden, width = max(layer.intermediate_size for layer in self.layers), self.token, self.dtype.itemsize
        weighed = 2 * hidden + 2 * 4 * self.geometry.hidden_size  # by weights in float32, and put back in order
        experts = self.geometry.top_k * max(2 * hidden + 3 * inner * width, weighed)
        attention = 6 * max(hidden, self.geometry.num_attention_heads * self.geometry.head_dim * width)
        dense = 4 * 4 * hidden  # a dense feed-forward part, taken as four times as wide
        return tokens * (max(experts, dense) + attention + 2 * hidden)

    def heap(self, tokens: float) -> Moment:
        """What a batch's activations leave in the heap, as much as they are; a GPU's allocator uses its own again."""
        return {} if self.gpu else {"heap of activations": min(self.activations(tokens), HEAP_MOST)}

    def running(self, tokens: float) -> Moment:
        """A batch inside a decoder layer."""
        return {"activations of a batch": self.activations(tokens), **self.heap(tokens)}

    def counts(self) -> int:
        """Bytes of routing counts and scores of every sequence."""
        return self.experts * self.calibration.sequences * 2 * 16

    def tables(self) -> Moment:
        return {
            "loss table and profile": 3 * self.loss_rows() * STORED_ROW + 2 * self.counts(),
            "assignments": self.experts * len(self.checkpoint.sections) * ASSIGNED,
        }

    # --- seconds -------------------------------------------------------------------------------------------------

    def reading(self, rates: Rates, size: float, *, first: bool = False) -> float:
        """Seconds of reading and stacking weights; a second time they come from the page cache, if they fit there."""
        cached = self.disk < loading.memory_bytes(torch.device("cpu")) / 2 and not first
        return size / (rates.cached_bytes if cached else rates.read_bytes) + size / rates.cached_bytes

    def forward(self, rates: Rates, tokens: float, batches: float, *, head: bool) -> float:
        """Seconds of running batches of `tokens` tokens through the whole model: products of everything but the
        experts, every expert once on its share of the tokens, attention as long as the calibration's, passes over the
        hidden states."""
        heads, length = self.geometry.num_attention_heads * self.geometry.head_dim, self.calibration.length
        blocks = sum(self.block_visits)
        experts = [layer.num_experts * layer.visits for layer in self.layers]
        in_experts = sum(n * layer.parameters_per_expert for n, layer in zip(experts, self.layers, strict=True))
        products = self._visited(self.block_parameters) - in_experts + 2 * blocks * length * heads
        routed = self.expert_tokens(tokens) / self.expert_tokens(self.calibration.batch_tokens) if self.layers else 0
        of_experts = sum(experts) * (rates.expert_seconds * routed + EXPERT_CALLS)
        layers = blocks * (PASSES * tokens * self.token / rates.elementwise_bytes + CALLS)
        last = 2 * self.geometry.hidden_size / rates.matrix_flops + 8 * 4 / rates.elementwise_bytes
        dense = 2 * tokens * products / rates.matrix_flops
        return batches * (dense + of_experts + layers + (tokens * self.vocabulary * last if head else 0))

    def expert_tokens(self, tokens: float) -> int:
        """Mean number of a batch's tokens that one expert is given."""
        return max(1, int(tokens) * self.geometry.top_k // self.layers[0].num_experts)

    def walk_seconds(self, rates: Rates) -> float:
        """Seconds of running the calibration text through the model, read if it is streamed."""
        text = self.calibration
        reading = self.reading(rates, self.walked) if self.streams else 0.0
        return reading + self.forward(rates, text.batch_tokens, text.batches, head=False)


def _residual_states(config: Any, visits: Sequence[int]) -> int:
    """Hidden states a token that a stopped batch keeps for residuals by attention over sums of some layers each: the
    sums, twice while one is added, and what is made of them; in a loop those of the pass before, with its messages."""
    text = config.get_text_config()
    each = int(getattr(text, "n_layers_per_attn_res_block", None) or 0)
    if not each:
        return 0
    looped = sum(times > 1 for times in visits)
    return SUMMED + 2 * -(-int(text.num_hidden_layers) // each) + (MESSAGES + looped // each if looped else 0)


def _words(model: Any) -> int:
    """Number of weights of a model's embeddings and head, in which the words of its vocabulary are."""
    parts = (model.get_input_embeddings(), model.get_output_embeddings())
    return sum(weight.numel() for weight in {part.weight for part in parts if part is not None})


def _weights(module: nn.Module) -> int:
    """Number of weights; tied ones count once."""
    return sum(parameter.numel() for parameter in module.parameters())
