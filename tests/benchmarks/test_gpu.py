"""`make gpu`: what it runs with a GPU, and what it names without one."""

from __future__ import annotations

from pathlib import Path

import gpu
import pytest


class Noted(gpu.Runs):
    def run(self, name: str, *words: str) -> None:
        commands[name] = words


commands: dict[str, tuple[str, ...]] = {}


@pytest.mark.parametrize("name", ["gptq", "gptq_model"])
def test_gptq_is_measured_on_cuda_and_named_where_there_is_none(name: str, tmp_path: Path) -> None:
    commands.clear()
    runs = Noted({})
    gpu.benchmarks(runs, True, tmp_path)
    assert commands[name][:3] == (f"benchmarks/{name}.py", "--device", "cuda")
    assert commands[name][-2:] == ("--json", str(tmp_path / f"{name}.json"))
    assert not runs.not_run
    commands.clear()
    gpu.benchmarks(runs, False, tmp_path)
    assert name not in commands
    assert name in runs.not_run
