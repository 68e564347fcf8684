"""Policies that follow a recorded trace, against plain loops: hot sets of prompts, caches, DynaExq."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from moeq.artifacts.stage import ModelStamp
from moeq.artifacts.trace import RoutingTrace
from moeq.errors import EstimateError
from moeq.estimator import Estimate, Grid, Hardware, ModelGeometry, Placement, caching, estimate
from moeq.estimator.replay import active_experts
from moeq.estimator.timeline import timeline

L, E, K = 3, 6, 2
WEIGHTS = 3 * 1024 * 3584
GEOMETRY = ModelGeometry(
    name="small",
    num_layers=L,
    hidden_size=1024,
    intermediate_size=3584,
    num_experts=E,
    top_k=K,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=64,
    non_expert_parameters=30_000_000,
)
HOT = np.array([[0, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]], dtype=bool)
BITS = np.where(HOT, 16, [[4, 1, 1, 3, 2, 2], [1, 2, 3, 4, 2, 1], [3, 3, 2, 2, 1, 4]])
PLACEMENT = Placement(name="mixed", bits=BITS, hot=HOT)


def made_trace(seed: int = 0, lengths: tuple[int, ...] = (30, 25, 41, 33), weights: bool = True) -> RoutingTrace:
    """Sequences with a liking of their own; the first 40 % of each are its prompt."""
    generator = np.random.default_rng(seed)
    rows = []
    for length in lengths:
        scores = generator.normal(0, 2, (1, L, E)) + generator.gumbel(size=(length, L, E))
        rows.append(np.argsort(-scores, axis=2)[..., :K])
    experts = np.concatenate(rows).astype(np.int16)
    return RoutingTrace(
        layers=tuple(f"layers.{index}" for index in range(L)),
        num_experts=(E,) * L,
        top_k=K,
        experts=experts,
        weights=generator.random(experts.shape).astype(np.float16) if weights else None,
        lengths=np.array(lengths, dtype=np.int32),
        prefill=np.array([4 * length // 10 for length in lengths], dtype=np.int32),
        domains=("a", "b", "a", "b")[: len(lengths)],
        model=ModelStamp(name="small", digest="0"),
    )


def run(hardware: Hardware, trace: RoutingTrace, batch: int = 1, **more: object) -> Estimate:
    grid = Grid(inputs=(64,), outputs=(16,), batches=(batch,))
    return estimate(GEOMETRY, hardware, PLACEMENT, trace=trace, grid=grid, **more)  # type: ignore[arg-type]


def seconds(result: Estimate, policy: str) -> float:
    return next(one.decode_seconds_per_token for one in result.points if one.policy == policy)


def dense_seconds(hw: Hardware, tokens: int, context: int = 1024) -> float:
    share = GEOMETRY.non_expert_parameters / L
    read = 2 * share + tokens * 4 * 4 * 64 * context
    work = tokens * (2 * share + 4 * context * 16 * 64)
    memory = hw.gpu.memory_efficiency * hw.gpu.memory_bandwidth_bytes_per_second
    return hw.gpu.layer_overhead_seconds + max(
        read / memory, work / (hw.gpu.compute_efficiency * hw.gpu.peak_compute_flops_per_second)
    )


def expert_seconds(hw: Hardware, bits: float, tokens: int) -> tuple[float, float]:
    """On the GPU and on the NDP."""
    rate = hw.gpu.compute_efficiency * hw.gpu.peak_compute_flops_per_second
    memory = hw.gpu.memory_efficiency * hw.gpu.memory_bandwidth_bytes_per_second
    gpu = max(WEIGHTS * bits / 8 / memory, 2 * WEIGHTS * tokens / rate)
    n = hw.ndp
    cycles = WEIGHTS / (n.array_rows * n.array_columns) / n.arrays * (n.array_rows + tokens + n.array_columns - 1)
    return gpu, max(
        WEIGHTS * bits / 8 / (n.memory_efficiency * n.memory_bandwidth_bytes_per_second),
        cycles / n.clock_hertz * bits / 16,
    )


def stored(bits: float) -> float:
    return bits if bits == 16 else bits + 16 / 128


def popularity_rank(trace: RoutingTrace, layer: int) -> np.ndarray:
    """Rank [E] of every expert in all prompts."""
    counts = np.bincount(trace.experts[trace.is_prefill, layer].ravel(), minlength=E)
    return np.argsort(np.argsort(-counts, kind="stable"))


def naive_placement(trace: RoutingTrace, members: list[int], layer: int) -> tuple[list[bool], list[float]]:
    """Place and stored bits of every expert of a layer for sequences that decode together."""
    counts, scores = np.zeros(E), np.zeros(E)
    for sequence in members:
        start = int(trace.starts[sequence])
        for row in range(start, start + int(trace.prefill[sequence])):
            for place, expert in enumerate(trace.experts[row, layer]):
                counts[expert] += 1
                if trace.weights is not None:
                    scores[expert] += float(trace.weights[row, layer, place])
    importance = counts / counts.sum()
    if trace.weights is not None:
        importance = 0.5 * importance + 0.5 * scores / scores.sum()
    best = sorted(range(E), key=lambda e: (not HOT[layer, e], -BITS[layer, e]))
    hot, bits = [False] * E, [0.0] * E
    popular = popularity_rank(trace, layer)
    for rank, expert in enumerate(sorted(range(E), key=lambda e: (-importance[e], popular[e]))):
        hot[expert], bits[expert] = bool(HOT[layer, best[rank]]), stored(float(BITS[layer, best[rank]]))
    return hot, bits


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize(("batch", "groups"), [(1, [[0], [1], [2], [3]]), (2, [[0, 1], [2, 3]])])
def test_hot_experts_follow_from_every_prompt(
    preset: Hardware, batch: int, groups: list[list[int]], weights: bool
) -> None:
    trace = made_trace(weights=weights)
    total, steps = 0.0, 0
    for members in groups:
        left = min(int(trace.lengths[s] - trace.prefill[s]) for s in members)
        placed = [naive_placement(trace, members, layer) for layer in range(L)]
        for step in range(left):
            steps += 1
            for layer, (hot, bits) in enumerate(placed):
                loads: dict[int, int] = {}
                for s in members:
                    for expert in trace.experts[trace.starts[s] + trace.prefill[s] + step, layer].tolist():
                        loads[expert] = loads.get(expert, 0) + 1
                gpu = sum(expert_seconds(preset, bits[e], m)[0] for e, m in loads.items() if hot[e])
                ndp = sum(expert_seconds(preset, bits[e], m)[1] for e, m in loads.items() if not hot[e])
                crossing = min(batch, sum(m for e, m in loads.items() if not hot[e]))
                act = 2 * (2 * crossing * 1024 / 64e9 + 5e-6) if crossing else 0.0
                total += dense_seconds(preset, batch) + max(gpu, ndp + act)
    result = run(preset, trace, batch)
    assert result.routing == {batch: "trace"}
    assert seconds(result, "context_aware") == pytest.approx(total / steps, rel=1e-9)


def test_static_placement_has_the_popular_experts_of_all_prompts(preset: Hardware) -> None:
    trace, total = made_trace(), 0.0
    rows = np.flatnonzero(~trace.is_prefill)
    on_gpu = 0
    for layer in range(L):
        rank = popularity_rank(trace, layer)
        best = sorted(range(E), key=lambda e, layer=layer: (not HOT[layer, e], -BITS[layer, e]))
        for row in rows:
            chosen = trace.experts[row, layer].tolist()
            hot = [e for e in chosen if HOT[layer, best[rank[e]]]]
            on_gpu += len(hot)
            gpu = sum(expert_seconds(preset, 16, 1)[0] for _ in hot)
            ndp = sum(
                expert_seconds(preset, stored(float(BITS[layer, best[rank[e]]])), 1)[1] for e in chosen if e not in hot
            )
            act = 2 * (2 * 1024 / 64e9 + 5e-6) if len(hot) < K else 0.0
            total += dense_seconds(preset, 1) + max(gpu, ndp + act)
    result = run(preset, trace)
    assert seconds(result, "static_placement") == pytest.approx(total / len(rows), rel=1e-9)
    shares = {one.policy: one.gpu_expert_share for one in result.points}
    assert shares["static_placement"] == pytest.approx(on_gpu / (len(rows) * L * K), rel=1e-12)
    assert shares["context_aware"] > shares["static_placement"]  # every sequence has a liking of its own
    assert all(one.migration_seconds == 0 for one in result.points if one.policy == "static_placement")


def test_static_placement_is_all_that_drawn_routing_needs(preset: Hardware) -> None:
    """Without context to follow, a step is the same and the migration is saved."""
    result = estimate(GEOMETRY, preset, PLACEMENT, grid=Grid(inputs=(64,), outputs=(16,)))
    where = {"batch": 1, "input_tokens": 64, "output_tokens": 16}
    mine, its = (result.point(one, **where) for one in ("context_aware", "static_placement"))
    assert its.decode_seconds_per_token == mine.decode_seconds_per_token
    assert its.migration_seconds == 0 < mine.migration_seconds


def naive_hits(experts: np.ndarray, used: np.ndarray, places: int) -> np.ndarray:
    hits = np.zeros(experts.shape, dtype=bool)
    for layer in range(len(experts)):
        cache: list[int] = []
        for step in range(experts.shape[1]):
            now = [int(e) for e, there in zip(experts[layer, step], used[layer, step], strict=True) if there]
            hits[layer, step] = used[layer, step] & np.isin(experts[layer, step], cache)
            for expert in reversed(now):
                cache = [expert, *(one for one in cache if one != expert)]
            cache = cache[:places]
    return hits


@given(seed=st.integers(0, 1000), places=st.integers(0, 8), block=st.sampled_from([1, 7, 64]))
@settings(max_examples=examples(40), deadline=None)
def test_a_cache_evicts_the_least_recently_used(seed: int, places: int, block: int) -> None:
    generator = np.random.default_rng(seed)
    experts = np.argsort(generator.random((2, 40, 7)), axis=2)[..., :3]
    used = generator.random(experts.shape) < 0.8
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(caching, "_STEPS_AT_ONCE", block)
        found = caching.lru_hits(experts, used, num_experts=7, places=places)
    assert np.array_equal(found, naive_hits(experts, used, places))


@pytest.mark.parametrize("places", [0, 2, 6])
def test_hobbit_fetches_what_its_cache_has_not(preset: Hardware, places: int) -> None:
    trace = made_trace()
    own = {**preset.policies["hobbit"], "cached_experts": float(places)}
    hardware = preset.model_copy(update={"policies": {**preset.policies, "hobbit": own}})
    rows = np.flatnonzero(~trace.is_prefill)
    experts = trace.experts[rows].transpose(1, 0, 2)
    by_popularity = np.stack([popularity_rank(trace, layer) for layer in range(L)])
    order = np.argsort(np.take_along_axis(by_popularity[:, None, :], experts, axis=2), axis=2)
    experts = np.take_along_axis(experts, order, axis=2)  # more popular experts count as the more recent of a step
    misses = (~naive_hits(experts, np.ones(experts.shape, dtype=bool), places)).sum() / len(rows)
    moved = 2 * WEIGHTS * (0.80 + 0.17 * (4 + 16 / 128) / 16)
    fetch = moved / 64e9 + 0.97 * 5e-6
    expected = L * (dense_seconds(preset, 1) + K * expert_seconds(preset, 16, 1)[0]) + misses * fetch
    assert seconds(run(hardware, trace), "hobbit") == pytest.approx(expected, rel=1e-9)


def naive_dynaexq(
    hw: Hardware, trace: RoutingTrace, places: int, period: int, alpha: float, share: float = 1.0, transient: float = 4
) -> float:
    """Algorithm 1 step by step: seconds of a decode step, stalls included; share: of tau; transient: experts a step
    that the buffer lets through, of all layers together."""
    gpu_rate = hw.gpu.memory_efficiency * hw.gpu.memory_bandwidth_bytes_per_second
    prompts = trace.experts[trace.is_prefill]
    hotness = [np.bincount(prompts[:, i].ravel(), minlength=E) + 1e-6 * len(prompts) for i in range(L)]
    hotness = [one / one.sum() for one in hotness]
    first = [sorted(range(E), key=lambda e, s=s: (-s[e], e)) for s in hotness]
    target = [set(ranked[:places]) for ranked in first]
    tau = [share * scores[ranked[places - 1]] for scores, ranked in zip(hotness, first, strict=True)]
    used = [set(one) for one in target]
    rows = np.flatnonzero(~trace.is_prefill)
    total, window = 0.0, {"compute": 0.0, "copy": 0.0, "bytes": 0.0}

    def close() -> float:
        late = max(window["copy"], window["bytes"] / gpu_rate) - window["compute"]
        window.update(compute=0.0, copy=0.0, bytes=0.0)
        return max(0.0, late)

    for step, row in enumerate(rows):
        if step and step % period == 0:
            total += close()
            used = [set(one) for one in target]  # what was copied during the last period
            for layer in range(L):
                ranked = sorted(range(E), key=lambda e: (-hotness[layer][e] - 1e-12 * (e in target[layer]), e))
                new = {e for e in ranked[:places] if hotness[layer][e] >= tau[layer]}
                ends = min(step + period, len(rows))
                most = int(transient / L * ends) - int(transient / L * step)
                hottest = sorted(range(E), key=lambda e: -hotness[layer][e])
                late = [e for e in hottest if e in new - target[layer]][most:]
                stay = [e for e in hottest if e in target[layer] - new][: len(late)]
                new = (new - set(late)) | set(stay)
                moved = len(new - target[layer]) * WEIGHTS * 2 + len(target[layer] - new) * WEIGHTS * stored(4) / 8
                switches = len(new ^ target[layer])
                window["copy"] += moved / 64e9 + switches * 5e-6
                window["bytes"] += moved
                target[layer] = new
        for layer in range(L):
            bits = [16 if e in used[layer] else stored(4) for e in trace.experts[row, layer].tolist()]
            taken = dense_seconds(hw, 1) + sum(expert_seconds(hw, b, 1)[0] for b in bits)
            read = 2 * GEOMETRY.non_expert_parameters / L + 4 * 4 * 64 * 1024
            window["compute"] += taken
            window["bytes"] += sum(WEIGHTS * b / 8 for b in bits) + read
            total += taken
            given = None if trace.weights is None else trace.weights[row, layer].astype(float) * K
            gain = np.bincount(trace.experts[row, layer], weights=given, minlength=E) / K
            hotness[layer] = alpha * hotness[layer] + (1 - alpha) * gain
    return (total + close()) / len(rows)


@pytest.mark.cases(6)
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize(("share", "transient"), [(1.0, 4), (0.0, 4), (0.5, 4), (0.0, 1), (0.0, 0)])
@pytest.mark.parametrize(("period", "overhead"), [(4, 0.33e-3), (4, 0.0), (9, 0.0), (1, 0.0), (1000, 0.0)])
def test_dynaexq_equals_algorithm_1_step_by_step(
    preset: Hardware, period: int, overhead: float, weights: bool, share: float, transient: int
) -> None:
    """Two experts a layer fit in FP16; without tau copies are hidden in part only, and fewer with a small buffer."""
    trace = made_trace(seed=3, weights=weights)
    room = 2 * 30_000_000 + 1024 * L * 4 * 4 * 64 + WEIGHTS / 8 * (L * E * stored(4) + transient * 16)
    room += 2.5 * L * WEIGHTS / 8 * (16 - stored(4))
    small = preset.changed("gpu", memory_capacity_bytes=room, layer_overhead_seconds=overhead)
    own: dict[str, float | str] = {"update_period": float(period), "ema": 0.7, "threshold": share}
    own["transient_experts"] = transient
    hardware = small.model_copy(update={"policies": {**preset.policies, "dynaexq": own}})
    result = run(hardware, trace)
    expected = naive_dynaexq(hardware, trace, places=2, period=period, alpha=0.7, share=share, transient=transient)
    assert seconds(result, "dynaexq") == pytest.approx(expected, rel=1e-9)
    stalled = next(one.stall_seconds_per_token for one in result.points if one.policy == "dynaexq")
    assert (stalled > 1e-12) == (period < 1000 and overhead == 0 and transient > 0)
    terms = result.step_terms("dynaexq", batch=1)
    assert (terms["copies"].bytes > 0) == (period < 1000 and transient > 0)
    assert terms["stall"].seconds == stalled


def test_dynaexq_needs_room_for_low_precision(preset: Hardware) -> None:
    tight = preset.changed("gpu", memory_capacity_bytes=150e6)
    result = run(tight, made_trace())
    reasons = {one.policy: one.reason for one in result.refused}
    assert reasons["dynaexq"].startswith(
        "needs experts 181 MiB + the rest 57.2 MiB + keys and values 3.00 MiB = 242 MiB"
    )
    assert "dynaexq" not in result.policies
    with pytest.raises(EstimateError, match="dynaexq at batch 1: needs experts"):
        result.point("dynaexq", batch=1, input_tokens=64, output_tokens=16)
    with pytest.raises(EstimateError, match="dynaexq at batch 1: needs experts"):
        run(tight, made_trace(), policies=("dynaexq",))


@given(seed=st.integers(0, 200), batch=st.integers(1, 5))
@settings(max_examples=examples(30), deadline=None)
def test_active_experts_are_counted_most_loaded_first(seed: int, batch: int) -> None:
    generator = np.random.default_rng(seed)
    chosen = generator.integers(-1, E, (2, 9, batch * K)).astype(np.int16)
    rank = np.stack([generator.permutation(E) for _ in range(2)])
    experts, tokens = active_experts(chosen, rank)
    for layer in range(2):
        for step in range(9):
            counts = np.bincount(chosen[layer, step][chosen[layer, step] >= 0], minlength=E)
            expected = sorted(np.flatnonzero(counts).tolist(), key=lambda e: (-counts[e], rank[layer, e]))
            there = tokens[layer, step] > 0
            assert experts[layer, step][there].tolist() == expected
            assert tokens[layer, step][there].tolist() == counts[expected].tolist()
            assert not there[there.sum() :].any()


def test_a_trace_drives_every_figure(preset: Hardware) -> None:
    trace = made_trace()
    result = run(preset, trace, batch=2)
    assert Estimate.model_validate_json(result.model_dump_json()) == result
    assert run(preset, trace, batch=2) == result
    text = "\n".join(result.assumptions)
    assert "as recorded from small (4 sequences, 129 tokens), decode steps in order: 35 at batch 2" in text
    rows = {(one.assumption, one.change) for one in result.sensitivity}
    assert ("routing", "as recorded -> drawn, popularity of the prompts") in rows
    assert ("batch", "2 -> 4") in rows
    assert ("batch", "2 -> 16") not in rows
    drawn = timeline(GEOMETRY, preset, PLACEMENT, policy="context_aware", batch=2, step=3, trace=trace)
    assert {one.layer for one in drawn} == {0, 1, 2}


def test_a_short_placement_is_repeated_over_the_layers_of_a_trace(preset: Hardware) -> None:
    generator = np.random.default_rng(0)
    short = Placement(name="short", bits=BITS[:2], hot=HOT[:2])
    whole = Placement(name="short", bits=BITS[[0, 0, 1]], hot=HOT[[0, 0, 1]])
    popularity = generator.dirichlet(np.ones(E), 2)
    grid = Grid(inputs=(64,), outputs=(16,))
    one, other = (
        estimate(GEOMETRY, preset, placement, trace=made_trace(), popularity=rows, grid=grid)
        for placement, rows in ((short, popularity), (whole, popularity[[0, 0, 1]]))
    )
    assert one.points == other.points
    assert one.assigned_layers == 2


def test_long_traces_are_sampled_for_the_sensitivity(preset: Hardware) -> None:
    result = run(preset, made_trace(lengths=(300, 300)))
    first = result.sensitivity[0]
    assert (first.assumption, first.change) == ("none", "128 steps of the trace")
    assert any("from 128 steps" in one for one in result.assumptions)
    whole = next(one for one in result.speedups if one.baseline == "monde_opt").decode
    assert first.decode_speedup_over_monde_opt == pytest.approx(whole, rel=0.15)


def test_a_trace_that_does_not_fit_is_one_line(preset: Hardware) -> None:
    other = replace(GEOMETRY, num_layers=4)
    for call, told in [
        (lambda: estimate(other, preset, PLACEMENT, trace=made_trace()), "a trace of 3 MoE layers, small has 4"),
        (lambda: run(preset, made_trace(), batch=5), "no 5 sequences of the trace decode at the same time"),
    ]:
        with pytest.raises(EstimateError, match=told) as caught:
            call()
        assert "\n" not in str(caught.value)
