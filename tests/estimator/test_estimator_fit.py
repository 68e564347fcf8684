"""Fitting hardware to measured points: constants come back, what does not matter is said, bad files are refused."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeq.errors import EstimateError
from moeq.estimator import Grid, estimate, load_geometry, load_hardware, uniform_placement
from moeq.estimator.devices import Hardware
from moeq.estimator.fit import Fit, describe, fit_file, fit_tables, write_hardware
from moeq.estimator.fitting import Setting
from moeq.estimator.measured import MEASURES, read_points

GEOMETRY = "mixtral-8x7b"
MEASURED = ("context_aware", "monde_opt", "gpu_only")


def other_machine() -> Hardware:
    """The preset with every efficiency and latency another one."""
    return (
        load_hardware("paper-ctxmoe")
        .changed("gpu", memory_efficiency=0.62, compute_efficiency=0.41, layer_overhead_seconds=1.1e-4)
        .changed("link", efficiency=0.77, latency_seconds=2.3e-5)
        .changed("ndp", memory_efficiency=0.55)
    )


def rows(noise: float = 0.0, policies: tuple[str, ...] = MEASURED) -> Iterator[dict[str, Any]]:
    """Runs on the other machine, as the model itself has them, each figure off by so much at random."""
    generator, geometry = np.random.default_rng(0), load_geometry(GEOMETRY)
    for bits, hot in ((3, 4), (16, 0)):
        placement = uniform_placement(geometry, bits=bits, hot_experts=hot)
        grid = Grid(inputs=(2048,), outputs=(64,), batches=(1, 4))
        for point in estimate(geometry, other_machine(), placement, grid=grid).points:
            if point.policy in policies:
                figures = {
                    name: getattr(point, name) * (1 + noise * generator.standard_normal())
                    for name in ("prefill_seconds", "decode_seconds_per_token", "end_to_end_seconds")
                }
                yield {
                    "policy": point.policy, "batch": point.batch, "input_tokens": 2048, "output_tokens": 64,
                    "geometry": GEOMETRY, "bits": bits, "gpu_experts": hot, **figures,
                }  # fmt: skip


def write(path: Path, table: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    return path


def values(hardware: Hardware) -> dict[str, float]:
    """The constants that are fitted."""
    return {
        "gpu.memory_efficiency": hardware.gpu.memory_efficiency,
        "gpu.compute_efficiency": hardware.gpu.compute_efficiency,
        "gpu.layer_overhead": hardware.gpu.layer_overhead_seconds,
        "link.efficiency": hardware.link.efficiency,
        "link.latency": hardware.link.latency_seconds,
        "ndp.memory_efficiency": hardware.ndp.memory_efficiency,
    }


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Fit:
    path = write(tmp_path_factory.mktemp("fit") / "measured.csv", list(rows()))
    return fit_file(path, load_hardware("paper-ctxmoe"))


@pytest.mark.full
def test_points_of_the_model_itself_give_its_constants_back(exact: Fit):
    assert values(exact.hardware) == pytest.approx(values(other_machine()), rel=1e-4)
    assert {one.key: one.value for one in exact.constants} == pytest.approx(values(other_machine()), rel=1e-4)
    assert {one.verdict for one in exact.constants} == {"determined"}
    assert exact.before.mean > 0.05
    assert exact.fitted.largest < 1e-6
    assert exact.held_out.largest < 1e-4
    assert exact.folds == 5


@pytest.mark.full
def test_nothing_but_efficiencies_and_latencies_is_touched(exact: Fit):
    fitted = {one.key for one in exact.constants}
    old = load_hardware("paper-ctxmoe")
    assert fitted == set(values(old))
    for section in ("gpu", "link", "ndp"):
        for name, value in getattr(old, section).model_dump().items():
            if not name.endswith(("efficiency", "latency_seconds", "overhead_seconds")):
                assert getattr(getattr(exact.hardware, section), name) == value


@pytest.mark.full
def test_the_written_file_is_hardware_that_estimates_the_points(exact: Fit, tmp_path: Path):
    write_hardware(tmp_path / "mine.yaml", exact)
    found = load_hardware(tmp_path / "mine.yaml")
    assert values(found) == pytest.approx(values(exact.hardware), rel=1e-5)
    assert found.policies == load_hardware("paper-ctxmoe").policies
    for constant in found.constants:
        assert (constant.key in values(found)) == constant.source.startswith("fitted to measured.csv (36 points")
    placement = uniform_placement(load_geometry(GEOMETRY), bits=3, hot_experts=4)
    grid = Grid(inputs=(2048,), outputs=(64,))
    points = {p.policy: p for p in estimate(load_geometry(GEOMETRY), found, placement, grid=grid).points}
    for one in exact.points:
        if one.point.bits == 3 and one.point.batch == 1:
            assert getattr(points[one.point.policy], one.point.measure) == pytest.approx(one.point.seconds, rel=1e-4)


@pytest.mark.full
def test_noise_does_not_break_it(tmp_path: Path):
    found = fit_file(write(tmp_path / "noisy.csv", list(rows(0.03, MEASURED[:2]))), load_hardware("paper-ctxmoe"))
    assert found.fitted.mean < 0.03
    assert found.fitted.mean < found.held_out.mean < 0.08
    assert found.held_out.mean < found.before.mean
    true = values(other_machine())
    for one in found.constants:
        if one.verdict == "determined":
            assert abs(one.value - true[one.key]) < 5 * one.standard_error


def test_what_does_not_matter_to_the_points_is_said_and_kept(tmp_path: Path):
    table = [
        {"policy": "gpu_only", "batch": 1, "geometry": GEOMETRY, "bits": 16, "gpu_experts": 0, "context": context,
         "decode_seconds_per_token": 0.6 + context / 1e8}
        for context in (0, 20_000)
    ]  # fmt: skip
    found = fit_file(write(tmp_path / "few.csv", table), load_hardware("paper-ctxmoe"))
    known = {one.key: one for one in found.constants}
    for key in ("gpu.compute_efficiency", "ndp.memory_efficiency"):
        assert known[key].value == known[key].before
    assert "does not matter" in describe(known["gpu.compute_efficiency"])
    assert known["ndp.memory_efficiency"].tied_to == ("link.efficiency",)  # the slower of the two paces what is fetched
    assert known["link.efficiency"].verdict == "tied"
    assert {"gpu.layer_overhead", "link.latency"} <= set(known["link.efficiency"].tied_to)
    write_hardware(tmp_path / "few.yaml", found)
    source = {one.key: one.source for one in load_hardware(tmp_path / "few.yaml").constants}
    assert "cannot tell it from" in source["link.efficiency"]
    assert not source["ndp.memory_efficiency"].startswith("fitted to few.csv")


@pytest.mark.parametrize("slow", [{"link": 0.31}, {"ndp": 0.05}])
def test_two_rates_of_one_minimum_are_told_apart_by_what_only_one_of_them_carries(
    slow: dict[str, float], tmp_path: Path
) -> None:
    """Fetched experts alone are as slow by the link as by the memory behind it; activations cross the link alone."""
    geometry, pair = load_geometry(GEOMETRY), {"link.efficiency", "ndp.memory_efficiency"}
    for name, policies in (("h200-host-pcie5", ("monde_bwrule",)), ("h100-ndp-pcie4", ("monde_bwrule", "monde_opt"))):
        hardware = load_hardware(name)
        truth = hardware.changed("link", efficiency=slow.get("link", hardware.link.efficiency))
        truth = truth.changed("ndp", memory_efficiency=slow.get("ndp", hardware.ndp.memory_efficiency))
        placement = uniform_placement(geometry, bits=16, hot_experts=1)
        grid = Grid(inputs=(64,), outputs=(8,), batches=(1, 4))
        table = [
            {"policy": point.policy, "batch": point.batch, "input_tokens": point.input_tokens, "geometry": GEOMETRY,
             "bits": 16, "gpu_experts": 1, "decode_seconds_per_token": point.decode_seconds_per_token,
             "prefill_seconds": point.prefill_seconds}
            for point in estimate(geometry, truth, placement, grid=grid, policies=policies).points
            if point.policy in policies
        ]  # fmt: skip
        found = fit_file(write(tmp_path / f"{name}.csv", table), hardware)
        assert found.fitted.largest < 1e-3
        tied = {one.key for one in found.constants if pair & {*one.tied_to}}
        assert tied & pair == (pair if name == "h200-host-pcie5" else set())


def test_one_row_leaves_nothing_to_hold_out(tmp_path: Path):
    table = [{"policy": "gpu_only", "batch": 1, "decode_seconds_per_token": 1.0}]
    setting = Setting(
        geometry=load_geometry(GEOMETRY), placement=uniform_placement(load_geometry(GEOMETRY), bits=3, hot_experts=4)
    )
    found = fit_file(write(tmp_path / "one.csv", table), load_hardware("paper-ctxmoe"), setting)
    assert found.held_out is None
    assert found.fitted.largest < 1e-3
    assert any("nothing can be held out" in note for table in fit_tables(found) for note in table.notes)


@pytest.mark.full
def test_tables_hold_every_constant_and_point(exact: Fit):
    errors, constants, points = fit_tables(exact)
    assert [row[0] for row in errors.rows][:2] == ["as the file has it", "fitted"]
    assert [row[0] for row in constants.rows] == list(values(exact.hardware))
    assert len(points.rows) == len(exact.points) == 36


HEADER = "policy,batch,input_tokens,output_tokens,geometry,bits,gpu_experts,decode_seconds_per_token,end_to_end_seconds"
GOOD = "monde_opt,1,128,64,mixtral-8x7b,3,4,0.02,1.5"


def test_a_good_file_is_read(tmp_path: Path):
    path = tmp_path / "m.csv"
    path.write_text(f"\ufeff{HEADER}\n{GOOD}\n\nmonde_opt,4,128,64,,,,0.03,\n")
    first, second, third = read_points(path)
    assert (first.row, first.measure, first.seconds, first.bits) == (2, "decode_seconds_per_token", 0.02, 3.0)
    assert (second.row, second.measure, second.seconds) == (2, "end_to_end_seconds", 1.5)
    assert (third.row, third.geometry, third.measure) == (4, None, "decode_seconds_per_token")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "row 1: no column 'policy'"),
        (HEADER, "no measured point in it"),
        (HEADER.replace("batch", "bacth"), "row 1: unknown column 'bacth'; did you mean 'batch'?"),
        (HEADER + ",bits", "column 'bits' is there twice"),
        ("policy,batch\nmonde_opt,1", "no measured column"),
        (f"{HEADER}\nmonde_opts{GOOD[9:]}", "row 2: unknown policy 'monde_opts'; did you mean 'monde_opt'?"),
        (f"{HEADER}\n{GOOD}\n{GOOD},7", "row 3: 10 cells for 9 columns"),
        (
            f"{HEADER}\n{GOOD.replace(',1,', ',9999999999,', 1)}",
            "row 2: batch is '9999999999'; give a whole number from 1 to 999999999",
        ),
        (f"{HEADER}\n{GOOD.replace(',1,', ',0,', 1)}", "row 2: batch is '0'; give a whole number from 1 to"),
        (f"{HEADER}\n{GOOD.replace(',1,', ',,', 1)}", "row 2: batch is empty"),
        (f"{HEADER}\n{GOOD.replace('0.02', '-1')}", "row 2: decode_seconds_per_token is '-1'"),
        (f"{HEADER}\n{GOOD.replace('0.02', 'nan')}", "row 2: decode_seconds_per_token is 'nan'"),
        (f"{HEADER}\n{GOOD.replace('0.02', '20 ms')}", "row 2: decode_seconds_per_token is '20 ms'"),
        (f"{HEADER}\n{GOOD.replace(',64,', ',,', 1)}", "row 2: end_to_end_seconds without output_tokens"),
        (f"{HEADER}\n{GOOD.replace('0.02,1.5', ',')}", "row 2: nothing measured in it"),
        (f"{HEADER}\n{GOOD.replace('8x7b', '8x7')}", "row 2: unknown geometry 'mixtral-8x7'"),
        (f"{HEADER}\n{GOOD.replace(',3,4,', ',3,9,')}", "row 2: 9 hot experts of 8"),
        (f"{HEADER}\n{GOOD.replace(',3,4,', ',3,,')}", "row 2: bits and gpu_experts go together"),
        (f"{HEADER}\n{GOOD.replace(',3,4,', ',,,')}", "row 2: neither bits nor gpu_experts"),
        (f"{HEADER}\n{GOOD.replace('mixtral-8x7b', '')}", "row 2: no geometry"),
        (f'{HEADER}\n"{GOOD}', "not a CSV file"),
    ],
)
def test_a_bad_file_is_refused_in_one_line_with_its_row(tmp_path: Path, text: str, told: str):
    path = tmp_path / "m.csv"
    path.write_text(text)
    with pytest.raises(EstimateError) as error:
        fit_file(path, load_hardware("paper-ctxmoe"))
    assert told in str(error.value)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    text=st.one_of(
        st.text(max_size=200),
        st.lists(st.sampled_from([*HEADER.split(","), *GOOD.split(","), "", "-1", "1e999", '"', "x"]), max_size=30).map(
            lambda cells: HEADER + "\n" + ",".join(cells)
        ),
    )
)
def test_any_text_is_read_or_refused_in_one_line(tmp_path: Path, text: str):
    path = tmp_path / "any.csv"
    path.write_text(text, errors="surrogatepass")
    refused: EstimateError | None = None
    try:
        assert all(point.seconds > 0 for point in read_points(path))
    except EstimateError as error:
        refused = error
    assert refused is None or ("\n" not in str(refused) and refused.where and refused.do)


def test_a_missing_file_and_bytes_that_are_no_text_are_told(tmp_path: Path):
    with pytest.raises(EstimateError, match="cannot be read"):
        read_points(tmp_path / "m.csv")
    (tmp_path / "m.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(EstimateError, match="cannot be read"):
        read_points(tmp_path / "m.csv")


def test_every_measure_is_one_that_the_estimate_has():
    placement = uniform_placement(load_geometry(GEOMETRY), bits=3, hot_experts=4)
    grid = Grid(inputs=(128,), outputs=(64,))
    point = estimate(load_geometry(GEOMETRY), load_hardware("paper-ctxmoe"), placement, grid=grid).points[0]
    assert all(hasattr(point, name) for name in MEASURES)


def test_a_constant_that_was_moved_out_of_sight_is_written(tmp_path: Path) -> None:
    """At the file's 10 % the near-data side would decide every time; at what was fitted the link hides it."""
    geometry, truth = load_geometry(GEOMETRY), load_hardware("h100-ndp-cxl")
    slow = truth.changed("ndp", memory_efficiency=0.1)
    made = estimate(
        geometry, truth, uniform_placement(geometry, bits=3, hot_experts=4),
        grid=Grid(inputs=(1024,), outputs=(64,), batches=(1,)), policies=("context_aware", "monde_opt"),
    )  # fmt: skip
    table = [
        {
            "policy": point.policy, "batch": 1, "input_tokens": 1024, "output_tokens": 64, "geometry": GEOMETRY,
            "bits": 3, "gpu_experts": 4,
            "prefill_seconds": point.prefill_seconds if point.policy == "context_aware" else "",
            "decode_seconds_per_token": point.decode_seconds_per_token,
        }
        for point in made.points
        if point.policy in ("context_aware", "monde_opt")
    ]  # fmt: skip
    path = write(tmp_path / "measured.csv", table)
    found = fit_file(path, slow)
    moved = next(constant for constant in found.constants if constant.key == "ndp.memory_efficiency")
    assert (moved.verdict, "hidden behind another term" in describe(moved)) == ("hidden", True)
    write_hardware(tmp_path / "fitted.yaml", found)
    written = load_hardware(str(tmp_path / "fitted.yaml"))
    assert written.ndp.memory_efficiency == pytest.approx(moved.value, rel=1e-5)
    assert fit_file(path, written).before.largest < 1e-4
