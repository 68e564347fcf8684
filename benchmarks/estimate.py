"""The estimator's speed: one full sweep of paper 000's Figures 5 and 6, and a long recorded trace.

    python benchmarks/estimate.py [--rounds 5] [--steps 10000]

Sweep: two models, two widths, six grid points, three batches, all policies. Trace: made-up routing of 60 layers of 256
experts, top 8, with a drifting set of popular experts a sequence, replayed step by step under all policies that fit
(a HOBBIT with a cache of 64 experts a layer among them). Goals: under 1 s (DESIGN.md) and under 10 s, in processor
time, since machines are shared.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moeq.artifacts.stage import ModelStamp
from moeq.artifacts.trace import RoutingTrace
from moeq.estimator import (
    Estimate,
    Grid,
    Hardware,
    ModelGeometry,
    estimate,
    load_geometry,
    load_hardware,
    uniform_placement,
)

SWEEP_GOAL_SECONDS, TRACE_GOAL_SECONDS = 1.0, 10.0
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
    every = type(placement)(
        name=placement.name,
        bits=np.repeat(placement.bits, LAYERS, axis=0),
        hot=np.repeat(placement.hot, LAYERS, axis=0),
    )
    return estimate(LARGE, caching(load_hardware("paper-ctxmoe")), every, trace=trace, grid=Grid(outputs=(DECODED,)))


@dataclass(frozen=True)
class Timing:
    """Medians of some rounds, in seconds: by the processor's clock, and by the wall's."""

    processor: float
    wall: float

    def __str__(self) -> str:
        return f"{self.processor:.3f} s of processor time, {self.wall:.3f} s by the wall"


def timed(rounds: int, work: Callable[[], object]) -> Timing:
    taken = []
    for _ in range(rounds):
        started = time.process_time(), time.perf_counter()
        work()
        taken.append((time.process_time() - started[0], time.perf_counter() - started[1]))
    processor, wall = (statistics.median(one) for one in zip(*taken, strict=True))
    return Timing(processor=processor, wall=wall)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10_000)
    options = parser.parse_args()
    swept = timed(options.rounds, sweep)
    print(f"2 models x 2 widths x 6 grid points x 3 batches, all policies: {swept}")
    trace = made_trace(options.steps)
    result = replay(trace)
    replayed = timed(max(1, options.rounds // 2), lambda: replay(trace))
    print(f"{options.steps} steps x {LAYERS} layers x {EXPERTS} experts, {len(result.policies)} policies: {replayed}")
    for one in result.points[: len(result.policies)]:
        milliseconds, share = 1e3 * one.decode_seconds_per_token, one.gpu_expert_share
        print(f"  {one.policy:14} {milliseconds:8.3f} ms a token, {share:.3f} of the expert tokens on the GPU")
    ratios = swept.processor / SWEEP_GOAL_SECONDS, replayed.processor / TRACE_GOAL_SECONDS
    print(
        f"sweep {swept.processor:.3f} s, {ratios[0]:.2f} of the goal of {SWEEP_GOAL_SECONDS:.0f} s; "
        f"trace {replayed.processor:.3f} s, {ratios[1]:.2f} of the goal of {TRACE_GOAL_SECONDS:.0f} s"
    )
    return 0 if max(ratios) <= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
