"""Timelines: no resource does two things at a time, and a step is as long as it is estimated."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from moeq.errors import EstimateError
from moeq.estimator import Grid, Hardware, Placement, estimate, load_geometry, uniform_placement
from moeq.estimator.policies import by_label
from moeq.estimator.timeline import Interval, timeline

MIXTRAL = load_geometry("mixtral-8x7b")
LABELS = list(by_label())
ONE_SET = np.array([1.0, 1, 0, 0, 0, 0, 0, 0])  # the first two experts are chosen always


def end(intervals: tuple[Interval, ...]) -> float:
    return max(one.start_seconds + one.seconds for one in intervals)


@pytest.mark.parametrize("policy", LABELS)
@pytest.mark.parametrize("batch", [1, 4])
def test_a_resource_does_one_thing_at_a_time(preset: Hardware, policy: str, batch: int) -> None:
    found = timeline(MIXTRAL, preset, uniform_placement(MIXTRAL, bits=3, hot_experts=1), policy=policy, batch=batch)
    assert {one.layer for one in found} == set(range(32))
    for resource in ("gpu", "ndp", "to_gpu", "to_ndp"):
        own = [one for one in found if one.resource == resource]
        for before, after in itertools.pairwise(own):
            assert after.start_seconds >= before.start_seconds + before.seconds - 1e-12


@pytest.mark.cases(5)
@pytest.mark.parametrize("policy", LABELS)
def test_a_step_is_as_long_as_it_is_estimated(preset: Hardware, policy: str) -> None:
    hot = np.arange(8)[None, :] < 1
    placement = Placement(name="one", bits=np.where(hot, 16, 3), hot=hot)
    settings = {"popularity": ONE_SET, "context": 500}
    found = timeline(MIXTRAL, preset, placement, policy=policy, **settings)
    point = estimate(MIXTRAL, preset, placement, grid=Grid(inputs=(8,), outputs=(8,)), **settings).point(
        policy, batch=1, input_tokens=8, output_tokens=8
    )
    assert end(found) == pytest.approx(point.decode_seconds_per_token, rel=1e-9)
    assert {one.expert for one in found} == {None, 0, 1}


def test_copies_run_beside_a_step_one_after_the_other(preset: Hardware) -> None:
    """The first step after DynaExq's first update, with all layers' switches in a row on the link."""
    placement = uniform_placement(MIXTRAL, bits=3, hot_experts=1)
    found = timeline(MIXTRAL, preset, placement, policy="dynaexq", step=32)
    copies = [one for one in found if one.name == "copies"]
    assert [one.layer for one in copies] == list(range(32))
    assert copies[0].start_seconds == 0
    for before, after in itertools.pairwise(copies):
        assert after.start_seconds >= before.start_seconds + before.seconds - 1e-12
    assert not any(one.name == "copies" for one in timeline(MIXTRAL, preset, placement, policy="dynaexq", step=33))


def test_the_default_outcome_is_a_typical_one(preset: Hardware) -> None:
    placement = uniform_placement(MIXTRAL, bits=3, hot_experts=4)
    found = timeline(MIXTRAL, preset, placement, policy="context_aware")
    assert {"ndp", "gpu", "to_ndp", "to_gpu"} == {one.resource for one in found}
    step = estimate(MIXTRAL, preset, placement).points[0].decode_seconds_per_token
    assert end(found) == pytest.approx(step, rel=0.1)


def test_what_cannot_be_drawn_is_refused(preset: Hardware) -> None:
    placement = uniform_placement(MIXTRAL, bits=3, hot_experts=4)
    with pytest.raises(EstimateError, match="did you mean 'monde_opt'"):
        timeline(MIXTRAL, preset, placement, policy="mondeopt")
    with pytest.raises(EstimateError, match="step 28: there are 28"):
        timeline(MIXTRAL, preset, placement, policy="hobbit", step=28)
    whole = uniform_placement(MIXTRAL, bits=16, hot_experts=8)
    with pytest.raises(
        EstimateError, match=r"needs experts 84\.0 GiB .* = 87\.1 GiB of GPU memory, which has 74\.5 GiB"
    ):
        timeline(MIXTRAL, preset, whole, policy="static_mixed")
