"""The result as a whole: layers that repeat, JSON, capacity, geometries, and input that does not fit."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from moeq.errors import EstimateError
from moeq.estimator import (
    Estimate,
    Grid,
    Hardware,
    Placement,
    equal_bits,
    estimate,
    geometry_from_config,
    known_geometries,
    known_hardware,
    load_geometry,
    load_hardware,
    timeline,
    uniform_placement,
)
from moeq.estimator.geometry import codebook_of, effective_bits
from moeq.estimator.terms import t_gpu, t_ndp
from moeq_kernels.iq_types import SETS
from moeq_kernels.packed import packed_bytes
from moeq_kernels.widths import FLOAT_BITS, FLOAT_GROUPS, Encoding

MIXTRAL = load_geometry("mixtral-8x7b")
GRID = Grid(inputs=(128,), outputs=(512,))


def placed(layers: int, seed: int = 0) -> Placement:
    generator = np.random.default_rng(seed)
    hot = generator.random((layers, 8)) < 0.5
    return Placement(name="random", bits=np.where(hot, 16, generator.integers(1, 5, (layers, 8))), hot=hot)


def test_results_become_json_and_back(preset: Hardware) -> None:
    result = estimate(MIXTRAL, preset, placed(4), grid=Grid(batches=(1, 4)))
    assert Estimate.model_validate_json(result.model_dump_json()) == result
    assert result.schema_version == 2
    assert result.routing == {1: "exact", 4: "monte-carlo"}


def test_layers_repeat_evenly(preset: Hardware) -> None:
    few = placed(4)
    every = Placement(name="random", bits=np.repeat(few.bits, 8, axis=0), hot=np.repeat(few.hot, 8, axis=0))
    short, long = (estimate(MIXTRAL, preset, one, grid=GRID) for one in (few, every))
    for mine, its in zip(short.points, long.points, strict=True):
        assert mine.end_to_end_seconds == pytest.approx(its.end_to_end_seconds, rel=1e-12)
    assert short.capacity.gpu_expert_bytes == pytest.approx(long.capacity.gpu_expert_bytes)
    assert any("4 layer(s) are repeated evenly over 32" in one for one in short.assumptions)
    assert not any("repeated" in one for one in long.assumptions)


def test_sampled_results_are_deterministic_and_seeded(preset: Hardware) -> None:
    grid = Grid(inputs=(128,), outputs=(512,), batches=(4,))
    first, again, other = (estimate(MIXTRAL, preset, placed(4), grid=grid, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.points != other.points


def test_more_samples_agree_with_fewer(preset: Hardware) -> None:
    grid = Grid(inputs=(128,), outputs=(512,), batches=(4,))
    few, many = (
        estimate(MIXTRAL, preset, placed(2), grid=grid, monte_carlo_samples=count).speedups[0].decode
        for count in (256, 8192)
    )
    assert few == pytest.approx(many, rel=0.03)


def test_popular_experts_on_the_gpu_are_worth_it(preset: Hardware) -> None:
    placement = uniform_placement(MIXTRAL, bits=3, hot_experts=4)
    skewed = np.array([8, 8, 8, 8, 1, 1, 1, 1])
    good, bad = (
        estimate(MIXTRAL, preset, placement, popularity=one, grid=GRID).point(
            "context_aware", batch=1, input_tokens=128, output_tokens=512
        )
        for one in (skewed, skewed[::-1])
    )
    assert good.decode_seconds_per_token < bad.decode_seconds_per_token
    assert good.ndp_seconds_per_layer < bad.ndp_seconds_per_layer


def test_capacity_counts_scales_and_zero_points(preset: Hardware) -> None:
    placement = Placement(name="mixed", bits=[[16] * 4 + [1, 2, 3, 4]], hot=[[True] * 4 + [False] * 4])
    one = MIXTRAL.expert_parameters / 8
    plain = estimate(MIXTRAL, preset, placement, grid=GRID, group_size=64).capacity
    assert plain.gpu_expert_bytes == pytest.approx(32 * 4 * 16 * one)
    assert plain.ndp_expert_bytes == pytest.approx(32 * (10 + 4 * 16 / 64) * one)
    assert plain.replica_bytes == pytest.approx(32 * 8 * (26 + 4 * 16 / 64) * one)
    zeros = estimate(MIXTRAL, preset, placement, grid=GRID, group_size=64, zero_points=True).capacity
    assert zeros.ndp_expert_bytes == pytest.approx(32 * (10 + 4 * 16 / 64 + 9 / 64) * one)


def test_what_does_not_fit_is_said(preset: Hardware) -> None:
    everything = estimate(MIXTRAL, preset, uniform_placement(MIXTRAL, bits=3, hot_experts=8), grid=GRID)
    assert not everything.capacity.fits_gpu
    assert everything.ndp_speedup_over_fp16 == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"popularity": np.ones((3, 8))}, "popularity has shape"),
        ({"popularity": np.ones(7)}, "popularity has shape"),
        ({"group_size": 0}, "group_size is 0"),
        ({"context": -1}, "context is -1"),
        ({"monte_carlo_samples": 0}, "monte_carlo_samples is 0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_arguments_that_do_not_fit(preset: Hardware, change: dict[str, object], message: str) -> None:
    with pytest.raises(EstimateError, match=message):
        estimate(MIXTRAL, preset, placed(4), grid=GRID, **change)  # type: ignore[arg-type]


def test_placements_that_do_not_fit(preset: Hardware) -> None:
    with pytest.raises(EstimateError, match="33 layers, mixtral-8x7b has 32"):
        estimate(MIXTRAL, preset, placed(33), grid=GRID)
    with pytest.raises(EstimateError, match="2 experts a layer"):
        estimate(MIXTRAL, preset, Placement(name="two", bits=[[16, 3]], hot=[[True, False]]), grid=GRID)
    with pytest.raises(EstimateError, match="hot has"):
        Placement(name="odd", bits=[[16, 3]], hot=[[True]])
    with pytest.raises(EstimateError, match=r"0\.5 bits at layer 0, expert 1"):
        Placement(name="odd", bits=[[16, 0.5]], hot=[[True, False]])
    with pytest.raises(EstimateError, match="9 hot experts of 8"):
        uniform_placement(MIXTRAL, bits=3, hot_experts=9)


def test_dropped_experts_take_no_bytes_and_no_time(preset: Hardware) -> None:
    assert effective_bits([0, 2], 64, zero_points=True).tolist() == [0, 2 + 18 / 64]
    for of, device in ((t_ndp, preset.ndp), (t_gpu, preset.all_gpus)):
        cost = of(1000, [0.0, 2.5], 3, device)  # type: ignore[operator]
        assert [cost.seconds[0], cost.bytes[0], cost.macs[0]] == [0, 0, 0]
        assert cost.seconds[1] > 0
    kept = Placement(name="kept", bits=[[3] * 8], hot=[[False] * 8])
    half = Placement(name="half", bits=[[3, 0] * 4], hot=[[False] * 8])
    whole, less = (estimate(MIXTRAL, preset, one, grid=GRID) for one in (kept, half))
    assert less.capacity.ndp_expert_bytes == whole.capacity.ndp_expert_bytes / 2


@pytest.mark.parametrize(("name", "term"), [("paper-ctxmoe", "activations"), ("a100-host-pcie4", "fetch")])
def test_nothing_crosses_the_link_for_dropped_experts(name: str, term: str) -> None:
    """Neither tokens nor a transfer's latency, for two of the placements."""
    placement = Placement(name="half", bits=[[4, 0] * 4], hot=[[True, False] * 4])
    result = estimate(MIXTRAL, load_hardware(name), placement, grid=GRID, changes=False)
    for policy in ("context_aware", "static_placement"):
        (crossing,) = [row for row in result.terms if (row.policy, row.term) == (policy, term)]
        assert crossing.seconds == 0


def test_a_dropped_hot_expert_is_not_fetched(preset: Hardware) -> None:
    """Neither its bytes nor a transfer's latency."""
    both = Placement(name="both", bits=[[3, 0] + [3] * 6], hot=[[True, True] + [False] * 6])
    kept = Placement(name="kept", bits=[[3, 0] + [3] * 6], hot=[[True, False] + [False] * 6])
    two = Placement(name="two", bits=[[3] * 8], hot=[[True, True] + [False] * 6])
    results = [estimate(MIXTRAL, preset, placement, grid=GRID) for placement in (both, kept, two)]
    fetched = [next(p for p in one.points if p.policy == "context_aware").migration_seconds for one in results]
    assert fetched[0] == fetched[1] == pytest.approx(fetched[2] / 2)


def test_keys_and_values_grow_over_the_output(preset: Hardware) -> None:
    """A step of a growing context is the mean of those of every length; the experts' part stays.

    Not so DynaExq's, whose pools leave room for the longest context from the start.
    """
    grid = Grid(inputs=(100,), outputs=(3, 4000), batches=(1, 4))
    placement = placed(2)
    grown = estimate(MIXTRAL, preset, placement, grid=grid, kv_growth=True)
    assert grown.kv_growth
    assert grown.capacity.gpu_kv_cache_bytes == 4 * 4100 * 32 * MIXTRAL.kv_bytes_per_layer(1)
    assert any("what was decoded so far" in one for one in grown.assumptions)
    short = Grid(inputs=(100,), outputs=(3,), batches=(1, 4))
    at = {length: estimate(MIXTRAL, preset, placement, grid=short, context=length) for length in (101, 102, 103)}
    for point in (one for one in grown.points if one.output_tokens == 3 and one.policy != "dynaexq"):
        where = {"batch": point.batch, "input_tokens": 100, "output_tokens": 3}
        fixed = [one.point(point.policy, **where).decode_seconds_per_token for one in at.values()]
        assert point.decode_seconds_per_token == pytest.approx(sum(fixed) / 3, rel=1e-9)
        first = point.prefill_seconds + point.migration_seconds + fixed[0]
        assert point.time_to_first_token_seconds == pytest.approx(first, rel=1e-9)
        longer = grown.point(point.policy, batch=point.batch, input_tokens=100, output_tokens=4000)
        assert longer.decode_seconds_per_token > point.decode_seconds_per_token


def test_terms_of_a_growing_context_are_those_of_the_first_point(preset: Hardware) -> None:
    """Shares are of the step that is shown, keys and values of the request among what is read, in sentences too."""
    grid = Grid(inputs=(8000,), outputs=(4000, 10), batches=(1, 4))
    grown = estimate(MIXTRAL, preset, placed(2), grid=grid, kv_growth=True)
    for policy, batch in itertools.product(grown.policies, grid.batches):
        first = grown.point(policy, batch=batch, input_tokens=8000, output_tokens=4000)
        dense = grown.step_terms(policy, batch=batch)["dense"]
        assert dense.seconds / dense.share == pytest.approx(first.decode_seconds_per_token, rel=1e-9)
        read = batch * MIXTRAL.num_layers * float(MIXTRAL.kv_bytes_per_layer(8000 + 2000.5))
        assert dense.bytes == pytest.approx(MIXTRAL.non_expert_bytes + read, rel=1e-9)
    over = {row.baseline: row.decode for row in reversed(grown.speedups) if row.batch == 1}
    said = next(line for line in grown.assumptions if line.startswith("baseline: "))
    assert f"{over['monde_bwrule']:.2f}x MoNDE" in said
    assert f"{over['monde_opt']:.2f}x a cost-optimal" in said


def test_policies_can_be_chosen(preset: Hardware) -> None:
    always = {"context_aware", "monde_bwrule", "monde_opt"}
    for chosen, more in [((), set()), (("hobbit",), {"hobbit"}), (("monde", "dynaexq"), {"monde_hotset", "dynaexq"})]:
        result = estimate(MIXTRAL, preset, placed(1), grid=GRID, policies=chosen)
        assert set(result.policies) == always | more
    with pytest.raises(EstimateError, match="unknown policy 'dynaex'; did you mean 'dynaexq'"):
        estimate(MIXTRAL, preset, placed(1), grid=GRID, policies=("dynaex",))


def test_terms_of_prefill_and_migration_add_up(preset: Hardware) -> None:
    result = estimate(MIXTRAL, preset, placed(4), grid=Grid(inputs=(64, 256), outputs=(8,), batches=(1,)))
    for point in result.points:
        rows = [one for one in result.earlier_terms if one.policy == point.policy]
        prefill = [one for one in rows if (one.phase, one.input_tokens) == ("prefill", point.input_tokens)]
        assert {"dense", "gpu_experts"} <= {one.term for one in prefill}
        assert max(one.seconds for one in prefill) <= point.prefill_seconds * (1 + 1e-12)
        assert sum(one.seconds for one in prefill) >= point.prefill_seconds * (1 - 1e-12)
        assert all(one.share == pytest.approx(one.seconds / point.prefill_seconds) for one in prefill)
        moved = [one for one in rows if one.phase == "migration"]
        assert sum(one.seconds for one in moved) == pytest.approx(point.migration_seconds)
        assert point.prefill_tokens_per_second == pytest.approx(point.input_tokens / point.prefill_seconds)


def test_sensitivity_rows_are_estimates_of_their_own(preset: Hardware) -> None:
    """Each row is what an estimate with the changed hardware, context or batch gives at the first point."""
    grid, placement = Grid(inputs=(128,), outputs=(512,), batches=(1, 4)), placed(1)
    rows = {one.assumption: one for one in estimate(MIXTRAL, preset, placement, grid=grid).sensitivity[::-1]}
    changed = {
        "gpu.layer_overhead": preset.changed("gpu", layer_overhead_seconds=0.0),
        "link.efficiency": preset.changed("link", efficiency=0.8),
        "ndp.low_bit_compute": preset.changed("ndp", low_bit_compute="const"),
    }
    for key, hardware in changed.items():
        other = estimate(MIXTRAL, hardware, placement, grid=grid)
        expected = {one.baseline: one for one in other.speedups if one.batch == 1}
        for policy in ("monde_bwrule", "monde_opt", "hobbit"):
            assert rows[key].decode_speedups[policy] == pytest.approx(expected[policy].decode, rel=1e-12)
            assert rows[key].end_to_end_speedups[policy] == pytest.approx(expected[policy].end_to_end, rel=1e-12)
    longer = estimate(MIXTRAL, preset, placement, grid=grid, context=8 * 1024).points[0]
    assert rows["context"].decode_seconds_per_token == pytest.approx(longer.decode_seconds_per_token, rel=1e-12)
    where = {"batch": 4, "input_tokens": 128, "output_tokens": 512}
    batch = estimate(MIXTRAL, preset, placement, grid=grid).point("context_aware", **where)
    assert rows["batch"].decode_seconds_per_token == pytest.approx(batch.decode_seconds_per_token, rel=1e-12)
    assert set(rows["policies.hobbit.low_precision_bits"].decode_speedups) == {"hobbit"}


@pytest.mark.full
def test_every_hardware_answers(preset: Hardware) -> None:
    for name in known_hardware():
        result = estimate(MIXTRAL, load_hardware(name), uniform_placement(MIXTRAL, bits=3, hot_experts=1), grid=GRID)
        all_on_gpu = {"static_mixed", "dynaexq"} if result.capacity.gpu_capacity_bytes > 24e9 else set()
        assert {"monde_bwrule", "monde_opt", *all_on_gpu} <= set(result.policies)
        assert all(one.seconds >= 0 for one in result.terms)
        energies = {one.energy_joules is None for one in result.points}
        assert energies == {load_hardware(name).energy is None}


def test_asking_for_what_was_not_estimated(preset: Hardware) -> None:
    result = estimate(MIXTRAL, preset, placed(1), grid=GRID)
    with pytest.raises(EstimateError, match="did you mean 'monde_opt'"):
        result.speedups_over("mondeopt", batch=1)
    with pytest.raises(EstimateError, match="batch 2"):
        result.point("hobbit", batch=2, input_tokens=128, output_tokens=512)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("mixtral-8x7b", 46_702_792_704),
        ("mixtral-8x22b", 140_620_634_112),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
    ],
)
def test_preset_geometries_add_up_to_the_checkpoint(name: str, parameters: int) -> None:
    one = load_geometry(name)
    assert name in known_geometries()
    assert one.num_layers * one.num_experts * one.expert_parameters + one.non_expert_parameters == parameters


@pytest.mark.parametrize("nested", [False, True])
def test_a_geometry_from_a_config(nested: bool) -> None:
    config = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "num_experts_per_tok": 2}
    config["max_position_embeddings"] = 32768
    whole = (
        {"model_type": "mixtral-8x7b", "text_config": config} if nested else {"model_type": "mixtral-8x7b", **config}
    )
    built = geometry_from_config(
        whole,
        num_moe_layers=32,
        num_experts=8,
        expert_intermediate_size=14336,
        non_expert_parameters=MIXTRAL.non_expert_parameters,
    )
    assert built == MIXTRAL


def test_a_config_without_top_k_is_an_error() -> None:
    sizes = {"num_moe_layers": 2, "num_experts": 8, "expert_intermediate_size": 64, "non_expert_parameters": 0}
    with pytest.raises(EstimateError, match="none of num_experts_per_tok"):
        geometry_from_config({"hidden_size": 64, "num_attention_heads": 4}, **sizes)
    with pytest.raises(EstimateError, match="top_k"):
        dataclasses.replace(MIXTRAL, top_k=9)
    with pytest.raises(EstimateError, match="did you mean 'mixtral-8x7b'"):
        load_geometry("mixtral-8x7")


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("group_size", [16, 128])
@pytest.mark.parametrize("widths", [(1, 1, 4), (1, 2, 1), (2, 3, 4), (1, 8), (16, 3, 3), (16, 16, 8)])
def test_matrices_of_several_widths_count_with_their_bytes(
    widths: tuple[int, ...], group_size: int, zero_points: bool
) -> None:
    each = [
        bits if bits == 16 else bits + 16 / group_size + (bits / group_size if zero_points and bits > 1 else 0)
        for bits in widths
    ]
    one = equal_bits(widths, group_size, zero_points)
    assert 1 < one < 16
    assert MIXTRAL.expert_bytes(one, group_size, zero_points) == pytest.approx(
        MIXTRAL.expert_parameters * sum(each) / len(each) / 8
    )
    assert equal_bits((3, 3), group_size, zero_points) == 3


@pytest.mark.parametrize("widths", [(2, 3, 4), (1, 2, 1), (3, 8, 2), (16, 3, 3), (2, 2, 2)])
def test_nested_matrices_of_several_widths_count_with_their_bytes(widths: tuple[int, ...]) -> None:
    zeros = {1: 0, 2: 4, 3: 4, 4: 4, 8: 8}
    each = [bits if bits == 16 else bits + (16 + zeros[bits]) / 32 for bits in widths]
    one = equal_bits(widths, 32, True, "nested")
    assert float(effective_bits(one, 32, True, "nested")) == pytest.approx(np.mean(each))


def test_policies_are_refused_where_the_longest_request_does_not_fit() -> None:
    """Keys and values of all its tokens lie beside the experts, whatever --context every step reads."""
    geometry, hardware = load_geometry("mixtral-8x7b"), load_hardware("h100-ndp-cxl")
    placement = uniform_placement(geometry, bits=12, hot_experts=0)
    made = estimate(geometry, hardware, placement, grid=Grid(inputs=(8192,), outputs=(8192,), batches=(8,)))
    assert "static_mixed" in {row.policy for row in made.refused}
    assert "static_mixed" not in {point.policy for point in made.points}
    short = estimate(geometry, hardware, placement, grid=Grid(inputs=(128,), outputs=(128,), batches=(8,)))
    assert "static_mixed" in {point.policy for point in short.points}


def test_nothing_of_a_text_is_kept_of_none() -> None:
    geometry = load_geometry("mixtral-8x7b")
    made = estimate(
        geometry, load_hardware("h100-ndp-cxl"), uniform_placement(geometry, bits=3, hot_experts=2), context=0
    )
    assert made.points


@pytest.mark.parametrize(
    "encoding",
    [
        Encoding(group_size=128, symmetric=False), Encoding(group_size=-1, symmetric=True), Encoding.trellis(10),
        Encoding(group_size=128, symmetric=False, nested=True), Encoding(group_size=128, symmetric=True, nested=True),
        Encoding.exl3(), *map(Encoding.floating, FLOAT_GROUPS), *map(Encoding.iq, SETS),
    ],
    ids=lambda encoding: codebook_of(encoding) or f"{encoding.codes} {encoding.group_size}",
)  # fmt: skip
def test_codes_of_every_kind_count_with_what_is_stored_of_them(encoding: Encoding) -> None:
    """Beside the packed tensors of a matrix; but for scales of whole rows."""
    rows, inputs = 4096, 8192
    widths = FLOAT_BITS if encoding.floats else (1, 2, 3, 4, 8)
    kept = {bits: 8 * packed_bytes(rows, inputs, bits, encoding) / (rows * inputs) for bits in widths}
    group = inputs if encoding.group_size == -1 else encoding.group_size
    codes = (group, not encoding.symmetric, codebook_of(encoding))
    assert effective_bits(widths, *codes) == pytest.approx(list(kept.values()), rel=1e-3)
    assert effective_bits([0, 16], *codes).tolist() == [0, 16]
    between = np.linspace(1, 16, 61)
    assert (np.diff(effective_bits(between, *codes)) > 0).all()
    for mixed in ((widths[0], widths[-1]), (widths[-1], 16, widths[0])):
        one = equal_bits(mixed, *codes)
        mean = np.mean([kept.get(bits, 16) for bits in mixed])
        assert float(effective_bits(one, *codes)) == pytest.approx(mean, rel=1e-3)


@pytest.mark.parametrize("kv_growth", [False, True])
def test_decode_steps_go_through_no_encoder(preset: Hardware, kv_growth: bool) -> None:
    """Of 32 equal layers 20 are an encoder's: prompts take their share of the time, decode steps that of the others."""
    model, grid = load_geometry("mixtral-8x7b"), Grid(inputs=(128,), outputs=(16,))
    other = dataclasses.replace(model, encoder_layers=20)
    placement = uniform_placement(model, bits=3, hot_experts=4)
    plain, halves = (estimate(each, preset, placement, grid=grid, kv_growth=kv_growth) for each in (model, other))
    for before, now in zip(plain.points, halves.points, strict=True):
        assert now.decode_seconds_per_token == pytest.approx(before.decode_seconds_per_token * 12 / 32), now.policy
        assert now.prefill_seconds == pytest.approx(before.prefill_seconds * 20 / 32), now.policy
        assert now.migration_seconds == pytest.approx(before.migration_seconds * 12 / 32)
        assert now.ndp_seconds_per_layer == pytest.approx(before.ndp_seconds_per_layer)
    assert "encoder-decoder: prompts go through 20 MoE layers, decode steps through the other 12" in halves.assumptions
    assert halves.capacity == plain.capacity
    steps = timeline(other, preset, placement, policy="context_aware")
    assert sorted({interval.layer for interval in steps}) == list(range(20, 32))
