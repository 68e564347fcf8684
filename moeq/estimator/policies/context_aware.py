"""Context-aware placement (paper 000): hot experts stay on the GPU for a sequence, cold ones compute on the NDP."""

from __future__ import annotations

import numpy as np

from moeq.estimator.in_place import where_they_live
from moeq.estimator.offload import PREFILL_SPLIT, moved_ahead, prefill_split
from moeq.estimator.policies import Holds, Policy, Variant, all_fp16, cold_bytes, mean_bits, parameter, stored_bytes
from moeq.estimator.step import FloatArray, Layers, Schedule, TermTotal, Work


class ContextAware(Policy):
    """Layer: t_dense + E[max(sum_hot t_gpu, sum_cold t_ndp + t_act)], GPU and NDP overlap; one migration a sequence.

    Every expert has the bits of the placement, hot ones included (16 in the paper). The prefill runs on FP16 experts
    that are all on the NDP still. A batch shares one placement, so it migrates once. Where the memory only holds
    experts, cold ones are fetched at their bits and compute on the GPU after the hot ones.
    """

    def decode(self, layers: Layers, work: Work, variant: str) -> Schedule:
        """Every active expert computes where it lives."""
        return where_they_live(layers, work, *work.placed(layers))

    def prefill(self, layers: Layers, work: Work, variant: str) -> Schedule:
        """As MoNDE's: FP16 experts, split between a fetch to the GPU and the NDP."""
        return prefill_split(layers, work, parameter(self, layers.hardware, "prefill_split"))

    def migration(self, layers: Layers, variant: str) -> TermTotal:
        """Fetching the hot experts of every layer: L*K*t_fetch; of a dropped one there is nothing to fetch."""
        fetched = layers.hot & (layers.stored_bits > 0)
        moved = layers.geometry.expert_parameters * layers.stored_bits / 8 * fetched
        return moved_ahead(layers, moved.sum(axis=1), fetched.sum(axis=1).astype(np.float64))

    def holds(self, layers: Layers, kv_cache_bytes: float) -> Holds:
        """Hot experts on the GPU; beside it FP16 and a replica of every expert at each width of a cold one."""
        experts = layers.geometry.num_layers * layers.geometry.num_experts
        widths = {float(bits) for bits in np.unique(layers.stored_bits[~layers.hot]) if bits != 16}
        replicas = sum(layers.geometry.expert_parameters * bits / 8 for bits in widths) * experts
        return Holds(
            gpu_bytes=stored_bytes(layers, layers.hot),
            near_bytes=all_fp16(layers) + replicas,
            bits=mean_bits(layers),
        )

    def reads_near(self, layers: Layers, *, prefill: bool = False) -> FloatArray:
        """FP16 of every expert in the prefill, cold ones at their widths afterwards."""
        return super().reads_near(layers) if prefill else cold_bytes(layers)


POLICY = ContextAware(
    name="context_aware",
    help="hot experts stay on the GPU for a sequence, cold ones compute near their memory",
    variants={"": Variant("context-aware", "this assignment, context-aware placement")},
    parameters={"prefill_split": PREFILL_SPLIT},
    near_data=True,
)
