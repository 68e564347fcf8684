"""`moeq report --maps` on a finished run, the page's header, and figures that agree with the artifacts."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner

from moeq import cli, pipeline, results
from moeq.artifacts.sensitivities import NAME as SENSITIVITIES
from moeq.assigners.report import THIS, UNIFORM, around
from moeq.final_table import BESIDE, NARROW, QUALITY, SIZES
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages import assign, evaluate, quantize, report
from moeq.stages.context import Context
from moeq.terminal import print_final

SMALL = (
    "corpus.sequences=8", "corpus.sequence_length=32", "losses.group_size=16", "losses.methods=[gptq]",
    "quantize.refine={iterations: 3}", "eval.perplexity.sequences=4", "eval.perplexity.sequence_length=32",
    "estimate.grid.inputs=[128]", "estimate.grid.outputs=[512]",
    "eval.compare=[{name: h-model, method: mopeq, metric: hessian, scope: model}]",
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(tiny_qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Context:
    context = Context(
        recipe=load_recipe(None, [*SMALL]),
        model_name=str(tiny_qwen),
        out=tmp_path_factory.mktemp("report") / "run",
        reporter=Reporter(quiet=True),
    )
    pipeline.run(context)
    return context


def values_of(path: Path) -> list[float]:
    with path.open(newline="") as file:
        return [float(row["value"] or "nan") for row in csv.DictReader(file)]


@pytest.mark.full
def test_every_map_is_a_drawing_beside_its_values(finished: Context, tmp_path: Path) -> None:
    arguments = ["report", "--out", str(finished.out), "--maps", str(tmp_path / "maps"), "--json", "--quiet"]
    result = CliRunner().invoke(cli.app, arguments, catch_exceptions=False)
    found = json.loads(result.stdout)
    written = [Path(name) for name in found["maps"]]
    assert sorted(written) == sorted((tmp_path / "maps").iterdir())
    for drawing in (path for path in written if path.suffix == ".svg"):
        assert ElementTree.parse(drawing).getroot().tag.endswith("svg")
        assert drawing.with_suffix(".csv") in written
    table = assign.sensitivities(finished)
    for name, column in (
        ("activation-frequency", "activation_frequency"), ("routing-mass", "routing_mass"),
        ("hessian-trace", "frobenius_hessian_trace"), ("hybrid-importance", "hybrid_importance"),
        ("calibration-hessian-trace", "calibration_hessian_trace"),
    ):  # fmt: skip
        values = values_of(tmp_path / "maps" / f"{name}.csv")
        np.testing.assert_array_equal(values, np.concatenate(table.column(column)))
    rows = {row.name: row.assignment for row in evaluate.load(finished).rows}
    for name in (finished.recipe.name, "h-model"):
        bits = np.concatenate(rows[name].bits())
        assert values_of(tmp_path / "maps" / f"widths-{name}.csv") == bits.tolist()


@pytest.mark.full
def test_maps_into_what_is_no_folder(finished: Context, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    arguments = ["report", "--out", str(finished.out), "--maps", str(tmp_path / "file"), "--quiet"]
    result = CliRunner().invoke(cli.app, arguments)
    assert isinstance(result.exception, Exception)
    assert str(tmp_path / "file") in str(result.exception)


@pytest.mark.full
def test_the_header_counts_the_refined_experts(finished: Context) -> None:
    page = (finished.directory("report") / report.NAME).read_text("utf-8")
    made = quantize.quantizers(finished.directory("quantize"))
    changed = sum("+refined" in method for layer in made.values() for one in layer for method in one.values())
    below = sum(int((bits < 16).sum()) for bits in assign.load(finished).bits())
    assert changed > 0
    assert f"3 steps a layer; it changed {changed} of {below}" in page
    assert "Calibration reached " in page


@pytest.mark.full
def test_other_sizes_stand_around_the_runs_own(finished: Context) -> None:
    section = finished.recipe.assign
    points = around(assign.inputs_of(finished, section, finished.recipe.name), assign.load(finished))
    own = next(point for point in points if point.method == THIS)
    exported = next(row for row in evaluate.load(finished).rows if row.exported)
    assert own.expert_bytes == exported.expert_bytes
    summary = json.loads((finished.directory("assign") / "stage.json").read_text("utf-8"))["summary"]
    assert own.objective == summary["objective"]
    line = [point for point in points if point.method.startswith("optimal")]
    assert [point.objective for point in line] == sorted((point.objective for point in line), reverse=True)
    uniform = [point for point in points if point.method == UNIFORM]
    assert len(uniform) == len(finished.recipe.losses.bits)
    for point in [*uniform, own]:
        assert all(best.objective <= point.objective for best in line if best.expert_bytes >= point.expert_bytes)
    assert 'id="frontier"' in (finished.directory("report") / report.NAME).read_text("utf-8")


@pytest.mark.full
def test_a_lost_table_of_sensitivities_is_made_again(finished: Context, tmp_path: Path) -> None:
    path = finished.directory("assign") / SENSITIVITIES
    before = path.read_bytes()
    path.unlink()
    report.write_maps(finished, tmp_path / "maps")
    assert path.read_bytes() == before


def test_sizes_of_every_row(finished: Context) -> None:
    rows = {row["name"]: row for row in results.final_rows(finished)}
    whole = sum(header.bytes for header in finished.model.source.tensors.values())
    original = rows["original"]
    assert original["total_bytes"] == whole
    assert (original["expert_share"], original["total_share"]) == (1, 1)
    assert original["stored_bits"] == 16  # bfloat16
    for row in rows.values():
        assert row["total_share"] == row["total_bytes"] / whole
        assert row["stored_bits"] == pytest.approx(16 * row["total_share"])
    assert rows["h-model"]["expert_share"] < 0.5


@pytest.mark.parametrize("width", [46, 60, 80, 90, BESIDE])
def test_the_final_tables_fit_the_window(
    finished: Context, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    outcome = pipeline.run_stage(finished, pipeline.BY_NAME["estimate"])
    print_final(results.final_rows(finished), {}, [outcome])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line.rstrip()) <= width for line in lines)
    heads = [line for line in lines if line.startswith("assignment")]
    assert len(heads) == (1 if width == BESIDE else 2)
    shown = " ".join(heads)
    assert all(title in shown for title in ("bits", "experts", "whole", "ppl", "KL", "top-1"))
    assert "acc" not in shown  # no task was asked
    assert "speed-up" not in "\n".join(lines)  # the geometry is this tiny model's own
    wanted = [column.title for column in (*SIZES, *QUALITY) if column.title != "acc"]
    assert width < NARROW or all(title in shown for title in wanted)
