"""What the fold is worth: perplexity with int8 weights and statically scaled int8 inputs, with it and without.

Weights are rounded per output row, inputs per tensor by the largest magnitude in calibration; behind a folded norm the
scale is the fold's, and inputs there have reparam.bits in both versions. They differ in nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from moeq.evaluation.perplexity import perplexity
from moeq.integers.artifacts.reparam import PerplexityRow
from moeq.integers.folding import FoldedNorm, apply_folds
from moeq.integers.static_int8 import BITS, Scale, StaticInputs, linears, round_experts, round_rows, scale_of
from moeq.models.experts import ExpertLayer
from moeq.models.streaming import StreamedModel
from moeq.stages.context import Context


def noting(context: Context, streamed: StreamedModel) -> StaticInputs:
    """A mode that notes the largest input of every linear that W8A8 rounds."""
    return StaticInputs(streamed.model, streamed.blocks, linears(context.model.others, context.model.described[1]))


def compare(context: Context, folds: Sequence[FoldedNorm], largest: dict[str, float]) -> PerplexityRow | None:
    """Three perplexities on the evaluation text, None where there is none; largest: inputs in calibration."""
    if context.text.perplexity is None:
        return None
    consumers = ((consumer.weight, folded.fold) for folded in folds for consumer in folded.edge.consumers)
    behind = {weight: fold for weight, fold in consumers if weight in largest}
    bits = {name: behind[name].bits if name in behind else BITS for name in largest}
    scales = {name: scale_of(most, bits[name]) for name, most in largest.items()}
    folded_scales = {name: (fold.scale, fold.bits) for name, fold in behind.items()}
    original = _measure(context, None, ())
    rounded = _measure(context, scales, ())
    folded = _measure(context, scales | folded_scales, folds)
    return PerplexityRow(
        original=original["perplexity"],
        w8a8=rounded["perplexity"],
        w8a8_folded=folded["perplexity"],
        tokens=original["tokens"],
    )


def _measure(context: Context, scales: dict[str, Scale] | None, folds: Sequence[FoldedNorm]) -> dict[str, Any]:
    """Perplexity of one version in float32; scales None: of the original."""
    streamed = context.model.in_float32()
    section, sequences = context.text.perplexity, context.text.evaluation
    assert section is not None
    assert sequences is not None

    def change(model: nn.Module, block: str) -> None:
        apply_folds(model, folds, lambda name: streamed.block_of(name) == block)
        for module in others.get(block, ()):
            weight = model.get_parameter(module)
            weight.data = round_rows(weight.detach())

    def round_layer(model: nn.Module, layer: ExpertLayer) -> None:
        with torch.no_grad():
            round_experts(model, layer)

    chosen = linears(context.model.others, context.model.described[1])
    experts = {f"{layer.name}.{name}" for layer in context.model.described[1] for name in layer.parameters}
    others: dict[str, list[str]] = {}
    for name in sorted(chosen - experts) if scales is not None else ():
        others.setdefault(streamed.block_of(name), []).append(name)
    change(streamed.model, "")
    streamed.block_overlay = change
    rounding: AbstractContextManager[Any] = nullcontext()
    if scales is not None:
        streamed.overlay = round_layer
        rounding = StaticInputs(streamed.model, streamed.blocks, chosen, scales)
    with rounding:
        return perplexity(
            streamed.model, sequences, section.batch_size, context.model.device, lambda: None, streamed=streamed
        )
