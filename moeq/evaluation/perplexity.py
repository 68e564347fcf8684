"""Perplexity of a causal language model on token sequences, by domain and together."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from moeq.errors import EvaluationError
from moeq.evaluation.divergence import Scorer
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
    scorer: Scorer | None = None,
) -> dict[str, Any]:
    """exp of the mean negative log-likelihood of every token but each sequence's first; pads do not count.

    Returns {"perplexity", "perplexity_stderr", "tokens", "by_domain": {domain: perplexity}}, the digest of the `text`
    as tokens, and the `items` that it is made of, as `strided.score_text` does: windows of `window` tokens that do not
    overlap. `advance` is called once a batch; a streamed model is read once for all batches; scorer: what sees the
    logits of every sequence, for comparisons. Raises EvaluationError when the model's outputs are not finite.
    """
    scorer = scorer or Scorer()
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
        lead = ahead(model)  # logits at t are of t + lead
        predicted = output.logits[:, 1 - lead : output.logits.shape[1] - lead]
        for row, index in enumerate(batch.sequences.tolist()):
            scored, logits = batch.mask[row, 1:].bool(), predicted[row]
            logits = logits if bool(scored.all()) else logits[scored.to(logits.device)]
            scores = scorer.score((index, 0), logits, batch.input_ids[row, 1:][scored])
            nll, domain = -float(scores.sum()), sequences.domains[index]
            items[index] = -nll, len(scores)
            total[domain] = total.get(domain, 0.0) + nll
            tokens[domain] = tokens.get(domain, 0) + len(scores)
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
