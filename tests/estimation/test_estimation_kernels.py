"""moeq estimate --kernels: designs side by side, one in all its parts, paper 004's runs, every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from estimation.test_estimation_answers import as_json, moeq
from integers.test_integer_files import CASES, written

from moeq.estimation import kernel_tables, kernels
from moeq.integers.hardware.design import device
from moeq.integers.hardware.vision import KNOWN

AT = ("queries=4", "lanes=8", "units=3", "inputs=8", "outputs=16")
TINY = ("--kernels", "zcu102", "--model", "vit-tiny", "--design", *AT)


def test_one_design_is_shown_in_all_its_parts() -> None:
    found = as_json(*TINY)
    (design,) = found["designs"]
    assert design["parallelism"] == {
        "queries": 4,
        "lanes": 8,
        "units": 3,
        "inputs": 8,
        "outputs": 16,
        "norm": 8,
        "ends": 1,
    }
    assert design["dsps"] == sum(one["slices"] for one in design["multipliers"])
    assert design["block_rams"] == sum(one["block_rams"] for one in design["memories"])
    assert design["cycles"] == sum(one["count"] * one["cycles"] for one in design["layers"])
    assert design["latency_seconds"] == pytest.approx(design["cycles"] / 300e6)
    assert design["images_per_second"] == pytest.approx(300e6 / max(design["busy_cycles"].values()))
    bits = {one["role"]: one["bits"] for one in design["registers"]["MLP down"]}
    assert (bits["product"], bits["accumulators"]) == (15, 26)
    code, text = moeq(*TINY, columns=200)
    assert code == 0
    for title in (
        "vit-tiny on zcu102 (2,520 DSPs",
        "Layers, each once",
        "Multipliers: ",
        "Memories: ",
        "Widths of the",
    ):
        assert title in text
    assert "normalized product" in text


def test_designs_are_compared_and_what_is_too_wide_is_left_out() -> None:
    found = as_json(*TINY, "widths=8/8/4,4/8/4", "softmax=log-sqrt2,log2")
    assert [(one["arithmetic"]["weights"], one["arithmetic"]["softmax"]) for one in found["designs"]] == [
        (8, "log-sqrt2"), (8, "log2"), (4, "log-sqrt2"), (4, "log2"),
    ]  # fmt: skip
    assert found["designs"][0]["dsps"] > found["designs"][1]["dsps"] > found["designs"][3]["dsps"]
    wide = as_json(*TINY, "widths=8/8/4", "softmax=log2,log-sqrt2", "clock=100MHz", "dsps=700")
    assert all(one["device"]["clock_hertz"] == 1e8 and one["device"]["dsps"] == 700 for one in wide["designs"])


def test_the_parallelism_that_is_left_out_is_the_fastest_that_fits() -> None:
    (found,) = as_json("--kernels", "zcu102", "--model", "vit-tiny", "--design", "units=4", "queries=8")["designs"]
    assert found["does_not_fit"] is None
    assert (found["parallelism"]["units"], found["parallelism"]["queries"]) == (4, 8)
    (slower,) = as_json(*TINY)["designs"]
    assert found["cycles"] < slower["cycles"]


def test_paper_004s_runs_are_within_reach() -> None:
    """No printed latency is under what the model needs with the DSPs and block RAMs that Table 3 prints."""
    found = as_json("--kernels", "paper-004")
    (page,) = found["pages"]
    assert [row[0] for row in page["rows"]] == [one["row"] for one in found["runs"]]
    ratio = page["columns"].index("printed over it")
    assert len(page["rows"]) == 4
    for row in page["rows"]:
        assert 1 <= row[ratio] < 3, "the model asks for no more than the chip did, and for no less than a third"
        assert row[3] <= row[2]
        assert row[5] <= row[4]


def test_an_integer_forward_has_its_own_widths(tmp_path: Path) -> None:
    folder = written(tmp_path / "integer", *CASES["moe"])
    found = as_json("--kernels", "u280", "--model", str(folder), "--design", "queries=2", "lanes=8")
    (design,) = found["designs"]
    assert (design["model"]["name"], design["model"]["hidden"]) == ("moe", 24)
    manifest = json.loads((folder / "manifest.json").read_text())
    kinds = {one["name"]: one["kind"] for one in manifest["operations"]}
    moved = {"patches", "table", "first_token"}
    assert set(design["registers"]) == {name for name, kind in kinds.items() if kind not in moved}
    code, text = moeq("--kernels", "u280", "--model", str(folder), "--design", "widths=4/4/4")
    assert code == 2
    assert "an integer forward has its own widths" in text
    run = tmp_path / "run"
    (run / "reparam").mkdir(parents=True)
    (run / "recipe.yaml").touch()
    folder.rename(run / "reparam" / "integer")
    asked = ("--kernels", "u280", "--model", str(run))
    assert as_json(*asked, "--design", "queries=2", "lanes=8") == found, "a run's own"
    (run / "reparam" / "integer").rename(tmp_path / "task-0")
    (run / "reparam" / "integer").mkdir()
    assert "name one of them, such as" in moeq(*asked)[1]


@pytest.mark.parametrize("change", ["no heads", "no attention"])
def test_an_integer_forward_of_something_else_is_refused(tmp_path: Path, change: str) -> None:
    folder = written(tmp_path / "integer", *CASES["moe"])
    data = json.loads((folder / "manifest.json").read_text())
    for one in data["operations"]:
        if one["kind"] == "log_attention" and change == "no heads":
            one["attributes"]["heads"] = 0
    if change == "no attention":
        data["operations"] = data["operations"][:2]
        made = {"pixels", *(name for one in data["operations"] for name in one["outputs"].values())}
        data["values"] = [value for value in data["values"] if value["name"] in made]
        held = {name for one in data["operations"] for name in one["tensors"].values()}
        data["tensors"] = [tensor for tensor in data["tensors"] if tensor["name"] in held]
    (folder / "manifest.json").write_text(json.dumps(data))
    code, text = moeq("--kernels", "u280", "--model", str(folder))
    assert (code, text.endswith("write the integer forward again")) == (7, True), text


def test_a_configuration_is_a_model() -> None:
    (design,) = as_json("--kernels", "zcu102", "--model", "bundled:tiny-moe-vit", "--design", *AT)["designs"]
    assert (design["model"]["positions"], design["model"]["mixture"]["num_experts"]) == (17, 8)


SEARCHED = ("--kernels", "zcu102", "--model", "vit-tiny", "--design")
MANY = f"units={','.join(map(str, range(1, 99)))}"
REFUSALS: list[tuple[tuple[str, ...], int, str]] = [
    (("--kernels", "zcu102"), 2, "--kernels needs a vision transformer"),
    (("--kernels", "zcu10", "--model", "vit-tiny"), 10, "unknown FPGA 'zcu10'; did you mean 'zcu102'?"),
    (("--kernels", "zcu102", "--model", "vit-tny"), 3, "no vision transformer 'vit-tny'; did you mean 'vit-tiny'?"),
    (("--kernels", "zcu102", "--model", "bundled:tiny-mixtral"), 3, "model_type is 'mixtral', no vision transformer"),
    (("--kernels", "zcu102", "--model", "vit-tiny", "--bits", "3"), 2, "--kernels uses nothing of --bits"),
    (("--kernels", "paper-004", "--model", "vit-tiny"), 2, "--kernels paper-004 uses nothing of --model"),
    (("--design", "units=4"), 2, "--design is of --kernels"),
    ((*TINY, "units=4"), 2, "units is there twice"),
    ((*TINY, "widths=8/8"), 2, "'8/8' is no W/A/Attn"),
    ((*TINY, "widths=8/2/4"), 2, "'2' is no whole number from 3 to 8"),
    ((*TINY, "softmax=exp"), 2, "'exp' is none of them; give log-sqrt2, log2, uniform"),
    ((*TINY, "clock=300"), 2, "--design clock: '300' has no unit"),
    ((*SEARCHED, "unit=4"), 2, "unknown axis 'unit'; did you mean 'units'?"),
    ((*SEARCHED, "units=0"), 2, "'0' is no whole number from 1 to 4096"),
    ((*SEARCHED, MANY), 2, "98 designs"),
    ((*TINY, "weights=preloaded", "brams=100"), 10, "vit-tiny at 8/8/4 does not fit zcu102: "),
    ((*TINY, "dsps=10"), 10, "of 10 DSPs; "),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "code", "message"), REFUSALS, ids=lambda value: str(value)[-50:])
def test_what_cannot_be_is_refused_in_one_line(arguments: tuple[str, ...], code: int, message: str) -> None:
    found, text = moeq(*arguments)
    assert (found, message in text) == (code, True), text


def test_a_design_that_does_not_fit_is_still_shown() -> None:
    axes = {"queries": (4,), "lanes": (8,), "units": (3,), "inputs": (8,), "outputs": (16,), "dsps": (10, 2520)}
    found: Any = kernels.designs(kernels.read_vision("vit-tiny"), device("zcu102"), axes)
    assert [one.shortage is None for one in found.designs] == [False, True]
    assert found.refusal is None, "one of them fits"


def compared(*axes: str) -> Any:
    found = kernels.designs(kernels.read_vision("vit-tiny"), device("zcu102"), kernels.parse_design([*AT, *axes]))
    return kernel_tables.side_by_side(found.designs, ())


def test_limits_that_differ_are_columns_and_the_others_are_in_the_title() -> None:
    table = compared("clock=100MHz,300MHz", "dsps=700,2520")
    assert table.title == "vit-tiny on zcu102 (912 block RAMs)"
    there = [(row[table.columns.index("MHz")], row[table.columns.index("DSPs there")]) for row in table.rows]
    assert there == [(100, 700), (100, 2520), (300, 700), (300, 2520)]
    alike = compared("brams=1048576")
    assert alike.title == "vit-tiny on zcu102 (2,520 DSPs, 1,048,576 block RAMs, 300 MHz)"
    assert not {"MHz", "DSPs there", "weights", "norm"} & set(alike.columns)


@pytest.mark.parametrize(
    ("axis", "column", "values"),
    [
        ("brams=912,2000", "block RAMs there", [912, 2000]),
        ("bandwidth=1GB/s,21GB/s", "GB/s", [1, 21]),
        ("weights=streamed,preloaded", "weights", ["streamed", "preloaded"]),
        ("denominator=quantized,exact", "denominator", ["quantized", "exact"]),
        ("ends=1,2", "ends", [1, 2]),
        ("norm=4,8", "norm", [4, 8]),
    ],
)
def test_every_axis_has_a_column(axis: str, column: str, values: list[object]) -> None:
    table = compared(axis)
    assert [row[table.columns.index(column)] for row in table.rows] == values


def test_names_on_the_command_line_are_those_of_the_sizes() -> None:
    from moeq.estimation.estimate_options import EstimateOptions

    words = EstimateOptions.__dataclass_fields__["kernels"].metadata["typer"].keywords["help"]
    assert [name for name in KNOWN if name not in words] == []
