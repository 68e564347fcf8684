"""Shared pieces of the robustness tests: a tiny random model, a short corpus."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from fork_server import ForkServer
from robustness.runs import save_short_corpus, save_tiny_model, tiny_recipe, write_recipe


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def short_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_short_corpus(tmp_path_factory.mktemp("corpus") / "short.jsonl")


@pytest.fixture(scope="session")
def recipe(tiny_model: Path, short_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("recipe") / "tiny.yaml", tiny_recipe(tiny_model, short_corpus))


@pytest.fixture(scope="session")
def finished_run(moeq: ForkServer, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run; copy it before changing anything."""
    out = tmp_path_factory.mktemp("finished") / "run"
    finished = moeq.run("run", recipe, "--out", out, "--quiet")
    assert (finished.code, finished.stderr) == (0, "")
    return out


@pytest.fixture
def run_copy(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in report.user_properties:
            if name == "refusals":
                terminalreporter.write_line(f"refusals walked: {value}")
