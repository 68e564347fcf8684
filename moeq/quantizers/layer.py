"""Replicas and losses of all experts of one layer, in memory-bounded batches of experts.

Letters: E experts, N output rows, K inputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moeq.models.experts import ExpertLayer, ExpertMath
from moeq.models.walk import LayerInputs
from moeq.numerics.slab import Slab
from moeq.quantizers.layer_data import ExpertBatch, RoutedTokens
from moeq.quantizers.measuring import Candidate, measured
from moeq.quantizers.memory import working_memory
from moeq.quantizers.quantizer import Quantizer
from moeq.quantizers.statistics import Note, Statistics
from moeq.quantizers.stored import Packed, packed_batch
from moeq.quantizers.trained_grid import select
from moeq.recipe import LossesSection
from moeq.registry import QUANTIZERS
from moeq_kernels.freed import return_memory
from moeq_kernels.packed import PackedWeight, joined


@dataclass(frozen=True, kw_only=True)
class LayerResult:
    """Rows of the loss table; the packed replicas of the stored method, {projection: {bits: stack over experts}}."""

    rows: list[dict[str, Any]]
    replicas: dict[str, dict[int, PackedWeight]]


@torch.no_grad()
def quantize_layer(
    inputs: LayerInputs,
    weights: dict[str, Tensor],
    math: ExpertMath,
    config: LossesSection,
    biases: dict[str, Tensor] | None = None,
    *,
    seed: int = 0,
) -> LayerResult:
    """Replicas of every expert at every width and what each one loses on held-out tokens.

    weights: {projection: [E, N, K]} of the layer's projections; biases: {projection: [E, N]}, which stay as they are.
    Of config.methods one at most is stored. Raises QuantizationError naming layer and expert when a loss is not a
    number, or when a method's result cannot be stored.
    """
    every = range(inputs.layer.num_experts)
    tokens = RoutedTokens.of(inputs, config)
    return quantize_experts(tokens, inputs.layer, every, weights, math, config, biases or {}, seed=seed)


@torch.no_grad()
def quantize_experts(
    tokens: RoutedTokens,
    layer: ExpertLayer,
    experts: range,
    weights: dict[str, Tensor],
    math: ExpertMath,
    config: LossesSection,
    biases: dict[str, Tensor],
    *,
    seed: int = 0,
) -> LayerResult:
    """What `quantize_layer` makes, of some of the layer's E experts alone: weights {projection: [E, N, K]} and biases
    {projection: [E, N]} are theirs."""
    quantizers = [QUANTIZERS.get(method) for method in config.methods]
    kept = [quantizer for quantizer in quantizers if quantizer.stored]
    if len(kept) > 1:
        raise ValueError(f"one stored method at a time, not {[quantizer.name for quantizer in kept]}")
    rows: list[dict[str, Any]] = []
    slab = Slab()
    stacks: dict[str, dict[int, list[PackedWeight]]] = {p: {b: [] for b in config.bits} for p in layer.projections}
    for which in expert_batches(layer, config, tokens.hidden.device, experts):
        given = slice(which.start - experts.start, which.stop - experts.start)
        batch = ExpertBatch(
            which=which,
            weights={name: stack[given].float() for name, stack in weights.items()},
            biases={name: stack[given].float() for name, stack in biases.items()},
            math=math,
        )
        candidates: dict[str, Candidate] = {}
        for quantizer in sorted(quantizers, key=lambda quantizer: not quantizer.stored):
            candidates[quantizer.name] = _candidate(quantizer, tokens, batch, layer, config, seed)
            if quantizer.stored:
                _keep(candidates[quantizer.name].packed, slab, stacks)
        for index in range(len(batch.numbers())):
            rows += measured(tokens, batch, candidates, index, layer, config)
        del batch, candidates
        return_memory()  # or the next batch lies on top of this one's gaps, higher in some layers than in others
    replicas: dict[str, dict[int, PackedWeight]] = {projection: {} for projection in stacks}
    if kept:  # popped, so that the store is not held twice
        for projection, parts in stacks.items():
            replicas[projection] = {bits: joined(parts.pop(bits)) for bits in config.bits}
    return LayerResult(rows=rows, replicas=replicas)


def _keep(packed: Packed, slab: Slab, stacks: dict[str, dict[int, list[PackedWeight]]]) -> None:
    """Move what was packed to where it stays, and add it to its stacks."""
    for projection, widths in packed.items():
        for bits in widths:
            widths[bits] = widths[bits].map(slab.keep)
            stacks[projection][bits].append(widths[bits])


def _candidate(
    quantizer: Quantizer,
    tokens: RoutedTokens,
    batch: ExpertBatch,
    layer: ExpertLayer,
    config: LossesSection,
    seed: int,
) -> Candidate:
    """What a quantizer makes of a batch of experts, packed."""
    notes = [Note() for _ in batch.numbers()]
    statistics = Statistics(tokens=tokens, batch=batch, settings=config, notes=notes, seed=seed)
    made = _codes(quantizer, statistics, layer)
    with QUANTIZERS.blaming(quantizer.name, lambda: f"{layer.name}, {_named(batch.numbers())}"):
        packed = packed_batch(made, config, config.bits, method=quantizer.name, layer=layer, experts=batch.numbers())
    return Candidate(packed=packed, notes=notes)


def _codes(quantizer: Quantizer, statistics: Statistics, layer: ExpertLayer) -> dict[str, Any]:
    """What a quantizer makes of a batch of experts, from the codes of the one that it starts from."""
    if quantizer.starts_from is not None:
        start = _codes(QUANTIZERS.get(quantizer.starts_from), statistics, layer)
        statistics = replace(statistics, start=start)
    with QUANTIZERS.blaming(quantizer.name, lambda: f"{layer.name}, {_failing(quantizer, statistics)}"):
        made: dict[str, Any] = quantizer.quantize(statistics.batch.weights, statistics, statistics.settings)
        return made


def _failing(quantizer: Quantizer, statistics: Statistics) -> str:
    """Which expert of a batch a quantizer fails at: the first that it cannot do alone, or all of them."""
    batch = statistics.batch
    for index, expert in enumerate(batch.numbers()):
        part = slice(index, index + 1)
        weights, biases = ({name: stack[part] for name, stack in of.items()} for of in (batch.weights, batch.biases))
        alone = replace(batch, which=slice(expert, expert + 1), weights=weights, biases=biases)
        start = statistics.start and {name: select(codes, (part,)) for name, codes in statistics.start.items()}
        own = replace(statistics, batch=alone, notes=[Note()], start=start)
        try:
            quantizer.quantize(weights, own, statistics.settings)
        except Exception:  # whatever another's code raises
            return f"expert {expert}"
    return _named(batch.numbers())


def _named(experts: range) -> str:
    return f"expert {experts[0]}" if len(experts) == 1 else f"experts {experts[0]} to {experts[-1]}"


def made_on_demand(
    method: str, weights: dict[str, Tensor], config: LossesSection, bits: int, *, layer: ExpertLayer, expert: int
) -> dict[str, PackedWeight]:
    """Some matrices of one expert at one width, by a method whose replicas are not stored; weights: [N, K] float32."""
    wanted = config.model_copy(update={"bits": [bits]})
    with QUANTIZERS.blaming(method, lambda: f"{layer.name}, expert {expert}"):
        made = QUANTIZERS.get(method).quantize({name: matrix[None] for name, matrix in weights.items()}, None, wanted)
        packed = packed_batch(made, config, [bits], method=method, layer=layer, experts=[expert])
    return {name: widths[bits].map(lambda part: part[0]) for name, widths in packed.items()}


def expert_batches(
    layer: ExpertLayer, config: LossesSection, device: torch.device | str = "cpu", experts: range | None = None
) -> Iterator[slice]:
    """Slices of experts, of all or some, whose Hessians, residuals and codes fit into the working memory (at least one
    expert)."""
    hidden, inter, widths = layer.hidden_size, layer.intermediate_size, len(config.bits)
    hessians = 4 * 3 * (hidden**2 + inter**2)
    results = len(layer.projections) * hidden * inter * (4 + widths * (4 + 1 + 1 + 4))
    step = max(1, working_memory(config.working_memory, device) // (hessians + results))
    experts = range(layer.num_experts) if experts is None else experts
    for start in range(experts.start, experts.stop, step):
        yield slice(start, min(start + step, experts.stop))
