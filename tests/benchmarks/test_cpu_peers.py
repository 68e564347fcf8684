"""What the comparison with other libraries' CPU kernels shows where one is not there, or fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cpu_peers
import figures
import pytest

SECONDS = {"exact": 2.0, "int8": 1.0, "auto-round-lib": 3.0, "llama.cpp": 0.5, "llama.cpp Q4_K": 4.0}


class Made:
    """A contender whose seconds are made up; the log names it as its last line."""

    broken: tuple[str, ...] = ()
    asked: list[tuple[str, str, int]]

    def __init__(self, name: str, python: Path, threads: int, log: Path) -> None:
        self.key, self.log = log.stem.replace("llama.cpp-", "llama.cpp "), log
        log.write_text(f"starts\n{self.key} says why\n")

    def ask(self, **job: Any) -> dict[str, Any]:
        if self.key in self.broken:
            raise RuntimeError(self.key)
        self.asked.append((self.key, job["kind"], job["rows"]))
        return {"seconds": SECONDS[self.key] / 1e6, "bits": 4.5}

    def close(self) -> None:
        pass


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> figures.Figures:
    """Of a run in which all peers are installed and every form runs."""
    monkeypatch.setattr(cpu_peers, "Contender", Made)
    monkeypatch.setattr(cpu_peers, "PAUSE", 0)
    monkeypatch.setattr(cpu_peers, "forms", lambda *, int8: ["form"])
    monkeypatch.setattr(Made, "broken", ())
    monkeypatch.setattr(Made, "asked", [], raising=False)
    for peer in cpu_peers.PEERS:
        python = tmp_path / peer.package / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.touch()
    given = figures.parsed(figures.parser("", rounds=3, peers=tmp_path), [])
    return figures.Figures(given)


def compared(results: figures.Figures, logs: Path, bits: int = 4) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The last cells of the rows, and what was refused."""
    comparison = cpu_peers.Comparison(results, 1, logs)
    comparison.compare("matrix", bits)
    comparison.close()
    return {row[0]: row[1:] for row in results.tables[-1]["rows"]}, comparison.refused


def test_forms_stand_beside_their_peers(results: figures.Figures, tmp_path: Path) -> None:
    rows, refused = compared(results, tmp_path)
    assert not refused
    assert rows["matrix, 4 bits, m = 1, auto-round-lib int4"] == ["2", "4.50", "3", "4.50", "1.50x"]
    assert rows["matrix, 4 bits, m = 16, llama.cpp Q4_0"] == ["1", "4.50", "0", "4.50", "0.50x"]
    assert rows["matrix, 4 bits, m = 16, llama.cpp Q4_K"][-1] == "4.00x"
    found = {figure.name: (figure.value, figure.met) for figure in results.figures}
    assert len(found) == len(rows) == 6
    assert found["matrix, 4 bits, m = 1, threads 1, of the speed of llama.cpp's Q4_0"] == (0.5, False)
    assert Made.asked[:5] == [("exact", "", 1), ("int8", "", 1), ("auto-round-lib", "int4", 1),
                              ("llama.cpp", "Q4_0", 1), ("llama.cpp Q4_K", "Q4_K", 1)]  # fmt: skip
    assert Made.asked[5:10] == Made.asked[:5], "they take turns"


def test_a_peer_that_is_not_there_is_shown_as_not_run(results: figures.Figures, tmp_path: Path) -> None:
    (tmp_path / "llama-cpp-python" / "bin" / "python").unlink()
    rows, refused = compared(results, tmp_path, 2)
    assert rows["matrix, 2 bits, m = 1, llama.cpp Q2_K"] == ["1", "4.50", "not run", "", "not run"]
    assert rows["matrix, 2 bits, m = 1, auto-round-lib int2"][-1] == "1.50x"
    assert refused == {"llama.cpp": cpu_peers.MAKE}
    assert "make peers" in cpu_peers.MAKE


def test_a_peer_that_fails_says_why(results: figures.Figures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Made, "broken", ("auto-round-lib",))
    rows, refused = compared(results, tmp_path)
    assert rows["matrix, 4 bits, m = 16, auto-round-lib int4"] == ["2", "4.50", "not run", "", "not run"]
    assert refused == {"auto-round-lib": "it failed: auto-round-lib says why"}
    assert len(results.figures) == 4


def test_a_cpu_without_the_form_says_so(
    results: figures.Figures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_peers, "forms", lambda *, int8: [] if int8 else ["form"])
    rows, refused = compared(results, tmp_path, 8)
    assert rows["matrix, 8 bits, m = 1, llama.cpp Q8_0"] == ["not run", "", "0", "4.50", "not run"]
    assert refused == {"int8": "this CPU has no dot products of bytes"}
