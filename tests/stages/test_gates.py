"""Gates of a finished run: judged exactly, told a line each, in JSON and on the page, with an exit code of theirs."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moeq import cli, pipeline
from moeq.artifacts.gates import Gate, bounded
from moeq.errors import GateError, RecipeError
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages import assign, estimate, evaluate, gates
from moeq.stages.context import Context
from moeq.stages.loading import where_it_loads
from moeq.stages.order import STAGES

SMALL = (
    "corpus.sequences=8", "corpus.sequence_length=32", "losses.methods=[rtn]", "losses.bits=[2, 4]",
    "losses.group_size=32", "losses.per_projection=false", "assign={method: uniform, bits: 4, quantizer: rtn}",
    "eval.perplexity={sequences: 4, sequence_length: 32}", "eval.compare=[]", "export.verify=false",
    "estimate.grid.inputs=[128, 256]", "estimate.grid.outputs=[512]", "estimate.grid.batches=[2, 1]",
)  # fmt: skip
KEPT = ("kl=1", "perplexity_increase=100", "equal_top1=0.5", "bytes=1GiB", "bits_per_weight=5", "tokens_per_second=1")


@pytest.mark.parametrize("side", ["<=", ">="])
def test_a_bound_itself_is_kept_and_what_lies_beyond_is_not(side: Any) -> None:
    above, below = math.nextafter(0.1, 1), math.nextafter(0.1, 0)
    assert bounded("kl", 0.1, 0.1, side).holds
    assert bounded("kl", below, 0.1, side).holds == (side == "<=")
    assert bounded("kl", above, 0.1, side).holds == (side == ">=")
    for nothing in (math.nan, math.inf, -math.inf, None):
        gate = bounded("kl", nothing, 0.1, side)
        assert not gate.holds
        assert gate.value is None
        json.loads(gate.model_dump_json())


@pytest.mark.parametrize(
    ("gate", "line"),
    [
        (bounded("kl", 0.091, 0.1, "<="), "gate kl: 0.091 <= 0.1 ok"),
        (bounded("kl", 0.0912345, 0.1, "<=", 0.01), "gate kl: 0.09123 (95 % 0.07163 to 0.1108) <= 0.1 ok"),
        (
            bounded("equal_top1", 0.995, 0.9, ">=", 0.005),
            "gate equal_top1: 0.995 (95 % 0.9852 to 1) >= 0.9 ok",
        ),
        (bounded("kl", 0.1000001, 0.1, "<="), "gate kl: 0.1000001 <= 0.1 failed"),
        (bounded("kl", math.nan, 0.1, "<="), "gate kl: nothing <= 0.1 failed (nan is no number)"),
        (bounded("tokens_per_second", None, 5, ">="), "gate tokens_per_second: nothing >= 5 failed (not measured)"),
        (bounded("bytes", 2**40 + 1, 2**40, "<="), "gate bytes: 1,099,511,627,777 B <= 1,099,511,627,776 B failed"),
        (bounded("perplexity_increase", 3.6, 5, "<="), "gate perplexity_increase: 3.6 % <= 5 % ok"),
        (Gate(name="formats", of="vllm", holds=True), "gate formats: vllm ok"),
        (Gate(name="formats", of="vllm", holds=False, why="1 bits"), "gate formats: vllm failed (1 bits)"),
    ],
)
def test_a_gate_is_one_line_that_says_what_was_measured(gate: Gate, line: str) -> None:
    assert gate.line() == line


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Context:
    context = context_of("bundled:tiny-mixtral", tmp_path_factory.mktemp("gates") / "run")
    pipeline.run(context)
    return context


def context_of(model: str, out: Path, *settings: str) -> Context:
    recipe = load_recipe(None, [*SMALL, *settings])
    return Context(recipe=recipe, model_name=model, out=out, reporter=Reporter(quiet=True))


def gated(finished: Context, *wanted: str) -> Context:
    """The run that is finished, with gates."""
    return context_of(finished.model_name, finished.out, *(f"gates.{one}" for one in wanted))


def invoke(finished: Context, command: str, *wanted: str, more: tuple[str, ...] = ()) -> Any:
    """A command on the run with gates and no others; where it ends with an error, that is what is raised."""
    settings = [word for one in ("gates={}", *(f"gates.{one}" for one in wanted)) for word in ("--set", one)]
    return CliRunner().invoke(cli.app, [command, "--out", str(finished.out), *settings, *more])


def test_every_gate_reads_what_the_run_measured(finished: Context) -> None:
    found = {gate.name: gate for gate in gates.verdicts(gated(finished, *KEPT))}
    assert all(gate.holds for gate in found.values())
    report = evaluate.load(finished)
    row, original = report.row(finished.recipe.name), report.row("original")
    assert row is not None
    assert original is not None
    assert row.divergence is not None
    assert row.perplexity is not None
    assert original.perplexity is not None
    assert found["kl"].value == row.divergence.kl
    assert found["kl"].low is not None
    assert found["equal_top1"].value == row.divergence.same_top
    assert found["perplexity_increase"].value == 100 * (row.perplexity / original.perplexity - 1)
    assert found["bits_per_weight"].value == row.bits_per_weight
    checkpoint = sum(path.stat().st_size for path in finished.directory("export").rglob("*") if path.is_file())
    assert checkpoint <= (found["bytes"].value or 0) <= 1.01 * checkpoint, "as assign.size counts"
    made = estimate.load(finished).of(finished.recipe.name)
    assert made is not None
    (point,) = (one for one in made.points if one.policy == "context_aware" and one.at == (2, 128, 512))
    assert found["tokens_per_second"].value == point.decode_tokens_per_second


def test_bounds_are_met_by_what_was_measured_and_no_less(finished: Context) -> None:
    measured = {gate.name: gate.value for gate in gates.verdicts(gated(finished, *KEPT))}
    exact = gates.verdicts(
        gated(finished, *(f"{name}={value!r}" for name, value in measured.items() if name != "bytes"))
    )
    assert all(gate.holds for gate in exact)
    worse = [
        f"{name}={math.nextafter(value or 0, math.inf if name in ('equal_top1', 'tokens_per_second') else 0)!r}"
        for name, value in measured.items()
        if name not in ("bytes", "perplexity_increase")
    ]
    assert not any(gate.holds for gate in gates.verdicts(gated(finished, *worse)))
    assert not gates.verdicts(gated(finished, f"bytes={int(measured['bytes'] or 0) - 1}"))[0].holds


def test_runtimes_are_judged_by_what_they_load(finished: Context) -> None:
    found = gates.verdicts(gated(finished, "formats=[auto-round, gptqmodel, llama.cpp]"))
    assert [(gate.of, gate.holds) for gate in found] == [
        ("auto-round", True),
        ("gptqmodel", True),
        ("llama.cpp", False),
    ]
    assert "llama.cpp" in str(found[2].why)
    error = gates.error_of(found)
    assert str(error).startswith("gates: 1 of 3 failed: formats llama.cpp")
    assert error is not None
    assert "assign.target: llama.cpp" in error.do


def test_runtimes_are_judged_by_what_is_packed_beside_the_experts(
    finished: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    symmetric = assign.load(finished).model_copy(update={"symmetric": True})
    monkeypatch.setattr(assign, "load", lambda _: symmetric)
    monkeypatch.setitem(sys.modules, "gguf", None)  # of what is not installed nothing is asked
    for others, holds in (("{}", [True, True, True]), ("{attention: 4, method: rtn}", [False, True, False])):
        asked = f"others={others}", "gates.formats=[transformers, gptqmodel, llama.cpp]"
        found = gates.verdicts(context_of(finished.model_name, finished.out, *asked))
        assert [gate.holds for gate in found] == holds
        loads = where_it_loads(context_of(finished.model_name, finished.out, *asked), symmetric)
        assert [loads[str(gate.of)] is None for gate in found] == holds, "as summaries say"
    assert "run without `others`" in str(found[0].why)


def test_gates_are_in_no_stages_key(finished: Context) -> None:
    with_gates = gated(finished, *KEPT)
    for stage in STAGES:
        assert stage.own_inputs(finished) == stage.own_inputs(with_gates), stage.name


@pytest.mark.full
@pytest.mark.parametrize("command", ["run", "report"])
def test_a_failed_gate_ends_the_command_after_everything_is_written(finished: Context, command: str) -> None:
    done = invoke(finished, command, "kl=1e-9", "bytes=1GiB")
    assert isinstance(done.exception, GateError)
    assert done.exception.exit_code == 14
    assert str(done.exception).startswith("gates: 1 of 2 failed: kl ")
    lines = [line for line in done.stdout.splitlines() if line.startswith("gate ")]
    assert [line.split(":")[0] for line in lines] == ["gate kl", "gate bytes"]
    assert (lines[0].endswith("<= 1e-09 failed"), lines[1].endswith(" ok")) == (True, True)
    page = finished.directory("report") / "report.html"
    assert "A gate failed: " in page.read_text("utf-8")
    in_json = invoke(finished, command, "kl=1e-9", "bytes=1GiB", more=("--json", "--quiet"))
    assert in_json.exit_code == 14
    found = json.loads(in_json.stdout)["gates"]
    assert [(gate["name"], gate["holds"]) for gate in found] == [("kl", False), ("bytes", True)]
    again = invoke(finished, command, "kl=1", more=("--json", "--quiet"))
    assert (again.exit_code, json.loads(again.stdout)["gates"][0]["holds"]) == (0, True)
    assert "A gate failed" not in page.read_text("utf-8")
    without = invoke(finished, command, more=("--json", "--quiet"))
    assert (without.exit_code, json.loads(without.stdout)["gates"]) == (0, [])


def test_an_image_classifier_has_no_gates_on_text(tmp_path: Path) -> None:
    one = Context(recipe=load_recipe(None, ["gates.kl=0.1"]), model_name="bundled:tiny-moe-vit", out=tmp_path / "run")
    with pytest.raises(RecipeError, match=r"gates.kl: an image classifier is measured on no text"):
        pipeline.run(one, ("report",))
    assert not (tmp_path / "run").exists()
