"""Several GPUs: matrices in equal parts or whole experts on each, exchanges by hand, what they keep of a text."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from moeq.errors import EstimateError
from moeq.estimator import Hardware, estimate, load_geometry, load_hardware, uniform_placement
from moeq.estimator.capacity import plan_capacity
from moeq.estimator.devices import Gpus
from moeq.estimator.geometry import geometry_from_config
from moeq.estimator.simulation import Simulation, build_simulation
from moeq.estimator.step import Step
from moeq.estimator.terms import t_fetch

MIXTRAL = load_geometry("mixtral-8x7b")
FREE = {"bandwidth_bytes_per_second": 1e30, "efficiency": 1.0, "latency_seconds": 0.0}


def gpus(count: int, parallel: str = "tensor", **fields: float) -> Gpus:
    return Gpus.model_validate({"count": count, "parallel": parallel, **FREE, **fields})


def hardware(gpus: Gpus | None, *, overhead: float = 0.0, capacity: float = 1e15, latency: float = 0.0) -> Hardware:
    base = load_hardware("h200-host-pcie5")
    gpu = base.gpu.model_copy(update={"layer_overhead_seconds": overhead, "memory_capacity_bytes": capacity})
    link = base.link.model_copy(update={"latency_seconds": latency})
    return base.model_copy(update={"gpu": gpu, "gpus": gpus, "link": link})


def simulated(gpus: Gpus | None, *, hot: int = 8, bits: float = 16, overhead: float = 0.0) -> Simulation:
    placement = uniform_placement(MIXTRAL, bits=bits, hot_experts=hot)
    return build_simulation(MIXTRAL, hardware(gpus, overhead=overhead), placement, group_size=None)


def step(gpus: Gpus | None, *, batch: int = 1, policy: str = "static_mixed", hot: int = 8, overhead: float = 0) -> Step:
    return simulated(gpus, hot=hot, overhead=overhead).decode(batch)[policy]


def test_an_exchange_by_hand() -> None:
    four = gpus(4, bandwidth_bytes_per_second=100e9, efficiency=0.5, latency_seconds=5e-6)
    assert four.exchange_seconds(8192) == pytest.approx(3 * 8192 / 50e9 + 5e-6)  # one message from each other GPU
    large = 1 << 30
    assert four.exchange_seconds(large) == pytest.approx(6 / 4 * large / 50e9 + 6 * 5e-6)  # reduce, then gather
    assert gpus(2).exchange_seconds(large) == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("policy", ["static_mixed", "static_placement", "dynaexq"])
def test_equal_parts_take_an_equal_part_of_the_time_where_exchanges_are_free(count: int, policy: str) -> None:
    for batch in (1, 16):
        one, several = step(None, batch=batch, policy=policy), step(gpus(count), batch=batch, policy=policy)
        assert several.seconds == pytest.approx(one.seconds / count)
        assert several.terms["gpu_experts"].bytes == pytest.approx(one.terms["gpu_experts"].bytes)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_whole_experts_wait_for_the_gpu_with_most_of_them(count: int) -> None:
    owners = [[place * count // 8 for place in pair] for pair in combinations(range(8), 2)]
    busiest = sum(max(map(pair.count, pair)) for pair in owners) / len(owners)  # of two experts, in the mean
    one, several = step(None).terms["gpu_experts"], step(gpus(count, "expert")).terms["gpu_experts"]
    assert several.seconds == pytest.approx(one.seconds * busiest / 2)
    assert several.bytes == pytest.approx(one.bytes)


@settings(max_examples=examples(20), deadline=None)
@given(count=st.integers(2, 8), batch=st.sampled_from([1, 2, 8, 64]), hot=st.integers(0, 8))
def test_whole_experts_are_never_faster_than_equal_parts_nor_slower_than_one_gpu(
    count: int, batch: int, hot: int
) -> None:
    machines = [hardware(found) for found in (None, gpus(count), gpus(count, "expert"))]
    fast = [
        each.changed("ndp", memory_bandwidth_bytes_per_second=1e15) for each in machines
    ]  # beside that they share it
    one, tensor, expert = (simulated(None, hot=hot).on(each).decode(batch) for each in fast)
    assert set(one) == set(tensor) == set(expert)
    for policy in one:
        assert tensor[policy].seconds <= expert[policy].seconds * (1 + 1e-9)
        assert expert[policy].seconds <= one[policy].seconds * (1 + 1e-9)


def test_two_exchanges_a_layer_of_all_tokens() -> None:
    told = gpus(4, bandwidth_bytes_per_second=450e9, efficiency=0.8, latency_seconds=5e-6)
    for batch in (1, 64):
        exchange = told.exchange_seconds(2 * batch * MIXTRAL.hidden_size)
        free, paid = step(gpus(4), batch=batch), step(told, batch=batch)
        assert paid.seconds - free.seconds == pytest.approx(2 * MIXTRAL.num_layers * exchange)
    exchange = told.exchange_seconds(2 * 1024 * MIXTRAL.hidden_size)
    free, paid = (simulated(found).prefill(1, 1024)["static_mixed"].seconds for found in (gpus(4), told))
    assert paid - free == pytest.approx(2 * MIXTRAL.num_layers * exchange)


def test_dense_layers_exchange_too() -> None:
    geometry = load_geometry("deepseek-v3")  # 58 MoE layers and three dense ones
    placement, told = uniform_placement(geometry, bits=4, hot_experts=0), gpus(8, latency_seconds=1e-3)
    free, paid = (
        build_simulation(geometry, hardware(found), placement).decode(1)["static_mixed"] for found in (gpus(8), told)
    )
    assert paid.seconds - free.seconds == pytest.approx(2 * 61 * 1e-3)


def test_every_gpu_has_a_link_of_its_own_until_the_memory_behind_them_sets_the_pace() -> None:
    def fetched(found: Gpus | None) -> float:
        return step(found, policy="gpu_only").terms["fetch"].seconds

    assert fetched(gpus(2)) == pytest.approx(fetched(None) / 2)
    most = step(None, policy="gpu_only").terms["fetch"].bytes / hardware(None).ndp.memory_rate
    assert fetched(gpus(64)) == pytest.approx(most)


def test_a_part_of_every_expert_pays_the_latency_of_a_whole_one() -> None:
    parts, whole = (t_fetch(8e6, 1.0, hardware(gpus(4, how), latency=1e-3)) for how in ("tensor", "expert"))
    rate = hardware(None).link.rate
    assert parts.seconds == whole.seconds == pytest.approx(8e6 / 4 / rate + 1e-3)


def test_keys_and_values_are_on_several_gpus_where_heads_cannot_be_divided() -> None:
    assert MIXTRAL.num_key_value_heads == 8
    one = float(MIXTRAL.kv_bytes(1000))
    assert [float(MIXTRAL.across(count).kv_bytes(1000)) / one for count in (1, 4, 8, 16)] == [1, 1, 1, 2]
    latent = load_geometry("deepseek-v3")
    assert float(latent.across(8).kv_bytes(1000)) == 8 * float(latent.kv_bytes(1000))  # every head reads all of it
    eighth = replace(latent, cache_bits=8.0)
    assert float(eighth.across(8).kv_bytes(1000)) == 4 * float(latent.kv_bytes(1000))
    mixed = load_geometry("qwen3-next-80b-a3b")  # two heads of keys and values, states of 32 heads
    states = mixed.kept[0].layers * mixed.kept[0].state_bytes
    kept = float(mixed.kv_bytes(1000)) - states
    assert float(mixed.across(8).kv_bytes(1000)) == pytest.approx(states + 4 * kept)
    assert latent.across(8).attention_macs(1000) == latent.attention_macs(1000)


def test_what_is_read_from_a_configuration_says_what_can_be_divided() -> None:
    sizes = {"num_attention_heads": 16, "num_key_value_heads": 2, "num_experts_per_tok": 2, "hidden_size": 64}
    sizes |= {"num_hidden_layers": 4, "head_dim": 8}
    weights = {"num_moe_layers": 4, "num_experts": 8, "expert_intermediate_size": 8, "non_expert_parameters": 10}
    latent = geometry_from_config({**sizes, "kv_lora_rank": 32, "qk_rope_head_dim": 4}, **weights)
    assert [kind.parts for kind in latent.kept] == [1]
    assert "parts" in latent.sizes()["attention"][0]
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
    windows = geometry_from_config({**sizes, **kinds}, **weights)
    assert [kind.parts for kind in windows.kept] == [None, None]
    assert "parts" not in windows.sizes()["attention"][0]
    linear = {"linear_num_value_heads": 8, "linear_key_head_dim": 4, "linear_value_head_dim": 4}
    states = geometry_from_config({**sizes, **linear, "layer_types": ["linear_attention"] * 4}, **weights)
    assert [kind.parts for kind in states.kept] == [8]


def test_memory_is_that_of_all_of_them() -> None:
    placement = uniform_placement(MIXTRAL, bits=16, hot_experts=8)
    for count, fits in ((None, False), (2, True)):
        found = hardware(None if count is None else gpus(count), capacity=80e9)
        plan = plan_capacity(
            MIXTRAL, found, placement, batch=1, context=1024, group_size=None, zero_points=False, replica_bits=()
        )
        assert plan.gpu.fits == fits
    assert plan.gpu.name == "2 GPUs"
    assert plan.largest_gpu_experts == 8


def test_the_answer_says_how_they_share_the_work() -> None:
    found = estimate(
        MIXTRAL, load_hardware("h100-x4-nvlink"), uniform_placement(MIXTRAL, bits=4, hot_experts=8), policies=()
    )
    assert any(line.startswith("4 GPUs, every matrix in equal parts") for line in found.assumptions)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('value: 4, source: "HGX H100', 'value: 1, source: "HGX H100', "gpus.count"),
        ("value: tensor", "value: pipeline", "gpus.parallel"),
        ("policies:", "energy:", "energy of several GPUs is not worked out"),
        ('  latency: {value: "5 us"', '  late: {value: "5 us"', "late"),
    ],
)
def test_files_with_mistakes_are_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    text = Path(load_hardware("h100-x4-nvlink").file).read_text("utf-8") + "policies: {}\n"
    assert old in text
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace(old, new, 1), "utf-8")
    with pytest.raises(EstimateError, match=said):
        load_hardware(path)
