"""Replicas and losses of all experts of one layer, in memory-bounded batches of experts.

Letters: T tokens, E experts, e experts of one batch, H hidden size, I intermediate size, B bit widths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeq.models.experts import DOWN, ExpertLayer, ExpertMath
from moeq.models.walk import LayerInputs
from moeq.numerics import gptq, nested
from moeq.numerics.factor import Factor, act_order, factorize
from moeq.numerics.packed import PackedWeight, joined
from moeq.numerics.slab import Slab
from moeq.numerics.widths import NESTED_BITS
from moeq.quantizers.layer_data import ExpertBatch, RoutedTokens, part_rows, sum_of_products
from moeq.quantizers.measuring import STORED, measured
from moeq.quantizers.memory import working_memory
from moeq.quantizers.signround import Training, sign_round
from moeq.quantizers.stored import Packed, packed_batch
from moeq.quantizers.training_rows import Rows
from moeq.recipe import GPTQ, RTN, LossesSection

MSE = "mse"  # losses.clip


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
) -> LayerResult:
    """Replicas of every expert at every width and what each one loses on held-out tokens.

    weights: {projection: [E, rows, inputs]} of the layer's projections; biases: {projection: [E, rows]}, which stay as
    they are. Of config.methods one at most is stored (GPTQ or SignRound, which starts from GPTQ's codes). Raises
    QuantizationError naming layer and expert when a loss is not a number, or when a method's result cannot be stored.
    """
    layer = inputs.layer
    stored = [method for method in config.methods if method in STORED]
    if len(stored) > 1:
        raise ValueError(f"one stored method at a time, not {stored}")
    tokens = RoutedTokens.of(inputs, config)
    shared = tokens.shared()
    rows: list[dict[str, Any]] = []
    slab = Slab()
    stacks: dict[str, dict[int, list[PackedWeight]]] = {p: {b: [] for b in config.bits} for p in layer.projections}
    for which in expert_batches(layer, config, tokens.hidden.device):
        batch = ExpertBatch(
            which=which,
            weights={name: stack[which].float() for name, stack in weights.items()},
            biases={name: stack[which].float() for name, stack in (biases or {}).items()},
            math=math,
        )
        notes = [{"calibration_tokens": tokens.count(expert)} for expert in batch.numbers()]
        packed = partial(packed_batch, config=config, bits=config.bits, layer=layer, experts=batch.numbers())
        candidates: dict[str, Packed] = {}
        if stored:
            result = _gptq_batch(tokens, batch, shared, config, notes)
            result = result if stored == [GPTQ] else _sign_round(tokens, batch, config, result)
            candidates[stored[0]] = kept = {
                name: {bits: one.map(slab.keep) for bits, one in widths.items()}
                for name, widths in packed(result, method=stored[0]).items()
            }
            for projection, made in kept.items():
                for bits, one in made.items():
                    stacks[projection][bits].append(one)
        if RTN in config.methods:
            candidates[RTN] = packed(rtn_batch(batch.weights, config), method=RTN)
        for index in range(len(notes)):
            rows += measured(tokens, batch, candidates, index, notes[index], layer, config)
    replicas: dict[str, dict[int, PackedWeight]] = {projection: {} for projection in stacks}
    if stored:  # popped, so that the store is not held twice
        for projection, widths in stacks.items():
            replicas[projection] = {bits: joined(widths.pop(bits)) for bits in config.bits}
    return LayerResult(rows=rows, replicas=replicas)


def _sign_round(
    tokens: RoutedTokens, batch: ExpertBatch, config: LossesSection, start: dict[str, gptq.Quantized]
) -> dict[str, gptq.Quantized]:
    """SignRound of a batch of experts from GPTQ's codes."""
    numbers = batch.numbers()
    return sign_round(
        lambda index: Rows(hidden=tokens.routed(numbers[index], heldout=False)),
        tokens.sample,
        batch.weights,
        batch.biases,
        batch.math,
        bits=config.bits,
        group_size=config.group_size,
        symmetric=config.symmetric,
        training=Training(
            iterations=config.signround_iterations,
            lend=config.borrow_tokens,
            working_memory=working_memory(config.working_memory, tokens.hidden.device),
        ),
        start=start,
        numbers=numbers,
    )


def expert_batches(layer: ExpertLayer, config: LossesSection, device: torch.device | str = "cpu") -> Iterator[slice]:
    """Slices of experts whose Hessians, residuals and codes fit into the working memory (at least one expert)."""
    hidden, inter, widths = layer.hidden_size, layer.intermediate_size, len(config.bits)
    hessians = 4 * 3 * (hidden**2 + inter**2)
    results = len(layer.projections) * hidden * inter * (4 + widths * (4 + 1 + 1 + 4))
    step = max(1, working_memory(config.working_memory, device) // (hessians + results))
    for start in range(0, layer.num_experts, step):
        yield slice(start, min(start + step, layer.num_experts))


def rtn_batch(
    batch: dict[str, Tensor], config: LossesSection, bits: Sequence[int] | None = None
) -> dict[str, gptq.Quantized]:
    """Rounding of a batch of experts without calibration, at `bits` or at all of the section's widths."""
    found = {}
    for projection, weight in batch.items():
        importance = weight.new_ones(len(weight), weight.shape[2]) if config.clip == MSE else None
        found[projection] = _quantized(weight, None, config, bits or config.bits, importance=importance)
    return found


def _quantized(
    weight: Tensor,
    factor: Tensor | None,
    config: LossesSection,
    bits: Sequence[int],
    importance: Tensor | None,
    order: Tensor | None = None,
) -> gptq.Quantized:
    """Codes and grids of one weight at some widths; nested ones share their codes where the recipe says so."""
    group, symmetric = config.group_size, config.symmetry()

    def alone(widths: Sequence[int]) -> gptq.Quantized:
        return gptq.quantize(
            weight, factor, bits=widths, group_size=group, symmetric=symmetric, order=order, importance=importance
        )

    if not config.nested or not set(bits) & set(NESTED_BITS):
        return alone(bits)
    found = {0: nested.quantize(weight, factor, group_size=group, symmetric=symmetric, importance=importance)}
    others = [width for width in bits if width not in NESTED_BITS]
    if others:
        found[1] = alone(others)
    return _by_width(found, bits)


def _gptq_batch(
    tokens: RoutedTokens, batch: ExpertBatch, shared: Tensor, config: LossesSection, notes: list[dict[str, Any]]
) -> dict[str, gptq.Quantized]:
    """GPTQ of a batch of experts: gate and up share one Hessian, down has its own; fills the notes' fallbacks.

    H_e <- (n_e*H_e + lambda*H_layer) / (n_e + lambda), H as means over tokens; for down, H_layer runs a sample of the
    layer's tokens through the expert itself.
    """
    first, second = [], []
    lend = config.borrow_tokens
    for index, expert in enumerate(batch.numbers()):
        mine = tokens.routed(expert, heldout=False)
        own, borrowed = (_inner_products(batch, index, rows) for rows in (mine, tokens.sample))
        total = max(len(mine) + lend, 1e-9)
        first.append((mine.T @ mine + lend * shared) / total)
        second.append((own + lend * borrowed / len(tokens.sample)) / total)
        stood_in = {"borrowed_hessian": len(mine) < config.min_tokens, "left_out_tokens": tokens.left_out > 0}
        notes[index]["fallback"] = [name for name, here in stood_in.items() if here]
        notes[index]["hessian_trace"] = [float(one[-1].diagonal().sum()) for one in (first, second)]
    names = [name for name in batch.weights if name != DOWN]
    stack = torch.cat([batch.weights[name] for name in names], 1)
    both = _gptq(stack, torch.stack(first), config, notes)
    found = {DOWN: _gptq(batch.weights[DOWN], torch.stack(second), config, notes)}
    rows = stack.shape[1] // len(names)
    return {name: _rows(both, slice(i * rows, (i + 1) * rows)) for i, name in enumerate(names)} | found


def _inner_products(batch: ExpertBatch, index: int, rows: Tensor) -> Tensor:
    """Sum [I, I] of y y^T over what an expert's down projection is given at some rows [n, H]."""
    weights, biases = batch.one(index)
    parts = rows.split(part_rows(weights[DOWN].shape[1]))
    return sum_of_products(batch.math.intermediate(part, weights, biases) for part in parts)


def _gptq(weight: Tensor, hessian: Tensor, config: LossesSection, notes: list[dict[str, Any]]) -> gptq.Quantized:
    """GPTQ of weights [E, N, K] that share Hessians [E, K, K], at all widths.

    With act_order, 1 bit keeps the order of the columns: its scale is worth much less when it is not taken from what
    earlier columns made of the group.
    """
    ordered = [bits for bits in config.bits if config.act_order and bits > 1]
    plain = [bits for bits in config.bits if bits not in ordered]
    found: dict[int, gptq.Quantized] = {}
    for widths in (ordered, plain):
        if widths:
            order, work = act_order(hessian) if widths is ordered else (None, hessian)
            factor = factorize(work, config.damping)
            _note(notes, factor, config.damping)
            importance = _importance(factor, order) if config.clip == MSE else None
            found[widths[0]] = _quantized(weight, factor.unit_upper, config, widths, order=order, importance=importance)
    return next(iter(found.values())) if len(found) == 1 else _by_width(found, config.bits)


def _importance(factor: Factor, order: Tensor | None) -> Tensor:
    """What the square of each column's error counts in clipping, [E, K], columns as they lie."""
    return factor.pivots if order is None else factor.pivots.gather(1, order.argsort(-1))


def _by_width(found: dict[int, gptq.Quantized], bits: Sequence[int]) -> gptq.Quantized:
    """Results at some widths each, as one at `bits`."""
    places = [(one, one.bits.index(width)) for width in bits for one in found.values() if width in one.bits]
    first = places[0][0]
    return gptq.Quantized(
        codes=torch.stack([one.codes[:, index] for one, index in places], 1),
        scale=torch.stack([one.scale[:, index] for one, index in places], 1),
        zero=torch.stack([one.zero[:, index] for one, index in places], 1),
        bits=tuple(bits),
        group_size=first.group_size,
    )


def _note(notes: list[dict[str, Any]], factor: Factor, damping: float) -> None:
    """Record what the factorization of each expert fell back to."""
    for index, note in enumerate(notes):
        found = {
            "rounded": bool(factor.failed[index]),
            "raised_damping": float(factor.damping[index]) > damping and not bool(factor.failed[index]),
            "float64": bool(factor.float64[index]),
        }
        note["fallback"] += [name for name, here in found.items() if here and name not in note["fallback"]]


def _rows(quantized: gptq.Quantized, rows: slice) -> gptq.Quantized:
    return gptq.Quantized(
        codes=quantized.codes[:, :, rows],
        scale=quantized.scale[:, :, rows],
        zero=quantized.zero[:, :, rows],
        bits=quantized.bits,
        group_size=quantized.group_size,
    )
