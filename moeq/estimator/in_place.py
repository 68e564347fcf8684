"""How layers run whose experts compute where they live, and where that is.

Shapes as in step.py: D distinct layers, S outcomes, A active experts.
"""

from __future__ import annotations

import numpy as np

from moeq.estimator.offload import (
    fetch_cost,
    fetch_spans,
    gpu_cost,
    gpu_span,
    in_turn,
    ndp_spans,
    pipelined_finish,
    returned,
)
from moeq.estimator.step import BoolArray, FloatArray, IntArray, Layers, Schedule, Work, schedule
from moeq.estimator.terms import t_act, t_ndp


def where_they_live(layers: Layers, work: Work, hot: BoolArray, bits: FloatArray) -> Schedule:
    """Hot experts [D, S, A] on the GPU and cold ones on the NDP, at stored bits [D, S, A], both at the same time.

    Where the memory only holds experts, cold ones are fetched and compute on the GPU after the hot ones. To dropped
    ones (0 bits) nothing is sent, and nothing of them is fetched.
    """
    return (_overlapped if layers.hardware.ndp.computes else _streamed)(layers, work, hot, bits)


def placed_by_rank(layers: Layers, rank: IntArray) -> tuple[BoolArray, FloatArray]:
    """Places and stored bits [D, S, A] of active experts, from their rank [D, S, A] by importance.

    A layer keeps the widths of its placement: the most important expert takes the place and the width of the
    placement's best placed one, and so on.
    """
    best_first = np.lexsort((-layers.bits, ~layers.hot), axis=1)
    places = np.take_along_axis(layers.hot, best_first, axis=1)
    widths = np.take_along_axis(layers.stored_bits, best_first, axis=1)
    layer = np.arange(len(layers.repeats))[:, None, None]
    return places[layer, rank], widths[layer, rank]


def _overlapped(layers: Layers, work: Work, hot: BoolArray, bits: FloatArray) -> Schedule:
    hardware, weights = layers.hardware, layers.geometry.expert_parameters
    gpu = gpu_cost(layers, work, bits, np.where(hot, work.tokens, 0.0))
    ndp = t_ndp(weights, bits, np.where(hot, 0.0, work.tokens), hardware.ndp)
    act = t_act(layers.geometry.expert_inputs, work.tokens_at(~hot & (bits > 0)), hardware.all_links)
    back = returned(ndp, act, 0.0)
    chain = np.maximum(gpu.seconds.sum(axis=-1), back)
    terms = {"gpu_experts": gpu, "ndp_experts": ndp, "activations": act}
    return schedule(layers, chain, terms, lambda: (gpu_span(gpu, in_turn(gpu.seconds)), *ndp_spans(ndp, act, back)))


def _streamed(layers: Layers, work: Work, hot: BoolArray, bits: FloatArray) -> Schedule:
    weights = layers.geometry.expert_parameters
    missed = (work.tokens > 0) & ~hot & (bits > 0)
    fetch = fetch_cost(layers, work, weights * bits / 8 * missed, missed)
    gpu = gpu_cost(layers, work, bits, work.tokens)
    first, later = np.where(hot, gpu.seconds, 0.0), np.where(hot, 0.0, gpu.seconds)
    held = first.sum(axis=-1, keepdims=True)
    finish = np.maximum(pipelined_finish(fetch.seconds, later), held + np.cumsum(later, axis=-1))
    terms = {"gpu_experts": gpu, "fetch": fetch}
    return schedule(
        layers, finish[..., -1], terms, lambda: fetch_spans(fetch, gpu, np.where(hot, in_turn(first), finish - later))
    )
