"""Decoding whose experts' precision follows the context (paper 000, Algorithm 1, lines 9 to 32).

A context is prefilled alone, without a pad, so that its routing statistics are the same bits whatever else is run; from
them a `Choose` decides which replica every expert has from then on. Contexts with different decisions then go through
the model together, each on its own keys and values.

All tokens of a context are prefilled and counted. The last one runs again as the first decode step by default: every
score is that of the fixed mix, also of continuations of one token, which would else never meet a quantized expert. With
exact_start it runs as the prefill does, as where a runtime takes the first new token from there. Without count_last it
is no part of the prefill and decides nothing.

Letters: L MoE layers, E experts of a layer, B rows, C tokens of a context, F tokens fed after it, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeq.artifacts.assignment import FULL
from moeq.errors import EvaluationError, ModelError
from moeq.models.experts import ExpertLayer
from moeq.models.forward import cache_name
from moeq.runtime.experts_by_row import Dequantized, LastUsed, Rows, by_row
from moeq.runtime.prefixes import cache_bytes, can_join, join
from moeq.runtime.routing_counts import RoutingCounts, counting

Choose = Callable[[RoutingCounts], np.ndarray]  # -> keys of replicas [L, E]
Stopping = Callable[[int, int], Any]
PREFILL_BYTES = 1 << 30  # of prefilled contexts that are kept


@dataclass(frozen=True, kw_only=True)
class Prefilled:
    """A context that has been run: its tokens, what its routers chose for those that count, the cache of all but its
    last token (None: it has one token only)."""

    tokens: tuple[int, ...]
    routing: RoutingCounts
    cache: Any


@dataclass(frozen=True, kw_only=True)
class Started:
    """The beginning of a text that has been run whole: logits [C, V], what the routers chose, and the cache."""

    logits: Tensor
    routing: RoutingCounts
    cache: Any
    length: int


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Tokens fed after a cache (None: from the start), and what they should predict: several answers of F tokens each.

    Where logits alone are wanted there are no answers. keys: replicas [L, E]; length: tokens in the cache; exact_start:
    the first token runs as the prefill does.
    """

    cache: Any
    length: int
    keys: np.ndarray
    tokens: Sequence[int]
    targets: Sequence[Sequence[int]] = ()
    exact_start: bool = False


class PrefillStore(LastUsed):
    """Prefilled contexts, the last used ones; models of the same weights may share them."""

    def __init__(self, limit: int = PREFILL_BYTES) -> None:
        super().__init__(limit, _bytes_of)


def _bytes_of(context: Prefilled | Started) -> int:
    return cache_bytes(context.cache) + (context.logits.nbytes if isinstance(context, Started) else 0)


class ContextAwareModel:
    """A causal language model whose experts have, for every sequence, the replicas that `choose` names.

    placed: replicas [L, E] that prefill runs with, None for full precision; exact_start: the last token of a context
    runs with them, too; count_last: whether it counts (it always does where there is no other).
    """

    def __init__(
        self,
        model: Any,
        layers: Sequence[ExpertLayer],
        replicas: Dequantized,
        choose: Choose,
        *,
        placed: np.ndarray | None = None,
        exact_start: bool = False,
        count_last: bool = True,
        prefills: PrefillStore | None = None,
    ) -> None:
        """Raises ModelError for an encoder-decoder, and for layers with different numbers of experts."""
        where = type(model).__name__
        if model.config.is_encoder_decoder:
            raise ModelError("an encoder-decoder has no prefill", where=where, do="give a decoder-only model")
        if len({layer.num_experts for layer in layers}) > 1:
            raise ModelError("its layers have different numbers of experts", where=where, do="evaluate it without")
        self.model, self.layers, self.choose = model, list(layers), choose
        self.exact_start, self.count_last = exact_start, count_last
        self.device = next(model.parameters()).device
        self._cache_name = cache_name(model)
        self.replicas = replicas
        shape = len(self.layers), self.layers[0].num_experts
        self.prefill_keys = np.full(shape, FULL) if placed is None else placed
        self.prefills = prefills or PrefillStore()
        self._rows = Rows(keys=self._keys([self.prefill_keys]))

    def _keys(self, each: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.stack(each).astype(np.int64)).to(self.device)

    def _rows_of(self, each: Sequence[np.ndarray], exact_start: bool) -> Rows:
        start = self._keys([self.prefill_keys])[0] if exact_start else None
        return Rows(keys=self._keys(each), start=start)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The model with this class's experts; everything else of this class works within."""
        with by_row(self.model, self.layers, self.replicas, lambda: self._rows), torch.no_grad():
            yield

    def prefill(self, context: Sequence[int]) -> Prefilled:
        """Run a context, or find it among those that were; it must have a token."""
        tokens = tuple(context)
        key = ("context", self.count_last, self.prefill_keys.tobytes(), tokens)
        prefilled: Prefilled = self.prefills.get(key, lambda: self._prefill(tokens))
        return prefilled

    def _prefill(self, tokens: tuple[int, ...]) -> Prefilled:
        cache = None
        with counting(self.model, self.layers) as routing:
            if len(tokens) > 1:
                cache = self._exactly(tokens[:-1], None)[1]
            if self.count_last or cache is None:
                self._exactly(tokens[-1:], cache)
        return Prefilled(tokens=tokens, routing=routing, cache=cache)

    def start(self, tokens: Sequence[int]) -> Started:
        """Run the beginning of a text."""
        key = ("start", self.prefill_keys.tobytes(), tuple(tokens))
        started: Started = self.prefills.get(key, lambda: self._start(tuple(tokens)))
        return started

    def _start(self, tokens: tuple[int, ...]) -> Started:
        with counting(self.model, self.layers) as routing:
            logits, cache = self._exactly(tokens, None)
        return Started(logits=logits[0], routing=routing, cache=cache, length=len(tokens))

    def _exactly(self, tokens: tuple[int, ...], cache: Any) -> tuple[Tensor, Any]:
        """Logits [1, F, V] and cache of one row with the replicas of the prefill; the given cache stays as it is."""
        self._rows = Rows(keys=self._keys([self.prefill_keys]))
        ids = torch.tensor([tokens], device=self.device)
        output = self.model(input_ids=ids, use_cache=True, **{self._cache_name: deepcopy(cache)})
        return output.logits, getattr(output, self._cache_name)

    def continuation(self, prefilled: Prefilled, continuations: Sequence[Sequence[int]]) -> Piece:
        """What is fed to score continuations after a context, of at least one token, which differ in the last one."""
        return Piece(
            cache=prefilled.cache,
            length=len(prefilled.tokens) - 1,
            keys=self.choose(prefilled.routing),
            tokens=(prefilled.tokens[-1], *continuations[0][:-1]),
            targets=continuations,
            exact_start=self.exact_start,
        )

    def score(self, pieces: Sequence[Piece]) -> list[list[tuple[Tensor, Tensor]]]:
        """Log-probabilities of the targets and whether they are the likeliest, [F] each, of every piece and answer."""
        return [
            [_scored(logits, answer) for answer in piece.targets]
            for logits, piece in zip(self.logits(pieces), pieces, strict=True)
        ]

    def logits(self, pieces: Sequence[Piece]) -> Iterator[Tensor]:
        """Logits [F, V] of what is fed of every piece.

        The pieces go through the model together, but for those whose caches have no place for pads.
        """
        cached = [piece.cache for piece in pieces if piece.cache is not None]
        alike = len(cached) in (0, len(pieces)) and len({piece.exact_start for piece in pieces}) == 1
        if len(pieces) > 1 and not (alike and can_join(cached)):
            for piece in pieces:
                yield from self.logits([piece])
            return
        self._rows = self._rows_of([piece.keys for piece in pieces], pieces[0].exact_start)
        logits = self._fed(pieces, join(cached) if cached else None)
        yield from (row[: len(piece.tokens)] for row, piece in zip(logits, pieces, strict=True))

    def _fed(self, pieces: Sequence[Piece], cache: Any) -> Tensor:
        """Logits [B, F, V] of the fed tokens, padded on the right."""
        most = max(len(piece.tokens) for piece in pieces)
        before = max(piece.length for piece in pieces)
        ids = torch.zeros(len(pieces), most, dtype=torch.long)
        mask = torch.zeros(len(pieces), before + most, dtype=torch.long)
        for row, piece in enumerate(pieces):
            ids[row, : len(piece.tokens)] = torch.tensor(piece.tokens)
            mask[row, before - piece.length : before + len(piece.tokens)] = 1
        padding: dict[str, Any] = {}
        if not bool(mask.all()):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, before:]
            padding = {"attention_mask": mask.to(self.device), "position_ids": positions.to(self.device)}
        cached = {self._cache_name: cache, "use_cache": cache is not None}
        logits: Tensor = self.model(input_ids=ids.to(self.device), **cached, **padding).logits
        return logits

    def generate(
        self, contexts: Sequence[Sequence[int]], pad: int, *, stopping: Stopping | None = None, **options: Any
    ) -> list[list[int]]:
        """New tokens after every context, `options` as transformers' generate takes them; ends of rows are pads.

        stopping: criteria for so many rows, whose contexts end at a length. Raises EvaluationError for beams and
        several answers.
        """
        said = self.model.generation_config
        asked = [options.get(name, getattr(said, name)) for name in ("num_beams", "num_return_sequences")]
        if any(count not in (None, 1) for count in asked):
            raise EvaluationError("beams and several answers have no assignment each", do="generate with num_beams: 1")
        prefilled = [self.prefill(context) for context in contexts]
        caches = [context.cache for context in prefilled]
        if len(caches) > 1 and not can_join(caches):
            return [self.generate([context], pad, stopping=stopping, **options)[0] for context in contexts]
        self._rows = self._rows_of([self.choose(context.routing) for context in prefilled], self.exact_start)
        longest = max(map(len, contexts))
        ids = torch.full((len(contexts), longest), pad)
        mask = torch.zeros_like(ids)
        for row, context in enumerate(contexts):
            ids[row, longest - len(context) :], mask[row, longest - len(context) :] = torch.tensor(list(context)), 1
        cache = None if caches[0] is None else join(caches)

        def after_first(*_: Any) -> None:
            self._rows.start = None  # only the first decode step may run as the prefill does

        hook = self.model.register_forward_hook(after_first)
        try:
            answers = self.model.generate(
                input_ids=ids.to(self.device),
                attention_mask=mask.to(self.device),
                pad_token_id=pad,
                stopping_criteria=None if stopping is None else stopping(len(contexts), longest),
                **{self._cache_name: cache},
                **options,
            )
        finally:
            hook.remove()
        return [answer[longest:].tolist() for answer in answers]


def _scored(logits: Tensor, targets: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Log-probabilities and greedy matches [F] of targets after logits [F, V]."""
    wanted = torch.tensor(list(targets), device=logits.device)
    logprobs = torch.log_softmax(logits.float(), -1).gather(1, wanted[:, None]).squeeze(1)
    return logprobs.cpu(), (logits.argmax(-1) == wanted).cpu()
