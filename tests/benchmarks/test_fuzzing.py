"""The counted run of fuzzing: how inputs are shared out, and that a crash is counted and kept."""

from __future__ import annotations

from pathlib import Path

import fuzzing
import pytest


class Stub:
    """A target that crashes at every tenth seed."""

    def target(self, name: str) -> None: ...

    def mutated(self, name: str, seed: int) -> bytes:
        return str(seed).encode()

    def run(self, name: str, data: bytes, *, memory: bool) -> str:
        if int(data) % 10 == 0:
            raise KeyError("lost")
        return "read" if int(data) % 2 else "refused"


def test_every_reader_has_its_inputs_and_the_rest_goes_where_it_is_quick() -> None:
    jobs = list(fuzzing.chunks(["a", "b"], {"a": 1200, "b": 100}, {"a": 0, "b": 50}, seed=2))
    assert jobs == [
        ("a", 2 * fuzzing.STEP, 500),
        ("b", 2 * fuzzing.STEP + 50, 100),
        ("a", 2 * fuzzing.STEP + 500, 500),
        ("a", 2 * fuzzing.STEP + 1000, 200),
    ]
    shared = fuzzing.shares(1000, {"a": 0.001, "b": 0.003})
    assert shared == {"a": 750, "b": 250}


def test_crashes_are_counted_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fuzzing, "FUZZED", Stub(), raising=False)
    counted = fuzzing.run_chunk("header", 1, 40)
    counted.add(fuzzing.run_chunk("header", 41, 10))
    assert counted.cells()[:5] == ["header", "50", "25", "20", "5"]
    fuzzing.keep(counted, tmp_path, Stub())
    assert [path.name for path in tmp_path.iterdir()] == ["header-10"]  # one of each place
    said = capsys.readouterr().out
    assert "KeyError: 'lost'" in said
    assert f"--replay header {tmp_path / 'header-10'}" in said


def test_a_refusal_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub()
    monkeypatch.setattr(stub, "run", lambda name, data, memory: "refused")
    monkeypatch.setattr(fuzzing, "FUZZED", stub, raising=False)
    counted = fuzzing.run_chunk("header", 0, 30)
    assert (counted.outcomes["refused"], counted.crashes) == (30, [])
