"""HOBBIT, the mixed-precision GPU-only baseline of paper 000: a missing expert comes at high precision, low, or not."""

from __future__ import annotations

import numpy as np

from moeq.errors import EstimateError
from moeq.estimator.caching import lru_hits
from moeq.estimator.devices import Parameter
from moeq.estimator.offload import on_demand
from moeq.estimator.policies import Holds, Policy, Variant, all_fp16, number, over_gpu_memory
from moeq.estimator.step import BoolArray, Layers, Schedule, Work

_ON_DEMAND = "paper 000, 5.1: all experts are loaded to the GPU on demand"
_PARAMETERS = {
    "high_precision_fraction": Parameter(default=1.0, source=_ON_DEMAND, maximum=1.0, alternative=0.5),
    "low_precision_fraction": Parameter(default=0.0, source=_ON_DEMAND, maximum=1.0, alternative=0.0),
    "low_precision_bits": Parameter(
        default=4, source="assumption: int4 replicas", minimum=1, maximum=16, alternative=2
    ),
    "cached_experts": Parameter(default=0, source=_ON_DEMAND),
}


class Hobbit(Policy):
    """Layer: t_dense + E[misses*(f_hi + f_lo*b'_lo/16)*t_fetch + sum t_gpu].

    The GPU caches `cached_experts` of a layer: of recorded steps the least recently used one leaves, of routing
    without an order the most popular experts never miss. A skipped expert (1 - f_hi - f_lo) costs no
    transfer, so latency is paid f_hi + f_lo times a miss. The prefill fetches every expert in FP16.
    """

    def decode(self, layers: Layers, work: Work, variant: str) -> Schedule:
        """Misses are fetched at mixed precision, compute waits for them."""
        high = number(self, layers.hardware, "high_precision_fraction")
        low = number(self, layers.hardware, "low_precision_fraction")
        if high + low > 1:
            what, where = f"high and low precision fractions add up to {high + low:g}", layers.hardware.file
            raise EstimateError(what, where=f"{where}: policies.hobbit", do="let them add up to at most 1")
        bits = number(self, layers.hardware, "low_precision_bits")
        share = high + low * layers.stored(bits) / 16
        return on_demand(
            layers,
            work,
            misses=~_cached(layers, work, int(number(self, layers.hardware, "cached_experts"))),
            bytes_per_miss=layers.fp16_expert_bytes * share,
            fetches_per_miss=high + low,
        )

    def prefill(self, layers: Layers, work: Work, variant: str) -> Schedule:
        """Every expert is fetched in FP16, compute follows the fetches."""
        return on_demand(layers, work, misses=work.tokens > 0, bytes_per_miss=layers.fp16_expert_bytes, overlap=True)

    def refusal(self, layers: Layers, kv_cache_bytes: float) -> str | None:
        """The cached experts, the rest of the model in FP16, and keys and values."""
        places = min(int(number(self, layers.hardware, "cached_experts")), layers.geometry.num_experts)
        cached = places * layers.geometry.num_layers * layers.fp16_expert_bytes
        return over_gpu_memory(layers, cached, kv_cache_bytes) if places else None

    def holds(self, layers: Layers, kv_cache_bytes: float) -> Holds:
        """The cached experts on the GPU; beside it FP16 and, where some come so, low precision of all."""
        places = min(int(number(self, layers.hardware, "cached_experts")), layers.geometry.num_experts)
        high = number(self, layers.hardware, "high_precision_fraction")
        low = number(self, layers.hardware, "low_precision_fraction")
        stored = layers.stored(number(self, layers.hardware, "low_precision_bits"))
        whole = all_fp16(layers)
        return Holds(
            gpu_bytes=whole * places / layers.geometry.num_experts,
            near_bytes=whole * (1 + (stored / 16 if low else 0.0)),
            bits=16 * high + stored * low,
        )


def _cached(layers: Layers, work: Work, places: int) -> BoolArray:
    if work.in_time:
        return lru_hits(work.experts, work.tokens > 0, num_experts=layers.geometry.num_experts, places=places)
    return np.asarray(work.pick(layers.popularity_rank < places), dtype=np.bool_)


POLICY = Hobbit(
    name="hobbit",
    help="a missing expert comes on demand at high precision, at low, or not",
    variants={"": Variant("HOBBIT", "HOBBIT: mixed precision, fetched on demand", follows="nothing")},
    parameters=_PARAMETERS,
)
