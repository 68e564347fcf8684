"""The workflow of docs/ci: its commands exist, it caches the store that it uses, and its steps run in a shell."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from documents import ROOT, blocks
from typer.main import get_command

from moeq.artifacts.run import STORE_VARIABLE, store_folder
from moeq.cli import app
from moeq.recipe import load_recipe

PAGE, WORKFLOW = ROOT / "docs" / "ci.md", ROOT / "docs" / "ci" / "moeq.yml"
COMMANDS = get_command(app).commands  # type: ignore[attr-defined]
INSTALL = "Install"  # the step that a test replaces by nothing: moeq is there, and nothing is downloaded
ALWAYS = "${{ !cancelled() }}"
TINY = """
model: bundled:tiny-mixtral
corpus: {sequences: 8, sequence_length: 32}
losses: {methods: [rtn], bits: [2, 4], group_size: 32, per_projection: false}
assign: {method: uniform, bits: 4, quantizer: rtn}
export: {verify: false}
eval: {perplexity: {sequences: 4, sequence_length: 32}, compare: []}
gates: {kl: KL, bytes: 1GiB, formats: [auto-round]}
"""


def workflow() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text("utf-8"))
    return found


def job() -> dict[str, Any]:
    (found,) = workflow()["jobs"].values()
    return dict(found)


def using(action: str) -> dict[str, Any]:
    """The settings of the one step that uses an action."""
    (found,) = (step["with"] for step in job()["steps"] if step.get("uses", "").partition("@")[0] == action)
    return dict(found)


def test_the_page_shows_the_file() -> None:
    (shown,) = (block.text for block in blocks(PAGE) if block.text.startswith("# Runs a moeq recipe"))
    assert shown == WORKFLOW.read_text("utf-8")


def test_the_recipe_that_it_shows_keeps_to_the_runtime_of_its_gate() -> None:
    (shown,) = (yaml.safe_load(block.text) for block in blocks(PAGE) if block.text.startswith("model:"))
    assert shown["gates"]["formats"] == [shown["assign"]["target"]]


def test_every_command_of_moeq_is_one_with_the_options_that_it_has() -> None:
    named = [line for step in job()["steps"] for line in step.get("run", "").splitlines() if line.startswith("moeq ")]
    assert [line.split()[1] for line in named] == ["plan", "run", "gc"]
    for line in named:
        _, command, *rest = shlex.split(line.partition("|")[0])
        COMMANDS[command].make_context(command, rest)


def test_the_store_that_is_cached_is_the_one_that_runs_use(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched, kept = using("actions/cache/restore"), using("actions/cache/save")
    store = job()["env"][STORE_VARIABLE]
    assert fetched["path"] == kept["path"] == store
    assert fetched["key"] == kept["key"]
    assert "github.run_id" in kept["key"], "a key that is there is never written again"
    monkeypatch.setenv(STORE_VARIABLE, "/somewhere/moeq-store")
    assert store_folder(load_recipe(None, []), Path("run")) == Path("/somewhere/moeq-store")


def test_a_failed_gate_fails_the_job_and_keeps_what_was_made() -> None:
    """The run's own step has no condition and a shell with pipefail; those behind it run in any case."""
    assert workflow()["defaults"]["run"]["shell"] == "bash"
    steps = job()["steps"]
    at = next(index for index, step in enumerate(steps) if step.get("run", "").startswith("moeq run"))
    assert "if" not in steps[at]
    assert "continue-on-error" not in steps[at]
    assert all(step["if"] == ALWAYS for step in steps[at + 1 :])
    run = job()["env"]["RUN"]
    paths = using("actions/upload-artifact")["path"].split()
    assert f"{run}/report/" in paths
    assert all(path.startswith(f"{run}/") for path in paths)


@pytest.mark.full
@pytest.mark.parametrize("holds", [True, False])
def test_its_steps_run_in_a_shell(holds: bool, tmp_path: Path) -> None:
    """All `run` steps but the installation, as the runner calls them, with a tiny recipe in the recipe's place."""
    (tmp_path / "bin").mkdir()
    moeq = tmp_path / "bin" / "moeq"
    moeq.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m moeq "$@"\n')
    moeq.chmod(0o755)
    place = tmp_path / "workspace"
    (place / "ci").mkdir(parents=True)
    (place / "ci" / "recipe.yaml").write_text(TINY.replace("KL", "1.0" if holds else "1.0e-9"))
    values = {name: value.replace("${{ github.workspace }}", str(place)) for name, value in job()["env"].items()}
    assert not re.search(r"\$\{\{", "".join(values.values()))
    environment = os.environ | values | {
        "PATH": f"{moeq.parent}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}:{ROOT / 'moeq-kernels'}",
        "HF_HUB_OFFLINE": "1", "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
    }  # fmt: skip
    failed: list[tuple[str, int]] = []
    for step in job()["steps"]:
        if "run" not in step or step["name"] == INSTALL or (failed and step.get("if") != ALWAYS):
            continue
        assert "${{" not in step["run"]
        shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        done = subprocess.run(
            shell, cwd=place, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        if done.returncode:
            failed.append((step["name"], done.returncode))
            print(done.stderr)
    assert failed == ([] if holds else [("Run", 14)])
    summary = (tmp_path / "summary.md").read_text("utf-8")
    assert ("gate kl: " in summary, "failed" in summary) == (True, not holds)
    for path in using("actions/upload-artifact")["path"].split():
        assert (place / path).exists()
    assert any(path.is_file() for path in (place / "moeq-store").rglob("*")), "the store is where the cache looks"
    assert not (place / values["RUN"] / "store").exists()
