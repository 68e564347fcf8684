"""Size, objective and speed of a run's assignments: what stands in its report, and what the commands beside it make."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moeq import cli, pipeline
from moeq.estimator import hardware
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.reporting.inputs import TradeOff
from moeq.stages import assign, report
from moeq.stages.context import Context
from moeq.stages.trade_offs import trade_offs

SMALL = (
    "corpus.sequences=12", "corpus.sequence_length=48", "losses.methods=[rtn]", "losses.bits=[2, 3, 4, 8]",
    "assign.quantizer=rtn", "assign.method=optimal", "assign.code_bits=3", "estimate.geometry=mixtral-8x22b",
    "estimate.hardware=h100-ndp-cxl",
)  # fmt: skip


@pytest.fixture(scope="module")
def assigned(tmp_path_factory: pytest.TempPathFactory) -> Context:
    context = context_of(tmp_path_factory.mktemp("traded") / "run")
    pipeline.run(context, ("profile", "losses", "assign"))
    return context


def context_of(out: Path, *changes: str) -> Context:
    recipe = load_recipe(None, [*SMALL, *changes])
    return Context(recipe=recipe, model_name="bundled:tiny-mixtral", out=out, reporter=Reporter(quiet=True))


@pytest.fixture(scope="module")
def points(assigned: Context) -> list[TradeOff]:
    return trade_offs(assigned, assign.load(assigned))


def row(point: TradeOff) -> tuple[float, ...]:
    return point.expert_bytes, point.objective, -point.tokens_per_second


@pytest.mark.full
def test_no_point_beats_another_and_the_runs_own_is_among_them(assigned: Context, points: list[TradeOff]) -> None:
    """8x22B at 8 bits does not fit the GPU of 80 GB: both policies stand there."""
    assert [p.tokens_per_second for p in points] == sorted((p.tokens_per_second for p in points), reverse=True)
    assert {p.policy for p in points} == {"static_mixed", "context_aware"}
    others = [p for p in points if p.command is not None]
    assert len(others) >= 6
    for point in others:
        assert not any(
            all(a <= b for a, b in zip(row(other), row(point), strict=True)) and row(other) != row(point)
            for other in others
        )
    summary = json.loads((assigned.directory("assign") / "stage.json").read_text("utf-8"))["summary"]
    own = [p for p in points if p.command is None]
    assert [(p.expert_bytes, p.objective) for p in own] == [(summary["expert_bytes"], summary["objective"])]


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["--bits", "--speed"])
def test_commands_make_their_points(assigned: Context, points: list[TradeOff], tmp_path: Path, kind: str) -> None:
    some = [p for p in points if p.command is not None and ("--speed" in p.command) == (kind == "--speed")]
    for number, point in enumerate(some[:: max(1, len(some) - 1)]):
        out = tmp_path / str(number)
        shutil.copytree(assigned.out, out)
        _, *words = shlex.split((point.command or "").replace("RUN", str(out)))
        done = CliRunner().invoke(cli.app, [*words, "--json", "--quiet"], catch_exceptions=False)
        made = json.loads(done.stdout)["summary"]
        if kind == "--bits":
            assert (made["expert_bytes"], made["objective"]) == (point.expert_bytes, pytest.approx(point.objective))
        else:
            assert made["tokens_per_second"] >= 0.999 * point.tokens_per_second
            assert made["objective"] <= point.objective * (1 + 1e-9)


def test_other_limits_of_the_recipe_are_lifted(assigned: Context, points: list[TradeOff]) -> None:
    limited = context_of(assigned.out, "assign.speed=40tok/s")
    found = trade_offs(limited, assign.load(assigned))
    assert {row(p) for p in found} == {row(p) for p in points}
    assert all("--set assign.speed=null" in p.command for p in found if p.command and "--speed" not in p.command)
    assert not any("--hardware" in p.command for p in found if p.command)


def test_a_report_is_made_again_where_their_hardware_was_edited(assigned: Context, tmp_path: Path) -> None:
    """The assignment may stay the same, and the estimate be of other hardware."""
    preset = (Path(hardware.__file__).parent / "hardware" / "h100-ndp-cxl.yaml").read_text("utf-8")
    preset = preset.replace("name: h100-ndp-cxl", "name: own")
    file, keys, speeds = tmp_path / "my own.yaml", [], []
    for bandwidth in ("3.35 TB/s", "1.35 TB/s"):
        file.write_text(preset.replace("3.35 TB/s", bandwidth), "utf-8")
        context = context_of(assigned.out, f"assign.hardware={file}")
        keys.append(report.own_inputs(context))
        points = trade_offs(context, assign.load(assigned))
        assert {point.hardware for point in points} == {"own"}  # not what the run's estimate is of
        assert all(str(file) in shlex.split(point.command) for point in points if "--speed" in (point.command or ""))
        speeds.append([point.tokens_per_second for point in points])
    assert speeds[0] != speeds[1]
    assert keys[0] != keys[1]


def test_a_method_without_a_least_objective_has_none(assigned: Context) -> None:
    other = context_of(assigned.out, "assign.method=frequency")
    assert trade_offs(other, assign.load(assigned)) == []
