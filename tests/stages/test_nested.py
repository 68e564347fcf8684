"""Nested replicas from the recipe to the checkpoint: one set of codes for 2, 3 and 4 bits, and what it saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from manifest_reader import read_expert
from pydantic import ValidationError

from moeq import inspection, pipeline
from moeq.errors import RecipeError
from moeq.progress import Reporter
from moeq.recipe import LossesSection, load_recipe
from moeq.stages import quantize
from moeq.stages.context import Context
from moeq.stages.replicas import load_index, open_layer

STAGES = ("profile", "losses", "assign", "quantize", "export")
SMALL = (
    "corpus.sequences=12", "corpus.sequence_length=48", "losses.group_size=16", "quantize.replicas=all",
    "assign.code_bits=5/2", "losses.clip=mse",
)  # fmt: skip


def made(model: Path, out: Path, *overrides: str) -> Context:
    recipe = load_recipe(None, [*SMALL, *overrides])
    context = Context(recipe=recipe, model_name=str(model), out=out, reporter=Reporter(quiet=True))
    pipeline.run(context, STAGES)
    return context


def manifest_of(context: Context) -> Any:
    return json.loads((context.directory("export") / "placement.json").read_text("utf-8"))


@pytest.mark.cases(1)
@pytest.mark.parametrize("quantizer", ["gptq", "best"])
@pytest.mark.parametrize("symmetric", ["false", "true"])
def test_every_replica_of_the_checkpoint_is_the_stores(
    tiny_mixtral: Path, tmp_path: Path, symmetric: str, quantizer: str
) -> None:
    context = made(
        tiny_mixtral, tmp_path, "losses.nested=true", f"losses.symmetric={symmetric}", f"assign.quantizer={quantizer}"
    )
    manifest, folder = manifest_of(context), context.directory("export")
    assert manifest["layout"]["version"] == 2
    index = load_index(context)
    kinds = set()
    for number, layer in enumerate(manifest["layers"]):
        stored = open_layer(context, index, number)
        for expert in layer["experts"]:
            assert sorted(replica["bits"] for replica in expert["replicas"]) == [1, 2, 3, 4, 8, 16]
            for replica in expert["replicas"]:
                kinds.add((replica["bits"], replica.get("leading_bits_of")))
                if replica["bits"] == 16 or replica["quantizer"] != "gptq":
                    continue
                values = read_expert(folder, layer, replica, manifest["layout"])
                entry = index.entry("gptq", replica["bits"])
                for name in layer["projections"]:
                    wanted = stored.expert(entry, name, expert["expert"]).dequantize()
                    np.testing.assert_allclose(values[name], wanted.numpy(), rtol=1e-6, atol=1e-9)
    if quantizer == "gptq":
        assert {(4, 3), (4, 2)} & kinds == set()
        assert (3, 4) in kinds
        assert (2, 4) in kinds
    inspection.check_checkpoint(folder, Reporter(quiet=True))


@pytest.mark.full
def test_narrow_codes_are_leading_bits_in_the_store_too(tiny_mixtral: Path, tmp_path: Path) -> None:
    context = made(tiny_mixtral, tmp_path, "losses.nested=true")
    index = load_index(context)
    stored = open_layer(context, index, 1)
    for name in ("gate_proj", "down_proj"):
        wide = stored.expert(index.entry("gptq", 4), name, 2)
        for bits in (2, 3):
            narrow = stored.expert(index.entry("gptq", bits), name, 2)
            assert wide.leading(bits).codes.equal(narrow.codes)
            assert wide.scales.equal(narrow.scales)


@pytest.mark.full
def test_other_replicas_take_fewer_bytes(tiny_mixtral: Path, tmp_path: Path) -> None:
    apart, shared = (
        made(tiny_mixtral, tmp_path / nested, f"losses.nested={nested}", "losses.bits=[1, 2, 3, 4]")
        for nested in ("false", "true")
    )
    sizes = [manifest_of(context)["totals"]["other_replica_bytes"] for context in (apart, shared)]
    dense = sum(
        replica["bytes"]
        for layer in manifest_of(apart)["layers"]
        for expert in layer["experts"]
        for replica in expert["replicas"]
        if replica["bits"] == 16
    )
    assert sizes[1] - dense < 0.75 * (sizes[0] - dense)


@pytest.mark.full
def test_a_width_alone_is_the_same_as_with_the_others(tiny_mixtral: Path, tmp_path: Path) -> None:
    alone = load_recipe(None, [*SMALL, "losses.nested=true", "losses.bits=[3]", "assign={method: uniform, bits: 3}",
                               "eval.compare=[]"])  # fmt: skip
    context = Context(recipe=alone, model_name=str(tiny_mixtral), out=tmp_path / "a", reporter=Reporter(quiet=True))
    pipeline.run(context, ("losses",))
    whole = made(tiny_mixtral, tmp_path / "b", "losses.nested=true")
    digests = [
        [layer[load_index(one).entry("gptq", 3)] for layer in load_index(one).layers] for one in (context, whole)
    ]
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("placed", "methods", "wanted"),
    [
        (2, "ggg", [2, 1, 4, 8]),
        (4, "ggg", [4, 1, 8]),
        (8, "ggg", [8, 1, 4]),
        (2, "grg", [2, 1, 3, 4, 8]),
        (4, "rrg", [4, 1, 3, 8]),
    ],
)
def test_what_is_stored(placed: int, methods: str, wanted: list[int]) -> None:
    others = [bits for bits in (1, 2, 3, 4, 8) if bits != placed]
    assert quantize.stored_widths(placed, others, True, lambda bits: methods[bits - 2]) == wanted
    assert quantize.stored_widths(placed, others, False) == [placed, *others]


def test_refining_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"losses\.nested cannot go with quantize\.refine"):
        load_recipe(None, ["losses.nested=true", "quantize.refine={}"])


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"act_order": True}, "act_order"),
        ({"methods": ["gptq", "signround"]}, "signround"),
        ({"methods": ["gptq", "signround"], "act_order": True}, "act_order and signround"),
    ],
)
def test_what_it_cannot_go_with_is_named_alone(other: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=f"nested cannot go with {named} "):
        LossesSection.model_validate({"nested": True} | other)
