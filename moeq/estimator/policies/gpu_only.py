"""GPU only: every active expert is fetched on demand in FP16 at every step."""

from __future__ import annotations

from moeq.estimator.offload import on_demand
from moeq.estimator.policies import Policy, Variant
from moeq.estimator.step import Layers, Schedule, Work


class GpuOnly(Policy):
    """Layer: t_dense + E[active*t_fetch + sum t_gpu], which is HOBBIT with f_hi = 1 and no cache."""

    def decode(self, layers: Layers, work: Work, variant: str) -> Schedule:
        """Compute waits for the fetches."""
        return on_demand(layers, work, misses=work.tokens > 0, bytes_per_miss=layers.fp16_expert_bytes)

    def prefill(self, layers: Layers, work: Work, variant: str) -> Schedule:
        """Every expert is fetched, compute follows the fetches."""
        return on_demand(layers, work, misses=work.tokens > 0, bytes_per_miss=layers.fp16_expert_bytes, overlap=True)


POLICY = GpuOnly(
    name="gpu_only",
    help="every active expert is fetched on demand in FP16 at every step",
    variants={"": Variant("GPU only", "GPU only: experts fetched on demand", follows="nothing")},
)
