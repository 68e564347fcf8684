"""The command line: flags are frozen, every command has help, imports stay light, JSON goes to standard output."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fork_server import TRANSFORMERS, ForkServer, shared
from typer.main import get_command

from moeq.cli import app
from moeq.inspection import inspect
from moeq.recipe import RefineSection, Start, load_recipe
from moeq.recipe.quantize import QuantizeSection, TuneSection
from moeq.runtimes import OF_FOLDED, QONNX
from moeq.version import __version__

COMMANDS = get_command(app).commands  # type: ignore[attr-defined]
RUN = {"--model", "--out", "--set", "--trust-remote-code", "--json", "--quiet", "--check"}
DEVICE = {"--device"}
STAGE = RUN | {"what"}
BUDGET = {"--bits", "--code-bits", "--size"}
BUILD = BUDGET | {"--group-size", "--text", "--eval-text", "--quality", "--preset", "--quantizer", "--refine", "--tune"}
FLAGS = {
    "run": STAGE | DEVICE | BUILD | {"--for", "--verify", "--force", "--workers"},
    "reparam": STAGE | DEVICE,
    "profile": STAGE | DEVICE | {"--imatrix", "--workers"},
    "eval": RUN
    | {"recipe"}
    | {"--tasks", "--include-path", "--num-fewshot", "--limit", "--batch-size", "--text", "--window", "--stride"}
    | {"--dynamic", "--dynamic-log"}
    | {"--context-aware", "--truncate", "--dtype", "--device", "--workers"},
    "estimate": RUN
    | {"recipe"}
    | {"--hardware", "--assignment", "--manifest", "--trace", "--bits", "--gpu-experts", "--group-size", "--policy"}
    | {"--grid", "--context", "--kv-growth", "--zipf", "--replicas", "--capacity", "--sheet", "--fit", "--kernels"}
    | {"--samples", "--gpu-bits", "--cache-bits", "--other-bits", "--rate", "--speed", "--memory", "--cost"}
    | {"--losses", "--design"},
    "bench": {"checkpoint", "--dense", "--batch", "--prompt-tokens", "--new-tokens", "--repeat", "--grid", "--beams"}
    | {"--dynamic", "--peers", "--gguf", "--dtype", "--out", "--device", "--trust-remote-code", "--json", "--quiet"},
    "export": STAGE | DEVICE | {"--format", "--widen", "--verify"},
    "convert": {"checkpoint", "--to", "--out", "--max-shard", "--widen", "--verify", "--trust-remote-code", "--json"}
    | {"--quiet"},
    "report": STAGE | {"--analysis", "--maps"},
    "losses": STAGE | DEVICE | {"--quantizer", "--workers"},
    "quantize": STAGE | DEVICE | {"--refine", "--tune"},
    "assign": STAGE
    | {"--speed"}
    | DEVICE
    | BUDGET
    | {"--method", "--quantizer", "--bits-per-weight", "--expert-bytes", "--target", "--price"}
    | {"--for", "--frontier", "--average-bits", "--granularity", "--ndp-latency", "--hardware", "--force"},
    "inspect": {"path", "--placement-for", "--tensor-types", "--widen", "--out", "--trust-remote-code", "--json"}
    | {"--quiet"},
    "families": {"name", "--json", "--quiet"},
    "verify": {
        "checkpoint",
        "--against",
        "--target",
        "--python",
        "--dtype",
        "--signature",
        "--public-key",
        "--certificate-chain",
        "--trust-remote-code",
        "--json",
        "--quiet",
    },
    "sign": {"checkpoint", "--key", "--certificate", "--certificate-chain", "--json", "--quiet"},
    "push": {
        "checkpoint",
        "name",
        "--private",
        "--branch",
        "--revision",
        "--replace",
        "--verify",
        "--trust-remote-code",
    }
    | {"--json", "--quiet"},
    "reproduce": {"checkpoint", "--model", "--text", "--out", "--trust-remote-code", "--json", "--quiet"},
    "gc": {"run", "--out", "--store", "--dry-run", "--json", "--quiet"},
    "generate": {
        "checkpoint",
        "prompt",
        "--max-new-tokens",
        "--dynamic",
        "--dynamic-log",
        "--watch",
        "--temperature",
        "--seed",
        "--device",
        "--trust-remote-code",
        "--json",
        "--quiet",
        "--chat",
        "--beams",
    },
    "plan": BUILD | DEVICE | STAGE - {"--check"} | {"--for", "--probe", "--workers"},
    "watch": {"out", "--once", "--html", "--json", "--quiet"},
    "init": BUILD | STAGE - {"--check"} | {"--format", "--for"},
    "recipe": BUILD | STAGE - {"--check", "--out"} | {"--format", "--schema"},
}


@pytest.mark.parametrize(("command", "folded"), [("export", True), ("init", False), ("recipe", False)])
def test_help_of_format_lists_what_the_command_takes(command: str, folded: bool) -> None:
    (option,) = [one for one in COMMANDS[command].params if "--format" in one.opts]
    assert all((name in option.help) == folded for name in (*OF_FOLDED, QONNX))


def test_flags_are_frozen() -> None:
    found = {
        name: {option for parameter in command.params for option in parameter.opts}
        for name, command in COMMANDS.items()
    }
    assert found == FLAGS


@pytest.mark.parametrize("name", list(FLAGS))
def test_every_command_and_option_has_help(name: str) -> None:
    command = COMMANDS[name]
    assert command.help
    for parameter in command.params:
        assert parameter.help, f"{name} {parameter.name}"


def test_help_and_version_do_not_import_torch() -> None:
    code = (
        "import gc, sys; sys.argv = ['moeq', '--help']\n"
        "from moeq.__main__ import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code\n"
        "assert gc.isenabled() and gc.get_freeze_count(), 'garbage is looked for, but not in what was imported'\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout
    command = [sys.executable, "-m", "moeq", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == f"moeq {__version__}"


@pytest.mark.full
def test_import_registers_with_transformers_whenever_it_is_imported(tmp_path: Path) -> None:
    check = "from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as m; assert 'moeq' in m"
    before, after = (f"import moeq; {check}", f"import transformers.quantizers.auto; import moeq; {check}")
    done = subprocess.run([sys.executable, "-c", before], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (tmp_path / "after.py").write_text("import sys; assert 'moeq' not in sys.modules\n" + after)
    forked = shared(*TRANSFORMERS).run(program=tmp_path / "after.py")
    assert forked.code == 0, forked.stderr


def test_method_and_training_change_the_recipe(tmp_path: Path) -> None:
    path = tmp_path / "bare.yaml"
    path.write_text("recipe_version: 1\n", "utf-8")
    base = load_recipe(path)
    assert base.quantize.refine is None
    assert Start(path=path).every_change() == []
    signround = Start(path=path, quantizer="signround", refine=True).recipe()
    assert signround.losses.methods == ["gptq", "rtn", "signround"]
    assert signround.assign.quantizer == "signround"
    assert signround.quantize.refine == RefineSection()
    best = Start(path=path, quantizer="best").recipe()
    assert (best.losses.methods, best.assign.quantizer) == (base.losses.methods, "best")
    assert Start(path=path, tune=True).recipe().quantize == QuantizeSection(tune=TuneSection())
    own = ["quantize.refine={iterations: 7}", "quantize.tune={steps: 8}"]
    assert Start(path=path, changes=own, refine=True, tune=True).every_change() == own


def test_stages_one_by_one_in_json(moeq: ForkServer, tiny_mixtral: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "name: one\nmodel: " + str(tiny_mixtral) + "\ncorpus: {sequences: 8, sequence_length: 32}\n"
        "losses: {group_size: 16}\neval: {perplexity: {sequences: 4, sequence_length: 32}, compare: []}\n"
    )
    out = tmp_path / "with space" / "run"
    first = moeq.run("profile", str(recipe), "--out", str(out), "--json", "--quiet")
    assert first.code == 0, first.stderr
    assert json.loads(first.stdout)["summary"]["layers"] == 2
    assert first.stderr == ""
    early = moeq.run("assign", "--out", str(out), "--model", str(tiny_mixtral))
    assert early.code == 7
    assert "this stage has not been run; run `moeq losses`" in early.stderr
    whole = moeq.run("run", str(recipe), "--out", str(out), "--json")
    assert whole.code == 0, whole.stderr
    found = json.loads(whole.stdout)
    assert [stage["skipped"] for stage in found["stages"]] == [True] + [False] * 7
    assert {row["name"] for row in found["table"]} == {"original", "one"}
    assert all(Path(path).exists() for path in found["paths"].values())
    table = moeq.run("run", str(recipe), "--out", str(out))
    assert " *" in table.stdout
    assert "unchanged, skipped" in table.stderr
    assert json.loads(moeq.run("inspect", str(out), "--json").stdout)["kind"] == "moeq run"
    assert inspect(out / "checkpoint")["check"].startswith("every size")
    kinds = {
        "assign/assignment.json": "assignment",
        "losses/losses.parquet": "loss table",
        "losses": "artifact of moeq losses",
        "recipe.yaml": "recipe",
        "eval/eval.json": "evaluation",
        "checkpoint/placement.json": "moeq checkpoint",
        "checkpoint/provenance.json": "provenance",
        "estimate/estimate.json": "moeq estimate",
    }
    for name, kind in kinds.items():
        assert inspect(out / name)["kind"] == kind, name
    told = json.loads(moeq.run("inspect", str(out / "estimate" / "estimate.json"), "--json").stdout)
    assert (told["schema_version"], told["file_schema_version"]) == (1, 2)
    assert inspect(out / "checkpoint" / "provenance.json")["made"] == inspect(out / "checkpoint")["provenance"]
    text = moeq.run("generate", str(out / "checkpoint"), "hello", "--max-new-tokens", "3")
    assert text.stdout.startswith("hello")
