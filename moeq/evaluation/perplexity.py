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
from moeq.models.walk import Batch, run_all
from moeq.progress import Bar, no_bar


def perplexity(
    model: Any,
    sequences: Sequences,
    batch_size: int,
    device: torch.device,
    advance: Callable[[], None],
    streamed: StreamedModel | None = None,
    scorer: Scorer | None = None,
    bar: Bar = no_bar,
) -> dict[str, Any]:
    """exp of the mean negative log-likelihood of every token but each sequence's first; pads do not count.

    Returns {"perplexity", "perplexity_stderr", "tokens", "by_domain": {domain: perplexity}}, the digest of the `text`
    as tokens, and the `items` that it is made of, as `strided.score_text` does: windows of `window` tokens that do not
    overlap. `advance` is called once a batch; a streamed model is read once for all batches, whose layers `bar` counts;
    scorer: what sees the logits of every sequence, for comparisons. Raises EvaluationError when the model's outputs are
    not finite.
    """
    scorer = scorer or Scorer()
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
            items[index] = float(scores.sum()), len(scores)
        advance()

    run_all(model, sequences.batches(batch_size), device, finish, streamed, bar)
    if not np.isfinite(items).all():
        raise EvaluationError("the model's outputs are not finite", do="use dtype: float32 or check the checkpoint")
    order = {domain: number for number, domain in enumerate(dict.fromkeys(sequences.domains))}
    numbers = np.array([order[domain] for domain in sequences.domains])
    sums = {domain: items[numbers == number].sum(0) for domain, number in order.items()}
    measured = Items(
        kind="perplexity",
        values=items[:, 0],
        weights=items[:, 1],
        names=("",) * len(items),
        strata=sequences.domains,
        documents=tuple(numbers.tolist()),
    )
    counted, window = "all tokens but the first of each sequence", sequences.ids.shape[1]
    return {
        "perplexity": measured.value,
        "tokens": int(items[:, 1].sum()),
        "by_domain": {domain: math.exp(-logprob / count) for domain, (logprob, count) in sums.items() if count},
        "text": sequences.digest(),
    } | text_of_items(measured, documents=len(items), window=window, stride=window, counted=counted, unit="sequence")
