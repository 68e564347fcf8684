"""The capacity planner: sums, what fits beside, and what does not."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from moeq.errors import EstimateError
from moeq.estimator import Hardware, Placement, estimate, load_geometry, uniform_placement
from moeq.estimator.capacity import CapacityPlan, largest_gpu_experts, plan_capacity
from moeq.estimator.workload import Grid

SMALL, LARGE = load_geometry("mixtral-8x7b"), load_geometry("mixtral-8x22b")


def plan(hardware: Hardware, placement: Placement, *, batch: int = 1, context: int = 1024) -> CapacityPlan:
    geometry = SMALL if placement.name.startswith("small") else LARGE
    return plan_capacity(geometry, hardware, placement, batch=batch, context=context, group_size=128, zero_points=False)


def test_sums_are_those_of_the_estimate(preset: Hardware) -> None:
    placement = uniform_placement(SMALL, bits=3, hot_experts=4, name="small")
    found = plan(preset, placement, batch=4, context=1024)
    capacity = estimate(SMALL, preset, placement, grid=Grid(inputs=(128,), outputs=(512,), batches=(4,))).capacity
    rest, hot, keys_values = (part.bytes for part in found.gpu.parts)
    assert (rest, hot, keys_values) == pytest.approx(
        (capacity.gpu_non_expert_bytes, capacity.gpu_expert_bytes, capacity.gpu_kv_cache_bytes)
    )
    assert found.ndp.bytes == pytest.approx(capacity.replica_bytes)
    assert (found.gpu.fits, found.ndp.fits) == (capacity.fits_gpu, capacity.fits_ndp) == (True, True)


def test_hot_experts_count_at_their_widths_in_every_layer(preset: Hardware) -> None:
    mixed = Placement(name="small", bits=[[4, 16, *[2] * 6]], hot=[[True, True, *[False] * 6]])
    hot = plan(preset, mixed).gpu.parts[1].bytes
    assert hot == pytest.approx(32 * SMALL.expert_parameters * (4 + 16 / 128 + 16) / 8)
    two_layers = Placement(name="small", bits=np.repeat(mixed.bits, 2, axis=0), hot=np.repeat(mixed.hot, 2, axis=0))
    assert plan(preset, two_layers).gpu.parts[1].bytes == pytest.approx(hot)


def test_the_papers_placements_fit_and_one_expert_more_does_not(preset: Hardware) -> None:
    """Paper 000, 5.1: two hot experts a layer of Mixtral-8x22B, considering the GPU's memory."""
    assert largest_gpu_experts(LARGE, preset, batch=1, context=1024) == 2
    plan(preset, uniform_placement(LARGE, bits=3, hot_experts=2)).require()
    with pytest.raises(EstimateError) as refused:
        plan(preset, uniform_placement(LARGE, bits=3, hot_experts=3)).require()
    text = str(refused.value)
    for word in ("mixtral-8x22b on paper-ctxmoe: does not fit: GPU", "non-expert weights 9.93 GiB", "= 105 GiB of"):
        assert word in text
    assert "at most 2 FP16 experts a layer fit" in text


def test_largest_experts_is_the_last_that_fits(preset: Hardware) -> None:
    for batch, context in itertools.product((1, 4, 16, 64), (512, 4096, 32768)):
        most = largest_gpu_experts(SMALL, preset, batch=batch, context=context)
        for hot in range(SMALL.num_experts + 1):
            one = plan(preset, uniform_placement(SMALL, bits=3, hot_experts=hot, name="small"), batch=batch,
                       context=context)  # fmt: skip
            assert one.gpu.fits == (most is not None and hot <= most)
            assert one.largest_gpu_experts == most


def test_room_for_keys_and_values(preset: Hardware) -> None:
    found = plan(preset, uniform_placement(LARGE, bits=2, hot_experts=1), batch=2, context=2048)
    for row in found.by_gpu_experts:
        for batch, context, fits in (
            (row.largest_batch, 2048, True),
            (row.largest_batch + 1, 2048, False),
            (2, row.largest_context, True),
            (2, row.largest_context + 1, False),
        ):
            placement = uniform_placement(LARGE, bits=2, hot_experts=row.gpu_experts)
            if batch:
                assert plan(preset, placement, batch=batch, context=context).gpu.fits == fits
    assert [row.gpu_experts for row in found.by_gpu_experts] == [0, 1, 2]
    batches = [row.largest_batch for row in found.by_gpu_experts]
    assert batches == sorted(batches, reverse=True)


def test_a_gpu_too_small_for_the_rest(preset: Hardware) -> None:
    small = preset.changed("gpu", memory_capacity_bytes=4e9)
    found = plan(small, uniform_placement(LARGE, bits=2, hot_experts=0))
    assert found.largest_gpu_experts is None
    assert found.by_gpu_experts == ()
    with pytest.raises(EstimateError, match="smaller batch or context"):
        found.require()


def test_replicas_that_do_not_fit_are_refused_with_their_sum(preset: Hardware) -> None:
    small = preset.changed("ndp", memory_capacity_bytes=300e9)
    with pytest.raises(EstimateError, match=r"near-data memory: FP16 experts 252 GiB \+ 1-bit replicas .* = 417 GiB"):
        plan(small, uniform_placement(LARGE, bits=3, hot_experts=2)).require()
