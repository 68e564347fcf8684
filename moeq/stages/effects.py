"""What quantizing one layer's experts alone does to the model's output: one pass over some text for each layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moeq.artifacts.assignment import FULL, Assignment, ExpertChoice, LayerAssignment
from moeq.artifacts.effects import LayerEffects
from moeq.errors import QuantizationError
from moeq.models.experts import ExpertLayer, set_expert_weights, stacked_weights
from moeq.models.walk import Batch, walk
from moeq.quantizers.layer import heldout_stride
from moeq.quantizers.memory import working_memory
from moeq.recipe import LayerEffectsSection
from moeq.stages.context import Context
from moeq.stages.quantize import Replicas


def measure(context: Context, section: LayerEffectsSection) -> LayerEffects:
    """The divergence that every layer alone causes, on sequences that losses held out.

    The exact output of one batch is kept, and compared with that of every layer's replicas in turn; batches are so
    small that it fits into losses.working_memory. Raises QuantizationError when an output is not finite.
    """
    method = context.recipe.losses.methods[0]
    totals = torch.zeros(len(context.layers), dtype=torch.float64)
    batches = _batches(context, section.sequences)
    with context.reporter.bar("layer effects", len(batches) * (len(context.layers) + 1)) as advance:
        for batch in batches:
            exact = _log_probabilities(context, batch)
            advance()
            for layer in context.layers:
                with _replaced(context, layer, section.bits, method):
                    found = _log_probabilities(context, batch)
                divergence = float((exact.exp() * (exact - found)).sum(dtype=torch.float64))
                if divergence != divergence:
                    raise QuantizationError(
                        "the output is not finite",
                        where=f"{layer.name} at {section.bits} bits",
                        do="use dtype: float32",
                    )
                totals[layer.index] += divergence
                advance()
    tokens = sum(int(batch.mask.sum()) for batch in batches)
    return LayerEffects(
        bits=section.bits,
        method=method,
        sequences=sum(len(batch.input_ids) for batch in batches),
        tokens=tokens,
        divergence=tuple((totals / tokens).tolist()),
    )


def _batches(context: Context, count: int) -> list[Batch]:
    """At most `count` held-out sequences, evenly spaced, in batches whose outputs fit into the working memory."""
    stride = heldout_stride(context.recipe.losses.heldout_fraction)
    vocabulary = int(context.source.config.get("vocab_size") or context.tokenizer.vocab_size)
    singles = context.grown_calibration.batches(1)[stride - 1 :: stride]
    chosen = singles if len(singles) <= count else [singles[index * len(singles) // count] for index in range(count)]
    widest = max(batch.input_ids.shape[1] for batch in chosen)
    size = max(1, working_memory(context.recipe.losses.working_memory, context.device) // (3 * 4 * vocabulary * widest))
    found: list[Batch] = []
    for batch in chosen:
        last = found[-1] if found else None
        joins = last is not None and not (last.extra or batch.extra) and len(last.input_ids) < size
        if last is not None and joins and last.input_ids.shape[1] == batch.input_ids.shape[1]:
            found[-1] = Batch(
                input_ids=torch.cat([last.input_ids, batch.input_ids]),
                mask=torch.cat([last.mask, batch.mask]),
                sequences=torch.cat([last.sequences, batch.sequences]),
                extra={},
            )
        else:
            found.append(batch)
    return found


def _log_probabilities(context: Context, batch: Batch) -> Tensor:
    """The output's logarithmic probabilities at every token that is no pad, [n, V] float32."""
    found: list[Tensor] = []

    def finish(done: Batch, output: Any) -> None:
        logits = output.logits[done.mask.to(output.logits.device)]
        found.append(logits.float().log_softmax(-1))

    for _ in walk(context.model, (), [batch], context.device, streamed=context.streamed, finish=finish):
        pass
    return found[0]


@contextmanager
def _replaced(context: Context, layer: ExpertLayer, bits: int, method: str) -> Iterator[None]:
    """The model with one layer's experts at `bits`; afterwards it has its own weights again."""
    assignment = _alone(context, layer, bits, method)

    def replace(model: nn.Module, here: ExpertLayer) -> None:
        if here.index == layer.index:
            replicas = Replicas(context, assignment, here, model)
            for expert in range(here.num_experts):
                values = {name: packed.dequantize() for name, packed in replicas.packed(expert, bits).items()}
                set_expert_weights(model, here, expert, values)

    if context.streamed is not None:
        context.streamed.overlay = replace
        yield
        context.streamed.overlay = None
        return
    kept = {name: stack.clone() for name, stack in stacked_weights(context.model, layer, slice(None)).items()}
    replace(context.model, layer)
    yield
    for expert in range(layer.num_experts):
        set_expert_weights(context.model, layer, expert, {name: stack[expert] for name, stack in kept.items()})


def _alone(context: Context, layer: ExpertLayer, bits: int, method: str) -> Assignment:
    """An assignment that quantizes one layer's experts and nothing else."""
    layers = []
    for one in context.layers:
        choice = ExpertChoice(
            tier="ndp",
            bits=bits if one.index == layer.index else FULL,
            quantizer=method if one.index == layer.index else None,
            importance=0.0,
        )
        layers.append(LayerAssignment(name=one.name, experts=(choice,) * one.num_experts))
    section = context.recipe.losses
    return Assignment(
        name="one layer",
        method="uniform",
        parameters={"quantizer": method},
        group_size=section.group_size,
        symmetric=section.symmetric,
        layers=tuple(layers),
    )
