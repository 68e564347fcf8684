"""Peak memory of every stage: what the code holds at its fullest moments, in words and bytes.

Each stage is a list of moments; the one with the largest sum counts. A term lies on the device that computes, or in the
machine's memory where it always does (text, packed results, tables). Letters: T tokens of all batches, t of one batch,
H hidden size, I intermediate size, E experts, W widths; d bytes of a number of the computing dtype.

What is held, and where the code holds it:
- a walk (models/walk.py): of every token its residual and the experts' input, since all batches stop there, and the
  inputs of one layer with the pieces that they are joined from;
- a streamed model (models/streaming.py): what is not in a decoder block, one block, two thirds of its experts again
  while they are stacked, all of it once more where the dtype changes;
- losses (quantizers/layer.py): the layer's tokens in float32 and three quarters of them again, and one batch of experts
  under losses.working_memory with the replicas that are packed by then (planning/batch.py);
- what a batch's activations leave in the allocator's heap lies there until it is asked to return it, when a streamed
  block is read or dropped and after each stage; what is left of a stage then is gaps between what stayed;
- export (verification/): a second process with the checkpoint, and one block of the reference at a time, with a group
  of its experts (of the format dequantized: all);
- eval (stages/evaluate.py): beside a loaded model the experts that replicas stand in for, until it is dropped for the
  exported checkpoint, which is loaded whole; logits in float32.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from moeq.artifacts.assignment import FULL
from moeq.artifacts.trace import BYTES_PER_CHOICE
from moeq.exporters.readers import PLAIN
from moeq.models.experts import ExpertLayer
from moeq.models.loading import memory_bytes
from moeq.planning.batch import batch_moments, store_bytes
from moeq.planning.effects import heldout, kept
from moeq.planning.placed import methods
from moeq.planning.result import Term
from moeq.planning.sizes import ModelSizes, Work
from moeq.quantizers.layer_data import part_rows
from moeq.quantizers.memory import working_memory
from moeq.quantizers.quantizer import on_demand
from moeq.quantizers.signround_expert import WEIGHT_BYTES
from moeq.recipe import Recipe
from moeq.verification.reference import GROUP_BYTES

MIB = 2**20
PROGRAM = 325 * MIB  # the interpreter with torch, transformers, pyarrow and matplotlib; measured 270 to 340
TARGET_PROGRAM = 312 * MIB  # and with what a verification's own process loads
HEADER = 1300  # bytes of one tensor's entry in the tables of headers and names
TOKEN = 16  # bytes of one token of the text that sequences are taken from, half of which are their ids
TOKENIZED_KEPT = 0.3  # of what tokenizing took, in the heap until the stage ends
TOKENIZED_AT_ONCE = 150 * MIB  # what the tokenizer holds of one lot of text, of at most a MiB, at 150 bytes a character
ROW = 1300  # bytes of one row of the loss table as a Python dictionary
STORED_ROW = 160  # bytes of one row of the loss table as Arrow columns
REPLICA = 9000  # bytes of one replica in the manifest: nine tensors' stamps as objects and as JSON
ESTIMATE = 40 * MIB  # arrays of the estimator's policies
RENDERING = 70 * MIB  # figures of the report
KERNELS = {True: 16 * MIB, False: 60 * MIB}  # caches once a model has run: in float32, or in 16 bits by way of it
COMPILED = 70 * MIB  # the column loop and its compiler, from losses on
TASKS = 45 * MIB  # lm-eval, from eval on
KEPT = 0.08  # of what earlier stages freed, gaps that cannot be returned
HEAP_MOST = 2**30  # of freed memory in the heap; larger blocks go back to the system at once
HELD_PER_TOKEN = (
    3  # hidden states a token that a stopped batch keeps: residual, the experts' input, a copy between them
)
CAPTURED = 3  # copies of a layer's inputs while they are joined and looked through: pieces, whole, absolute values
LOOKED = 2  # bytes of a number that says whether it is finite, while it is found out

APART = "checkpoint in its target's process"
COMPARED = 5  # effects: two outputs as logarithmic probabilities and what is between them, in float32
REFINED_FLOATS = 4  # refining: a layer's inputs, what is behind, what is wanted, and one temporary
STAGES = ("profile", "losses", "assign", "quantize", "export", "eval", "estimate", "report")
Moment = list[Term]


def peak(moments: Iterable[Moment], *, gpu: bool) -> tuple[Term, ...]:
    """The terms of the fullest moment in the GPU's memory or the machine's."""
    sides = [tuple(term for term in moment if term.gpu == gpu and term.bytes) for moment in moments]
    return max(sides, key=lambda terms: sum(term.bytes for term in terms), default=())


class Memory:
    """Moments of every stage of one recipe on one model."""

    def __init__(self, sizes: ModelSizes, work: Work, recipe: Recipe, *, streams: bool, gpu: bool, placed: int) -> None:
        """placed: bytes of the experts as the recipe's assignment packs them."""
        self.sizes, self.work, self.recipe = sizes, work, recipe
        self.streams, self.gpu, self.placed = streams, gpu, placed
        self.d = sizes.dtype.itemsize
        self.token = sizes.hidden_size * self.d

    def moments(self, stage: str) -> list[Moment]:
        """What is in memory at the fullest moments of a stage of a whole run."""
        found: list[Moment] = getattr(self, f"_{stage}")()
        earlier = STAGES[: STAGES.index(stage)]
        freed = max((self._transient(before) for before in earlier), default=0)
        always = [
            Term(what="program", bytes=self._program(stage)),
            Term(what="headers", bytes=self.sizes.tensors * HEADER),
            Term(what="kept by the allocator", bytes=int(min(KEPT * freed, HEAP_MOST))),
        ]
        return [[*always, *moment] for moment in found]

    def _program(self, stage: str) -> int:
        """Bytes of the interpreter, of libraries and of what they keep, by the time of a stage."""
        place = STAGES.index(stage)
        compiled = COMPILED if place >= STAGES.index("losses") else 0
        tasks = TASKS if self.work.tasks is not None and place >= STAGES.index("eval") else 0
        return PROGRAM + KERNELS[self.d == 4] + compiled + tasks

    def _transient(self, stage: str) -> int:
        """Bytes of the machine's memory that a stage frees again, at most."""
        moments: list[Moment] = getattr(self, f"_{stage}")()
        fullest = max(sum(term.bytes for term in moment if not term.gpu and term.what != APART) for moment in moments)
        return fullest - sum(term.bytes for term in self._model() if not term.gpu)

    def _term(self, what: str, size: float, lever: str | None = None) -> Term:
        """A term on the device that computes."""
        return Term(what=what, bytes=int(size), gpu=self.gpu, lever=lever)

    def _model(self) -> Moment:
        """What a stage holds of the model before it reads a block."""
        if self.streams:
            return [self._term("resident weights", self.sizes.resident)]
        return [self._term("model", self.sizes.whole, "stream: always")]

    def _loading(self) -> Moment:
        """The model, or its next block, while it is being read."""
        joined = 2 * self.sizes.largest_experts / 3
        if self.streams:
            block = self.sizes.largest_block
            cast = block if self.sizes.casts else 0
            return [
                *self._model(),
                self._term("decoder block", block),
                self._term("experts being stacked", joined + cast),
            ]
        cast = self.sizes.whole if self.sizes.casts else 0
        reading = [
            Term(what="model while it is read", bytes=self.sizes.whole, lever="stream: always"),
            Term(what="experts being stacked", bytes=int(joined + cast), lever="stream: always"),
        ]
        return [*reading, *self._model()] if self.gpu else reading

    def _block(self) -> Moment:
        return [self._term("decoder block", self.sizes.largest_block)] if self.streams else []

    def _text(self, tokens: int) -> Moment:
        return [
            Term(what="text", bytes=tokens * TOKEN + min(TOKENIZED_AT_ONCE, 600 * tokens), lever="a smaller corpus")
        ]

    def _forward(self, tokens: int, length: int) -> Term:
        """Activations of one batch inside one decoder layer."""
        sizes = self.sizes
        inner = max(layer.intermediate_size for layer in sizes.layers)
        within = (2 * sizes.hidden_size + 3 * inner) * self.d
        weighed = sizes.hidden_size * (2 * self.d + 2 * 4)  # by weights in float32, and put back in order
        experts = sizes.top_k * max(within, weighed)
        attention = 6 * max(sizes.hidden_size, sizes.num_heads * sizes.head_dim) * self.d
        dense = 4 * 4 * sizes.hidden_size * self.d  # a dense feed-forward part, taken as four times as wide
        mask = length * self.d  # of padded batches: a row of the mask a token
        size = tokens * (max(experts, dense) + attention + 2 * self.token + mask)
        return self._term("activations of a batch", size, "a smaller batch_size")

    def _left(self, tokens: int, length: int) -> Term:
        """What a batch's activations leave in the heap, as much as they are; a GPU's allocator uses its own again."""
        size = 0 if self.gpu else min(self._forward(tokens, length).bytes, HEAP_MOST)
        return Term(what="heap of activations", bytes=size, lever="a smaller batch_size")

    def _stopped(self, copies: float) -> Term:
        tokens = self.work.calibration.tokens
        return self._term("stopped batches", tokens * copies * self.token, "fewer corpus.sequences")

    def _captured(self, copies: float) -> Term:
        tokens = self.work.calibration.tokens
        looked = LOOKED * self.sizes.hidden_size if copies > 1 else 0
        size = tokens * (copies * self.token + looked + 12 * self.sizes.top_k + 16)
        return self._term("inputs of a layer", size, "fewer corpus.sequences")

    def _profile(self) -> list[Moment]:
        text = self.work.calibration
        counts = sum(layer.num_experts for layer in self.sizes.layers) * text.sequences * 2 * 16
        tables = Term(what="routing counts", bytes=counts + self._recorded())
        read = self._text(max(text.whole, 0 if self.work.evaluation is None else self.work.evaluation.whole))
        kept = Term(what="heap of the text", bytes=int(TOKENIZED_KEPT * sum(term.bytes for term in read)))
        return [
            read,
            [*self._loading(), self._stopped(2), self._captured(1), tables, kept],
            [
                *self._model(), *self._block(), self._stopped(HELD_PER_TOKEN), self._captured(CAPTURED), kept,
                self._forward(text.batch_tokens, text.length), self._left(text.batch_tokens, text.length), tables,
            ],
        ]  # fmt: skip

    def _recorded(self) -> int:
        """Bytes of the routing trace while its layers become one array: half as much again as it has in the end."""
        if not self.recipe.profile.trace:
            return 0
        choices = self.work.calibration.tokens * len(self.sizes.layers) * self.sizes.top_k
        grows = self.recipe.corpus.until_covered is not None
        return choices * BYTES_PER_CHOICE * (4 if grows else 3) // 2

    def _losses(self) -> list[Moment]:
        text, section, sizes = self.work.calibration, self.recipe.losses, self.sizes
        largest = max(self.sizes.layers, key=lambda layer: layer.num_experts * layer.parameters_per_expert)
        batch, packed = max(batch_moments(largest, self.recipe, self._routed(largest), gpu=self.gpu), key=sum)
        rows = loss_rows(self.sizes, self.recipe)
        whole = rows // (1 + len(largest.projections) if section.per_projection else 1)
        tokens = text.tokens * self.sizes.hidden_size * 4
        part = 4 * self.sizes.hidden_size * part_rows(self.sizes.hidden_size)
        floats = (0 if self.d == 4 else tokens) + min(part, int(tokens * (1 - section.heldout_fraction)))
        return [
            [*self._loading(), self._stopped(2)],
            [
                *self._model(), *self._block(), self._stopped(HELD_PER_TOKEN), self._captured(CAPTURED),
                self._forward(text.batch_tokens, text.length), self._left(text.batch_tokens, text.length),
            ],
            [
                *self._model(), *self._block(), self._stopped(HELD_PER_TOKEN), self._captured(1),
                self._term("tokens in float32", floats, "fewer corpus.sequences"),
                self._left(text.batch_tokens, text.length),
                Term(what="rows of a layer", bytes=rows // len(self.sizes.layers) * ROW),
                self._term("batch of experts", batch, "a smaller losses.working_memory"),
                self._term("packed replicas of a layer", packed),
                self._term("sums over inputs of other modules", sizes.others.sums()),
            ],
            [
                *self._model(), *self._block(), self._stopped(HELD_PER_TOKEN),
                self._term("sums over inputs of other modules", sizes.others.sums()),
                self._term("another module", sizes.others.working()),
            ],
            [*self._model(), Term(what="loss table", bytes=whole * ROW + 2 * rows * STORED_ROW)],
            *self._effects(),
        ]  # fmt: skip

    def _effects(self) -> list[Moment]:
        """The exact output of a batch beside another, and what goes into the layers that are begun at."""
        found, losses = [], self.recipe.losses
        for section in (losses.layer_effects, losses.expert_effects):
            if section is not None:
                tokens, _ = heldout(self.sizes, self.work, losses, section)
                numbers = COMPARED * self.sizes.vocabulary * 4 + self.sizes.vocabulary * self.d
                size = int(tokens * (numbers + kept(self.sizes, section) * self.d))
                outputs = self._term("outputs that are compared", size, "a smaller losses.working_memory")
                moment = [*self._model(), *self._block(), outputs]
                length = self.work.calibration.length
                found.append([*moment, self._forward(int(tokens), length), self._left(int(tokens), length)])
        return found

    def _routed(self, layer: ExpertLayer) -> int:
        """Calibration tokens of a popular expert: three times the mean."""
        tokens = self.work.calibration.tokens
        if self.recipe.losses.tokens == "all":
            return tokens
        return int(min(tokens, 3 * tokens * self.sizes.top_k / layer.num_experts))

    def _tables(self) -> Moment:
        rows = loss_rows(self.sizes, self.recipe)
        counts = sum(layer.num_experts for layer in self.sizes.layers) * self.work.calibration.sequences * 2 * 16
        experts = sum(layer.num_experts for layer in self.sizes.layers)
        named = 1 + len(self.recipe.eval.compare)
        return [
            Term(what="loss table and profile", bytes=3 * rows * STORED_ROW + 2 * counts),
            Term(what="assignments", bytes=experts * named * 2500),
        ]

    def _assign(self) -> list[Moment]:
        largest = max(layer.parameters_per_expert for layer in self.sizes.layers)
        one = Term(what="one expert", bytes=2 * largest * self.sizes.source_dtype.itemsize)
        return [[*self._model(), *self._tables(), one]]

    def _quantize(self) -> list[Moment]:
        largest = max(self.sizes.layers, key=lambda layer: layer.num_experts * layer.parameters_per_expert)
        dense = largest.num_experts * largest.parameters_per_expert * self.sizes.source_dtype.itemsize
        share = self.placed / max(1, len(self.sizes.layers))
        every = store_bytes(largest, self.recipe) + dense if self.recipe.quantize.replicas == "all" else share
        reads = read_share(self.sizes, self.recipe) > 0
        one = Term(what="one expert", bytes=16 * largest.parameters_per_expert if reads else 0)
        packed = Term(what="packed experts of a layer", bytes=int(every))
        return [[*self._model(), *self._tables(), packed, one], *self._refine(largest, packed)]

    def _refine(self, layer: ExpertLayer, packed: Term) -> list[Moment]:
        """Both runs of all batches stand at the end of a decoder layer, whose experts are trained."""
        section, text = self.recipe.quantize.refine, self.work.calibration
        if section is None:
            return []
        floats = REFINED_FLOATS * 4 * text.tokens * self.sizes.hidden_size
        trained = max(working_memory(section.working_memory), WEIGHT_BYTES * layer.parameters_per_expert)
        unpacked = 2 * layer.num_experts * layer.parameters_per_expert
        waiting = [*self._model(), *self._block(), self._stopped(2 * HELD_PER_TOKEN), self._captured(CAPTURED)]
        return [
            [*self._loading(), self._stopped(4)],
            [*waiting, self._forward(text.batch_tokens, text.length), self._left(text.batch_tokens, text.length)],
            [
                *waiting, *self._tables(), packed, self._left(text.batch_tokens, text.length),
                self._term("tokens in float32", floats, "fewer corpus.sequences"),
                self._term("codes of a layer", unpacked),
                self._term("experts in training", trained, "a smaller quantize.refine.working_memory"),
            ],
        ]  # fmt: skip

    def _export(self) -> list[Moment]:
        experts = sum(layer.num_experts for layer in self.sizes.layers)
        widths = len(self.recipe.losses.bits) + 1 if self.recipe.quantize.replicas == "all" else 1
        writing = [*self._model(), *self._tables(), Term(what="manifest", bytes=experts * widths * REPLICA)]
        return [writing, *([*writing, *moment] for moment in self._verifying() if self.recipe.export.verify)]

    def _verifying(self) -> list[Moment]:
        """The target's process, and when it has ended what its layers are compared with, of which only the resident
        parts were there before; nothing where it is left out."""
        sizes, lever = self.sizes, "export.verify: false"
        rest = sizes.whole // self.d - sizes.expert_parameters - sizes.others.parameters
        loaded = 4 * rest + sizes.others.packed + self.placed
        if loaded > memory_bytes(torch.device("cpu")):
            return []
        resident = 4 * sizes.resident // self.d
        reference = 4 * sizes.largest_block // self.d
        if PLAIN not in self.recipe.export.formats:  # whose experts are read as stacks, a layer at a time
            largest = max(sizes.layers, key=lambda layer: layer.num_experts * layer.parameters_per_expert)
            one, experts = 4 * largest.parameters_per_expert, 4 * largest.num_experts * largest.parameters_per_expert
            reference -= max(0, experts - max(GROUP_BYTES, one) - one)

        def compared(block: int) -> Term:
            return Term(what="reference in float32", bytes=resident + block, lever=lever)

        apart = Term(what=APART, bytes=int(TARGET_PROGRAM + loaded), lever=lever)
        return [[apart, compared(0)], [compared(reference)]]

    def _eval(self) -> list[Moment]:
        text, tasks, sizes = self.work.evaluation, self.work.tasks, self.sizes
        held = sum(text.whole * TOKEN for text in [text] if text is not None)
        tables = [*self._tables(), Term(what="text", bytes=held // 4)]
        rest = sizes.whole - (sizes.expert_parameters + sizes.others.parameters) * self.d + sizes.others.packed
        exported = self._term("exported checkpoint", rest + self.placed * 1.02, "run the stages before eval alone")
        largest = max(layer.parameters_per_expert for layer in sizes.layers)
        one = self._term("one expert, dequantized", 12 * largest)
        size = 0 if self.streams else sizes.expert_parameters * self.d  # in the machine's memory, wherever the model is
        originals = Term(what="experts that were replaced", bytes=size, lever="stream: always")
        moments = [[*self._loading(), *tables]]
        if self.streams:
            moments += [[*self._model(), exported, *tables, Term(what="being read", bytes=int(0.1 * self.placed))]]
        else:
            moments += [[exported, *tables]]
        for tokens, length, lever in self._passes():
            logits = self._term("logits", tokens * sizes.vocabulary * (self.d + 12), lever)
            running = [self._forward(tokens, length), self._left(tokens, length), logits, one, *tables]
            lockstep = 0 if not self.streams or text is None else text.tokens * 2 * self.token
            stopped = self._term("stopped batches", lockstep, "fewer eval.perplexity.sequences")
            moments += [[*self._model(), *self._block(), originals, stopped, *running]]
            moments += [[*self._resting(), exported, *running]]
            if self.streams:
                moments += [[*self._loading(), stopped, one, *tables]]
        if tasks is not None:
            moments[-1].append(Term(what="requests", bytes=tasks.requests * 6000))
        return moments

    def _passes(self) -> list[tuple[int, int, str]]:
        """Tokens and length of the batches that eval runs, and what makes them smaller."""
        text, tasks = self.work.evaluation, self.work.tasks
        found = [(64, 32, "")]
        if text is not None:
            found.append((text.batch_tokens, text.length, "a smaller eval.perplexity.batch_size"))
        if tasks is not None:
            found.append((tasks.batch * tasks.most_tokens, tasks.most_tokens, "a smaller eval.batch_size"))
        return found

    def _resting(self) -> Moment:
        return [self._term("resident weights", self.sizes.resident)] if self.streams else []

    def _estimate(self) -> list[Moment]:
        return [[*self._resting(), *self._tables(), Term(what="estimator", bytes=ESTIMATE)]]

    def _report(self) -> list[Moment]:
        section = self.recipe.losses
        once = loss_rows(self.sizes, self.recipe) // (len(section.methods) * (4 if section.per_projection else 1))
        manifest = self._export()[0][-1]
        rows = Term(what="rows of the loss table", bytes=once * ROW)
        return [[*self._resting(), *self._tables(), rows, manifest, Term(what="figures", bytes=RENDERING)]]


def read_share(sizes: ModelSizes, recipe: Recipe) -> float:
    """Share of the experts that `quantize` reads from the checkpoint: all of them for what is made on demand, biases or
    every replica, else those that stay in full precision."""
    section = recipe.assign
    whole = recipe.quantize.replicas == "all" or on_demand(methods(section, recipe)) or section.named() == {FULL}
    if whole or any(layer.biased for layer in sizes.layers):
        return 1.0
    return section.gpu_experts * len(sizes.layers) / sum(layer.num_experts for layer in sizes.layers)


def loss_rows(sizes: ModelSizes, recipe: Recipe) -> int:
    """Rows of the loss table."""
    section = recipe.losses
    each = len(section.methods) * len(section.bits)
    return sum(
        each * layer.num_experts * (1 + len(layer.projections) if section.per_projection else 1)
        for layer in sizes.layers
    )
