"""Static mixed precision: all experts lie on the GPU at the widths of the placement, and nothing ever moves."""

from __future__ import annotations

import numpy as np

from moeq.estimator.offload import all_on_gpu
from moeq.estimator.policies import Holds, Policy, Variant, mean_bits, over_gpu_memory, stored_bytes
from moeq.estimator.step import FloatArray, Layers, Schedule, Work


class StaticMixed(Policy):
    """Layer: t_dense + E[sum t_gpu(b')]; hot experts of the placement have their width too. Needs memory for all."""

    def decode(self, layers: Layers, work: Work, variant: str) -> Schedule:
        """Every active expert is read at its width."""
        return all_on_gpu(layers, work, np.asarray(work.pick(layers.stored_bits), dtype=np.float64))

    def refusal(self, layers: Layers, kv_cache_bytes: float) -> str | None:
        """All experts at their widths, the rest of the model in FP16, and keys and values."""
        return over_gpu_memory(layers, stored_bytes(layers), kv_cache_bytes)

    def holds(self, layers: Layers, kv_cache_bytes: float) -> Holds:
        """Every expert once, on the GPU."""
        return Holds(gpu_bytes=stored_bytes(layers), near_bytes=0.0, bits=mean_bits(layers))

    def reads_near(self, layers: Layers, *, prefill: bool = False) -> FloatArray:
        """None: all of them lie on the GPU."""
        return np.zeros(layers.bits.shape)


POLICY = StaticMixed(
    name="static_mixed",
    help="all experts lie on the GPU at the widths of the placement, and nothing moves",
    variants={"": Variant("static mixed precision", "static mixed precision: all on the GPU")},
)
