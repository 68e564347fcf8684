"""A small model on any hardware, placed and routed at random, for laws that hold for every policy."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from moeq.artifacts.trace import RoutingTrace
from moeq.estimator import Estimate, Grid, Hardware, ModelGeometry, Placement, estimate, load_hardware

E, K, L = 6, 2, 4
GEOMETRY = ModelGeometry(
    name="small",
    num_layers=L,
    hidden_size=512,
    intermediate_size=1536,
    num_experts=E,
    top_k=K,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    non_expert_parameters=20_000_000,
)
GRID = Grid(inputs=(64,), outputs=(16,))
NAMES = st.sampled_from(["paper-ctxmoe", "h100-ndp-pcie4", "h100-cpu-pcie5", "rtx5090-host-pcie5", "rtx5090-ssd"])
CAPACITY = 120e6  # bytes of GPU memory: low precision fits for all experts, high precision for some


@st.composite
def hardwares(draw: st.DrawFn) -> Hardware:
    """Any bandwidth, rate and fixed time, far from those of real devices too."""
    factor, part = st.floats(0.02, 50), st.floats(0.3, 1)
    one = load_hardware(draw(NAMES))
    if one.ndp.computes:
        one = one.changed(
            "ndp",
            clock_hertz=one.ndp.clock_hertz * draw(factor),
            dataflow=draw(st.sampled_from(["ws", "os"])),
            low_bit_compute=draw(st.sampled_from(["scale", "const"])),
        )
    one = one.changed(
        "ndp",
        memory_bandwidth_bytes_per_second=one.ndp.memory_bandwidth_bytes_per_second * draw(factor),
        memory_efficiency=draw(part),
    )
    one = one.changed(
        "link",
        bandwidth_bytes_per_second=one.link.bandwidth_bytes_per_second * draw(factor),
        latency_seconds=draw(st.sampled_from([0.0, 1e-6, 1e-3])),
        efficiency=draw(part),
    )
    return one.changed(
        "gpu",
        memory_bandwidth_bytes_per_second=one.gpu.memory_bandwidth_bytes_per_second * draw(factor),
        memory_capacity_bytes=CAPACITY,
        peak_compute_flops_per_second=one.gpu.peak_compute_flops_per_second * draw(factor),
        layer_overhead_seconds=draw(st.sampled_from([0.0, 1e-5, 1e-3])),
    )


def placed(seed: int, *, hot: int | None = None, bits: int | None = None) -> Placement:
    """Random places and widths, or the first `hot` experts of each layer on the GPU and `bits` for the others."""
    generator = np.random.default_rng(seed)
    place = generator.random((L, E)) < 0.4 if hot is None else np.tile(np.arange(E) < hot, (L, 1))
    width = generator.integers(1, 5, (L, E)) if bits is None else np.full((L, E), bits)
    return Placement(name=f"random-{seed}", bits=np.where(place, 16, width), hot=place)


def recorded(seed: int) -> RoutingTrace:
    generator = np.random.default_rng(seed)
    experts = np.argsort(generator.random((80, L, E)) + generator.random((1, L, E)), axis=2)[..., :K]
    return RoutingTrace(
        layers=tuple(map(str, range(L))),
        num_experts=(E,) * L,
        top_k=K,
        experts=experts.astype(np.int16),
        lengths=np.array([30, 50], dtype=np.int32),
        prefill=np.array([10, 20], dtype=np.int32),
        domains=("a", "b"),
    )


def run(hardware: Hardware, placement: Placement, seed: int, *, batch: int = 1, traced: bool = False) -> Estimate:
    generator = np.random.default_rng(seed)
    return estimate(
        GEOMETRY,
        hardware,
        placement,
        popularity=None if traced else generator.dirichlet(np.ones(E), L) + 1e-3,
        trace=recorded(seed) if traced else None,
        grid=Grid(inputs=GRID.inputs, outputs=GRID.outputs, batches=(batch,)),
        monte_carlo_samples=24,
    )
