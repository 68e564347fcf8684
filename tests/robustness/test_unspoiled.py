"""What was finished stands: when an assignment is looked at or edited, and when a stage dies or fails on the way."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fork_server import ForkServer
from robustness.runs import STAGES, follow, partials
from robustness.test_refusals import tree
from typer.testing import CliRunner, Result

from moeq import cli, conversion, inspection
from moeq.artifacts.assignment import EDITED
from moeq.artifacts.files import BEGUN, building, claimed, filling, locked, remove_partials
from moeq.artifacts.stage import read_record
from moeq.errors import ArtifactError, EvaluationError, MoeqError, StorageError
from moeq.evaluation.reference_logits import ReferenceLogits, Scored
from moeq.stages.context import DIRECTORIES
from moeq.verification import launch, probe

ASSIGNMENT = "assign/assignment.json"
RECIPE = "recipe.yaml"


def moeq_in(run: Path, *words: str) -> Result:
    """A moeq command in this process; its error is raised."""
    result = CliRunner().invoke(cli.app, [words[0], "--out", str(run), *words[1:]])
    if isinstance(result.exception, MoeqError):
        raise result.exception
    assert result.exception is None, result.output
    return result


def edit(run: Path) -> bytes:
    """Give the first expert of three bits four, by hand."""
    path = run / ASSIGNMENT
    data = json.loads(path.read_text("utf-8"))
    expert = next(expert for layer in data["layers"] for expert in layer["experts"] if expert["bits"] == 3)
    expert["bits"] = 4
    path.write_text(json.dumps(data, indent=2), "utf-8")
    return path.read_bytes()


def differing(before: dict[str, bytes | None], after: dict[str, bytes | None]) -> set[str]:
    return {name for name in before | after if before.get(name, b"") != after.get(name, b"")}


def test_looking_at_an_assignment_changes_nothing(run_copy: Path) -> None:
    moeq_in(run_copy, "assign", "--code-bits", "3")
    before = tree(run_copy)
    shown = moeq_in(run_copy, "assign", "--frontier", "--price", "--json", "--quiet")
    assert {"prices", "frontier"} <= json.loads(shown.stdout).keys()
    assert differing(before, tree(run_copy)) == {"assign/frontier.json", "assign/frontier.svg"}
    edited = edit(run_copy)
    moeq_in(run_copy, "assign", "--price")
    assert (run_copy / ASSIGNMENT).read_bytes() == edited


@pytest.mark.full
def test_options_go_into_the_recipe_and_are_said(run_copy: Path, moeq: ForkServer) -> None:
    done = moeq.run("assign", "--out", run_copy, "--code-bits", "3", "--method", "frequency")
    said = [line for line in done.stderr.splitlines() if line.startswith(RECIPE)]
    assert said == [f"{RECIPE}: assign.method optimal -> frequency, assign.code_bits 2 -> 3"]
    assert yaml.safe_load((run_copy / RECIPE).read_text("utf-8"))["assign"]["code_bits"] == 3
    made = (run_copy / ASSIGNMENT).read_bytes()
    events = dict(follow(running := moeq.start("run", "--out", run_copy)))
    assert running.wait().code == 0
    assert events["assign"] == "skipped"
    assert (run_copy / ASSIGNMENT).read_bytes() == made


def test_a_stage_command_that_changes_nothing_writes_nothing(run_copy: Path) -> None:
    before = tree(run_copy)
    for stage in STAGES:
        moeq_in(run_copy, stage, "--quiet")
    assert differing(before, tree(run_copy)) == set()


@pytest.mark.full
def test_what_was_edited_by_hand_is_kept(run_copy: Path, moeq: ForkServer) -> None:
    edited = edit(run_copy)
    assert "edited by hand, kept" in moeq.run("assign", "--out", run_copy).stderr
    assert json.loads(moeq_in(run_copy, "assign", "--json", "--quiet").stdout)["edited"] == ["assignment.json"]
    before = tree(run_copy)
    otherwise = (
        ("assign", "--code-bits", "3"),
        ("run", "--set", "assign.code_bits=3"),
        ("run", "--set", "corpus.sequences=11"),  # from which profile, losses and the assignment follow
    )
    for command in otherwise:
        with pytest.raises(ArtifactError, match=r"assign/assignment\.json: edited by hand.*--force.*undo the change"):
            moeq_in(run_copy, *command, "--quiet")
        assert differing(before, tree(run_copy)) == set(), command
    told = (run_copy / "report" / "report.html", run_copy / "checkpoint" / "README.md")
    assert not any(EDITED in page.read_text("utf-8") for page in told)
    moeq_in(run_copy, "run", "--quiet")
    assert (run_copy / ASSIGNMENT).read_bytes() == edited
    assert all(EDITED in page.read_text("utf-8") for page in told)
    moeq_in(run_copy, "assign", "--code-bits", "3", "--force", "--quiet")
    bits = [
        one["bits"] for layer in json.loads((run_copy / ASSIGNMENT).read_text())["layers"] for one in layer["experts"]
    ]
    assert sum(bits) == 3 * len(bits)


def test_force_makes_an_edited_assignment_anew(run_copy: Path, finished_run: Path) -> None:
    edit(run_copy)
    moeq_in(run_copy, "run", "--force", "--quiet")
    assert (run_copy / ASSIGNMENT).read_bytes() == (finished_run / ASSIGNMENT).read_bytes()


@pytest.mark.full
@pytest.mark.parametrize("command", ["run", "assign"])
def test_an_edit_without_a_record_is_kept(run_copy: Path, command: str) -> None:
    edited = edit(run_copy)
    (run_copy / "assign" / "stage.json").unlink()
    moeq_in(run_copy, command, "--quiet")
    assert (run_copy / ASSIGNMENT).read_bytes() == edited
    assert "by hand" in inspection.inspect(run_copy)["assign"]


def stands(run: Path) -> set[str]:
    """The stages that are finished: their record and every file that it names, as it names them."""
    found = {name for name in STAGES if (run / DIRECTORIES.get(name, name)).exists()}
    for name in found:
        inspection.check_files(run / DIRECTORIES.get(name, name), read_record(run / DIRECTORIES.get(name, name), name))
    return found


@pytest.mark.full
def test_killed_at_every_rename_of_a_second_run(moeq: ForkServer, recipe: Path, run_copy: Path) -> None:
    """Every stage that was finished stands, as it was before or as it is now."""
    again = (
        "run",
        recipe,
        "--out",
        run_copy,
        "--set",
        "assign.code_bits=3",
        "--set",
        "corpus.sequences=11",
        "--quiet",
    )
    for rename in range(1, 100, 2):
        code = moeq.run(*again, die_at_rename=rename).code
        assert stands(run_copy) == set(STAGES), rename
        shown = inspection.inspect(run_copy)
        assert "not run" not in [shown[stage] for stage in STAGES]
        if code == 0:
            break
    assert code == 0
    assert partials(run_copy) == list(run_copy.glob(f"*{BEGUN}")) == []


def test_a_directory_that_cannot_be_exchanged_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file system cannot exchange names: killed between two renames, the next run puts the old one back."""
    monkeypatch.setattr("moeq.artifacts.files._exchange", lambda *_: False)
    for text in ("old", "new"):
        with building(tmp_path / "made") as unfinished:
            (unfinished / "file").write_text(text)
    assert (tmp_path / "made" / "file").read_text() == "new"
    (tmp_path / "made").rename(tmp_path / "made.old.partial")
    remove_partials(tmp_path, ["made"])
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_link_makes_way_for_a_directory(tmp_path: Path) -> None:
    """What it leads to is left alone, and nothing stays beside it."""
    for name in ("there", "nowhere"):
        link = tmp_path / "run" / "checkpoint"
        link.parent.mkdir()
        (tmp_path / "there").mkdir(exist_ok=True)
        (tmp_path / "there" / "mine").write_text("mine")
        link.symlink_to(tmp_path / name)
        with building(link) as unfinished:
            (unfinished / "file").write_text("new")
        assert tree(link.parent) == {"checkpoint": None, "checkpoint/file": b"new"}
        assert not link.is_symlink()
        assert tree(tmp_path / "there") == {"mine": b"mine"}
        shutil.rmtree(link.parent)


def test_what_a_disk_refuses_is_named(tmp_path: Path) -> None:
    """The file where the error says which, by the folder's last name; never the lock that is held meanwhile."""
    with pytest.raises(StorageError) as refused, locked(tmp_path), building(tmp_path / "made") as unfinished:
        (unfinished / "sub" / "file").write_text("there is no folder sub")
    assert refused.value.where == str(tmp_path / "made" / "sub" / "file")
    for holding in (locked(tmp_path), claimed(tmp_path / "made")):
        with pytest.raises(OSError, match="No space left") as full, holding:
            raise OSError(28, "No space left on device")
        assert not isinstance(full.value, MoeqError), "whoever knows the file says it"
    (tmp_path / "empty").mkdir()
    for name, made in (("made", building), ("empty", filling)):
        with pytest.raises(StorageError) as refused, made(tmp_path / name):
            raise OSError(28, "No space left on device")
        assert refused.value.where == str(tmp_path / name)


def test_logits_that_a_disk_refuses_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: closing their file, which has no name, is no second error."""
    full = Path("/dev/full")
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda buffering=-1, **_: full.open("wb", buffering))
    logits = torch.zeros(3, 16)
    scored = Scored(logits=logits, logprobs=logits.double(), targets=torch.arange(3), scores=logits[:, 0].double())
    reference = ReferenceLogits(tmp_path, 3)
    with pytest.raises(StorageError, match="cannot write the reference's logits: No space left"):
        reference.write((0, 0), scored)
    reference.close()


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", ["profile", "losses", "quantize", "export", "eval", "estimate", "report"])
def test_a_failure_on_the_way_loses_nothing(run_copy: Path, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full when the record is written, the last that a stage does: what was finished before stands."""
    before = tree(run_copy)
    said = inspection.inspect(run_copy)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("moeq.pipeline.write_record", full)
    changed = {"profile": "corpus.sequences=11", "losses": "losses.damping=0.02", "quantize": "quantize.replicas=all",
               "export": "export.max_shard=1MB", "eval": "eval.perplexity.sequences=3",
               "estimate": "estimate.context=99", "report": "name=other"}  # fmt: skip
    with pytest.raises(StorageError, match="No space left"):
        moeq_in(run_copy, stage, "--set", changed[stage], "--quiet")
    left = differing(before, tree(run_copy))
    assert not {name for name in left if not name.startswith(("store", f"losses{BEGUN}"))} - {"checkpoint/README.md"}
    assert inspection.inspect(run_copy) == said


def test_sigterm_is_an_interrupt(moeq: ForkServer, recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for _ in range(5):  # on a busy machine the signal can come after the run has ended: then once more
        running = moeq.start("run", recipe, "--out", run)
        for stage, event in follow(running):
            if (stage, event) == ("quantize", "begins"):
                running.signal(signal.SIGTERM)
        finished = running.wait()
        if finished.code != 0:
            break
        shutil.rmtree(run / "quantize")
    assert finished.code == 143, finished.stderr
    assert finished.stderr.splitlines()[-1] == "interrupted; run the same command to go on"
    assert partials(run) == []


# --- what is written is proven before it takes a place


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(data)


def _copy_flipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def flipping(source: Path, target: Path) -> None:
        shutil.copyfile(source, target)
        if target.name == "experts-layer-001.safetensors":
            _flip(target)

    monkeypatch.setattr("moeq.exporters.native_writer.place", flipping)


def _weights_flipped(monkeypatch: pytest.MonkeyPatch) -> None:
    from moeq.exporters import plain

    def flipping(source: Any, keys: Any, directory: Path, *more: Any) -> dict[str, str]:
        where = plain.write_plain(source, keys, directory, *more)
        _flip(directory / sorted(set(where.values()))[0])
        return where

    monkeypatch.setattr("moeq.exporters.native_writer.write_plain", flipping)


@pytest.mark.parametrize(
    ("tamper", "error", "what"),
    [
        (_copy_flipped, ArtifactError, r"experts-layer-001\.safetensors: is not what quantize wrote"),
        (_weights_flipped, EvaluationError, r"is not as in tiny"),
    ],
)
def test_an_export_is_compared_with_what_it_was_made_of(
    run_copy: Path,
    monkeypatch: pytest.MonkeyPatch,
    tamper: Callable[[pytest.MonkeyPatch], None],
    error: type[MoeqError],
    what: str,
) -> None:
    """A bit that flips while the checkpoint is written: the manifest is made of what lies on the disk, and has it."""
    before = tree(run_copy)
    tamper(monkeypatch)
    with pytest.raises(error, match=what) as raised:
        moeq_in(run_copy, "export", "--set", "export.verify=true", "--set", "export.max_shard=1GB", "--quiet")
    assert ".partial" not in str(raised.value)
    assert differing(before, tree(run_copy)) == set()


def test_a_conversion_appears_when_it_is_right(finished_run: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from moeq.exporters import dequantized

    whole = dequantized.value_of
    monkeypatch.setattr(dequantized, "value_of", lambda *given: whole(*given) * 1.001)
    with pytest.raises(EvaluationError, match="its values differ"):
        conversion.convert(finished_run / "checkpoint", "dequantized", tmp_path / "out", verify=True)
    assert list(tmp_path.iterdir()) == []


def test_two_conversions_do_not_share_a_directory(finished_run: Path, tmp_path: Path) -> None:
    with claimed(tmp_path / "out"), pytest.raises(StorageError, match="another moeq run is working here"):
        conversion.convert(finished_run / "checkpoint", "dequantized", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    conversion.convert(finished_run / "checkpoint", "dequantized", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# --- the process that verifies


def request_for(checkpoint: Path) -> launch.Request:
    sizes: dict[str, Any] = {"inputs": {}, "layers": {}, "hidden": {}, "rows": 1, "trust_remote_code": False}
    sizes |= {"packages": {}, "load": "transformers_model", "logits_only": False, "loading": {}, "environment": {}}
    names = {"target": "moeq", "method": "moeq", "architecture": "", "dtype": "float32", "stored": "float32"}
    return launch.Request(checkpoint=checkpoint, **names, **sizes)


def test_a_verifying_process_that_is_killed_for_memory_is_named_so(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    process = subprocess.Popen(["sh", "-c", "sleep 60", str(tmp_path)])
    process.kill()
    with pytest.raises(EvaluationError, match=r"was killed \(SIGKILL\), as the system does when memory runs out"):
        launch.answer(process, request_for(tmp_path))


def test_a_verifying_process_has_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "BASE_SECONDS", 0.2)
    (tmp_path / "weights").write_bytes(bytes(1000))
    assert launch.limit_seconds(tmp_path) == pytest.approx(0.2 + 1000 / launch.BYTES_PER_SECOND)
    process = subprocess.Popen(["sleep", "60"])
    with pytest.raises(EvaluationError, match=r"no answer in 0\.2 s"):
        launch.answer(process, request_for(tmp_path))
    process.kill()
    process.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_a_verifying_process_dies_with_its_parent(tmp_path: Path) -> None:
    child = "import os, runpy, sys, time; runpy.run_path(sys.argv[1])['die_with'](os.getppid()); print('x', flush=True)"
    parent = (
        "import subprocess, sys, time;"
        "one = subprocess.Popen([sys.executable, '-c', sys.argv[1] + '; time.sleep(60)', sys.argv[2]], stdout=-1);"
        "one.stdout.read(1); print(one.pid, flush=True); time.sleep(60)"
    )
    arguments = [sys.executable, "-c", parent, child, probe.__file__]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        pid = int(started.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        started.kill()
    for _ in range(200):
        if _gone(pid):
            return
        time.sleep(0.05)
    raise AssertionError("it lives on")


def _gone(pid: int) -> bool:
    """Whether a process has ended: nobody may have asked yet how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
