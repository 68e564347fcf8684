"""A recorded trace as work: its decode steps in time order, and placements that follow from every sequence's prefill.

Shapes: S full decode steps, B sequences of a batch, G batches one after the other, D layers, E experts, A places for
active experts, most loaded first.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeq.artifacts.trace import NONE, RoutingTrace, sequence_counts
from moeq.errors import EstimateError
from moeq.estimator.in_place import placed_by_rank
from moeq.estimator.step import FloatArray, IntArray, Layers, Work
from moeq.estimator.terms import Cost
from moeq.estimator.trace import DecodeSteps, counts_and_scores, decode_steps, default_alpha, importance

Active = tuple[IntArray, FloatArray, IntArray]  # experts, tokens and rank in the prompts [D, S, A]
SAMPLED_BLOCK = 32


@dataclass(frozen=True, kw_only=True, eq=False)
class Replay:
    """The trace of a placed model. `most_steps`: only so many steps, in blocks spread evenly over time (None: all)."""

    trace: RoutingTrace
    most_steps: int | None = None
    of_batch: dict[int, DecodeSteps] = field(default_factory=dict)
    active: dict[tuple[int, int, int], Active] = field(default_factory=dict)

    def sampled(self, most_steps: int) -> Replay:
        """The same trace with at most so many steps."""
        return replace(self, most_steps=most_steps, of_batch={}, active={})

    def steps(self, batch: int) -> DecodeSteps:
        """Decode steps in which all `batch` places are taken; EstimateError when there is none."""
        if batch not in self.of_batch:
            whole = decode_steps(self.trace, batch)
            full = np.flatnonzero((whole.rows != NONE).all(axis=1))
            if len(full) == 0:
                text = f"no {batch} sequences of the trace decode at the same time"
                raise EstimateError(text, do="give smaller batches in the grid")
            kept = full[_spread(len(full), self.most_steps)]
            self.of_batch[batch] = replace(whole, rows=whole.rows[kept], group=whole.group[kept])
        return self.of_batch[batch]

    def prefill_share(self) -> FloatArray:
        """Expected tokens [D, E] that reach every expert for a token of a prompt (of a trace without prompts: any)."""
        trace = self.trace
        marked = trace.is_prefill if trace.is_prefill.any() else np.ones(trace.num_tokens, dtype=np.bool_)
        counts = [sequence_counts(trace, layer, marked).sum(axis=0) for layer in range(trace.num_layers)]
        return np.asarray(np.stack(counts) / float(marked.sum()), dtype=np.float64)

    def work(self, layers: Layers, start: int, *, batch: int, dense: Cost, kv_cache_bytes: float) -> Work:
        """Work of the layers of the trace from `start` on, as many as `layers` has."""
        key, steps = (batch, start, len(layers.repeats)), self.steps(batch)
        experts, tokens, rank = self.active.get(key) or self._active(layers, start, steps)
        if self.most_steps is not None:  # few enough to keep for the next hardware
            self.active[key] = experts, tokens, rank
        hot, stored_bits = placed_by_rank(layers, rank)
        return Work(
            step_tokens=batch,
            probability=np.full(tokens.shape[:2], 1.0 / tokens.shape[1]),
            experts=experts,
            tokens=tokens,
            dense=dense,
            kv_cache_bytes=kv_cache_bytes,
            in_time=True,
            hot=hot,
            stored_bits=stored_bits,
            routed=None if self.trace.weights is None else lambda: self._routed(layers, start, steps),
        )

    def _routed(self, layers: Layers, start: int, steps: DecodeSteps) -> tuple[IntArray, FloatArray]:
        """Experts and their routing weights [D, S, B*k]; expert 0 of no weight stands for none."""
        assert self.trace.weights is not None
        experts, weights = (_choices(table, layers, start, steps) for table in (self.trace.experts, self.trace.weights))
        there = experts != NONE
        return np.where(there, experts, 0).astype(np.int64), np.where(there, weights, 0).astype(np.float64)

    def _active(self, layers: Layers, start: int, steps: DecodeSteps) -> Active:
        experts, tokens = active_experts(_choices(self.trace.experts, layers, start, steps), layers.popularity_rank)
        layer = np.arange(len(layers.repeats))[:, None, None]
        rank = self._prefill_rank(layers, start, steps)[steps.group[None, :, None], layer, experts]
        return experts, tokens, rank

    def _prefill_rank(self, layers: Layers, start: int, steps: DecodeSteps) -> IntArray:
        """Rank [G, D, E] of every expert in the prompts of a batch, 0 the most important."""
        trace, alpha, ranks = self.trace, default_alpha(self.trace), []
        members = np.where(steps.sequences == NONE, trace.num_sequences, steps.sequences)
        for row, popular in enumerate(layers.popularity_rank):
            counts, scores = counts_and_scores(trace, start + row, trace.is_prefill, alpha)
            matter = importance(_group_sums(counts, members), _group_sums(scores, members), alpha)
            order = np.lexsort((np.broadcast_to(popular, matter.shape), -matter), axis=1)
            ranks.append(np.argsort(order, axis=1))
        return np.stack(ranks, axis=1)


def _choices(table: NDArray[Any], layers: Layers, start: int, steps: DecodeSteps) -> NDArray[Any]:
    """What a table [N, L, k] has [D, S, B*k] for the tokens of steps at the layers from `start` on."""
    rows = table[:, start : start + len(layers.repeats)][steps.rows]  # [S, B, D, k]
    return rows.transpose(2, 0, 1, 3).reshape(len(layers.repeats), len(steps.rows), -1)


def _group_sums(per_sequence: FloatArray, members: IntArray) -> FloatArray:
    """Sums [G, E] over the sequences members[G, B], one after the last standing for none."""
    padded = np.concatenate([per_sequence, np.zeros_like(per_sequence[:1])])
    return np.asarray(padded[members].sum(axis=1))


def _spread(count: int, most: int | None) -> IntArray:
    """Indices of all, or of blocks of consecutive ones that are spread evenly."""
    if most is None or count <= most:
        return np.arange(count)
    block = min(SAMPLED_BLOCK, most)
    starts = np.linspace(0, count - block, most // block).astype(np.int64)
    return np.unique(starts[:, None] + np.arange(block))


def active_experts(chosen: NDArray[np.int16], popularity_rank: IntArray) -> tuple[IntArray, FloatArray]:
    """Experts [D, S, A] and their tokens, most loaded first, ties to the more popular, of chosen[D, S, B*k].

    Places that are left over have expert 0 and no tokens.
    """
    num_experts = popularity_rank.shape[1]
    by_rank = np.concatenate([np.argsort(popularity_rank, axis=1), np.zeros_like(popularity_rank[:, :1])], axis=1)
    ranks = np.concatenate([popularity_rank, np.full_like(popularity_rank[:, :1], num_experts)], axis=1)
    layer = np.arange(len(chosen))[:, None, None]
    rank = np.sort(ranks[layer, chosen], axis=2)  # -1 takes the last entry: no expert
    first = np.concatenate([np.ones_like(rank[..., :1], dtype=bool), rank[..., 1:] != rank[..., :-1]], axis=2)
    first &= rank < num_experts
    width = rank.shape[2]
    there = (rank < num_experts).sum(axis=2, keepdims=True)
    place = np.where(first, np.arange(width), there)
    after = np.concatenate([np.minimum.accumulate(place[..., ::-1], axis=2)[..., ::-1][..., 1:], there], axis=2)
    tokens = np.where(first, after - np.arange(width), 0)
    order = np.argsort(-tokens, axis=2, kind="stable")[..., : max(1, int((tokens > 0).sum(axis=2).max()))]
    tokens = np.take_along_axis(tokens, order, axis=2)
    experts = by_rank[layer, np.take_along_axis(rank, order, axis=2)]
    return np.where(tokens > 0, experts, 0), tokens.astype(np.float64)
