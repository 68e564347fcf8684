"""Whether two versions of a model compute the same: logits compared where their routers chose the same experts.

Letters: T tokens, V outputs of the model, k experts a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moeq.errors import ModelError
from moeq.integers.artifacts.reparam import ErrorRow
from moeq.models.streaming import StreamedModel
from moeq.models.walk import Batch, LayerInputs, walk

TIE = 1e-4  # routing weights nearer than this may change places by rounding alone
LOGIT_BYTES = 1 << 30  # of one version; beyond it every second, third, ... token counts


@dataclass(kw_only=True)
class Outputs:
    """logits: [T, V] in float32 of real tokens, batch by batch, with the sequence [T] that each belongs to; routing: of
    every MoE layer sequence [T], experts [T, k] in rising order and their weights [T, k] in falling order."""

    logits: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    routing: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)


def outputs(
    streamed: StreamedModel,
    batches: Sequence[Batch],
    *,
    left: Callable[[str], None] | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Outputs:
    """Run all batches through a model, every block read once; left: called with a block before it is dropped."""
    seen = Outputs()
    by_batch: dict[int, tuple[Tensor, Tensor]] = {}
    tokens = sum(int(batch.mask.sum()) for batch in batches)

    def finish(batch: Batch, output: Any) -> None:
        by_batch[int(batch.sequences[0])] = _real(output.logits, batch, tokens)

    blocks = streamed.blocks if left is not None else ()
    inputs: LayerInputs | None
    for inputs in walk(
        streamed.model,
        streamed.layers,
        batches,
        streamed.device,
        streamed=streamed,
        finish=finish,
        blocks=blocks,
        left=left,
    ):
        experts, weights = inputs.experts.sort(1).values, inputs.weights.sort(1, descending=True).values
        seen.routing.append((inputs.sequence.cpu(), experts.cpu(), weights.cpu()))
        advance()
        inputs = None  # before the next layer's are gathered
    seen.logits = [by_batch[start] for start in sorted(by_batch)]
    return seen


def _real(logits: Tensor, batch: Batch, tokens: int) -> tuple[Tensor, Tensor]:
    """Logits of a batch's real tokens, thinned to LOGIT_BYTES in all, or of its images; and their sequences."""
    if logits.dim() == 2:
        return logits.float().cpu(), batch.sequences
    stride = math.ceil(tokens * logits.shape[-1] * 4 / LOGIT_BYTES)
    keep = batch.mask.clone()
    keep[:, torch.arange(keep.shape[1]) % stride != 0] = False
    sequence = batch.sequences.unsqueeze(1).expand_as(keep)[keep]
    return logits[keep.to(logits.device)].float().cpu(), sequence


def compare(before: Outputs, after: Outputs) -> ErrorRow:
    """The difference between two versions, over the sequences in which no tie was broken another way.

    error: norm of the logits' difference over the norm of the logits; changed_tokens: whose routing changed in a tie.
    Raises ModelError when there is none, and where all logits are 0.
    """
    out: set[int] = set()
    changed = 0
    for (sequence, experts, weights), (_, others, their) in zip(before.routing, after.routing, strict=True):
        near = (weights - their).abs().amax(1) < TIE
        moved = (experts != others).any(1) & near & ~torch.isin(sequence, torch.tensor(sorted(out)))
        changed += int(moved.sum())
        out |= set(sequence[moved].tolist())
    difference = size = 0.0
    everything: set[int] = set()
    for (logits, sequence), (others, _) in zip(before.logits, after.logits, strict=True):
        keep = ~torch.isin(sequence, torch.tensor(sorted(out)))
        everything |= set(sequence.tolist())
        difference += float((logits[keep] - others[keep]).double().square().sum())
        size += float(logits[keep].double().square().sum())
    if everything <= out:
        raise ModelError(
            "routing changed in ties in all sequences: nothing is left to compare",
            where=f"{len(everything)} sequences",
            do="use more reparam.samples",
        )
    if not size:
        raise ModelError("all logits of the model are 0", do="check the weights of its head and last norm")
    error = math.sqrt(difference / size)
    return ErrorRow(error=error, sequences=len(everything), left_out=len(out), changed_tokens=changed)
