"""`moeq estimate --speed` from the command line: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moeq.artifacts.losses import WHOLE, write_losses
from moeq.cli import app
from moeq.errors import MoeqError
from moeq.estimation.searches import SearchDocument
from moeq.estimator import hardware, load_geometry

RECIPE = Path(__file__).parents[2] / "recipes" / "paper-000-figures.yaml"
SEARCH = ("--model", "mixtral-8x7b", "--speed", "20tok/s")


def moeq(*arguments: Any, columns: int = 120) -> tuple[int, str]:
    done = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["estimate", *map(str, arguments)])
    if isinstance(done.exception, MoeqError):
        return done.exception.exit_code, str(done.exception)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_what_is_printed_fits_the_window(columns: int) -> None:
    code, text = moeq(*SEARCH, "--gpu-experts", "4", columns=columns)
    assert code == 0
    assert max(map(len, text.splitlines())) <= columns
    flat = " ".join(text.split())
    assert "20 tokens a second: 16.00 bits a weight with static_placement" in flat
    assert "static_mixed on paper-ctxmoe, 4 of 8 experts FP16, the others 3 code bits keeps no less" in flat
    assert "tokens/s" in flat
    assert "measured" in flat


@pytest.mark.full
def test_what_is_written(tmp_path: Path) -> None:
    code, text = moeq(*SEARCH, "--hardware", "all", "--cost", "h100-ndp-cxl=3", "--out", tmp_path / "out", "--json")
    assert code == 0
    kept = SearchDocument.model_validate_json((tmp_path / "out" / "search.json").read_text())
    assert len({point.hardware for point in kept.searches[0].points}) > 8
    assert {name for name in json.loads(text) if name != "paths"} == set(SearchDocument.model_fields)
    page = (tmp_path / "out" / "search.html").read_text()
    assert page.count("<svg") == 1
    assert "What was refused" in page
    assert len(page) < 600_000


@pytest.mark.full
def test_money_of_some_hardware_only_is_no_part_of_the_front_and_that_is_said() -> None:
    both = ("--hardware", "h100-ndp-cxl", "--hardware", "a100-host-pcie4")
    text = " ".join(moeq(*SEARCH, *both, "--cost", "h100-ndp-cxl=3")[1].split())
    assert "Money is no part of the front: no --cost of a100-host-pcie4." in text
    assert "Money" not in " ".join(moeq(*SEARCH, *both)[1].split())
    priced = moeq(*SEARCH, *both, "--cost", "h100-ndp-cxl=3", "--cost", "a100-host-pcie4=2")[1]
    assert "Money" not in priced


def test_a_recipes_figures_are_searched_case_by_case() -> None:
    code, text = moeq(RECIPE, "--speed", "20", "--json")
    assert code == 0
    found = json.loads(text)
    assert len(found["searches"]) == len(found["cases"]) == 4
    asked = [search["asked"] for search in found["searches"]]
    assert [each["gpu_experts"] for each in asked] == [4, 4, 2, 2]
    assert [each["meets"] for each in asked] == [True, True, False, False]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((*SEARCH[:2], "--speed", "fast"), 2, "'fast' is no speed"),
        ((*SEARCH, "--cost", "h100"), 2, "'h100' is no cost"),
        ((*SEARCH, "--cost", "h100-ndp-cxl=3"), 2, "h100-ndp-cxl is none of the hardware"),
        ((*SEARCH, "--memory", "24 apples"), 2, "'24 apples' is no size"),
        ((*SEARCH, "--zipf", "1"), 2, "--speed uses nothing of --zipf"),
        ((*SEARCH[:2], "--memory", "24GiB"), 2, "--memory is of a search"),
        ((*SEARCH, "--losses", "nowhere"), 13, "nowhere"),
        (("--speed", "20"), 2, "no model"),
    ],
)  # fmt: skip
def test_refusals(arguments: tuple[str, ...], code: int, words: str) -> None:
    found, text = moeq(*arguments)
    assert (found, words in text) == (code, True), text


@pytest.mark.parametrize(
    ("method", "group_size", "symmetric", "stored"),
    [
        ("gptq", 32, False, 4 + 20 / 32), ("gptq", 32, False, 3 + 19 / 32), ("gptq", 32, False, 3 + 20 / 32),
        ("trellis", -1, True, 4 + 16 / 4096), ("mxfp4", 32, True, 4.25),
        ("iq", 256, True, 2.5625), ("iq", 256, True, 2.3125), ("iq", 256, True, 2.0625),
    ],
)  # fmt: skip
def test_bytes_are_of_the_codes_whose_losses_are_measured(
    tmp_path: Path, method: str, group_size: int, symmetric: bool, stored: float
) -> None:
    """Of i-quants the bytes of the table tell the set, of grids whether they have the zero points of 4 bits."""
    bits = int(stored)
    own = {"method": method, "group_size": group_size, "symmetric": symmetric, "bits": bits, "projection": WHOLE}
    texts = dict.fromkeys(("layer_name", "fallback", "measured_on"), "x")
    counts = dict.fromkeys(("calibration_tokens", "heldout_tokens"), 50)
    counts["bytes"] = round(load_geometry("mixtral-8x7b").expert_parameters * stored / 8)
    figures = dict.fromkeys(("loss", "relative_loss", "weighted_loss", "hessian_trace"), 0.5)
    (tmp_path / "losses").mkdir()
    rows = [{**own, **texts, **counts, **figures, "layer": 0, "expert": expert} for expert in range(8)]
    write_losses(tmp_path / "losses" / "losses.parquet", [rows])
    code, said = moeq(*SEARCH, "--losses", tmp_path, "--json")
    assert code == 0, said
    points = json.loads(said)["searches"][0]["points"]
    assert {point["bits"] for point in points if point["loss"] == 0.5} == {stored}


def test_costs_are_of_hardware_however_it_is_named(tmp_path: Path) -> None:
    text = (Path(hardware.__file__).parent / "hardware" / "h100-ndp-cxl.yaml").read_text()
    mine = tmp_path / "my.v2.yaml"
    mine.write_text(text.replace("name: h100-ndp-cxl", "name: my-box"))
    for name in (mine, mine.name, "my.v2", "my-box"):
        code, said = moeq(*SEARCH, "--hardware", mine, "--cost", f"{name}=3", "--json")
        assert code == 0, said
        assert json.loads(said)["dollars_per_hour"] == {"my-box": 3.0}
    code, said = moeq(RECIPE, "--speed", "20tok/s", "--cost", "paper-ctxmoe=2", "--json")
    assert code == 0, said
    code, said = moeq(*SEARCH, "--hardware", mine, "--hardware", tmp_path / "." / "other.yaml")
    assert "other.yaml" in said
    (tmp_path / "other.yaml").write_text(mine.read_text())
    code, said = moeq(*SEARCH, "--hardware", mine, "--hardware", tmp_path / "other.yaml")
    assert (code, "my-box is named twice" in said) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((RECIPE, "--speed", "20tok/s", "--bits", "2"), "--bits cannot go with a recipe"),
        ((*SEARCH, "--kernels", "zcu102"), "--speed uses nothing of --kernels"),
        ((*SEARCH, "--design", "units=4"), "--speed uses nothing of --design"),
        (("--model", "mixtral-8x7b", "--capacity", "--out", "nowhere"), "--out is of an estimate"),
    ],
)
def test_what_would_do_nothing_is_refused(arguments: tuple[Any, ...], told: str) -> None:
    code, said = moeq(*arguments)
    assert (code, told in said) == (2, True), said
