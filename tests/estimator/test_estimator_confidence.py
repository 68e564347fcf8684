"""All assumptions varied together: the value is the estimate's, the interval holds it, and what decides it is named."""

from __future__ import annotations

import pytest

from moeq.estimator import Grid, estimate, load_geometry, load_hardware, uniform_placement
from moeq.estimator.confidence import STEPS, IntervalRow, assumptions_of, intervals
from moeq.estimator.simulation import Simulation, build_simulation

MIXTRAL = load_geometry("mixtral-8x7b")
PLACEMENT = uniform_placement(MIXTRAL, bits=3, hot_experts=4)


def simulation(name: str = "paper-ctxmoe") -> Simulation:
    return build_simulation(MIXTRAL, load_hardware(name), PLACEMENT, samples=64)


@pytest.fixture(scope="module")
def rows() -> dict[str, IntervalRow]:
    return {row.figure: row for row in intervals(simulation(), 1)}


def test_the_value_is_the_estimates_and_lies_inside(rows: dict[str, IntervalRow]) -> None:
    made = estimate(MIXTRAL, load_hardware("paper-ctxmoe"), PLACEMENT, grid=Grid(inputs=(128,), outputs=(16,)))
    speedups = {f"decode over {row.baseline}": row.decode for row in made.speedups}
    assert set(rows) == {STEPS, "decode over monde_bwrule", "decode over monde_opt", "decode over hobbit"}
    for figure, row in rows.items():
        wanted = made.points[0].decode_seconds_per_token if figure == STEPS else speedups[figure]
        assert row.value == pytest.approx(wanted, rel=1e-9)
        assert row.low < row.value < row.high


def test_three_assumptions_are_named_with_the_way_they_go(rows: dict[str, IntervalRow]) -> None:
    varied = {assumption.key for assumption in assumptions_of(simulation(), 1)}
    assert {"gpu.layer_overhead", "link.bandwidth", "ndp.low_bit_compute", "routing"} <= varied
    for row in rows.values():
        assert len(row.most) == 3
        assert {key for key, _ in row.most} <= varied
    assert dict(rows[STEPS].most)["gpu.layer_overhead"] > 0.3  # a longer fixed time makes the step longer
    over_fetches = [dict(rows[f"decode over {name}"].most).get("link.bandwidth") for name in ("monde_bwrule", "hobbit")]
    assert [each for each in over_fetches if each is not None]
    assert all(each < -0.2 for each in over_fetches if each is not None)  # what fetches gains by a faster link


def test_the_draws_follow_from_the_seed() -> None:
    first, again, other = (intervals(simulation(), 1, samples=16, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_what_is_not_assumed_is_not_varied() -> None:
    """Of a memory that only holds: efficiencies, latencies, fixed times and the link; no datasheet's bandwidth."""
    keys = {assumption.key for assumption in assumptions_of(simulation("a100-host-pcie4"), 1)}
    assert "gpu.memory_bandwidth" not in keys
    assert {"gpu.memory_efficiency", "link.latency"} <= keys
    assert not {"ndp.dataflow", "ndp.low_bit_compute", "ndp.clock"} & keys


def test_an_interval_moves_with_the_value_of_more_samples() -> None:
    plain = intervals(simulation(), 1, samples=16)
    moved = intervals(simulation(), 1, values={STEPS: 2 * plain[0].value}, samples=16)
    assert [moved[0].value, moved[0].low, moved[0].high] == pytest.approx(
        [2 * plain[0].value, 2 * plain[0].low, 2 * plain[0].high]
    )
    assert moved[1:] == plain[1:]
