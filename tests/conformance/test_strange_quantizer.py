"""Somebody else's quantizer, one file and an entry point: from the recipe to plan, report and checkpoint."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from fork_server import ForkServer
from strangers import on_path, started, write_package

from moeq.artifacts.losses import NAME, read_losses
from moeq.artifacts.manifest import read_manifest
from moeq.quantizers.quantizer import label
from moeq.registry import QUANTIZERS

HALF = """
from pydantic import BaseModel, Field

from moeq.quantizers.quantizer import Quantizer


class Settings(BaseModel):
    strangers_share: float = Field(0.5, gt=0, le=1, description="strangers: part of the range that the grid spans")


def quantize(weights, statistics, settings):
    from moeq.quantizers.rounding import rounded

    found = {}
    for name, weight in weights.items():
        most = settings.strangers_share * weight.abs().amax((1, 2), keepdim=True)
        found[name] = rounded(weight.clamp(-most, most), None, settings, settings.bits, None)
    return found


def linear(weight, factor, grid):
    from moeq.numerics import gptq

    assert factor is None, "it needs none"
    return gptq.quantize(weight[None], None, bits=[grid.bits], group_size=grid.group_size, symmetric=grid.symmetric)


def memory(sizes):
    return [sizes.experts * sizes.layer.parameters_per_expert * (4 + len(sizes.settings.bits))]


QUANTIZER = Quantizer(
    name="strangers", label="Half the range", help="rounding to nearest within a part of the range",
    quantize=quantize, memory=memory, settings=Settings, widths=(2, 3, 4), grids=("asymmetric",), linear=linear,
)
"""
ALL = """
import sys
from pathlib import Path

from moeq import pipeline
from moeq.planning.plan import make_plan
from moeq.recipe import load_recipe
from moeq.stages.context import Context

model, out, *overrides = sys.argv[1:]
context = Context(recipe=load_recipe(None, overrides), model_name=model, out=Path(out))
assert make_plan(context, probe=False).stages
pipeline.run(context)
"""
SMALL = (
    "corpus.sequences=8", "corpus.sequence_length=32", "losses.group_size=16", "losses.bits=[2,3]",
    "losses.methods=[gptq,strangers]", "losses.strangers_share=0.4",
    "assign={method: uniform, bits: 2, quantizer: strangers}",
    "eval.compare=[{name: chosen, method: uniform, bits: 2, quantizer: best}]", "eval.tasks=[]", "export.verify=false",
    "eval.perplexity.sequences=4", "eval.perplexity.sequence_length=32", "estimate.grid.inputs=[128]",
    "others.attention=4", "others.method=strangers",
)  # fmt: skip
MODULES = {"strangers_quantizer": HALF}
ENTRIES = {"strangers": "strangers_quantizer:QUANTIZER"}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    write_package(tmp_path / "there", QUANTIZERS.group, ENTRIES, MODULES)
    return tmp_path / "there"


@pytest.mark.full
def test_it_runs_from_the_recipe_to_the_report(
    moeq_anew: ForkServer, package: Path, tiny_mixtral: Path, tmp_path: Path
) -> None:
    out, program = tmp_path / "run", tmp_path / "all.py"
    program.write_text(ALL)
    done = moeq_anew.run(str(tiny_mixtral), str(out), *SMALL, program=program, package=package)
    assert done.code == 0, done.stderr
    table = read_losses(out / "losses" / NAME)
    assert table.methods() == ["gptq", "strangers"]
    gptq, strangers = (table.matrix(method, "relative_loss") for method in table.methods())
    assert all((one[3] < other[3]).all() for one, other in zip(gptq, strangers, strict=True))
    assert all(row["fallback"] == "none" and row["hessian_trace"] is None for row in table.rows() if
               row["method"] == "strangers")  # fmt: skip
    made = json.loads((out / "quantize" / "quantizers.json").read_text())["layers"]
    assert {method for layer in made.values() for expert in layer for method in expert.values()} == {"strangers"}
    manifest = read_manifest(out / "checkpoint")
    assert {module.quantizer for module in manifest.others} == {"strangers"}
    experts = [expert for layer in manifest.layers for expert in layer.experts]
    assert {replica.quantizer for expert in experts for replica in expert.replicas} == {"strangers"}
    page = next((out / "report").glob("*.html")).read_text("utf-8")
    assert "Half the range" in page


def test_the_command_line_knows_it_and_what_it_cannot_do(package: Path, tiny_mixtral: Path, tmp_path: Path) -> None:
    run = ("run", "--model", str(tiny_mixtral), "--out", str(tmp_path / "run"), "--quantizer")
    refused = started(package, *run, "strangers")
    assert refused.returncode == 2
    assert "bits: strangers makes no codes of 1, 8 bits" in refused.stderr
    assert "'strangers'" in started(package, *run, "stranger").stderr


FAILING = {
    "an exception": (
        "    if 2 in statistics.batch.numbers():\n        raise ZeroDivisionError('no\\nrange')\n",
        r"expert 2 \(ZeroDivisionError: no range\)",
    ),
    "nothing made": ("    return None\n", r"experts 0 to 4 \(TypeError: .*NoneType.*\)"),
}


@pytest.mark.full
@pytest.mark.cases(1)
@pytest.mark.parametrize("how", FAILING)
def test_what_it_raises_is_one_line_that_names_package_layer_and_expert(
    moeq_anew: ForkServer, how: str, tiny_mixtral: Path, tmp_path: Path
) -> None:
    code, where = FAILING[how]
    head = "def quantize(weights, statistics, settings):\n"
    modules = {"strangers_quantizer": HALF.replace(head, head + code)}
    write_package(tmp_path / "there", QUANTIZERS.group, ENTRIES, modules)
    settings = [word for setting in SMALL for word in ("--set", setting)]
    losses = ("losses", "--quiet", "--model", str(tiny_mixtral), "--out", str(tmp_path / "run"))
    failed = moeq_anew.run(*losses, *settings, package=tmp_path / "there")
    assert failed.code == 5, failed.stderr
    what = rf"quantizer 'strangers' failed at model\.layers\.0\.[a-z.]*experts, {where}"
    do = "report it to the authors of that package, or use another quantizer"
    assert re.fullmatch(rf"moeq: strangers 1\.0: {what}; {do}\n", failed.stderr)


def test_its_label_is_its_name_once_it_is_gone(package: Path) -> None:
    with on_path(package, QUANTIZERS, MODULES):
        assert label("strangers") == "Half the range"
    assert label("strangers") == "strangers"
