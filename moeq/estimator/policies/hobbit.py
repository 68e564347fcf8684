"""HOBBIT, the mixed-precision GPU-only baseline of paper 000: a missing expert comes at high precision, low, or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from moeq.errors import EstimateError
from moeq.estimator.devices import Parameter
from moeq.estimator.geometry import effective_bits
from moeq.estimator.offload import on_demand_step
from moeq.estimator.policies import number
from moeq.estimator.step import Layers, Step, Work

_ON_DEMAND = "paper 000, 5.1: all experts are loaded to the GPU on demand"
_PARAMETERS = {
    "high_precision_fraction": Parameter(default=1.0, source=_ON_DEMAND, maximum=1.0),
    "low_precision_fraction": Parameter(default=0.0, source=_ON_DEMAND, maximum=1.0),
    "low_precision_bits": Parameter(default=4, source="int4 replicas", minimum=1, maximum=16),
    "cached_experts": Parameter(default=0, source=_ON_DEMAND),
}


@dataclass(frozen=True)
class Hobbit:
    """Layer: t_dense + E[misses*(f_hi + f_lo*b'_lo/16)*t_fetch + sum t_gpu].

    The `cached_experts` most popular experts of a layer never miss. A skipped expert (1 - f_hi - f_lo) costs no
    transfer, so latency is paid f_hi + f_lo times a miss. The prefill fetches every expert in FP16.
    """

    name: str = "hobbit"
    variants: tuple[str, ...] = ("",)
    parameters: Mapping[str, Parameter] = field(default_factory=lambda: dict(_PARAMETERS))

    def decode(self, layers: Layers, work: Work, variant: str) -> Step:
        """Misses are fetched at mixed precision, compute waits for them."""
        high = number(self, layers.hardware, "high_precision_fraction")
        low = number(self, layers.hardware, "low_precision_fraction")
        if high + low > 1:
            raise EstimateError(
                f"high and low precision fractions add up to {high + low:g}",
                where=f"{layers.hardware.file}: policies.hobbit",
                do="let them add up to at most 1",
            )
        bits = number(self, layers.hardware, "low_precision_bits")
        share = high + low * float(effective_bits(bits, layers.group_size)) / 16
        cached = layers.popularity_rank < number(self, layers.hardware, "cached_experts")
        misses = ~np.asarray(work.pick(cached), dtype=np.bool_)
        return on_demand_step(
            layers,
            work,
            misses=misses,
            bytes_per_miss=layers.fp16_expert_bytes * share,
            fetches_per_miss=high + low,
        )

    def prefill(self, layers: Layers, work: Work, variant: str) -> Step:
        """Every expert is fetched in FP16, compute follows the fetches."""
        return on_demand_step(
            layers, work, misses=work.tokens > 0, bytes_per_miss=layers.fp16_expert_bytes, overlap=True
        )

    def migration_seconds(self, layers: Layers, variant: str) -> float:
        """Nothing moves ahead of decoding."""
        return 0.0


POLICY = Hobbit()
