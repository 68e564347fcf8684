"""Static placement: the same experts on the GPU for every sequence, the others on the NDP, and nothing ever moves."""

from __future__ import annotations

import numpy as np

from moeq.estimator.in_place import placed_by_rank, where_they_live
from moeq.estimator.policies import Holds, Policy, Variant, cold_bytes, mean_bits, stored_bytes
from moeq.estimator.step import FloatArray, Layers, Schedule, Work


class StaticPlacement(Policy):
    """Layer: t_dense + E[max(sum_hot t_gpu, sum_cold t_ndp + t_act)], as the context-aware placement of the same K.

    What is missing is the context: of a trace the most popular experts of all its prompts (or by the popularity that
    was given) are hot for every sequence. Routing that is drawn is alike for all sequences, so that context can gain
    nothing there, and the placement itself is the static one. The prefill computes where experts live, too, at their
    bits; nothing migrates.
    """

    def decode(self, layers: Layers, work: Work, variant: str) -> Schedule:
        """Every active expert computes where it lives."""
        if work.hot is None:
            return where_they_live(layers, work, *work.placed(layers))
        rank = np.asarray(work.pick(layers.popularity_rank), dtype=np.int64)
        return where_they_live(layers, work, *placed_by_rank(layers, rank))

    def holds(self, layers: Layers, kv_cache_bytes: float) -> Holds:
        """Every expert once, at its width."""
        hot, all_of_them = stored_bytes(layers, layers.hot), stored_bytes(layers)
        return Holds(gpu_bytes=hot, near_bytes=all_of_them - hot, bits=mean_bits(layers))

    def reads_near(self, layers: Layers, *, prefill: bool = False) -> FloatArray:
        """Cold experts at their widths."""
        return cold_bytes(layers)


POLICY = StaticPlacement(
    name="static_placement",
    help="the same experts are on the GPU for every sequence, the others near their memory",
    variants={"": Variant("static placement", "static placement on GPU and NDP")},
    near_data=True,
)
