"""Finding the GPU's settings with a measuring function that is not a GPU, and what `make gpu` keeps and gathers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import failures
import gpu
import gpu_tuning
import gpu_wheels
import pytest

from moeq_kernels.gpu import settings
from moeq_kernels.gpu.settings import Settings, Shape, candidates, choose, usual

SHAPE = Shape(experts=8, rows=4096, inputs=14336, widths=1 << 4, pairs=2, two=False)


def pretended(one: Settings) -> float:
    """Seconds: fastest with 128 x 8 blocks, 4 splits and two persistent programs; blocks of 32 do not fit."""
    if one.block_n == 32:
        raise RuntimeError("first line\nout of resource: shared memory")
    return 1 + abs(one.block_n - 128) + one.block_m + abs(one.splits - 4) + abs(one.persistent - 2) + one.sort


def fastest(measure: gpu_tuning.Measure) -> Settings:
    search = gpu_tuning.Search(SHAPE, measure)
    search.blocks()
    return search.programs()


def test_the_fastest_settings_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    found = fastest(pretended)
    assert (found.block_n, found.block_m, found.splits, found.persistent, found.sort) == (128, 8, 4, 2, False)
    assert "out of resource: shared memory" in capsys.readouterr().out
    assert fastest(lambda one: 1.0 + (one != usual(SHAPE))) == usual(SHAPE)


def test_a_table_is_written_launch_by_launch_and_read_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of every launch before the programs of one."""
    monkeypatch.setattr(settings, "TUNED", tmp_path)
    second = Shape(experts=8, rows=4096, inputs=14336, widths=1 << 2, pairs=2, two=False)

    def stopped(_: Settings) -> float:
        found = choose(SHAPE, "NVIDIA H200")
        assert (found.block_n, found.splits, found.persistent) == (128, 4, 0), "what was found is there already"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gpu_tuning.tune("NVIDIA H200", [(SHAPE, pretended), (SHAPE, stopped), (second, stopped)], seconds=60)
    assert choose(second, "NVIDIA H200") == usual(second)
    found = gpu_tuning.tune("NVIDIA H200", [(SHAPE, pretended), (second, pretended)], seconds=60)
    assert choose(SHAPE, "NVIDIA H200") == found[SHAPE.key] == fastest(pretended) != usual(SHAPE)
    assert choose(SHAPE, "NVIDIA H100 80GB HBM3") == usual(SHAPE)
    assert gpu_tuning.tune("NVIDIA H100 80GB HBM3", [(SHAPE, stopped)], seconds=-1) == {}


def test_programs_are_compiled_in_shares() -> None:
    """Each once, for launches that differ in sizes alone, by one of the processes; none when the time is over."""
    called: list[tuple[int, Settings]] = []
    shapes = SHAPE, replace(SHAPE, experts=128, inputs=2048, rows=768), replace(SHAPE, widths=1 << 2)
    launches = [(one, lambda given, at=at: called.append((at, given)) or 1.0) for at, one in enumerate(shapes)]
    for number in range(3):
        gpu_tuning.share(launches, number, 3, seconds=60)
    wanted = [{usual(one), *candidates(one)} for one in shapes]
    assert {one for at, one in called if at == 0} == wanted[0]
    assert {one for at, one in called if at == 1} == wanted[1] - wanted[0]
    assert {one for at, one in called if at == 2} == wanted[2]
    assert len(called) == len({*called})
    gpu_tuning.share(launches, 0, 1, seconds=-1)
    assert len(called) == len({*called})


def test_from_how_many_rows_on_unpacking_is_faster() -> None:
    assert gpu_tuning.rows_to_unpack(lambda rows: 2.0 * rows, lambda rows: 300.0 + rows) == 512
    assert gpu_tuning.rows_to_unpack(lambda rows: 1.0 * rows, lambda rows: 300.0 + rows) is None


def test_parts_that_ended_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = gpu.Runs({}, tmp_path / "made" / "summary.json", seconds=60.0, about={"device": "none"})
    runs.run("good", "-c", "print('x')")
    runs.run("bad", "-c", "raise SystemExit(3)")
    runs.seconds = 0.0
    runs.run("late", "-c", "print('never')")
    found = json.loads(runs.summary.read_text("utf-8"))
    assert [(one["part"], one["ended"]) for one in found["parts"]] == [("good", "ok"), ("bad", "FAILED")]
    assert found["device"] == "none"
    assert found["failed"] == ["bad"]
    assert found["not run"] == ["late: 0 s are over"]
    assert "== good: ok" in capsys.readouterr().out


def test_what_fails_is_told_before_a_run_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "test_slow.py").write_text(
        "import os, pytest\ndef test_bad():\n    assert 1 == 2, 'of one'\ndef test_stopped():\n    os._exit(9)\n"
    )
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment = own | {
        "PYTHONPATH": str(gpu.ROOT / "benchmarks"),
        failures.VARIABLE: str(tmp_path / "told" / "f"),
    }
    words = ["-m", "pytest", "-p", failures.__name__, "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    done = subprocess.run([sys.executable, *words, "test_slow.py"], cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 9
    told = (tmp_path / "told" / "f").read_text("utf-8")
    assert told.startswith("== test_slow.py::test_bad (call)\n")
    assert "of one" in told


def test_the_large_wheels_come_when_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, wanted in ((["--list"], False), (["--list", "--whole"], True)):
        monkeypatch.setattr(sys, "argv", ["gpu_wheels.py", *words])
        assert gpu_wheels.main() == 0
        names = capsys.readouterr().out.split()
        assert "pytest" in names
        assert all((name in names) == wanted for name in gpu_wheels.LARGE)


class Noted(gpu.Runs):
    def run(self, name: str, *words: str, **more: str) -> None:
        commands[name] = words
        threads[name] = more.get("OMP_NUM_THREADS")


commands: dict[str, tuple[str, ...]] = {}
threads: dict[str, str | None] = {}


@pytest.mark.parametrize("name", ["dynamic", "gptq", "gptq_model"])
def test_what_is_measured_on_cuda_is_named_where_there_is_none(name: str, tmp_path: Path) -> None:
    commands.clear()
    runs = Noted(dict(os.environ), tmp_path / "summary.json", seconds=60.0)
    gpu.benchmarks(runs, True, tmp_path, tune=False)
    assert commands[name][:3] == (f"benchmarks/{name}.py", "--device", "cuda")
    assert commands[name][-2:] == ("--json", str(tmp_path / f"{name}.json"))
    assert not runs.not_run
    commands.clear()
    gpu.benchmarks(runs, False, tmp_path, tune=False)
    assert name not in commands
    assert f"{name}: {gpu.NONE}" in runs.not_run


def test_precision_that_changes_is_tested_whole_on_a_gpu(tmp_path: Path) -> None:
    commands.clear()
    runs = Noted(dict(os.environ), tmp_path / "summary.json", seconds=60.0)
    gpu.tests(runs, True, tmp_path)
    assert gpu.MARK in (gpu.ROOT / gpu.DYNAMIC).read_text("utf-8")
    assert commands["dynamic precision"][-1] == "tests/runtime/test_dynamic_on_gpu.py"
    assert gpu.DYNAMIC not in commands["other CUDA tests"]
    assert commands["other CUDA tests"][6:10] == ("-n", str(gpu.BESIDE), "--dist", "load")
    assert threads["other CUDA tests"] == "1", "processes side by side, each of one thread"
    assert not runs.not_run
    gpu.tests(runs, False, tmp_path)
    assert f"CUDA tests of {gpu.DYNAMIC}: {gpu.NONE}" in runs.not_run


WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(("numba", "llvmlite", "pyarrow")))  # as where they are not installed
sys.path.insert(0, "benchmarks")
import gpu_kernels, pytest
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "tests/kernels/gpu"]))
"""


def test_kernels_tests_and_benchmark_are_found_without_the_large_wheels() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], cwd=gpu.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "tests/kernels/gpu/test_products.py" in done.stdout
