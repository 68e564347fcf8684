"""Walking a model layer by layer with many batches in lockstep.

All batches run up to the experts of one MoE layer and wait there; the caller then sees what the layer's experts are
about to be given, and the batches go on. `model.forward` is untouched, so masks, rotary embeddings and whatever else a
family does stay its own; only one layer's inputs are held at a time. Each batch runs in a greenlet: one thread, one at
a time, in a fixed order, so that results repeat exactly.

Letters: T tokens of all batches (pads taken out), H hidden size, k experts a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor, nn

from moeq.errors import ModelError, QuantizationError
from moeq.models.experts import ExpertLayer, stacked_weights


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Token ids [B, S] and a mask of real tokens [B, S]; `sequences` numbers the rows within the corpus [B]."""

    input_ids: Tensor
    mask: Tensor
    sequences: Tensor


@dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """What the experts of one layer are given, pads removed.

    hidden: [T, H]; experts: [T, k] chosen experts; weights: [T, k] routing weights; sequence: [T] row in the corpus;
    position: [T] index among the real tokens of its sequence.
    """

    layer: ExpertLayer
    hidden: Tensor
    experts: Tensor
    weights: Tensor
    sequence: Tensor
    position: Tensor


def walk(
    model: nn.Module, layers: Sequence[ExpertLayer], batches: Sequence[Batch], device: torch.device
) -> Iterator[LayerInputs]:
    """Yield the inputs of every MoE layer in turn, over all batches.

    Raises ModelError when the layers do not run in the order in which they were found, and QuantizationError when
    activations are not finite.
    """
    main = getcurrent()
    captured: list[tuple[ExpertLayer, Tensor, Tensor, Tensor]] = []

    def stop_here(layer: ExpertLayer, arguments: tuple[Tensor, ...]) -> None:
        hidden, experts, weights = arguments[:3]
        captured.append((layer, hidden.detach(), experts.detach(), weights.detach()))
        main.switch()

    hooks = [
        model.get_submodule(layer.name).register_forward_pre_hook(
            lambda _, arguments, at=layer: stop_here(at, arguments)
        )
        for layer in layers
    ]
    runs = [greenlet(lambda batch=batch: _forward(model, batch, device)) for batch in batches]
    try:
        with torch.no_grad():
            for layer in layers:
                captured.clear()
                for run in runs:
                    run.switch()
                if len(captured) != len(batches) or any(at is not layer for at, *_ in captured):
                    raise ModelError(
                        "this MoE layer did not run in its turn",
                        where=layer.name,
                        do="report the model's family: its layers are not run in order",
                    )
                check_weights(model, layer)
                yield _gather(layer, captured, batches)
    finally:
        for hook in hooks:
            hook.remove()
        for run in runs:
            if run and not run.dead:
                run.throw(GreenletExit)


def check_weights(model: nn.Module, layer: ExpertLayer) -> None:
    """QuantizationError naming the expert and the matrix whose weights are not finite."""
    for projection, stack in stacked_weights(model, layer, slice(None)).items():
        finite = torch.isfinite(stack).flatten(1).all(1)
        if not bool(finite.all()):
            expert = int((~finite).nonzero()[0])
            raise QuantizationError(
                "weights are not finite",
                where=f"{layer.name}, expert {expert}, {projection}",
                do="check the checkpoint",
            )


def _forward(model: nn.Module, batch: Batch, device: torch.device) -> None:
    padded = not bool(batch.mask.all())
    model(
        input_ids=batch.input_ids.to(device),
        attention_mask=batch.mask.to(device, torch.long) if padded else None,
        use_cache=False,
    )


def _gather(
    layer: ExpertLayer, captured: Sequence[tuple[ExpertLayer, Tensor, Tensor, Tensor]], batches: Sequence[Batch]
) -> LayerInputs:
    """Join the batches' captures and take the pads out."""
    parts: list[tuple[Tensor, ...]] = []
    for (_, hidden, experts, weights), batch in zip(captured, batches, strict=True):
        keep = batch.mask.reshape(-1).bool()
        if hidden.shape[0] != keep.numel():
            raise ModelError(
                f"the experts were given {hidden.shape[0]} rows for {keep.numel()} tokens",
                where=layer.name,
                do="report the model's family: its experts do not see one row a token",
            )
        sequence = batch.sequences.unsqueeze(1).expand_as(batch.mask).reshape(-1)
        position = (batch.mask.long().cumsum(1) - 1).reshape(-1)
        there = keep.to(hidden.device)
        parts.append((hidden[there], experts[there], weights[there], sequence[keep], position[keep]))
    hidden, experts, weights, sequence, position = (torch.cat(column) for column in zip(*parts, strict=True))
    if not bool(torch.isfinite(hidden).all()):
        raise QuantizationError(
            "activations before the experts are not finite",
            where=layer.name,
            do="use dtype: float32, or check the checkpoint's weights",
        )
    return LayerInputs(
        layer=layer,
        hidden=hidden,
        experts=experts.long(),
        weights=weights.float(),
        sequence=sequence,
        position=position,
    )
