"""Hit rates of placements on a recorded trace: which share of the decode's expert tokens finds its expert on the GPU.

All placements keep the same K experts of a layer on the GPU; they differ in how these are chosen:

- `context_aware`: for every sequence anew, from the importance of the experts in its own prefill (paper 000, 4.1);
- `context_aware_with_prior`: the same with PRIOR_TOKENS average tokens of the training sequences before the prefill, so
  that a short prompt does not decide alone;
- `static`: once, the most important over the training sequences, whatever their domain;
- `static_of_domain`: once for every domain, over its training sequences (of a domain without any: over all of them):
  what knowing the domain beforehand gives;
- `static_in_hindsight`: once, the most used in the very decode that is measured: no static choice is better;
- `oracle`: for every sequence anew, the most used in its own decode: no choice that stays for a sequence is better.

An expert token is one token at one expert that it chose. Only the decode counts; training sequences are not measured.

Letters: N tokens, S sequences, E experts of a layer, K of them on the GPU.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeq.artifacts.trace import RoutingTrace, sequence_counts
from moeq.errors import EstimateError
from moeq.estimator.trace import counts_and_scores, default_alpha, importance

ALL = "all"
PLACEMENTS = (
    "context_aware",
    "context_aware_with_prior",
    "static",
    "static_of_domain",
    "static_in_hindsight",
    "oracle",
)
PRIOR_TOKENS = 16
BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class HitRate:
    """Hit rates of one domain, or of "all": measured sequences and expert tokens, a share in [0, 1] by placement."""

    domain: str
    sequences: int
    expert_tokens: int
    rates: dict[str, float]

    @property
    def gain(self) -> float:
        """What the context-aware placement serves beyond the static one, as a share of the expert tokens."""
        return self.rates["context_aware"] - self.rates["static"]


@dataclass(frozen=True, kw_only=True)
class HitRates:
    """Hit rates of a trace: K by layer, alpha, the number of training sequences, a row a domain and one of all."""

    gpu_experts: tuple[int, ...]
    alpha: float
    training_sequences: int
    rows: tuple[HitRate, ...]

    @property
    def overall(self) -> HitRate:
        """The row of all domains."""
        return self.rows[-1]


def hit_rates(trace: RoutingTrace, gpu_experts: int | Sequence[int]) -> HitRates:
    """Hit rates by domain with `gpu_experts` experts of every layer (or of each) on the GPU.

    Static placements learn from every other sequence of each domain. Raises EstimateError for a number of experts that
    no layer has, and when there is nothing to learn from or to measure.
    """
    hot = _gpu_experts(trace, gpu_experts)
    share = default_alpha(trace)
    learnt = alternate_sequences(trace)
    decodes = (trace.lengths > trace.prefill) & ~learnt
    if not learnt.any() or not decodes.any():
        text = f"{int(learnt.sum())} sequences to learn from and {int(decodes.sum())} with a decode to measure"
        raise EstimateError(text, where="hit rates", do="record more sequences")
    domains = np.array(trace.domains)
    names = [name for name in dict.fromkeys(trace.domains) if (decodes & (domains == name)).any()]
    members = {name: decodes & (domains == name) for name in names} | {ALL: decodes}
    hits = {name: dict.fromkeys(PLACEMENTS, 0) for name in members}
    total = dict.fromkeys(members, 0)
    for layer, count in enumerate(hot):
        decoded = sequence_counts(trace, layer, ~trace.is_prefill)
        placed = _placed(trace, layer, count, share, learnt, decodes, decoded)
        for name, rows in members.items():
            total[name] += int(decoded[rows].sum())
            for placement, where in placed.items():
                hits[name][placement] += int(decoded[rows][where[rows]].sum())
    return HitRates(
        gpu_experts=hot,
        alpha=share,
        training_sequences=int(learnt.sum()),
        rows=tuple(
            HitRate(
                domain=name,
                sequences=int(rows.sum()),
                expert_tokens=total[name],
                rates={placement: hits[name][placement] / max(1, total[name]) for placement in PLACEMENTS},
            )
            for name, rows in members.items()
        ),
    )


def alternate_sequences(trace: RoutingTrace) -> BoolArray:
    """Every other sequence [S] of each domain, its first one included."""
    numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
    return np.array([next(numbers[domain]) % 2 == 0 for domain in trace.domains], dtype=np.bool_)


def top_experts(values: FloatArray, count: int) -> BoolArray:
    """The `count` largest of every row [S, E], ties to the lower index."""
    order = np.argsort(-values, axis=1, kind="stable")[:, :count]
    chosen = np.zeros(values.shape, dtype=np.bool_)
    np.put_along_axis(chosen, order, True, axis=1)
    return chosen


def _placed(
    trace: RoutingTrace,
    layer: int,
    count: int,
    alpha: float,
    learnt: BoolArray,
    measured: BoolArray,
    decoded: NDArray[np.int64],
) -> dict[str, BoolArray]:
    """The experts [S, E] of a layer that each placement keeps on the GPU."""
    whole = counts_and_scores(trace, layer, np.ones(trace.num_tokens, dtype=np.bool_), alpha)
    prefill = counts_and_scores(trace, layer, trace.is_prefill, alpha)
    prior = [PRIOR_TOKENS * sums[learnt].sum(0) / trace.lengths[learnt].sum() for sums in whole]
    domains = np.array(trace.domains)
    of_domain = np.zeros(decoded.shape, dtype=np.bool_)
    for name in np.unique(domains):
        members = domains == name
        taught = members & learnt
        of_domain[members] = _once(whole, taught if taught.any() else learnt, alpha, count)
    in_hindsight = top_experts(decoded[measured].sum(0, keepdims=True).astype(np.float64), count)
    return {
        "context_aware": top_experts(importance(*prefill, alpha), count),
        "context_aware_with_prior": top_experts(importance(prefill[0] + prior[0], prefill[1] + prior[1], alpha), count),
        "static": np.broadcast_to(_once(whole, learnt, alpha, count), decoded.shape),
        "static_of_domain": of_domain,
        "static_in_hindsight": np.broadcast_to(in_hindsight, decoded.shape),
        "oracle": top_experts(decoded.astype(np.float64), count),
    }


def _once(sums: tuple[FloatArray, FloatArray], rows: BoolArray, alpha: float, count: int) -> BoolArray:
    """The experts [1, E] that matter most over some sequences taken together."""
    counts, scores = (table[rows].sum(0, keepdims=True) for table in sums)
    return top_experts(importance(counts, scores, alpha), count)


def _gpu_experts(trace: RoutingTrace, given: int | Sequence[int]) -> tuple[int, ...]:
    """K of every layer; EstimateError when there are not as many layers, or a layer has not as many experts."""
    hot = (given,) * trace.num_layers if isinstance(given, int) else tuple(given)
    if len(hot) != trace.num_layers:
        text = f"GPU experts of {len(hot)} layers, the trace has {trace.num_layers}"
        raise EstimateError(text, where="hit rates", do="give one number, or one for each layer")
    for layer, (count, experts) in enumerate(zip(hot, trace.num_experts, strict=True)):
        if not 0 <= count <= experts:
            where = f"hit rates, {trace.layers[layer]}"
            raise EstimateError(f"{count} of {experts} experts on the GPU", where=where, do="give fewer")
    return hot
