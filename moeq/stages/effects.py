"""What quantizing one layer's experts alone does to the model's output: one pass over some text for each layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from moeq.artifacts.assignment import FULL, Assignment, ExpertChoice, LayerAssignment
from moeq.artifacts.effects import LayerEffects
from moeq.errors import QuantizationError
from moeq.models.experts import ExpertLayer
from moeq.models.walk import Batch
from moeq.quantizers.layer_data import heldout_stride
from moeq.quantizers.memory import working_memory
from moeq.recipe import LayerEffectsSection
from moeq.stages.context import Context
from moeq.stages.replicas import Replicas

OUTPUTS = 3  # that are held at once


def measure(context: Context, section: LayerEffectsSection) -> LayerEffects:
    """The divergence that every layer alone causes, on sequences that losses held out.

    The exact output of one batch is kept, and compared with that of every layer's replicas in turn; batches are so
    small that it fits into losses.working_memory. Raises QuantizationError when an output is not finite.
    """
    method = context.recipe.losses.methods[0]
    totals = torch.zeros(len(context.model.layers), dtype=torch.float64)
    batches = heldout_batches(context, section.sequences)
    with context.reporter.bar("layer effects", len(batches) * (len(context.model.layers) + 1)) as advance:
        for batch in batches:
            exact = log_probabilities(context, batch)
            advance()
            for layer in context.model.layers:
                with replaced(context, layer, alone(context, layer, section.bits, method), range(layer.num_experts)):
                    changed = log_probabilities(context, batch)
                totals[layer.index] += divergence(exact, changed, f"{layer.name} at {section.bits} bits")
                advance()
    tokens = sum(predictions(context, batch) for batch in batches)
    return LayerEffects(
        bits=section.bits,
        method=method,
        sequences=sum(len(batch.input_ids) for batch in batches),
        tokens=tokens,
        divergence=tuple((totals / tokens).tolist()),
    )


def divergence(exact: Tensor, changed: Tensor, where: str) -> float:
    """The sum over tokens of the divergence of `changed` from `exact`, logarithmic probabilities [n, V], in nats.

    Raises QuantizationError naming `where` when it is not finite.
    """
    total = float((exact.exp() * (exact - changed)).sum(dtype=torch.float64))
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
    section = context.recipe.losses
    assignment = Assignment(
        name="one layer",
        method="uniform",
        parameters={"quantizer": method},
        group_size=section.group_size,
        symmetric=section.symmetric,
        layers=tuple(layers),
    )
    return Replicas(context, assignment, layer, context.model.module)
