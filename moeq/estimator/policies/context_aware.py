"""Context-aware placement (paper 000): hot experts stay on the GPU for a sequence, cold ones compute on the NDP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from moeq.estimator.devices import Parameter
from moeq.estimator.offload import (
    PREFILL_SPLIT,
    in_turn,
    moved_ahead,
    ndp_spans,
    pipelined_finish,
    prefill_split,
    returned,
)
from moeq.estimator.policies import Plain, parameter
from moeq.estimator.step import BoolArray, FloatArray, Layers, Schedule, Span, TermTotal, Work, schedule
from moeq.estimator.terms import t_act, t_fetch, t_gpu, t_ndp


@dataclass(frozen=True)
class ContextAware(Plain):
    """Layer: t_dense + E[max(sum_hot t_gpu, sum_cold t_ndp + t_act)], GPU and NDP overlap; one migration a sequence.

    Every expert has the bits of the placement, hot ones included (16 in the paper). The prefill runs on FP16 experts
    that are all on the NDP still. A batch shares one placement, so it migrates once. Where the memory only holds
    experts, cold ones are fetched at their bits and compute on the GPU after the hot ones.
    """

    name: str = "context_aware"
    variants: tuple[str, ...] = ("",)
    parameters: Mapping[str, Parameter] = field(default_factory=lambda: {"prefill_split": PREFILL_SPLIT})

    def decode(self, layers: Layers, work: Work, variant: str) -> Schedule:
        """Every active expert computes where it lives."""
        hot, bits = work.placed(layers)
        return (_overlapped if layers.hardware.ndp.computes else _streamed)(layers, work, hot, bits)

    def prefill(self, layers: Layers, work: Work, variant: str) -> Schedule:
        """As MoNDE's: FP16 experts, split between a fetch to the GPU and the NDP."""
        return prefill_split(layers, work, parameter(self, layers.hardware, "prefill_split"))

    def migration(self, layers: Layers, variant: str) -> TermTotal:
        """Fetching the hot experts of every layer: L*K*t_fetch."""
        moved = layers.geometry.expert_parameters * layers.stored_bits / 8 * layers.hot
        return moved_ahead(layers, moved.sum(axis=1), layers.hot.sum(axis=1).astype(np.float64))


def _overlapped(layers: Layers, work: Work, hot: BoolArray, bits: FloatArray) -> Schedule:
    hardware, weights = layers.hardware, layers.geometry.expert_parameters
    gpu = t_gpu(weights, bits, np.where(hot, work.tokens, 0.0), hardware.gpu)
    ndp = t_ndp(weights, bits, np.where(hot, 0.0, work.tokens), hardware.ndp)
    act = t_act(layers.geometry.hidden_size, work.tokens_at(~hot), hardware.link)
    back = returned(ndp, act, 0.0)

    def spans() -> tuple[Span, ...]:
        computed = Span(resource="gpu", name="gpu_experts", start=in_turn(gpu.seconds), seconds=gpu.seconds)
        return computed, *ndp_spans(ndp, act, back)

    chain = np.maximum(gpu.seconds.sum(axis=-1), back)
    return schedule(layers, chain, {"gpu_experts": gpu, "ndp_experts": ndp, "activations": act}, spans)


def _streamed(layers: Layers, work: Work, hot: BoolArray, bits: FloatArray) -> Schedule:
    hardware, weights = layers.hardware, layers.geometry.expert_parameters
    missed = (work.tokens > 0) & ~hot
    fetch = t_fetch(weights * bits / 8 * missed, missed, hardware)
    gpu = t_gpu(weights, bits, work.tokens, hardware.gpu)
    first, later = np.where(hot, gpu.seconds, 0.0), np.where(hot, 0.0, gpu.seconds)
    held = first.sum(axis=-1, keepdims=True)
    finish = np.maximum(pipelined_finish(fetch.seconds, later), held + np.cumsum(later, axis=-1))

    def spans() -> tuple[Span, ...]:
        start = np.where(hot, in_turn(first), finish - later)
        fetches = Span(resource="to_gpu", name="fetch", start=in_turn(fetch.seconds), seconds=fetch.seconds)
        return fetches, Span(resource="gpu", name="gpu_experts", start=start, seconds=gpu.seconds)

    return schedule(layers, finish[..., -1], {"gpu_experts": gpu, "fetch": fetch}, spans)


POLICY = ContextAware()
