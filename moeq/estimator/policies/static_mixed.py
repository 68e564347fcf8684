"""Static mixed precision: all experts lie on the GPU at the widths of the placement, and nothing ever moves."""

from __future__ import annotations

import numpy as np

from moeq.estimator.offload import all_on_gpu
from moeq.estimator.policies import Policy, Variant, over_gpu_memory
from moeq.estimator.step import Layers, Schedule, Work


class StaticMixed(Policy):
    """Layer: t_dense + E[sum t_gpu(b')]; hot experts of the placement have their width too. Needs memory for all."""

    def decode(self, layers: Layers, work: Work, variant: str) -> Schedule:
        """Every active expert is read at its width."""
        return all_on_gpu(layers, work, np.asarray(work.pick(layers.stored_bits), dtype=np.float64))

    def refusal(self, layers: Layers, kv_cache_bytes: float) -> str | None:
        """All experts at their widths, the rest of the model in FP16, and keys and values."""
        each = layers.geometry.expert_parameters * layers.stored_bits / 8
        return over_gpu_memory(layers, float((each * layers.repeats[:, None]).sum()), kv_cache_bytes)


POLICY = StaticMixed(
    name="static_mixed",
    help="all experts lie on the GPU at the widths of the placement, and nothing moves",
    variants={"": Variant("static mixed precision", "static mixed precision: all on the GPU")},
)
