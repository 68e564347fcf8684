"""The estimator's speed: one full sweep of paper 000's Figures 5 and 6, and a long recorded trace.

    python benchmarks/estimate.py [--rounds 5] [--steps 10000]

Search: what meets a speed among ten hardware files, all policies and forty settings or more.

Sweep: two models, two widths, six grid points, three batches, all policies. Trace: made-up routing of 60 layers of 256
experts, top 8, with a drifting set of popular experts a sequence, replayed step by step under all policies that fit
(a HOBBIT with a cache of 64 experts a layer among them). Goals: under 1 s (DESIGN.md) and under 10 s, in processor
time, since machines are shared; the second for 10,000 steps, whatever --steps.
"""

from __future__ import annotations

import sys

import figures
import numpy as np

from moeq.artifacts.stage import ModelStamp
from moeq.artifacts.trace import RoutingTrace
from moeq.estimator import (
    Estimate,
    Grid,
    Hardware,
    ModelGeometry,
    estimate,
    known_hardware,
    load_geometry,
    load_hardware,
    uniform_placement,
)
from moeq.estimator.search import Search, SearchResult, Setting

SWEEP_GOAL_SECONDS, TRACE_GOAL_SECONDS, SEARCH_GOAL_SECONDS = 1.0, 10.0, 10.0
CASES = (("mixtral-8x7b", 4), ("mixtral-8x22b", 2))
LAYERS, EXPERTS, TOP_K = 60, 256, 8
PROMPT, DECODED = 100, 400  # tokens of a sequence
LARGE = ModelGeometry(
    name="60x256",
    num_layers=LAYERS,
    hidden_size=2048,
    intermediate_size=768,
    num_experts=EXPERTS,
    top_k=TOP_K,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    non_expert_parameters=1_500_000_000,
)


def sweep() -> None:
    hardware = load_hardware("paper-ctxmoe")
    for name, hot in CASES:
        geometry = load_geometry(name)
        for bits in (3, 2):
            placement = uniform_placement(geometry, bits=bits, hot_experts=hot)
            estimate(geometry, hardware, placement, grid=Grid(batches=(1, 4, 16)))


def searched() -> SearchResult:
    """Mixtral 8x7B on ten of the hardware files that come with moeq."""
    systems = [load_hardware(name) for name in known_hardware()[:10]]
    asked = Setting(gpu_experts=4, gpu_bits=16, bits=3)
    return Search(geometry=load_geometry("mixtral-8x7b"), hardware=systems, speed=20, asked=asked).run()


def made_trace(steps: int) -> RoutingTrace:
    """Sequences of PROMPT + DECODED tokens until `steps` are decoded; every sequence prefers experts of its own."""
    generator = np.random.default_rng(0)
    sequences = -(-steps // DECODED)
    chosen = np.empty((sequences, PROMPT + DECODED, LAYERS, TOP_K), dtype=np.int16)
    for index in range(sequences):
        liking = generator.normal(0, 1.5, (1, LAYERS, EXPERTS)).astype(np.float32)
        scores = liking + generator.gumbel(size=(PROMPT + DECODED, LAYERS, EXPERTS)).astype(np.float32)
        chosen[index] = np.argpartition(-scores, TOP_K - 1, axis=2)[..., :TOP_K]
    lengths = np.full(sequences, PROMPT + DECODED, dtype=np.int32)
    return RoutingTrace(
        layers=tuple(f"layers.{index}" for index in range(LAYERS)),
        num_experts=(EXPERTS,) * LAYERS,
        top_k=TOP_K,
        experts=chosen.reshape(-1, LAYERS, TOP_K),
        lengths=lengths,
        prefill=np.full(sequences, PROMPT, dtype=np.int32),
        domains=("made up",) * sequences,
        model=ModelStamp(name=LARGE.name, digest="0"),
    )


def caching(hardware: Hardware) -> Hardware:
    hobbit = {**hardware.policies["hobbit"], "cached_experts": 64.0}
    return hardware.model_copy(update={"policies": {**hardware.policies, "hobbit": hobbit}})


def replay(trace: RoutingTrace) -> Estimate:
    placement = uniform_placement(LARGE, bits=3, hot_experts=64)
    bits, hot = (np.repeat(part, LAYERS, axis=0) for part in (placement.bits, placement.hot))
    every = type(placement)(name=placement.name, bits=bits, hot=hot)
    return estimate(LARGE, caching(load_hardware("paper-ctxmoe")), every, trace=trace, grid=Grid(outputs=(DECODED,)))


def main() -> int:
    options = figures.arguments(__doc__, rounds=(5, 3), steps=(10_000, 4_000))
    results = figures.Figures(options)
    what = "sweep of 2 models, 2 widths, 6 grid points, 3 batches, all policies"
    results.add(what, figures.processor_seconds(sweep, options.rounds), "s", at_most=SWEEP_GOAL_SECONDS)
    what = f"search of {len(searched().points)} points that fit, 10 hardware files, all policies"
    results.add(what, figures.processor_seconds(searched, options.rounds), "s", at_most=SEARCH_GOAL_SECONDS)
    trace = made_trace(options.steps)
    result = replay(trace)
    print(f"{options.steps} steps x {LAYERS} layers x {EXPERTS} experts, {len(result.policies)} policies")
    for point in result.points[: len(result.policies)]:
        milliseconds, share = 1e3 * point.decode_seconds_per_token, point.gpu_expert_share
        print(f"  {point.policy:14} {milliseconds:8.3f} ms a token, {share:.3f} of the expert tokens on the GPU")
    seconds = figures.processor_seconds(lambda: replay(trace), max(1, options.rounds // 2))
    results.add("trace, 10,000 steps", seconds * 10_000 / options.steps, "s", at_most=TRACE_GOAL_SECONDS, digits=1)
    return results.report()


if __name__ == "__main__":
    sys.exit(main())
