"""What quantizing one layer's experts alone does to the model's output: all layers in one run over some text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moeq.artifacts.assignment import FULL, Assignment, ExpertChoice, LayerAssignment
from moeq.artifacts.effects import LayerEffects
from moeq.engine.task import groups
from moeq.errors import QuantizationError
from moeq.models.carried import Carried, Lost
from moeq.models.experts import ExpertLayer
from moeq.models.walk import Batch
from moeq.quantizers.layer_data import heldout_stride
from moeq.quantizers.memory import working_memory
from moeq.recipe import LayerEffectsSection
from moeq.stages.context import Context
from moeq.stages.replicas import Replicas
from moeq.stages.workers import Opened, Openers, opening

OUTPUTS = 3  # that are held at once
MOST = 16  # sequences, where the recipe gives no number
WHOLE = "  decoder layers need more than the one before: the whole model runs for each layer"
AGREEING = 0.01  # part of a layer's divergence by which a whole run may differ: devices add in any order


def sequence_count(section: LayerEffectsSection, layers: int, calibration: int) -> int:
    """Sequences that the effects are measured on: as the recipe says, else as many as take no longer than a pass over
    `calibration` sequences. A sequence takes `passes(layers)`."""
    if section.sequences is not None:
        return section.sequences
    return max(1, min(MOST, int(calibration / passes(layers))))


def passes(layers: int) -> float:
    """Passes over all layers that one sequence takes: as it is, from every layer on, and one that is compared."""
    return 1 + (layers + 1) / 2 + 1


def measure(context: Context, section: LayerEffectsSection, opened: Openers | None = None) -> LayerEffects:
    """The divergence that every layer alone causes, on sequences that losses held out; opened: workers among which
    their batches are divided.

    One run of the model carries all layers' changes along; where a family's layers hand on more than their output, the
    model runs once for each. Outputs are compared batch by batch, batches being so small that they fit into
    losses.working_memory. Raises QuantizationError when an output is not finite.
    """
    layers = context.model.layers
    count = sequence_count(section, len(layers), len(context.text.grown_calibration))
    batches = heldout_batches(context, count, kept=kept_numbers(len(layers), layers[0].hidden_size))
    with context.reporter.bar("layer effects", len(batches) * len(layers)) as advance:
        if opened is None or len(batches) < 2:
            part = _measured(context, section.bits, batches, carries=None, advance=advance)
        else:
            part = _measured_apart(context, section.bits, batches, opened.count, advance)
    tokens = sum(predictions(context, batch) for batch in batches)
    return LayerEffects(
        bits=section.bits,
        method=context.recipe.losses.methods[0],
        sequences=sum(len(batch.input_ids) for batch in batches),
        tokens=tokens,
        divergence=tuple((torch.tensor(part.found, dtype=torch.float64).sum(0) / tokens).tolist()),
    )


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What some batches gave. found: of every batch the divergence, summed over its tokens, that each layer causes;
    carries: whether layers' changes can be carried."""

    found: list[list[float]]
    carries: bool


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """Batches that a worker measures; carries: as in `_Worker`."""

    opened: Opened
    bits: int
    batches: list[Batch]
    carries: bool | None


def _measured_apart(
    context: Context, bits: int, batches: Sequence[Batch], count: int, advance: Callable[[], None]
) -> _Part:
    """As `_measured`, of parts of the batches by so many workers. The one with the first batch finds whether changes
    can be carried; the others hope so, and measure once more where they cannot."""
    some = [list(batches[which.start : which.stop]) for which in groups(len(batches), count)]
    opened, layers = Opened.of(context), len(context.model.layers)

    def asked(first: int, carries: Sequence[bool | None]) -> list[tuple[str, _Asked]]:
        return [
            (f"layer effects, part {first + place + 1}", _Asked(opened=opened, bits=bits, batches=own, carries=known))
            for place, (own, known) in enumerate(zip(some[first:], carries, strict=True))
        ]

    sizes = iter(some)

    def measured() -> None:
        for _ in range(len(next(sizes)) * layers):
            advance()

    with opening(context, len(some)) as crew:
        parts = crew.did(_measure_in_worker, asked(0, [None, *[True] * (len(some) - 1)]), measured)
        if not parts[0].carries:
            context.reporter.say(WHOLE)
            parts[1:] = crew.did(_measure_in_worker, asked(1, [False] * (len(some) - 1)))
    return _Part(found=[row for part in parts for row in part.found], carries=parts[0].carries)


def _measure_in_worker(asked: _Asked, tensors: Any) -> tuple[_Part, dict[str, Tensor]]:
    """The task."""
    context = asked.opened.context()
    return _measured(context, asked.bits, asked.batches, carries=asked.carries, advance=lambda: None), {}


def _measured(
    context: Context, bits: int, batches: Sequence[Batch], *, carries: bool | None, advance: Callable[[], None]
) -> _Part:
    """What some batches give in this process; carries: as in `_Worker`."""
    layers, method = expert_layers(context), context.recipe.losses.methods[0]
    worker = _Worker(context=context, bits=bits, method=method, layers=layers, advance=advance, carries=carries)
    found = [row for group in grouped(batches, len(layers), context) for row in worker.measure(group)]
    return _Part(found=found, carries=bool(worker.carries))


def expert_layers(context: Context) -> list[ExpertLayer]:
    """The expert layers as the loaded model has them."""
    module, streamed = context.model.module, context.model.streamed  # found while all are there
    return context.model.layers if streamed is None or module is None else streamed.layers


def kept_numbers(layers: int, hidden: int) -> int:
    """Numbers of every token that are kept while layers' changes are carried along: hidden states."""
    return (layers + 1) * hidden


def grouped(batches: Sequence[Batch], layers: int, context: Context) -> list[list[Batch]]:
    """Batches in groups whose hidden states, those of every layer's change too, fit into the working memory."""
    memory = working_memory(context.recipe.losses.working_memory, context.model.device)
    hidden = max(layer.hidden_size for layer in context.model.layers) * context.model.dtype.itemsize
    groups: list[list[Batch]] = []
    for batch in batches:
        if groups and sum(at.input_ids.numel() for at in [*groups[-1], batch]) * (layers + 1) * hidden <= memory:
            groups[-1].append(batch)
        else:
            groups.append([batch])
    return groups


@dataclass(kw_only=True)
class _Worker:
    """Measures some batches at a time. carries: whether layers' changes can be carried; None: not yet known."""

    context: Context
    bits: int
    method: str
    layers: Sequence[ExpertLayer]
    advance: Callable[[], None]
    carries: bool | None = None

    def measure(self, batches: Sequence[Batch]) -> list[list[float]]:
        """Of every batch the sum over tokens of the divergence that each layer causes."""
        run = None if self.carries is False else self._carried(batches)
        if self.carries is None:
            self.carries = run is not None and self._agrees(run, batches[0])
            if not self.carries:
                self.context.reporter.say(WHOLE)
        if run is None or not self.carries:
            return [self._one_by_one(batch) for batch in batches]
        return [self._compared(run, index, batch) for index, batch in enumerate(batches)]

    def _carried(self, batches: Sequence[Batch]) -> Carried | None:
        """The run of some batches with every layer's change; None where changes cannot be carried."""
        model = self.context.model
        run = Carried(model.module, batches, model.device, model.streamed)
        try:
            for block in run.walk():
                for layer in self.layers:
                    if layer.name.startswith(f"{block}."):
                        with self._replaced(layer):
                            run.begin(layer.index, block)
        except Lost:
            return None
        return run if len(run.changed) == len(self.layers) else None

    def _agrees(self, run: Carried, batch: Batch) -> bool:
        """Whether the first layer, whose change went through all others, does what it does in a whole run."""
        with run.ending(0):
            exact = log_probabilities(self.context, batch)
        with run.ending(0, self.layers[0].index):
            carried = self._divergence(exact, log_probabilities(self.context, batch), self.layers[0])
        return math.isclose(carried, self._whole(exact, batch, self.layers[0]), rel_tol=AGREEING)

    def _compared(self, run: Carried, index: int, batch: Batch) -> list[float]:
        """The divergence of each layer on a batch that was run."""
        with run.ending(index):
            exact = log_probabilities(self.context, batch)
        found = []
        for layer in self.layers:
            with run.ending(index, layer.index):
                found.append(self._divergence(exact, log_probabilities(self.context, batch), layer))
            self.advance()
        return found

    def _one_by_one(self, batch: Batch) -> list[float]:
        """The divergence of each layer, every one in a run of the whole model."""
        exact, found = log_probabilities(self.context, batch), []
        for layer in self.layers:
            found.append(self._whole(exact, batch, layer))
            self.advance()
        return found

    def _whole(self, exact: Tensor, batch: Batch, layer: ExpertLayer) -> float:
        with self._replaced(layer):
            return self._divergence(exact, log_probabilities(self.context, batch), layer)

    def _replaced(self, layer: ExpertLayer) -> AbstractContextManager[None]:
        replicas = alone(self.context, layer, self.bits, self.method)
        return replaced(self.context, layer, replicas, range(layer.num_experts))

    def _divergence(self, exact: Tensor, changed: Tensor, layer: ExpertLayer) -> float:
        return divergence(exact, changed, f"{layer.name} at {self.bits} bits")


def divergence(exact: Tensor, changed: Tensor, where: str) -> float:
    """The sum over tokens of the divergence of `changed` from `exact`, logarithmic probabilities [n, V], in nats.

    Raises QuantizationError naming `where` when it is not finite.
    """
    terms = (exact.exp() * (exact - changed)).masked_fill_(exact == -torch.inf, 0.0)  # of a token that is ruled out
    total = float(terms.sum(dtype=torch.float64))
    if not math.isfinite(total):
        raise QuantizationError("the output is not finite", where=where, do="use dtype: float32")
    return total


def sequences_at_once(memory: int, vocabulary: int, length: int, kept: int) -> int:
    """Sequences of a length whose outputs, and so many further numbers of every token, fit into some memory.

    The exact output, the other and their difference are there at once, in single precision; at least one sequence.
    """
    return max(1, memory // (4 * (OUTPUTS * vocabulary + kept) * length))


def heldout_batches(context: Context, count: int, kept: int = 0) -> list[Batch]:
    """At most `count` held-out sequences, evenly spaced, in batches whose outputs fit into the working memory.

    kept: further numbers, in single precision, that are kept of every token.
    """
    stride = heldout_stride(context.recipe.losses.heldout_fraction)
    singles = context.text.grown_calibration.batches(1)[stride - 1 :: stride]
    chosen = singles if len(singles) <= count else [singles[index * len(singles) // count] for index in range(count)]
    widest = max(batch.input_ids.shape[1] for batch in chosen)
    memory = working_memory(context.recipe.losses.working_memory, context.model.device)
    return joined(chosen, sequences_at_once(memory, outputs(context), widest, kept))


def joined(singles: Sequence[Batch], size: int) -> list[Batch]:
    """Batches of one sequence, in their order, as batches of at most `size` of the same length; none with images."""
    batches: list[Batch] = []
    for batch in singles:
        last = batches[-1] if batches else None
        joins = last is not None and not (last.extra or batch.extra) and len(last.input_ids) < size
        if last is not None and joins and last.input_ids.shape[1] == batch.input_ids.shape[1]:
            batches[-1] = Batch(
                input_ids=torch.cat([last.input_ids, batch.input_ids]),
                mask=torch.cat([last.mask, batch.mask]),
                sequences=torch.cat([last.sequences, batch.sequences]),
                extra={},
            )
        else:
            batches.append(batch)
    return batches


def outputs(context: Context) -> int:
    """V, how many numbers the model gives for a token, or for an image."""
    if context.model.takes_images:
        return context.model.image_task.labels
    return int(context.model.source.config.get("vocab_size") or context.model.tokenizer.vocab_size)


def predictions(context: Context, batch: Batch) -> int:
    """n, for how many tokens, or images, the model gives an output."""
    return len(batch.sequences) if context.model.takes_images else int(batch.mask.sum())


def log_probabilities(context: Context, batch: Batch) -> Tensor:
    """The output's logarithmic probabilities at every token that is no pad, or for every image, [n, V] float32."""
    outputs: list[Tensor] = []

    def finish(done: Batch, output: Any) -> None:
        logits = output.logits
        logits = logits if context.model.takes_images else logits[done.mask.to(logits.device)]
        outputs.append(logits.float().log_softmax(-1))

    for _ in context.model.walk([batch], (), finish=finish):
        pass
    return outputs[0]


def replaced(
    context: Context, layer: ExpertLayer, replicas: Replicas, experts: Sequence[int]
) -> AbstractContextManager[None]:
    """The model with some of a layer's experts as replicas; afterwards it has its own weights again."""

    def weights(expert: int) -> dict[str, Tensor]:
        packed = replicas.packed(expert, replicas.choices[expert].bits)
        return {name: matrix.dequantize() for name, matrix in packed.items()}

    return context.model.replacing(layer, experts, weights)


def alone(context: Context, layer: ExpertLayer, bits: int, method: str) -> Replicas:
    """The replicas of an assignment that quantizes one layer's experts and nothing else."""
    full = ExpertChoice(tier="ndp", bits=FULL, quantizer=None, importance=0.0)
    quantized = ExpertChoice(tier="ndp", bits=bits, quantizer=method, importance=0.0)
    layers = []
    for other in context.model.layers:
        choice = quantized if other.index == layer.index else full
        layers.append(LayerAssignment(name=other.name, experts=(choice,) * other.num_experts))
    assignment = Assignment(
        name="one layer",
        method="uniform",
        parameters={"quantizer": method},
        layers=tuple(layers),
        **vars(context.recipe.losses.encoding),
    )
    return Replicas(context, assignment, layer, context.model.module)
