"""`moeq report --analysis`: files from a profile with its trace alone, and errors in one line."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner

from moeq import cli, pipeline
from moeq.artifacts.low_precision import Curve, LowPrecisionReport, Point, Sweep, write_sweeps
from moeq.artifacts.trace import NAME as TRACE
from moeq.artifacts.trace import read_trace, write_trace
from moeq.errors import ArtifactError, RecipeError
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages import analysis, profile
from moeq.stages.context import Context

SMALL = ("corpus.sequences=8", "corpus.sequence_length=32", "profile.trace=true")


@pytest.fixture(scope="module")
def profiled(tiny_qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Context:
    """A run of which only the profile is done."""
    found = Context(
        recipe=load_recipe(None, SMALL),
        model_name=str(tiny_qwen),
        out=tmp_path_factory.mktemp("analysis") / "run",
        reporter=Reporter(quiet=True),
    )
    pipeline.run(found, ("profile",))
    return found


def command(one: Context, *more: str) -> dict[str, Any]:
    arguments = ["report", "--out", str(one.out), "--json", "--quiet", *more]
    found: dict[str, Any] = json.loads(CliRunner().invoke(cli.app, arguments, catch_exceptions=False).stdout)
    return found


def test_the_files_say_what_the_profile_says(profiled: Context, tmp_path: Path) -> None:
    found = command(profiled, "--analysis", str(tmp_path / "found"))
    assert sorted(found["files"]) == sorted(str(path) for path in (tmp_path / "found").iterdir())
    table = json.loads((tmp_path / "found" / "routing.json").read_text("utf-8"))
    counted = profile.load(profiled)
    assert (table["text_digest"], table["model"]["digest"]) == (counted.text, profiled.model.stamp.digest)
    assert table["prefill_decode_cosine"]["all"]["own_decode_by_layer"] == pytest.approx(counted.similarity(), abs=1e-6)
    whole = found["prefill_decode_cosine"]["all"]
    assert whole["own_decode"] == pytest.approx(np.mean([one for one in counted.similarity() if one is not None]))
    assert whole["decode_of_another"] < whole["own_decode"]
    assert set(table["sequences"]) == set(profiled.text.calibration.domains)
    with (tmp_path / "found" / "activation-all.csv").open(newline="") as file:
        values = [float(row["value"]) for row in csv.DictReader(file)]
    assert values == pytest.approx(np.concatenate(counted.activation()).tolist())
    for name in (*table["sequences"], "all"):
        path = tmp_path / "found" / (f"activation-domain-{name}.svg" if name != "all" else "activation-all.svg")
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
    assert sum(name.endswith("decode.csv") for name in found["files"]) == 2, "two single sequences"
    assert not (profiled.directory("report")).exists()


def test_curves_of_the_evaluation_come_along(profiled: Context, tmp_path: Path) -> None:
    points = tuple(Point(share=share, low_experts=int(14 * share), perplexity=20 + share) for share in (0.0, 0.5, 1.0))
    curves = tuple(Curve(order=order, number=None, points=points) for order in ("coldest", "hottest"))
    sweep = Sweep(low_bits=2, high_bits=16, quantizer="rtn", experts=14, sequences=4, tokens=124, curves=curves)
    profiled.directory("eval").mkdir()
    write_sweeps(profiled.directory("eval") / "low_precision.json", LowPrecisionReport(sweeps=(sweep,)))
    analysis.write(profiled, tmp_path / "found")
    ElementTree.parse(tmp_path / "found" / "low-precision-2-of-16-0.svg")
    copied = json.loads((tmp_path / "found" / "low_precision.json").read_text("utf-8"))
    assert copied["sweeps"][0]["curves"][1]["points"][1] == {"share": 0.5, "low_experts": 7, "perplexity": 20.5}


def test_what_is_missing_is_said_in_one_line(profiled: Context, tiny_qwen: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="--analysis goes without --maps"):
        command(profiled, "--analysis", str(tmp_path / "a"), "--maps", str(tmp_path / "b"))
    bare = replace(profiled, out=tmp_path / "run")
    with pytest.raises(ArtifactError, match=r"no routing trace .*moeq profile RUN --set profile.trace=true") as caught:
        analysis.write(bare, tmp_path / "a")
    assert "\n" not in str(caught.value)
    pipeline.run(bare, ("profile",))
    path = bare.directory("profile") / TRACE
    write_trace(path, replace(read_trace(path), text="0" * 64))
    with pytest.raises(ArtifactError, match="of other text than the profile"):
        analysis.write(bare, tmp_path / "a")
    assert not (tmp_path / "a").exists()
