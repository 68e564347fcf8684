"""Perplexity of texts in overlapping windows: at least `window - stride` tokens stand before the token that predicts.

A window starts every `stride` tokens and feeds `window` of them. Of a text's first window all predictions count, of
every later one the last `stride`, so that every token but a text's first counts once. A context-aware model prefills
the first half of the first window, which is scored in the prefill's precision, and keeps the decision for the rest.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from moeq.artifacts.files import digest_of
from moeq.errors import CorpusError
from moeq.evaluation.batching import BatchSize, rows_at_once
from moeq.evaluation.divergence import Scorer
from moeq.evaluation.harness_models import ContextAwareLM, StaticLM, Window, check_finite
from moeq.evaluation.paired import Items
from moeq.evaluation.reference_logits import Key
from moeq.evaluation.results import text_of_items
from moeq.evaluation.windows import check_windows, too_long
from moeq.models import corpus
from moeq.progress import Bar, no_bar


@dataclass(frozen=True, kw_only=True)
class Text:
    """Documents as tokens, by domain, and how they are cut. name: as the user gave it."""

    name: str
    documents: tuple[tuple[int, ...], ...]
    domains: tuple[str, ...]
    window: int
    stride: int

    @property
    def tokens(self) -> int:
        """That are scored."""
        return sum(len(document) - 1 for document in self.documents)


def read_text(source: str, tokenizer: Any, window: int, stride: int | None) -> Text:
    """The documents of a file, or of the bundled evaluation text; those of one token are left out.

    stride: none for the window's own length. Raises CorpusError for text that is not there or too short, and
    EvaluationError for windows that cannot be.
    """
    stride = check_windows(window, stride)
    read: list[tuple[array[int], str]] = []
    for opened in corpus.open_sources(source, "evaluation"):
        for document, ids in corpus.encoded(corpus.documents_of(opened, corpus.Fields(), tokenizer), tokenizer):
            if document.begins:
                read.append((array("i"), document.domain))
            read[-1][0].extend(ids)  # a long document comes in pieces
    kept = [(tuple(ids), domain) for ids, domain in read if len(ids) > 1]
    if not kept:
        raise CorpusError("no document has two tokens", where=source, do="give more text")
    documents, domains = zip(*kept, strict=True)
    return Text(name=source, documents=documents, domains=domains, window=window, stride=stride)


def windows(tokens: Sequence[int], window: int, stride: int) -> Iterator[Window]:
    """(tokens that are fed, targets of the last of them) of one text; every token but the first is a target once."""
    done = 1
    for start in range(0, len(tokens) - 1, stride):
        end = min(start + window, len(tokens) - 1)
        if end >= done:
            yield tokens[start:end], tokens[done : end + 1]
            done = end + 1


def score_text(
    lm: StaticLM, text: Text, batch_size: BatchSize, scorer: Scorer | None = None, bar: Bar = no_bar
) -> dict[str, Any]:
    """Perplexity with its standard error, by domain and together, and the items that it is made of.

    scorer: what sees the logits of every window of every document, for comparisons; bar: counts windows. Raises
    EvaluationError when windows are longer than the model's positions or outputs are not finite.
    """
    if text.window > lm.max_length:
        raise too_long(text.window, lm.max_length)
    cut = [list(windows(tokens, text.window, text.stride)) for tokens in text.documents]
    scorer, sums = scorer or Scorer(), [[(0.0, 0)] * len(own) for own in cut]
    scored = _by_context(lm, cut) if isinstance(lm, ContextAwareLM) else _in_batches(lm, cut, batch_size)
    with bar("text", sum(map(len, cut))) as advance:
        for (place, number), logits in scored:
            targets = torch.tensor(cut[place][number][1])
            sums[place][number] = float(scorer.score((place, number), logits, targets).sum()), len(targets)
            advance()
    check_finite(total for of_text in sums for total, _ in of_text)
    return _report(text, sums, isinstance(lm, ContextAwareLM))


def _by_context(lm: ContextAwareLM, cut: list[list[Window]]) -> Iterator[tuple[Key, torch.Tensor]]:
    """Windows and the logits [T, V] of their targets, text by text."""
    for text, own in enumerate(cut):
        yield from (((text, number), logits) for number, logits in enumerate(lm.rolling(own)))


def _in_batches(lm: StaticLM, cut: list[list[Window]], batch_size: BatchSize) -> Iterator[tuple[Key, torch.Tensor]]:
    """Windows and the logits [T, V] of their targets; windows of all texts go together, the longest first."""
    places = [(text, number) for text, own in enumerate(cut) for number in range(len(own))]
    places.sort(key=lambda place: -len(cut[place[0]][place[1]][0]))
    start = 0
    while start < len(places):
        longest = len(cut[places[start][0]][places[start][1]][0])
        some = places[start : start + rows_at_once(batch_size, lm.model, longest)]
        start += len(some)
        ids = torch.zeros(len(some), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (text, number) in enumerate(some):
            tokens = cut[text][number][0]
            ids[row, : len(tokens)], mask[row, : len(tokens)] = torch.tensor(tokens), 1
        padded = {} if bool(mask.all()) else {"attention_mask": mask.to(lm.device)}
        with torch.no_grad():
            logits = lm.model(input_ids=ids.to(lm.device), use_cache=False, **padded).logits
        for row, (text, number) in enumerate(some):
            tokens, targets = cut[text][number]
            yield (text, number), logits[row, len(tokens) - len(targets) : len(tokens)]


def _report(text: Text, sums: list[list[tuple[float, int]]], context_aware: bool) -> dict[str, Any]:
    of_documents = [np.array(of_text).sum(0) for of_text in sums]
    values, weights = np.array([row for of_text in sums for row in of_text], float).T.copy()
    documents = tuple(number for number, of_text in enumerate(sums) for _ in of_text)
    items = Items(
        kind="perplexity",
        values=values,
        weights=weights,
        names=tuple(f"window {number}" for number in range(len(values))),
        strata=tuple(text.domains[number] for number in documents),
        documents=documents,
    )
    totals: dict[str, np.ndarray] = {}
    for domain, total in zip(text.domains, of_documents, strict=True):
        totals[domain] = totals.get(domain, np.zeros(2)) + total
    first = ", of which the first half is the prefill" if context_aware else ""
    counted = f"all tokens but the first of a text's first window{first}; of later windows the last {text.stride}"
    return {
        "perplexity": items.value,
        "by_domain": {domain: float(np.exp(-total[0] / total[1])) for domain, total in totals.items()},
        "tokens": int(items.weights.sum()),
        "text": digest_of([text.documents, text.domains]),
    } | text_of_items(
        items, documents=len(sums), window=text.window, stride=text.stride, counted=counted, unit="window"
    )
