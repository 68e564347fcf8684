"""What is drawn: prompts of few tokens, and how far off a figure may be; and what does not fit beside a placement."""

from __future__ import annotations

import numpy as np
import pytest

from moeq.errors import EstimateError
from moeq.estimator import Estimate, Grid, estimate, load_geometry, load_hardware, uniform_placement

QWEN = load_geometry("qwen3-235b-a22b")
PRESET = load_hardware("paper-ctxmoe")


def of_qwen(grid: Grid, samples: int = 256, seed: int = 0, **more: object) -> Estimate:
    placement = uniform_placement(QWEN, bits=3, hot_experts=8)
    return estimate(QWEN, PRESET, placement, grid=grid, monte_carlo_samples=samples, seed=seed, **more)


def test_a_prompt_of_one_token_reaches_top_k_whole_experts() -> None:
    """Fractions of a token at every expert would read all 128 of a layer instead of 8."""
    made = of_qwen(Grid(inputs=(1,), outputs=(1,)))
    moved = {row.term: row for row in made.earlier_terms if row.policy == "gpu_only" and row.phase == "prefill"}
    whole = QWEN.num_layers * QWEN.top_k * QWEN.expert_bytes(16, None)
    assert moved["fetch"].bytes == pytest.approx(whole, rel=1e-6)
    point = made.point("gpu_only", batch=1, input_tokens=1, output_tokens=1)
    assert point.prefill_seconds == pytest.approx(point.decode_seconds_per_token, rel=0.05)


@pytest.mark.full
def test_a_prompt_of_many_tokens_takes_little_longer_than_a_drawn_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds() -> float:
        made = of_qwen(Grid(inputs=(256,), outputs=(1,)), policies=())
        return made.point("context_aware", batch=1, input_tokens=256, output_tokens=1).prefill_seconds

    expected = seconds()
    monkeypatch.setattr("moeq.estimator.simulation.FEW_TOKENS", 1 << 20)
    drawn = seconds()
    assert 0.9 * expected < drawn < expected


@pytest.mark.full
def test_the_standard_error_is_that_of_other_seeds() -> None:
    at, places = Grid(inputs=(16,), outputs=(64,), batches=(4,)), {"batch": 4, "input_tokens": 16, "output_tokens": 64}
    points = [of_qwen(at, 64, seed, policies=()).point("context_aware", **places) for seed in range(24)]
    figures = {"decode_seconds_per_token": "decode_error_seconds", "prefill_seconds": "prefill_error_seconds"}
    for figure, error in figures.items():
        found = np.std([getattr(point, figure) for point in points], ddof=1)
        stated = np.mean([getattr(point, error) for point in points])
        assert 0.6 < stated / found < 1.7, figure
    fewer, more = (of_qwen(at, samples, policies=()).sampling_error for samples in (64, 1024))
    assert 2.5 < fewer / more < 6.5


def test_what_is_enumerated_has_no_error() -> None:
    mixtral = load_geometry("mixtral-8x7b")
    placement = uniform_placement(mixtral, bits=3, hot_experts=4)
    made = estimate(mixtral, PRESET, placement, grid=Grid(inputs=(128,), outputs=(16,)), policies=())
    assert made.sampling_error == 0.0
    assert made.speedups[0].decode_error == 0.0


def test_points_that_do_not_fit_are_left_out() -> None:
    grid = Grid(inputs=(128, 60_000), outputs=(64,), batches=(1, 4, 512))
    made = of_qwen(grid)
    assert {point.at for point in made.points} == {(1, 128, 64), (1, 60_000, 64), (4, 128, 64), (4, 60_000, 64)} - {
        (row.batch, row.input_tokens, row.output_tokens) for row in made.unfit
    }
    assert {row.batch for row in made.unfit} >= {512}
    assert len(made.unfit) + len({point.at for point in made.points}) == 6
    line = next(line for line in made.unfit_lines if line.startswith("batch 512"))
    assert "2 points do not fit; with 128 + 64 tokens it needs" in line
    assert "of GPU memory, which has 74.5 GiB" in line


def test_a_batch_has_room_beside_its_own_longest_request() -> None:
    """The long request fits one sequence; what 16 of them took was held against their short ones."""
    mixtral, hardware = load_geometry("mixtral-8x7b"), load_hardware("h100-ndp-cxl")
    placement = uniform_placement(mixtral, bits=3, hot_experts=0)

    def made(*inputs: int) -> Estimate:
        grid = Grid(inputs=inputs, outputs=(64,), batches=(1, 16))
        return estimate(mixtral, hardware, placement, grid=grid, policies=("static_mixed", "dynaexq"))

    short, both = made(128), made(128, 200_000)
    assert [(row.batch, row.input_tokens) for row in both.unfit] == [(16, 200_000)]
    assert not both.refused
    at = {"batch": 16, "input_tokens": 128, "output_tokens": 64}
    for policy in short.policies:
        assert both.point(policy, **at) == short.point(policy, **at)
    assert both.capacity.fits_gpu
    assert both.capacity.gpu_kv_cache_bytes == mixtral.kv_bytes(200_064)


@pytest.mark.full
def test_where_nothing_fits_all_is_estimated_and_said_not_to_fit() -> None:
    made = of_qwen(Grid(inputs=(128,), outputs=(64,), batches=(4096,)))
    assert made.unfit
    assert made.points
    assert not made.unfit_lines
    assert not made.capacity.fits_gpu


def test_a_policy_that_runs_at_some_batch_is_no_error() -> None:
    """static_mixed holds all experts on the GPU, and keys and values of few sequences beside them."""
    mixtral = load_geometry("mixtral-8x7b")
    placement = uniform_placement(mixtral, bits=3, hot_experts=0)
    wanted = {"policies": ("static_mixed",), "context": 8192}
    made = estimate(mixtral, PRESET, placement, grid=Grid(batches=(1, 60)), **wanted)
    assert [(row.policy, row.batch) for row in made.refused] == [("static_mixed", 60)]
    with pytest.raises(EstimateError, match="needs experts"):
        estimate(mixtral, PRESET, placement, grid=Grid(batches=(60,)), **wanted)
