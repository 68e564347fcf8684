"""Perplexity of a causal language model on token sequences, by domain and together."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeq.errors import EvaluationError
from moeq.evaluation.paired import Items
from moeq.evaluation.results import text_of_items
from moeq.models.corpus import Sequences
from moeq.models.forward import ahead
from moeq.models.streaming import StreamedModel
from moeq.models.walk import Batch, walk


def perplexity(
    model: Any,
    sequences: Sequences,
    batch_size: int,
    device: torch.device,
    advance: Callable[[], None],
    streamed: StreamedModel | None = None,
) -> dict[str, Any]:
    """exp of the mean negative log-likelihood of every token but each sequence's first; pads do not count.

    Returns {"perplexity", "perplexity_stderr", "tokens", "by_domain": {domain: perplexity}}, the digest of the `text`
    as tokens, and the `items` that it is made of, as `strided.score_text` does: windows of `window` tokens that do not
    overlap. `advance` is called once a batch; a streamed model is read once for all batches. Raises EvaluationError
    when the model's outputs are not finite.
    """
    total: dict[str, float] = {}
    tokens: dict[str, int] = {}
    items = np.zeros((len(sequences), 2))

    def finish(batch: Batch, output: Any) -> None:
        if output.logits.shape[-1] <= int(batch.input_ids.max()):
            raise EvaluationError(
                f"not a language model: it has {output.logits.shape[-1]} outputs",
                where=type(model).__name__,
                do="set eval.perplexity: null and eval.tasks: []",
            )
        nll, counted = _score(output.logits, batch.input_ids.to(device), batch.mask.to(device), ahead(model))
        for row, index in enumerate(batch.sequences.tolist()):
            domain = sequences.domains[index]
            items[index] = -float(nll[row]), int(counted[row])
            total[domain] = total.get(domain, 0.0) + float(nll[row])
            tokens[domain] = tokens.get(domain, 0) + int(counted[row])
        advance()

    for _ in walk(model, (), sequences.batches(batch_size), device, streamed=streamed, finish=finish):
        pass
    if not all(math.isfinite(value) for value in total.values()):
        raise EvaluationError("the model's outputs are not finite", do="use dtype: float32 or check the checkpoint")
    order = {domain: number for number, domain in enumerate(dict.fromkeys(sequences.domains))}
    return {
        "perplexity": math.exp(sum(total.values()) / sum(tokens.values())),
        "tokens": sum(tokens.values()),
        "by_domain": {domain: math.exp(total[domain] / tokens[domain]) for domain in total if tokens[domain]},
        "text": sequences.digest(),
    } | text_of_items(
        Items(
            kind="perplexity",
            values=items[:, 0],
            weights=items[:, 1],
            names=("",) * len(items),
            strata=sequences.domains,
            documents=tuple(order[domain] for domain in sequences.domains),
        ),
        documents=len(items),
        window=sequences.ids.shape[1],
        stride=sequences.ids.shape[1],
        counted="all tokens but the first of each sequence",
        unit="sequence",
    )


def _score(logits: Tensor, ids: Tensor, mask: Tensor, lead: int) -> tuple[Tensor, Tensor]:
    """Summed negative log-likelihood and number of scored tokens of each row, [B] each; logits at t are of t + lead."""
    predicted = logits[:, 1 - lead : logits.shape[1] - lead].float().transpose(1, 2)
    losses = torch.nn.functional.cross_entropy(predicted, ids[:, 1:], reduction="none")
    scored = mask[:, 1:]
    return (losses.double() * scored).sum(1), scored.sum(1)
