"""DynaExq's decode throughput over that of all experts at its low width, by recorded routing beside drawn one.

    python benchmarks/dynaexq_routing.py [--model DIR ...] [--source FILE ...] [--sequences 40] [--length 512]

Paper 001 states at least 85 % for Qwen3-30B-A3B and Qwen3-Next-80B-A3B, whose routing is not here. What is here are
traces of small trained models: their layers, experts and top-k, with experts so wide that a layer has the paper's
bytes, all else and the GPU's memory in proportion to the layers. Each recorded share stands beside that of the same
sizes with even routing and with Zipf 1, so that what differs follows from routing alone. No goal: it says what holds.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import figures
import hit_rate

from moeq.artifacts.trace import RoutingTrace
from moeq.bundled import bundled_path
from moeq.estimator import (
    Grid,
    Hardware,
    ModelGeometry,
    estimate,
    load_geometry,
    load_hardware,
    uniform_placement,
    zipf_popularity,
)

CASES = (("qwen3-30b-a3b", 16, 4), ("qwen3-next-80b-a3b", 4, 2))  # paper 001, 4.2: the high and the low width
HARDWARE = ("a6000-host-pcie4", "rtx5090-host-pcie5")
DYNAEXQ, STATIC = "dynaexq", "static_mixed"


def sized(model: ModelGeometry, trace: RoutingTrace) -> ModelGeometry:
    """The paper's model with the trace's layers, experts and top-k; a layer's experts together stay as large."""
    layers, experts = trace.num_layers, trace.num_experts[0]
    inner = round(model.num_experts * model.intermediate_size / experts)
    rest = model.non_expert_parameters * layers // model.num_layers
    return replace(
        model, name=f"{model.name} by {trace.model.name}", num_layers=layers, num_experts=experts, top_k=trace.top_k,
        intermediate_size=inner, non_expert_parameters=rest, attention=None,
    )  # fmt: skip


def on(name: str, layers: float, high: int, low: int) -> Hardware:
    """A hardware with a share of its GPU's memory and DynaExq's widths."""
    hardware = load_hardware(name)
    hardware = hardware.changed("gpu", memory_capacity_bytes=layers * hardware.gpu.memory_capacity_bytes)
    widths: dict[str, float | str] = {"high_precision_bits": high, "low_precision_bits": low}
    return hardware.model_copy(update={"policies": {**hardware.policies, DYNAEXQ: widths}})


def share(geometry: ModelGeometry, hardware: Hardware, low: int, **routing: Any) -> float:
    """Decode tokens a second of DynaExq over those of every expert at the low width."""
    made = estimate(
        geometry,
        hardware,
        uniform_placement(geometry, bits=low, hot_experts=0),
        policies=(DYNAEXQ, STATIC),
        grid=Grid(inputs=(128,), outputs=(128,)),
        **routing,
    )
    steps = {point.policy: point.decode_seconds_per_token for point in made.points}
    return steps[STATIC] / steps[DYNAEXQ]


def main() -> int:
    parser = figures.parser(__doc__, sequences=40, length=512)
    parser.add_argument("--model", nargs="*", type=Path)
    parser.add_argument("--source", nargs="*")
    asked = figures.parsed(parser)
    models, sources = [bundled_path("tiny-mixtral")], ["bundled"]
    if (figures.SHARED / "models").is_dir():
        models = [figures.SHARED / "models" / name for name in hit_rate.MODELS]
        sources = [str(figures.SHARED / "data" / name) for name in hit_rate.TEXTS]
    results = figures.Figures(asked)
    for model in asked.model or models:
        trace = hit_rate.record(model, asked.source or sources, asked.sequences, asked.length, 0.25)
        experts = trace.num_experts[0]
        routings = {
            "recorded": {"trace": trace}, "uniform": {}, "Zipf 1": {"popularity": zipf_popularity(experts, 1.0)},
        }  # fmt: skip
        for name, high, low in CASES:
            geometry = sized(load_geometry(name), trace)
            for hardware in HARDWARE:
                system = on(hardware, geometry.num_layers / load_geometry(name).num_layers, high, low)
                for routing, settings in routings.items():
                    what = f"{geometry.name}, {high} over {low} bits, {hardware}, {routing}"
                    results.add(what, share(geometry, system, low, **settings), "of the low width", digits=3)
    return results.report()


if __name__ == "__main__":
    sys.exit(main())
