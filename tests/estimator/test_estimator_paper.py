"""What shared/ESTIMATOR.md says that the preset `paper-ctxmoe` must reproduce, and what follows from its fit."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from moeq.estimator import Estimate, Grid, Hardware, estimate, load_geometry, load_hardware, uniform_placement
from moeq.estimator.terms import Bound, t_ndp

Run = Callable[..., Estimate]
SMALL, LARGE = "mixtral-8x7b", "mixtral-8x22b"
BWRULE, OPT = "monde_bwrule", "monde_opt"


def decode(result: Estimate, baseline: str = BWRULE, batch: int = 1) -> float:
    return result.speedups_over(baseline, batch=batch)[0].decode


def end_to_end(result: Estimate, baseline: str = BWRULE) -> tuple[float, float]:
    rows = [one.end_to_end for one in result.speedups_over(baseline, batch=1)]
    return min(rows), max(rows)


@pytest.mark.parametrize(
    ("model", "bits", "paper", "preset"),
    [(SMALL, 3, 8.7, 8.56), (SMALL, 2, 11.2, 9.75), (LARGE, 3, 8.9, 8.99), (LARGE, 2, 11.5, 11.2)],
)
def test_decode_rows(run: Run, model: str, bits: int, paper: float, preset: float) -> None:
    value = decode(run(model, bits))
    assert value == pytest.approx(paper, rel=0.15)
    assert value == pytest.approx(preset, rel=0.005)


@pytest.mark.parametrize(
    ("model", "bits", "paper", "preset"),
    [
        (SMALL, 3, (6.6, 8.3), (7.32, 8.29)),
        (SMALL, 2, (7.9, 10.6), (8.16, 9.41)),
        (LARGE, 3, (7.6, 8.7), (7.82, 8.76)),
        (LARGE, 2, (9.5, 11.2), (9.41, 10.85)),
    ],
)
def test_end_to_end_rows(
    run: Run, model: str, bits: int, paper: tuple[float, float], preset: tuple[float, float]
) -> None:
    value = end_to_end(run(model, bits))
    assert value == pytest.approx(paper, rel=0.15)
    assert value == pytest.approx(preset, rel=0.005)


def test_the_8x7b_2_bit_rows_fall_short_of_the_paper(run: Run) -> None:
    """The known miss of the fit: about 13 % of decode and 11 % of the best end-to-end figure are missing."""
    result = run(SMALL, 2)
    assert 0.86 < decode(result) / 11.2 < 0.88
    assert 0.88 < end_to_end(result)[1] / 10.6 < 0.90


@pytest.mark.parametrize(("model", "paper", "preset"), [(SMALL, 18, 15.55), (LARGE, 19, 18.08)])
def test_end_to_end_over_hobbit(run: Run, model: str, paper: float, preset: float) -> None:
    value = end_to_end(run(model, 2), "hobbit")[1]
    assert value == pytest.approx(paper, rel=0.15)
    assert value == pytest.approx(preset, rel=0.005)


@pytest.mark.parametrize(
    ("bits", "group_size", "ratio"), [(3, 128, 5.12), (2, 128, 16 / 2.125), (3, None, 16 / 3), (2, None, 8.0)]
)
def test_ndp_ratios(run: Run, bits: int, group_size: int | None, ratio: float) -> None:
    for model in (SMALL, LARGE):
        assert run(model, bits, group_size=group_size).ndp_speedup_over_fp16 == pytest.approx(ratio, rel=1e-12)


def test_ndp_gains_nothing_with_a_constant_mac_rate(run: Run, preset: Hardware) -> None:
    constant = preset.changed("ndp", low_bit_compute="const")
    assert run(LARGE, 2, hardware=constant).ndp_speedup_over_fp16 == pytest.approx(1.0, rel=1e-12)
    assert preset.ndp.peak_macs_per_second == pytest.approx(1.024e12)


def test_bytes_of_experts_migration_and_replicas(run: Run, preset: Hardware) -> None:
    pcie = preset.changed("link", bandwidth_bytes_per_second=32e9)
    for model, megabytes, seconds, gigabytes in ((SMALL, 352.3, 1.41, 147), (LARGE, 604.0, 2.11, 440)):
        assert load_geometry(model).expert_bytes(16, 128) / 1e6 == pytest.approx(megabytes, abs=0.05)
        result = run(model, 3, hardware=pcie)
        point = result.point("context_aware", batch=1, input_tokens=128, output_tokens=512)
        assert point.migration_seconds == pytest.approx(seconds, abs=0.005)
        assert run(model, 3, group_size=None).capacity.replica_bytes / 1e9 == pytest.approx(gigabytes, abs=0.5)
        assert result.capacity.replica_bytes < 512e9  # with scales
        assert result.capacity.fits_ndp
        assert result.capacity.fits_gpu


def test_end_to_end_speedup_rises_to_the_decode_ratio(run: Run) -> None:
    outputs = tuple(2**power for power in range(5, 22))
    roomy = load_hardware("paper-ctxmoe").changed("gpu", memory_capacity_bytes=1e15)
    result = run(LARGE, 2, hardware=roomy, grid=Grid(inputs=(512,), outputs=outputs))
    rows = result.speedups_over(BWRULE, batch=1)
    rising = [one.end_to_end for one in rows]
    assert all(earlier < later for earlier, later in itertools.pairwise(rising))
    assert rising[-1] == pytest.approx(rows[0].decode, rel=1e-3)


def test_output_stationary_fills_its_rows_first(preset: Hardware) -> None:
    ndp = preset.changed("ndp", dataflow="os").ndp
    parameters = load_geometry(SMALL).expert_parameters
    cost = t_ndp(parameters, 16, np.array([1, 2, 3, 4, 8]), ndp)
    assert np.unique(cost.seconds[:4]).size == 1
    assert cost.seconds[4] > cost.seconds[0]
    assert cost.bound[4] == Bound.MACS
    assert cost.seconds[4] == pytest.approx(parameters * 2 / (64 * 4) / 1e9)


def test_weight_stationary_fp16_is_bound_by_macs(preset: Hardware) -> None:
    assert t_ndp(10**8, 16, 1, preset.ndp).bound == Bound.MACS


@pytest.mark.parametrize(("bits", "at_fit", "at_300_us"), [(3, 4.58, 4.7), (2, 5.71, 5.9)])
def test_a_cost_optimal_monde_halves_the_headline(
    run: Run, preset: Hardware, bits: int, at_fit: float, at_300_us: float
) -> None:
    """ESTIMATOR.md prints 4.7 and 5.9: those are the values at tau = 0.30 ms, not at the preset's 0.33 ms."""
    assert decode(run(LARGE, bits), OPT) == pytest.approx(at_fit, rel=0.005)
    assert "fetch" in run(LARGE, bits).step_terms(OPT, batch=1)
    assert run(LARGE, bits).step_terms(OPT, batch=1)["fetch"].bytes == 0  # H = 0 at batch 1
    earlier = preset.changed("gpu", layer_overhead_seconds=0.30e-3)
    assert decode(run(LARGE, bits, hardware=earlier), OPT) == pytest.approx(at_300_us, rel=0.01)


@pytest.mark.parametrize(
    ("bits", "assumption", "change", "expected"),
    [
        (3, "gpu.layer_overhead", "0 s", 12.3),
        (2, "gpu.layer_overhead", "0 s", 17.1),
        (3, "link.bandwidth", "32 GB/s", 17.4),
        (2, "link.bandwidth", "32 GB/s", 21.7),
        (3, "batch", "-> 4", 4.8),
        (2, "batch", "-> 4", 6.6),
        (3, "batch", "-> 16", 5.3),
        (2, "batch", "-> 16", 7.4),
    ],
)
def test_sensitivity_of_the_8x22b_decode(run: Run, bits: int, assumption: str, change: str, expected: float) -> None:
    """ESTIMATOR.md prints 17.9 and 22.4 at 32 GB/s: see the test below. Batch 16 does not fit with the paper's two hot
    experts a layer."""
    roomy = load_hardware("paper-ctxmoe").changed("gpu", memory_capacity_bytes=1e12)
    rows = [
        one
        for one in run(LARGE, bits, hardware=roomy).sensitivity
        if one.assumption == assumption and change in one.change
    ]
    assert len(rows) == 1
    assert rows[0].decode_speedup_over_monde_bwrule == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(("bits", "expected"), [(3, 17.9), (2, 22.4)])
def test_pcie_gen4_figures_of_the_specification_are_those_of_300_us(
    run: Run, preset: Hardware, bits: int, expected: float
) -> None:
    earlier = preset.changed("gpu", layer_overhead_seconds=0.30e-3)
    slow = earlier.changed("link", bandwidth_bytes_per_second=32e9)
    assert decode(run(LARGE, bits, hardware=slow)) == pytest.approx(expected, rel=0.005)


def test_sensitivity_names_every_assumption_that_carries_the_result(run: Run) -> None:
    result = run(LARGE, 3)
    assert [one.assumption for one in result.sensitivity] == [
        *("gpu.memory_efficiency", "gpu.compute_efficiency", "gpu.layer_overhead"),
        *("link.bandwidth", "link.efficiency", "link.latency", "ndp.dataflow", "ndp.low_bit_compute"),
        "policies.context_aware.prefill_split",
        *(f"policies.hobbit.{key}" for key in ("high_precision_fraction", "low_precision_fraction")),
        *("policies.hobbit.low_precision_bits", "policies.monde.prefill_split"),
        *("routing", "batch"),
    ]
    left_out = [one for one in result.assumptions if "is left out" in one]
    assert [line.split(" is left out")[0] for line in left_out] == [
        "sensitivity: context 1024 -> 8192 tokens",
        "sensitivity: batch 1 -> 16",
    ]
    text = "\n".join(result.assumptions)
    for word in ("gpu.layer_overhead", "link.bandwidth", "high_precision_fraction", "1.02 TMAC/s", "dataflow", "4.58x"):
        assert word in text
    assert sum("fitted to Figures 5-6" in one for one in result.assumptions) == 3


def test_prefill_by_the_bandwidth_rule(run: Run, preset: Hardware) -> None:
    rule: dict[str, float | str] = {"prefill_split": "bwrule"}
    policies = {**preset.policies, "monde": rule, "context_aware": rule}
    result = run(SMALL, 3, hardware=preset.model_copy(update={"policies": policies}))
    assert end_to_end(result) == pytest.approx((3.7, 8.2), rel=0.01)


def test_the_unfitted_roofline() -> None:
    """ESTIMATOR.md: 26-53x at the stated PCIe Gen4 rate; the ends are the hot-set baseline of both models at 3 bits."""
    hardware = load_hardware("h100-ndp-pcie4")
    assert not any(one.is_fitted for one in hardware.constants)
    for model, hot, expected in ((LARGE, 2, 26), (SMALL, 4, 53)):
        geometry = load_geometry(model)
        result = estimate(geometry, hardware, uniform_placement(geometry, bits=3, hot_experts=hot))
        assert decode(result, "monde_hotset") == pytest.approx(expected, rel=0.03)
