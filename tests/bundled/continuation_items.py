"""Four-way multiple choice: which of four pieces of text really comes next?

The wrong choices come from other places of the same domain and are about as likely as the right one under bigram
counts, so that a choice cannot win by being common. Every cut is at white space where the tokenizer cuts too, so
context and choice give the same tokens together or apart.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from moeq.errors import CorpusError

CONTEXT_TOKENS = 64
CHOICE_TOKENS = 16
ITEMS_PER_DOMAIN = 100
NUM_CHOICES = 4
NEAREST = 24  # wrong choices are drawn among this many of the nearest bigram score
MIN_LETTERS = 16  # a choice of rules and brackets asks nothing


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A context and what follows it; `document` and `position` (in tokens) say where."""

    document: int
    position: int
    context: str
    continuation: str
    context_ids: tuple[int, ...]
    continuation_ids: tuple[int, ...]


class BigramScorer:
    """Log-probability of tokens under interpolated bigram counts of a stream of tokens."""

    def __init__(self, stream: Sequence[int], vocabulary: int) -> None:
        self.single = Counter(stream)
        self.pairs = Counter(pairwise(stream))
        self.total = len(stream) + 0.5 * vocabulary

    def score(self, ids: Sequence[int]) -> float:
        result = math.log(self._single(ids[0]))
        for first, second in pairwise(ids):
            count = max(self.single[first], 1)
            result += math.log(0.9 * self.pairs[first, second] / count + 0.1 * self._single(second))
        return result

    def _single(self, token: int) -> float:
        return (self.single[token] + 0.5) / self.total


def pieces(text: str, document: int, tokenizer: Any) -> Iterator[Piece]:
    """Every place of a document where context and continuation both begin at white space and tokenize alone."""
    encoding = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False, verbose=False)
    ids, begin = encoding["input_ids"], [a for a, _ in encoding["offset_mapping"]] + [len(text)]
    clean = [a == len(text) or (a > 0 and text[a].isspace() and not text[a - 1].isspace()) for a in begin]
    for at in range(CONTEXT_TOKENS, len(ids) - CHOICE_TOKENS + 1):
        start, end = at - CONTEXT_TOKENS, at + CHOICE_TOKENS
        if not ((start == 0 or clean[start]) and clean[at] and clean[end]):
            continue
        context, continuation = text[begin[start] : begin[at]], text[begin[at] : begin[end]]
        alone = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (context, continuation)]
        letters = sum(character.isalnum() for character in continuation)
        if alone == [ids[start:at], ids[at:end]] and letters >= MIN_LETTERS:
            yield Piece(
                document=document,
                position=at,
                context=context,
                continuation=continuation,
                context_ids=tuple(ids[start:at]),
                continuation_ids=tuple(ids[at:end]),
            )


def _apart(piece: Piece, other: Piece, tokens: int) -> bool:
    return piece.document != other.document or abs(piece.position - other.position) > tokens


def _joins(piece: Piece, wrong: Piece, tokenizer: Any) -> bool:
    """Whether context and a foreign choice give the same tokens together and apart."""
    together = tokenizer(piece.context + wrong.continuation, add_special_tokens=False)["input_ids"]
    return bool(together == [*piece.context_ids, *wrong.continuation_ids])


def _wrong_choices(piece: Piece, ranked: Sequence[Piece], place: int, tokenizer: Any, rng: random.Random) -> list[str]:
    """Up to three continuations from elsewhere whose bigram scores are near; `ranked` is sorted by score."""
    near = list(ranked[max(0, place - NEAREST // 2) : place + NEAREST // 2 + 1])
    rng.shuffle(near)
    chosen: list[str] = []
    for other in near:
        fits = _apart(piece, other, 4 * CONTEXT_TOKENS) and other.continuation.strip() not in piece.context
        fresh = other.continuation not in (piece.continuation, *chosen)
        if fits and fresh and len(chosen) < NUM_CHOICES - 1 and _joins(piece, other, tokenizer):
            chosen.append(other.continuation)
    return chosen


def domain_items(
    domain: str, documents: Sequence[str], calibration: Sequence[str], tokenizer: Any, rng: random.Random
) -> list[dict[str, Any]]:
    """`ITEMS_PER_DOMAIN` items of one domain; bigram counts come from its calibration documents."""
    stream = [i for text in calibration for i in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
    scorer = BigramScorer(stream, len(tokenizer))
    pool = [piece for number, text in enumerate(documents) for piece in pieces(text, number, tokenizer)]
    ranked = sorted(pool, key=lambda piece: (scorer.score(piece.continuation_ids), piece.document, piece.position))
    order = list(range(len(ranked)))
    rng.shuffle(order)
    chosen: list[Piece] = []
    items: list[dict[str, Any]] = []
    for place in order:
        piece = ranked[place]
        if not all(_apart(piece, other, CONTEXT_TOKENS) for other in chosen):
            continue
        choices = _wrong_choices(piece, ranked, place, tokenizer, rng)
        if len(choices) < NUM_CHOICES - 1:
            continue
        gold = len(items) % NUM_CHOICES  # every position is right equally often
        choices.insert(gold, piece.continuation)
        chosen.append(piece)
        items.append({"context": piece.context, "choices": choices, "gold": gold, "domain": domain})
        if len(items) == ITEMS_PER_DOMAIN:
            return items
    raise CorpusError(f"the {domain} text gives {len(items)} items of {ITEMS_PER_DOMAIN}", where="continuation_4way")
