"""Context-aware placement (paper 000): hot experts stay on the GPU for a sequence, cold ones compute on the NDP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from moeq.estimator.devices import Parameter
from moeq.estimator.offload import PREFILL_SPLIT, prefill_step
from moeq.estimator.policies import parameter
from moeq.estimator.step import Layers, Step, Work, expected_step
from moeq.estimator.terms import t_act, t_fetch, t_gpu, t_ndp


@dataclass(frozen=True)
class ContextAware:
    """Layer: t_dense + E[max(sum_hot t_gpu, sum_cold t_ndp + t_act)], GPU and NDP overlap; one migration a sequence.

    Every expert has the bits of the placement, hot ones included (16 in the paper). The prefill runs on FP16 experts
    that are all on the NDP still. A batch shares one placement, so it migrates once.
    """

    name: str = "context_aware"
    variants: tuple[str, ...] = ("",)
    parameters: Mapping[str, Parameter] = field(default_factory=lambda: {"prefill_split": PREFILL_SPLIT})

    def decode(self, layers: Layers, work: Work, variant: str) -> Step:
        """Every active expert computes where it lives."""
        hardware, weights = layers.hardware, layers.geometry.expert_parameters
        bits = work.pick(layers.stored_bits)
        hot = np.asarray(work.pick(layers.hot), dtype=np.bool_)
        gpu = t_gpu(weights, bits, np.where(hot, work.tokens, 0.0), hardware.gpu)
        ndp = t_ndp(weights, bits, np.where(hot, 0.0, work.tokens), hardware.ndp)
        act = t_act(layers.geometry.hidden_size, work.tokens_at(~hot), hardware.link)
        moe = np.maximum(gpu.seconds.sum(axis=-1), ndp.seconds.sum(axis=-1) + act.seconds)
        return expected_step(layers, work, moe, {"gpu_experts": gpu, "ndp_experts": ndp, "activations": act})

    def prefill(self, layers: Layers, work: Work, variant: str) -> Step:
        """As MoNDE's: FP16 experts, split between a fetch to the GPU and the NDP."""
        return prefill_step(layers, work, parameter(self, layers.hardware, "prefill_split"))

    def migration_seconds(self, layers: Layers, variant: str) -> float:
        """Fetching the hot experts of every layer: L*K*t_fetch."""
        moved = layers.geometry.expert_parameters * layers.stored_bits / 8 * layers.hot
        fetch = t_fetch(moved, layers.hot, layers.hardware.link)
        return float((fetch.seconds * layers.repeats[:, None]).sum())


POLICY = ContextAware()
