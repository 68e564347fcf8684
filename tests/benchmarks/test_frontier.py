"""The frontier's goals, the file that a stopped run goes on from, and its plot; the figures take minutes."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import bench
import figures
import frontier
import pytest
from frontier_plot import STYLES, Point, plot


def point(method: str, kind: str, bits: float, kl: float, model: str = "tiny-mixtral") -> Point:
    return Point(model, method, kind, f"{bits:.1f}", bits, 25.0, kl, 0.001, 0.9, 1.0)


POINTS = [
    point("GPTQ", "uniform", 2.18, 0.14),
    point("GPTQ", "mixed", 2.1, 0.08),
    point("GPTQ", "mixed", 2.99, 0.016),
    point("trellis, 1024 states", "mixed", 2.99, 0.009),
    point("trellis, 1024 states", "tuned", 2.99, 0.008),
    point("trellis, 1024 states", "tuned, dropping", 2.98, 0.007),
    point("trellis, 256 states", "mixed, dropping", 2.98, 0.0085),
    point("auto-round", "peer", 2.25, 0.10),
    point("auto-round", "peer", 3.25, 0.018),
    point("GPTQ", "mixed", 2.1, 0.06, "tiny-qwen3-moe"),
]


def options(tmp_path: Path, **given: Any) -> argparse.Namespace:
    values = {"names": ["a", "b"], "methods": ["GPTQ", "learned codes"], "bits": ["2"], "budgets": ["2.3", "2.6"]}
    values |= {"tune": 512, "peers": ["gptqmodel"], "models": tmp_path, "seconds": 60.0, "quick": False, "started": 0.0}
    return argparse.Namespace(**(values | {"json": None} | given))


def test_goals_count_no_more_bits_than_the_peer_has(tmp_path: Path) -> None:
    results = figures.Figures(options(tmp_path))
    frontier.goals(results, POINTS)
    found = {figure.name: figure for figure in results.figures}
    assert found["tiny-mixtral: KL at 3.0 bits, not tuned"].value == 0.0085
    assert found["tiny-mixtral: KL at 3.0 bits, tuned or not"].value == 0.007
    ratio = found["tiny-mixtral: KL of moeq's best mixed, of auto-round's at most"]
    assert ratio.value == pytest.approx(0.8)  # .08 at 2.1 against .10, where 2.99 against 3.25 has half
    assert ratio.met
    assert found["tiny-qwen3-moe: KL at 3.0 bits, not tuned"].at_most is None, "its goal is another"
    frontier.goals(results, [point("gptqmodel", "peer", 2.0, 1.0), POINTS[1]])
    assert math.isnan(results.figures[-1].value), "no point of moeq's is as small"
    assert not results.figures[-1].met


def test_bits_of_a_peer_count_its_scales_and_zero_points() -> None:
    assert frontier.peer_bits("auto-round", 2, 64) == 2.25
    assert frontier.peer_bits("gptqmodel", 2, 64) == 2 + 18 / 64


def test_a_stopped_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Points that the file has are not measured again; what cannot be had is said; time ends between two points."""
    asked: list[tuple[str, ...]] = []

    def measure(self: frontier.Frontier, key: frontier.Key) -> Point:
        asked.append((self.name, *key))
        if key[1] == "peer":
            raise RuntimeError("it is not installed")
        return Point(self.name, *key, 2.0, 25.0, 0.1, 0.01, 0.9, 1.0)

    monkeypatch.setattr(frontier.Frontier, "measure", measure)
    monkeypatch.setattr(frontier.time, "monotonic", lambda: float(len(asked)))
    points: list[Point] = []
    given = options(tmp_path, seconds=3.5)
    assert list(frontier.measured(given, points, tmp_path, lambda: None)) == [
        ("16 points", "the time was over; run the same command again")
    ]
    assert [entry[0] for entry in asked] == ["a", "b", "a", "b"]  # by turns
    path = tmp_path / "frontier.json"
    path.write_text(json.dumps({"points": [asdict(one) for one in points], "seconds": 7.0}))
    points, seconds = frontier.read(path)
    assert seconds == 7
    first = list(asked)
    left_out = list(frontier.measured(options(tmp_path, seconds=99), points, tmp_path, lambda: None))
    assert left_out[0] == ("a: gptqmodel, peer, 2 bits", "it is not installed")
    assert len(left_out) == 6
    assert len(set(asked)) == len(asked) == 20
    assert asked[: len(first)] == first


def test_the_plot_names_every_line() -> None:
    drawn = plot(POINTS)
    assert drawn == plot(POINTS)
    root = ElementTree.fromstring(drawn)
    texts = ["".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")]
    for name in ("GPTQ", "trellis, 1024 states", "trellis, 1024 states, tuned", "auto-round", "0.01", "0.1"):
        assert name in texts, name
    assert "var(" not in drawn
    assert "#0a01f" not in drawn
    assert {point.method for point in POINTS} <= set(STYLES)


def test_results_show_the_plot(tmp_path: Path) -> None:
    made, kept, results = tmp_path / "made", tmp_path / "results", tmp_path / "RESULTS.md"
    made.mkdir()
    results.write_text("# Results\n")
    written = {"date": "d", "commit": "c", "machine": "m", "seconds": 1.0, "command": "x", "tables": [], "left_out": []}
    figure = figures.Figure(name="KL", value=0.01).as_json()
    plotted = {"figures": [figure], "plot": ["frontier.svg", "KL against bits"]}
    (made / "frontier.json").write_text(json.dumps(written | plotted))
    (made / "frontier.svg").write_text(plot(POINTS))
    bench.record(made, kept, results)
    assert "![KL against bits](results/frontier.svg)" in results.read_text()
    assert (kept / "frontier.svg").read_text() == plot(POINTS)
