"""Searches: every point is the estimator's, nothing beats the front, paper 000's setting is found or bettered."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from moeq.artifacts.losses import WHOLE, write_losses
from moeq.errors import EstimateError
from moeq.estimation.searches import losses_of_run
from moeq.estimator import Grid, estimate, load_geometry, load_hardware, uniform_placement
from moeq.estimator.placement import Placement
from moeq.estimator.search import Search, SearchResult, Setting, front
from moeq.reporting.search_page import asked_text

MIXTRAL = load_geometry("mixtral-8x7b")
PAPER = Setting(gpu_experts=4, gpu_bits=16, bits=3)  # paper 000, 5.1


def searched(*hardware: str, speed: float = 20, asked: Setting = PAPER, **more: Any) -> SearchResult:
    systems = [load_hardware(name) for name in hardware or ("paper-ctxmoe",)]
    return Search(geometry=MIXTRAL, hardware=systems, speed=speed, asked=asked, **more).run()


@pytest.fixture(scope="module")
def found() -> SearchResult:
    return searched("paper-ctxmoe", "h100-ndp-cxl", batches=(1, 4))


@pytest.mark.full
def test_points_are_the_estimators(found: SearchResult) -> None:
    for point in found.points[:: len(found.points) // 40]:
        placement = uniform_placement(
            MIXTRAL, bits=point.code_bits, hot_experts=point.gpu_experts, hot_bits=point.gpu_bits
        )
        grid = Grid(inputs=(128,), outputs=(16,), batches=(point.batch,))
        made = estimate(MIXTRAL, load_hardware(point.hardware), placement, grid=grid, policies=(point.policy,))
        wanted = made.point(point.policy, batch=point.batch, input_tokens=128, output_tokens=16)
        assert point.all_tokens_per_second == pytest.approx(wanted.decode_tokens_per_second, rel=1e-9)
        assert point.tokens_per_second == pytest.approx(1 / wanted.decode_seconds_per_token, rel=1e-9)
        assert (point.joules is None) == (point.hardware == "paper-ctxmoe")


def test_the_papers_own_setting_is_found_and_bettered(found: SearchResult) -> None:
    """On paper 000's hardware its setting meets 20 tokens a second, and all experts fit on the GPU at its widths."""
    assert found.asked is not None
    assert found.asked.setting == PAPER
    assert found.asked.meets
    better = found.better_than_asked
    assert better is not None
    assert better.policy == "static_mixed"
    assert better.bits >= found.asked.bits
    assert better.tokens_per_second > 1.3 * found.asked.tokens_per_second


def test_only_what_fits_and_meets_the_speed_is_on_the_front(found: SearchResult) -> None:
    systems = {name: load_hardware(name) for name in ("paper-ctxmoe", "h100-ndp-cxl")}
    assert found.front
    for point in found.points:
        assert point.gpu_bytes <= systems[point.hardware].gpu.memory_capacity_bytes
        assert point.near_bytes <= systems[point.hardware].ndp.memory_capacity_bytes
        assert point.meets == (point.tokens_per_second >= 20)
        assert point.meets or not point.on_front
    assert found.evaluated == len(found.points) + sum(row.points for row in found.refused)
    assert any("GPU memory, which has" in row.example for row in found.refused)


def test_less_memory_refuses_more() -> None:
    less = searched(memory_bytes=24 * 2**30)
    assert 0 < len(less.points) < len(searched().points)
    assert max(point.gpu_bytes for point in less.points) <= 24 * 2**30


def test_money_is_that_of_the_time() -> None:
    made = searched("h100-ndp-cxl", dollars_per_hour={"h100-ndp-cxl": 3.6}, batches=(4,))
    for point in made.points:
        assert point.dollars == pytest.approx(1e6 * 3.6 / 3600 / point.all_tokens_per_second)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 4)] * 3), min_size=1, max_size=25))
def test_the_front_is_what_no_other_beats(rows: list[tuple[int, int, int]]) -> None:
    kept = front([tuple(map(float, row)) for row in rows])

    def beats(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
        return one != other and all(a <= b for a, b in zip(one, other, strict=True))

    assert {row for row, is_kept in zip(rows, kept, strict=True) if is_kept} == {
        row for row in rows if not any(beats(other, row) for other in rows)
    }


def test_losses_of_a_run_decide_what_is_kept(tmp_path: Path) -> None:
    """Losses fall fourfold with every bit; the most sensitive experts lie on the GPU."""
    generator = np.random.default_rng(0)
    sizes = generator.random((2, 8)) + 0.1
    rows = [
        {
            **dict.fromkeys(("layer_name", "fallback", "measured_on"), "x"),
            "projection": WHOLE,
            "method": "gptq",
            "group_size": 128,
            "symmetric": True,
            "relative_loss": 0.1,
            "calibration_tokens": 50,
            "heldout_tokens": 50,
            "bytes": 1,
            "hessian_trace": 1.0,
            "layer": layer,
            "expert": expert,
            "bits": bits,
            **dict.fromkeys(("loss", "weighted_loss"), sizes[layer, expert] * 4.0 ** (3 - bits)),
        }
        for layer, expert, bits in itertools.product(range(2), range(8), (2, 3))
    ]
    (tmp_path / "losses").mkdir()
    write_losses(tmp_path / "losses" / "losses.parquet", [rows])
    losses = losses_of_run(tmp_path, 8)
    loss = losses.of_widths
    assert losses.widths == (2, 3)
    placement = uniform_placement(MIXTRAL, bits=2, hot_experts=4)
    assert loss(placement) == pytest.approx(4 * np.sort(sizes, axis=1)[:, :4].sum() / 8)
    assert loss(uniform_placement(MIXTRAL, bits=4, hot_experts=4)) is None
    assert loss(uniform_placement(MIXTRAL, bits=3, hot_experts=8)) == 0.0
    own = Placement(name="own", bits=np.where(sizes > 0.5, 3, 2), hot=np.zeros((2, 8), dtype=bool))
    by_expert = sizes * np.where(sizes > 0.5, 1, 4)
    assert losses.of_experts(own) == pytest.approx(by_expert.sum() / 8)
    on_gpu = Placement(name="own", bits=np.where(sizes > 0.9, 16, own.bits), hot=sizes > 0.9)
    assert losses.of_experts(on_gpu) == pytest.approx(by_expert[sizes <= 0.9].sum() / 8)
    assert losses.of_experts(Placement(name="mixed", bits=own.bits + 0.5, hot=own.hot)) is None
    found = searched(loss=loss, widths=(16.0, 2.0, 3.0), gpu_widths=(16.0, 2.0, 3.0))
    assert {point.policy for point in found.points} & {"hobbit", "dynaexq"} == set()
    assert any("widths of its own" in row.example for row in found.refused)
    ranked = [point.loss for point in found.points]
    assert ranked == sorted(ranked)
    with pytest.raises(EstimateError, match="the model 16"):
        losses_of_run(tmp_path, 16)


def test_a_policy_counts_once_where_the_placement_is_nothing_to_it() -> None:
    found = searched("h100-ndp-cxl")
    for policy, text in (("monde_opt", "all FP16"), ("monde_bwrule", "all FP16")):
        (point,) = (point for point in found.points if point.policy == policy)
        assert point.text(8) == text
        assert point.short(8) == "8x16"
    placed = [(point.gpu_experts, point.short(8)) for point in found.points if point.policy == "context_aware"]
    assert {hot for hot, _ in placed} >= {0, 8}
    assert all([int(part.partition("x")[0]) for part in text.split()] == [hot, 8 - hot] for hot, text in placed)
    fetched = [point for point in found.points if point.policy == "monde_hotset"]
    assert len({point.gpu_experts for point in fetched}) == len(fetched)
    assert all(f"the {point.gpu_experts} most popular of 8 fetched" in point.text(8) for point in fetched)


def test_a_placement_of_mixed_widths_is_asked_about_as_it_is() -> None:
    hot = np.arange(8)[None, :] < np.array([[2], [4]])
    placement = Placement(name="mixed", bits=np.where(hot, 16.0, np.array([[2.0], [4.0]])), hot=hot)
    found = searched("h100-ndp-cxl", asked=Setting(gpu_experts=3, gpu_bits=16, bits=3), placed=placement)
    made = estimate(MIXTRAL, load_hardware("h100-ndp-cxl"), placement, grid=Grid(inputs=(128,), outputs=(16,)))
    wanted = made.point("context_aware", batch=1, input_tokens=128, output_tokens=16)
    assert found.asked is not None
    assert found.asked.tokens_per_second == pytest.approx(wanted.decode_tokens_per_second)
    assert found.asked_setting == "3 of 8 experts on the GPU FP16, the others 3 code bits on average"


def test_what_is_faster_is_told_of_widths_that_were_not_measured() -> None:
    """Bits decide then: a loss was compared with them, and nothing kept as much."""
    placement = Placement(name="by matrix", bits=np.full((2, 8), 2.5), hot=np.zeros((2, 8), dtype=bool))
    asked = Setting(gpu_experts=0, gpu_bits=16, bits=2.5)
    found = searched(asked=asked, placed=placement, loss=lambda placement: 0.5, placed_loss=None)
    assert found.asked is not None
    assert found.asked.loss is None
    better = found.better_than_asked
    assert better is not None
    assert better.bits >= found.asked.bits
    assert better.tokens_per_second > found.asked.tokens_per_second
    assert "nothing on the same hardware" not in asked_text(found)
    assert f"keeps no less ({better.bits:.2f} bits a weight)" in asked_text(found)
    losing = searched(asked=asked, placed=placement, loss=lambda placement: 0.5, placed_loss=0.25)
    assert losing.better_than_asked is None or losing.better_than_asked.loss == 0.0
