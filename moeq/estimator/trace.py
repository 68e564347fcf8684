"""What the estimator asks of a recorded routing trace: is it of this model, its steps in time, its token counts.

Letters: N tokens, S sequences, L layers, k experts a token, E experts of a layer, T steps, B sequences of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeq.artifacts.trace import NONE, RoutingTrace, sequence_counts, sequence_sums
from moeq.errors import EstimateError
from moeq.estimator.geometry import ModelGeometry

__all__ = [
    "ALPHA",
    "NONE",
    "DecodeSteps",
    "RoutingTrace",
    "check_trace",
    "decode_steps",
    "importance",
    "sequence_counts",
    "sequence_scores",
    "step_counts",
]

ALPHA = 0.5  # weight of the counts in an expert's importance: paper 000, 5.3
IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


def check_trace(trace: RoutingTrace, geometry: ModelGeometry, *, layers: int | None = None, where: str) -> None:
    """EstimateError unless the trace is of a model of this geometry; layers: how many it must have (None: all).

    A trace of fewer layers than the geometry's is refused too: which layer of the trace would stand for which?
    """
    wanted = geometry.num_layers if layers is None else layers
    do = f"give a trace that was recorded from {geometry.name}"
    if trace.num_layers != wanted:
        raise EstimateError(
            f"a trace of {trace.num_layers} MoE layers, {geometry.name} has {wanted}", where=where, do=do
        )
    other = sorted(set(trace.num_experts) - {geometry.num_experts})
    if other:
        raise EstimateError(
            f"a trace of {other[0]} experts a layer, {geometry.name} has {geometry.num_experts}", where=where, do=do
        )
    if trace.top_k != geometry.top_k:
        raise EstimateError(
            f"a trace of {trace.top_k} experts a token, {geometry.name} has {geometry.top_k}", where=where, do=do
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodeSteps:
    """The decode steps of a trace in time order: rows[T, B] of the trace's tokens, -1 where a sequence has ended.

    group[T]: which batch of sequences a step belongs to; its sequences are sequences[group], -1 for none.
    """

    rows: IntArray
    group: IntArray
    sequences: IntArray


def decode_steps(trace: RoutingTrace, batch: int, *, sequences: IntArray | None = None) -> DecodeSteps:
    """Decode steps when `batch` sequences at a time decode together, batch after batch, from the end of their prefill.

    A sequence that has ended leaves its place empty. sequences: which, in which order (None: all as they stand).
    Raises EstimateError when none of them has a token after its prefill.
    """
    if batch < 1:
        raise EstimateError(f"a batch of {batch} sequences", do="give at least 1")
    chosen = np.arange(trace.num_sequences) if sequences is None else np.asarray(sequences, dtype=np.int64)
    chosen = chosen[trace.lengths[chosen] > trace.prefill[chosen]]
    if len(chosen) == 0:
        raise EstimateError("no sequence of the trace has tokens after its prefill", do="record longer sequences")
    padded = np.concatenate([chosen, np.full(-len(chosen) % batch, NONE)]).reshape(-1, batch)
    left = np.where(padded == NONE, 0, trace.lengths[padded] - trace.prefill[padded])  # [G, B] tokens to decode
    first = trace.starts[padded] + trace.prefill[padded]
    longest = left.max(axis=1)
    group = np.repeat(np.arange(len(padded)), longest)
    time = np.arange(len(group)) - np.repeat(np.cumsum(longest) - longest, longest)
    rows = np.where(time[:, None] < left[group], first[group] + time[:, None], NONE)
    return DecodeSteps(rows=rows, group=group, sequences=padded)


def step_counts(trace: RoutingTrace, rows: IntArray, layer: int) -> IntArray:
    """Tokens[T, E] that reach every expert of one layer in each of the steps rows[T, B] (-1: no token)."""
    experts = trace.num_experts[layer]
    chosen = trace.experts[:, layer][rows]  # [T, B, k]; the last row stands in for -1
    there = (rows != NONE)[..., None] & (chosen != NONE)
    cell = np.arange(len(rows))[:, None, None] * experts + chosen
    return np.bincount(cell[there], minlength=len(rows) * experts).reshape(len(rows), experts)


def sequence_scores(trace: RoutingTrace, layer: int, tokens: NDArray[np.bool_]) -> FloatArray:
    """Sums [S, E] of the routing weights that each sequence gave every expert of one layer, over marked tokens [N].

    Raises EstimateError for a trace without weights.
    """
    if trace.weights is None:
        raise EstimateError("the trace has no routing weights", do="record it again")
    return sequence_sums(trace, layer, tokens, trace.weights[tokens, layer].astype(np.float64))


def importance(counts: FloatArray, scores: FloatArray, alpha: float) -> FloatArray:
    """S = alpha*P~ + (1-alpha)*W~ of every row of counts P and scores W [..., E]; ~ divides a row by its sum.

    A row without any stays 0. Source: paper 000, Algorithm 1.
    """
    found: FloatArray = alpha * _shares(counts) + (1 - alpha) * _shares(scores)
    return found


def _shares(values: FloatArray) -> FloatArray:
    sums = values.sum(axis=-1, keepdims=True)
    found: FloatArray = np.divide(values, sums, out=np.zeros_like(values), where=sums > 0)
    return found
