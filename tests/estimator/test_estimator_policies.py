"""Policies against a naive oracle, and what must hold for all of them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from moeq.estimator import (
    Grid,
    Hardware,
    ModelGeometry,
    Placement,
    estimate,
    load_hardware,
    simulation,
)
from moeq.estimator.devices import Gpus
from moeq.estimator.geometry import load_geometry
from moeq.estimator.offload import cost_optimal, pipelined_finish, split_schedule
from moeq.estimator.placement import uniform_placement
from moeq.estimator.policies import by_label
from moeq.estimator.simulation import build_simulation
from moeq.estimator.workload import routing_outcomes
from moeq.stages.estimate import decode_speedups

GRID = Grid(inputs=(128,), outputs=(512,))
GEOMETRY = ModelGeometry(
    name="small",
    num_layers=6,
    hidden_size=1024,
    intermediate_size=3584,
    num_experts=5,
    top_k=2,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=64,
    non_expert_parameters=60_000_000,
)


def random_placement(seed: int, layers: int = 3) -> tuple[Placement, np.ndarray]:
    generator = np.random.default_rng(seed)
    shape = (layers, GEOMETRY.num_experts)
    hot = generator.random(shape) < 0.4
    bits = np.where(hot, 16, generator.integers(1, 5, shape))
    return Placement(name=f"random-{seed}", bits=bits, hot=hot), generator.dirichlet(np.ones(shape[1]), shape[0])


def naive_context_aware_seconds(
    hw: Hardware, placement: Placement, popularity: np.ndarray, group: int, context: int
) -> float:
    """A decode step at batch 1 by the printed equations: every order of every draw, plain floats."""
    g, total = GEOMETRY, 0.0
    weights = 3 * g.hidden_size * g.intermediate_size
    hbm = hw.gpu.memory_efficiency * hw.gpu.memory_bandwidth_bytes_per_second
    flops = hw.gpu.compute_efficiency * hw.gpu.peak_compute_flops_per_second
    link = hw.link.efficiency * hw.link.bandwidth_bytes_per_second
    dense_bytes = 2 * g.non_expert_parameters / g.num_layers + 4 * g.num_key_value_heads * g.head_dim * context
    dense_flops = 2 * g.non_expert_parameters / g.num_layers + 4 * context * g.num_attention_heads * g.head_dim
    dense = hw.gpu.layer_overhead_seconds + max(dense_bytes / hbm, dense_flops / flops)
    act = 2 * (2 * g.hidden_size / link + hw.link.latency_seconds)
    n, rows, cols = hw.ndp, hw.ndp.array_rows, hw.ndp.array_columns
    for layer in range(g.num_layers):
        row = layer * len(placement.bits) // g.num_layers
        total += dense
        for order in itertools.permutations(range(g.num_experts), g.top_k):
            probability, left = 1.0, 1.0
            for expert in order:
                probability *= popularity[row][expert] / left
                left -= popularity[row][expert]
            on_gpu = on_ndp = 0.0
            for expert in order:
                if placement.hot[row][expert]:
                    on_gpu += max(2 * weights / hbm, 2 * weights / flops)
                    continue
                bits = placement.bits[row][expert] + 16 / group
                memory = weights * bits / 8 / (n.memory_efficiency * n.memory_bandwidth_bytes_per_second)
                if n.dataflow == "ws":
                    cycles = weights / (rows * cols) / n.arrays * (rows + 1 + cols - 1)
                else:
                    cycles = weights * math.ceil(1 / rows) / (n.arrays * cols)
                speed = 16 / bits if n.low_bit_compute == "scale" else 1.0
                on_ndp += max(memory, cycles / n.clock_hertz / speed)
            total += probability * max(on_gpu, on_ndp + act if on_ndp else 0.0)
    return total


@pytest.mark.cases(5)
@pytest.mark.parametrize("dataflow", ["ws", "os"])
@pytest.mark.parametrize("compute", ["scale", "const"])
@pytest.mark.parametrize("seed", range(4))
def test_context_aware_decode_equals_the_oracle(preset: Hardware, seed: int, compute: str, dataflow: str) -> None:
    hardware = preset.changed("ndp", dataflow=dataflow, low_bit_compute=compute)
    placement, popularity = random_placement(seed)
    result = estimate(GEOMETRY, hardware, placement, popularity=popularity, group_size=64, context=777, grid=GRID)
    point = result.point("context_aware", batch=1, input_tokens=128, output_tokens=512)
    expected = naive_context_aware_seconds(hardware, placement, popularity, 64, 777)
    assert point.decode_seconds_per_token == pytest.approx(expected, rel=1e-12)


def naive_baseline_seconds(hw: Hardware, policy: str, tokens: list[int], placement: Placement) -> float:
    """The experts of one layer by the printed equations; popularity is uniform, ties go to the lower index."""
    g = GEOMETRY
    weights = 3 * g.hidden_size * g.intermediate_size
    link = hw.link.efficiency * hw.link.bandwidth_bytes_per_second
    fetch = 2 * weights / link + hw.link.latency_seconds
    active = sorted((e for e in range(g.num_experts) if tokens[e]), key=lambda e: (-tokens[e], e))

    def gpu(e: int, bits: float = 16) -> float:
        read = weights * bits / 8 / (hw.gpu.memory_efficiency * hw.gpu.memory_bandwidth_bytes_per_second)
        rate = hw.gpu.compute_efficiency * hw.gpu.peak_compute_flops_per_second
        return max(read, 2 * weights * tokens[e] / rate)

    def ndp(e: int, bits: float = 16) -> float:
        n = hw.ndp
        memory = weights * bits / 8 / (n.memory_efficiency * n.memory_bandwidth_bytes_per_second)
        tile = n.array_rows * n.array_columns
        cycles = weights / tile / n.arrays * (n.array_rows + tokens[e] + n.array_columns - 1)
        return max(memory, cycles / n.clock_hertz / (16 / bits))

    def act(there: list[int]) -> float:
        crossing = min(4, sum(tokens[e] for e in there))
        return 2 * (2 * crossing * g.hidden_size / link + hw.link.latency_seconds) if there else 0.0

    def split(fetched: list[int]) -> float:
        cold = [e for e in active if e not in fetched]
        gpu_side = len(fetched) * fetch + (gpu(fetched[-1]) if fetched else 0.0)
        return max(gpu_side, sum(map(ndp, cold)) + act(cold))

    if policy in ("context_aware", "static_placement"):  # one for all sequences: drawn routing is alike for them
        hot = [e for e in active if placement.hot[0][e]]
        cold = [e for e in active if e not in hot]
        return max(sum(map(gpu, hot)), sum(ndp(e, placement.bits[0][e] + 16 / 128) for e in cold) + act(cold))
    if policy == "static_mixed":
        return sum(gpu(e, 16 if placement.hot[0][e] else placement.bits[0][e] + 16 / 128) for e in active)
    if policy == "dynaexq":  # so small that all experts fit in high precision
        return sum(map(gpu, active))
    if policy == "monde_bwrule":
        share = hw.link.bandwidth_bytes_per_second / (
            hw.link.bandwidth_bytes_per_second + hw.ndp.memory_bandwidth_bytes_per_second
        )
        return split(active[: max(1, math.ceil(share * len(active)))])
    if policy == "monde_hotset":
        return split([e for e in active if e < placement.hot[0].sum()])
    if policy == "monde_opt":
        return min(split(active[:count]) for count in range(len(active) + 1))
    high, low = (0.80, 0.17) if policy == "hobbit" else (1.0, 0.0)
    moved = 2 * weights * (high + low * (4 + 16 / 128) / 16)
    return len(active) * (moved / link + (high + low) * hw.link.latency_seconds) + sum(map(gpu, active))


def naive_dense_seconds(hw: Hardware, *, tokens: int, sequences: int, context: float) -> float:
    g = GEOMETRY
    share = g.non_expert_parameters / g.num_layers
    read = 2 * share + sequences * 4 * g.num_key_value_heads * g.head_dim * context
    work = 2 * share * tokens + 4 * tokens * context * g.num_attention_heads * g.head_dim
    hbm = hw.gpu.memory_efficiency * hw.gpu.memory_bandwidth_bytes_per_second
    rate = hw.gpu.compute_efficiency * hw.gpu.peak_compute_flops_per_second
    return hw.gpu.layer_overhead_seconds + max(read / hbm, work / rate)


@pytest.mark.parametrize(("batch", "prompt"), [(1, 200), (3, 50_000)])
def test_gpu_only_prefill_equals_the_oracle(preset: Hardware, batch: int, prompt: int) -> None:
    """All experts are fetched, compute follows; the sequences of a batch share the fetches."""
    placement, popularity = random_placement(3, layers=1)
    grid = Grid(inputs=(prompt,), outputs=(1,), batches=(batch,))
    result = estimate(GEOMETRY, preset, placement, popularity=popularity, grid=grid)
    one = routing_outcomes(popularity[0], top_k=2, batch=1)
    loads = sorted((batch * prompt * (one.probability @ one.tokens)).tolist(), reverse=True)
    weights = 3 * GEOMETRY.hidden_size * GEOMETRY.intermediate_size
    arrived = done = 0.0
    for load in loads:
        arrived += 2 * weights / 64e9 + 5e-6
        done = max(done, arrived) + max(2 * weights / (0.8 * 3.35e12), 2 * weights * load / (0.6 * 989.4e12))
    dense = naive_dense_seconds(preset, tokens=batch * prompt, sequences=batch, context=prompt / 2)
    point = result.point("gpu_only", batch=batch, input_tokens=prompt, output_tokens=1)
    assert point.prefill_seconds == pytest.approx(GEOMETRY.num_layers * (done + dense), rel=1e-12)


def test_layers_in_pieces_add_up(preset: Hardware, monkeypatch: pytest.MonkeyPatch) -> None:
    placement, popularity = random_placement(5, layers=6)
    grid = Grid(inputs=(64,), outputs=(16,), batches=(1, 4))
    whole = estimate(GEOMETRY, preset, placement, popularity=popularity, grid=grid)
    monkeypatch.setattr(simulation, "CHUNK_ELEMENTS", 1)
    pieces = estimate(GEOMETRY, preset, placement, popularity=popularity, grid=grid)
    for mine, its in zip(whole.terms, pieces.terms, strict=True):
        assert (mine.policy, mine.term, mine.bound_by) == (its.policy, its.term, its.bound_by)
        assert (mine.seconds, mine.bytes, mine.macs) == pytest.approx((its.seconds, its.bytes, its.macs), rel=1e-9)
    for one, other in zip(whole.points, pieces.points, strict=True):
        assert one.end_to_end_seconds == pytest.approx(other.end_to_end_seconds, rel=1e-12)


def test_every_policy_equals_the_oracle_at_batch_4(preset: Hardware) -> None:
    placement, _ = random_placement(3, layers=1)
    grid = Grid(inputs=(128,), outputs=(512,), batches=(4,))
    result = estimate(GEOMETRY, preset, placement, grid=grid, monte_carlo_samples=64, seed=9)
    drawn = routing_outcomes(np.full(5, 0.2), top_k=2, batch=4, samples=64, seed=(9, 4, 0))
    dense = GEOMETRY.num_layers * naive_dense_seconds(preset, tokens=4, sequences=4, context=1024)
    for point in result.points:
        layers = [naive_baseline_seconds(preset, point.policy, row, placement) for row in drawn.tokens.tolist()]
        expected = dense + GEOMETRY.num_layers * sum(layers) / 64
        assert point.decode_seconds_per_token == pytest.approx(expected, rel=1e-12), point.policy


@pytest.mark.parametrize("batch", [1, 4])
def test_every_variant_is_estimated_and_compared(preset: Hardware, batch: int) -> None:
    placement, popularity = random_placement(1)
    result = estimate(
        GEOMETRY, preset, placement, popularity=popularity, grid=Grid(inputs=(8,), outputs=(4,), batches=(batch,))
    )
    labels = list(by_label())
    assert result.policies == labels
    assert {one.baseline for one in result.speedups} == set(labels) - {"context_aware"}
    assert {"monde_bwrule", "monde_opt", "monde_hotset", "hobbit", "gpu_only"} < set(labels)
    for point in result.points:
        tail = (point.output_tokens - 1) * point.decode_seconds_per_token
        assert point.end_to_end_seconds == pytest.approx(point.time_to_first_token_seconds + tail)
        assert point.decode_tokens_per_second == pytest.approx(batch / point.decode_seconds_per_token)
        assert (point.migration_seconds > 0) == (point.policy == "context_aware")
    for name in labels:
        terms = result.step_terms(name, batch=batch)
        step = result.point(name, batch=batch, input_tokens=8, output_tokens=4).decode_seconds_per_token
        assert sum(one.share for one in terms.values()) >= 1 - 1e-9
        assert terms["dense"].seconds == pytest.approx(terms["dense"].share * step)
        assert all(one.bound_by in {"bytes", "macs", "latency", "none"} for one in terms.values())


@pytest.mark.full
@given(seed=st.integers(0, 50), batch=st.sampled_from([1, 2, 8]))
@settings(max_examples=examples(20), deadline=None)
def test_the_cost_optimal_monde_is_the_fastest_monde(seed: int, batch: int) -> None:
    placement, popularity = random_placement(seed)
    result = estimate(
        GEOMETRY,
        load_hardware("paper-ctxmoe"),
        placement,
        popularity=popularity,
        grid=Grid(inputs=(64,), outputs=(16,), batches=(batch,)),
        monte_carlo_samples=24,
    )
    seconds = {one.policy: one.decode_seconds_per_token for one in result.points}
    assert seconds["monde_opt"] <= seconds["monde_bwrule"] * (1 + 1e-12)
    if batch == 1:
        assert seconds["monde_opt"] <= seconds["monde_hotset"] * (1 + 1e-12)


@pytest.mark.parametrize("parallel", ["tensor", "expert"])
@pytest.mark.parametrize("batch", [1, 4])
def test_no_other_number_of_fetched_experts_is_faster_on_several_gpus(parallel: str, batch: int) -> None:
    gpus = Gpus(count=4, parallel=parallel, bandwidth_bytes_per_second=450e9, efficiency=0.8, latency_seconds=5e-6)
    hardware = load_hardware("paper-ctxmoe").changed("gpu", memory_capacity_bytes=1e13)
    hardware = hardware.model_copy(update={"gpus": gpus})
    geometry = load_geometry("mixtral-8x22b")
    made = build_simulation(geometry, hardware, uniform_placement(geometry, bits=3, hot_experts=0), samples=64)
    for layers, work in made.chunks(batch):
        shape = work.tokens.shape
        masks = [np.broadcast_to(np.arange(shape[-1]) < count, shape) for count in range(shape[-1] + 1)]
        every = np.stack([split_schedule(layers, work, mask).seconds for mask in masks])
        chosen = split_schedule(layers, work, cost_optimal(layers, work)).seconds
        np.testing.assert_allclose(chosen, every.min(axis=0), rtol=1e-12)


def test_compute_follows_fetches() -> None:
    fetch = np.array([2.0, 2.0, 2.0])
    assert pipelined_finish(fetch, np.array([1.0, 1.0, 1.5])).tolist() == [3.0, 5.0, 7.5]  # H*t_fetch + t_gpu(last)
    assert pipelined_finish(fetch, np.array([5.0, 5.0, 5.0])).tolist() == [7.0, 12.0, 17.0]  # compute is the longer
    assert pipelined_finish(np.array([2.0, 0.0, 2.0]), np.array([1.0, 0.0, 1.0])).tolist() == [3.0, 3.0, 5.0]


def test_hobbit_without_low_precision_is_gpu_only() -> None:
    hardware = load_hardware("h100-ndp-pcie4")
    placement, popularity = random_placement(2)
    result = estimate(GEOMETRY, hardware, placement, popularity=popularity, grid=GRID)
    seconds = {one.policy: one.end_to_end_seconds for one in result.points}
    assert seconds["hobbit"] == pytest.approx(seconds["gpu_only"], rel=1e-12)


def test_a_hobbit_that_caches_everything_fetches_nothing(preset: Hardware) -> None:
    cached = {**preset.policies["hobbit"], "cached_experts": 5.0}
    hardware = preset.model_copy(update={"policies": {**preset.policies, "hobbit": cached}})
    placement, _ = random_placement(2)
    assert estimate(GEOMETRY, hardware, placement, grid=GRID).step_terms("hobbit", batch=1)["fetch"].seconds == 0


def test_a_hobbit_whose_cache_does_not_fit_is_refused(preset: Hardware) -> None:
    cached = {**preset.policies["hobbit"], "cached_experts": 4.0}
    hardware = preset.model_copy(update={"policies": {**preset.policies, "hobbit": cached}})
    small = hardware.changed("gpu", memory_capacity_bytes=0.5e9)
    made = estimate(GEOMETRY, small, random_placement(2)[0], grid=GRID)
    reasons = {one.policy: one.reason for one in made.refused}
    assert reasons["hobbit"].startswith("needs experts 504 MiB + the rest 114 MiB + keys and values 6.00 MiB = 624 MiB")
    assert decode_speedups(made).keys() == {"monde_bwrule", "monde_opt"}  # as the stage sums it up
