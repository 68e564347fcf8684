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

ALPHA = 0.5  # weight of the counts in an expert's importance: paper 000, 5.3
IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


def check_trace(trace: RoutingTrace, geometry: ModelGeometry, *, where: str) -> None:
    """EstimateError unless the trace is of a model of this geometry.

    A trace of fewer layers than the geometry's is refused too: which layer of the trace would stand for which?
    """
    what, do = "a trace of ", f"give a trace that was recorded from {geometry.name}"
    geometry.check_layers(trace.num_experts, where=where, do=do, what=what)
    if trace.top_k != geometry.top_k:
        text = f"{what}{trace.top_k} experts a token, {geometry.name} has {geometry.top_k}"
        raise EstimateError(text, where=where, do=do)


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodeSteps:
    """The decode steps of a trace in time order: rows[T, B] of the trace's tokens, -1 where a sequence has ended.

    group[T]: which batch of sequences a step belongs to; its sequences are sequences[group], -1 for none.
    """

    rows: IntArray
    group: IntArray
    sequences: IntArray


def decode_steps(trace: RoutingTrace, batch: int) -> DecodeSteps:
    """Decode steps when `batch` sequences at a time decode together, batch after batch, from the end of their prefill.

    A sequence that has ended leaves its place empty. Raises EstimateError when none has a token after its prefill.
    """
    if batch < 1:
        raise EstimateError(f"a batch of {batch} sequences", do="give at least 1")
    chosen = np.flatnonzero(trace.lengths > trace.prefill)
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


def default_alpha(trace: RoutingTrace) -> float:
    """Weight of the counts in an expert's importance: all of it where no routing weights were recorded."""
    return 1.0 if trace.weights is None else ALPHA


def counts_and_scores(
    trace: RoutingTrace, layer: int, tokens: NDArray[np.bool_], alpha: float
) -> tuple[FloatArray, FloatArray]:
    """Counts P and scores W [S, E] of one layer over marked tokens [N]; W is 0 where alpha leaves it out."""
    counts = sequence_counts(trace, layer, tokens).astype(np.float64)
    return counts, np.zeros_like(counts) if alpha == 1 else sequence_scores(trace, layer, tokens)


def sequence_scores(trace: RoutingTrace, layer: int, tokens: NDArray[np.bool_]) -> FloatArray:
    """Sums [S, E] of the routing weights that each sequence gave every expert of one layer, over marked tokens [N]."""
    assert trace.weights is not None
    return sequence_sums(trace, layer, tokens, trace.weights[tokens, layer].astype(np.float64))


def importance(counts: FloatArray, scores: FloatArray, alpha: float) -> FloatArray:
    """S = alpha*P~ + (1-alpha)*W~ of every row of counts P and scores W [..., E]; ~ divides a row by its sum.

    A row without any stays 0. Source: paper 000, Algorithm 1.
    """
    return np.asarray(alpha * _shares(counts) + (1 - alpha) * _shares(scores))


def _shares(values: FloatArray) -> FloatArray:
    sums = values.sum(axis=-1, keepdims=True)
    return np.asarray(np.divide(values, sums, out=np.zeros_like(values), where=sums > 0))
