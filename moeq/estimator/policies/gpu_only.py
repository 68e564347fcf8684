"""GPU only: every active expert is fetched on demand in FP16 at every step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moeq.estimator.devices import Parameter
from moeq.estimator.offload import on_demand
from moeq.estimator.policies import Plain
from moeq.estimator.step import Layers, Schedule, Work


@dataclass(frozen=True)
class GpuOnly(Plain):
    """Layer: t_dense + E[active*t_fetch + sum t_gpu], which is HOBBIT with f_hi = 1 and no cache."""

    name: str = "gpu_only"
    variants: tuple[str, ...] = ("",)
    parameters: Mapping[str, Parameter] = field(default_factory=dict)

    def decode(self, layers: Layers, work: Work, variant: str) -> Schedule:
        """Compute waits for the fetches."""
        return on_demand(layers, work, misses=work.tokens > 0, bytes_per_miss=layers.fp16_expert_bytes)

    def prefill(self, layers: Layers, work: Work, variant: str) -> Schedule:
        """Every expert is fetched, compute follows the fetches."""
        return on_demand(layers, work, misses=work.tokens > 0, bytes_per_miss=layers.fp16_expert_bytes, overlap=True)


POLICY = GpuOnly()
