"""Qualities compared on models that are trained for it: pairs, goals, the file that a stopped run goes on from."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import figures
import never_worse
import pytest
from never_worse import FAMILIES, QUALITIES, Point

QUICK = argparse.Namespace(quick=False, json=None, started=0.0)


def points(family: str, *kl: list[float]) -> list[Point]:
    return [Point(family, quality, 50.0, 2.29, 1.0, one) for quality, one in zip(QUALITIES, kl, strict=True)]


def test_the_interval_is_that_of_pairs() -> None:
    """Sequences differ much more than what two qualities make of one."""
    before, after = [1.0, 5.0, 9.0], [0.9, 4.8, 8.7]
    mean, half = never_worse.difference(before, after)
    assert mean == pytest.approx(-0.2)
    assert half == pytest.approx(1.96 * 0.1 / 3**0.5)


def test_a_model_counts_where_the_whole_interval_is_below_zero() -> None:
    results = figures.Figures(QUICK)
    clear, unclear = [0.2, 0.3, 0.4], [0.3, 0.1, 0.395]
    found = points("olmoe", [0.3, 0.4, 0.5], clear, unclear) + points("phimoe", clear, clear, [0.1, 0.2, 0.3])
    never_worse.findings(results, [*found, *points("dbrx", clear, clear, clear)[:2]])
    values = {figure.name: figure.value for figure in results.figures}
    assert values["models on which balanced loses less than fast"] == 1
    assert values["models on which best loses less than balanced"] == 1
    assert not results.figures[0].met, "it takes all of them"
    assert [row[0] for row in results.tables[0]["rows"]] == ["olmoe", "phimoe"], "what lacks a quality is left out"


def test_a_stopped_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[str] = []

    def train(family: str, *_: Any) -> None:
        trained.append(family)
        (tmp_path / family / "model").mkdir(parents=True)
        (tmp_path / family / "model" / "config.json").touch()

    monkeypatch.setattr(never_worse, "train", train)
    monkeypatch.setattr(never_worse, "measure", lambda family, quality, *_: Point(family, quality, 9, 2, 1, [0.1]))
    monkeypatch.setattr(never_worse.figures, "script", lambda _: None)
    found: list[Point] = []
    monkeypatch.setattr(never_worse.time, "monotonic", lambda: float(len(found)))
    given = {"families": ["olmoe", "phimoe"], "shared": tmp_path, "bits": "2.3", "steps": 1, "started": 0.0}
    assert never_worse.measured(argparse.Namespace(**given, seconds=3.5), found, tmp_path, lambda: None) == 2
    path = tmp_path / "file.json"
    path.write_text(json.dumps({"points": [asdict(one) for one in found], "seconds": 4.0}))
    again, seconds = never_worse.read(path)
    assert (again, seconds) == (found, 4.0)
    assert never_worse.measured(argparse.Namespace(**given, seconds=99.0), found, tmp_path, lambda: None) == 0
    assert [(one.family, one.quality) for one in found] == [(f, q) for f in ("olmoe", "phimoe") for q in QUALITIES]
    assert trained == ["olmoe", "phimoe"]


def test_ten_families_with_experts_that_moeq_quantizes() -> None:
    from moeq.models.experts import find_expert_layers

    assert len(FAMILIES) == 10
    for family in FAMILIES:
        model = never_worse.built(family)
        assert len(find_expert_layers(model)) >= 2, family
