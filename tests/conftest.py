"""Shared fixtures: tiny random models of awkward sizes, and no network."""

from __future__ import annotations

import os

for _name, _value in {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_WAIT_POLICY": "PASSIVE",
}.items():
    os.environ.setdefault(_name, _value)

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import FULL, save_tiny


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not FULL:
        for item in items:
            if item.get_closest_marker("full"):
                item.add_marker(pytest.mark.skip(reason="long sweep: make test-full"))


@pytest.fixture(autouse=True)
def probe_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any) -> None:
    """Exports are verified in this process, which takes a fraction of a second, but in tests marked fresh_process."""
    launch = sys.modules.get("moeq.verification.launch")
    if launch is None or request.node.get_closest_marker("fresh_process"):
        return
    from moeq.verification import probe

    fresh = launch.started

    @contextmanager
    def started(wanted: Any, python: str | None) -> Iterator[Any]:
        if wanted.target not in ("moeq", "transformers") or wanted.method == "compressed-tensors":
            with fresh(wanted, python) as process:  # peers change transformers for the rest of a process
                yield process
            return
        folder = tmp_path_factory.mktemp("probe")
        launch.write_request(folder, wanted)
        probe.main(folder)
        yield SimpleNamespace(args=["python", "probe.py", str(folder)], wait=lambda: 0, poll=lambda: 0)

    monkeypatch.setattr(launch, "started", started)


@pytest.fixture(scope="session")
def tiny_mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "mixtral", "mixtral")


@pytest.fixture(scope="session")
def tiny_qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bfloat16, a dense layer before the sparse one, odd numbers of experts."""
    folder = tmp_path_factory.mktemp("models") / "qwen3_moe"
    return save_tiny(folder, "qwen3_moe", torch.bfloat16, num_hidden_layers=3, mlp_only_layers=[0])
