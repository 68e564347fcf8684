"""`moeq assign --price`: what a target costs is what its format takes, and a reason is the one that export gives."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import family_models
import pytest
import yaml

from moeq import pipeline
from moeq.artifacts.assignment import count_matrices
from moeq.artifacts.stage import read_record
from moeq.artifacts.targets import targets
from moeq.assigners.sensitivity import objective
from moeq.errors import BudgetError
from moeq.planning.capability import refusals
from moeq.progress import Reporter
from moeq.recipe import AssignSection, load_recipe
from moeq.stages import assign, assign_ahead, export, frontier
from moeq.stages.context import Context
from moeq.stages.expert_bytes import expert_weights, total_bytes, total_loaded_bytes
from moeq.stages.loading import where_it_loads
from moeq.terminal import print_prices

SMALL = (
    "corpus.sequences=8", "corpus.sequence_length=48", "losses.methods=[rtn]", "eval.compare=[]",
    "assign={method: optimal, quantizer: rtn, code_bits: 2.5}",
)  # fmt: skip


@pytest.fixture(
    scope="module",
    params=["group_size: 64", "group_size: 128", "group_size: 32, symmetric: true", "group_size: 16, bits: [1, 3]"],
)
def priced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Context:
    """Assigned on the bundled model, whose matrices have 128 and 256 inputs."""
    recipe = load_recipe(None, [*SMALL, f"losses={{methods: [rtn], {request.param}}}"])
    out = tmp_path_factory.mktemp("price") / "run"
    context = Context(recipe=recipe, model_name="bundled:tiny-mixtral", out=out, reporter=Reporter(quiet=True))
    pipeline.run(context, ("profile", "losses", "assign"))
    return context


def refused(context: Context, name: str, bits: int) -> tuple[str, str] | None:
    """Why a target refuses experts that all have one width."""
    widths = [[bits] * layer.num_experts for layer in context.model.layers]
    return export.refused(context, name, widths, context.recipe.losses.encoding)


@pytest.mark.cases(1)
def test_a_price_is_had_where_the_format_takes_a_width(priced: Context) -> None:
    prices = {price["target"]: price for price in frontier.prices(priced)}
    assert set(prices) == set(targets())
    for target in targets().values():
        price = prices[target.name]
        taken = [bits for bits in priced.recipe.losses.bits if refused(priced, target.name, bits) is None]
        if target.symmetric_only and not priced.recipe.losses.symmetric:
            assert not taken
            assert price["refusal"] is not None
        elif taken and min(taken) <= 2.5:
            assert price["refusal"] is None, target.name
            weights = expert_weights(priced.model.layers)
            assert price["bits_per_weight"] == 8 * price["expert_bytes"] / weights
        elif taken:
            assert f"cannot be met with {taken} bits" in price["refusal"]
        else:
            assert price["refusal"] is not None


@pytest.mark.full
def test_a_reason_names_a_width_a_matrix_and_what_is_in_the_way(priced: Context) -> None:
    for price in frontier.prices(priced):
        target, reason = targets()[price["target"]], price["refusal"]
        if (
            reason is None
            or "cannot be met" in reason
            or "symmetric grids only" in reason
            or "losses.bits are" in reason
            or "grids; exl3 has none" in reason
        ):
            continue
        named = [bits for bits in priced.recipe.losses.bits if f"{bits} bits" in reason]
        named = named or [max({*priced.recipe.losses.bits} & {*target.widths})]  # whatever the width
        assert len(named) == 1, reason
        found = refused(priced, target.name, named[0])
        assert found is not None
        assert found[0] in reason
        assert found[1] in reason


@pytest.mark.cases(1)
def test_llama_cpp_says_which_grid_it_lacks(priced: Context) -> None:
    reason = {price["target"]: price["refusal"] for price in frontier.prices(priced)}["llama.cpp"]
    section = priced.recipe.losses
    said = {
        64: "gate_proj: 8 bits with zero points; llama.cpp has no type that holds them",
        16: "gate_proj: 3 bits with zero points; llama.cpp has no type that holds them",
    }
    if section.group_size in said:
        assert said[section.group_size] in reason
    elif section.symmetric:
        assert "cannot be met with [4, 8] bits" in reason
    else:
        assert reason is None  # 1 bit in groups of 128


@pytest.mark.full
def test_a_target_of_none_of_the_widths_says_so(priced: Context) -> None:
    reason = {price["target"]: price["refusal"] for price in frontier.prices(priced)}["vllm"]
    assert (reason == "losses.bits are 1, 3; vllm loads 4, 16") == (priced.recipe.losses.bits == [1, 3])


def test_a_matrix_that_no_block_fits_takes_a_width_that_one_does(tmp_path: Path) -> None:
    """Of the bundled model llama.cpp has no 2 and 3 bits for matrices of 128 inputs, for `down_proj` of 256 it has."""
    chosen = (
        "assign={method: optimal, quantizer: rtn, bits_per_weight: 3.2, granularity: projection, target: llama.cpp}"
    )
    recipe = load_recipe(None, [*SMALL[:-1], chosen, "losses.group_size=256", "losses.symmetric=true"])
    out = tmp_path / "run"
    context = Context(recipe=recipe, model_name="bundled:tiny-mixtral", out=out, reporter=Reporter(quiet=True))
    pipeline.run(context, ("profile", "losses", "assign"))
    made = assign.load(context)
    counted = count_matrices([width for layer in made.expert_widths() for width in layer])
    assert {"2", "3"} & {*counted["down_proj"]}
    assert {*counted["gate_proj"], *counted["up_proj"]} <= {"1", "4", "8"}
    assert export.refused(context, "llama.cpp", made.expert_widths(), recipe.losses.encoding) is None
    assert refusals(context, made.expert_widths()) == [], "what a plan says of it"
    whole = recipe.model_copy(update={"assign": recipe.assign.model_copy(update={"granularity": None})})
    assert refusals(replace(context, recipe=whole), made.expert_widths()) == [], "of 1, 4 and 8 bits"
    prices = {price["target"]: price for price in frontier.prices(context)}
    reached = read_record(context.directory("assign"), "assign").summary["objective"]
    assert prices["llama.cpp"]["refusal"] is None
    assert prices["llama.cpp"]["objective"] == pytest.approx(reached)
    assert prices["llama.cpp"]["ratio"] > 1
    less = context.recipe.model_copy(update={"assign": recipe.assign.model_copy(update={"bits_per_weight": "1.05"})})
    with pytest.raises(BudgetError, match=r"cannot be met; the least possible is 1\.125"):
        assign_ahead.check(replace(context, recipe=less))
    wide = load_recipe(
        None, [*SMALL[:-1], chosen, "losses={methods: [rtn], group_size: 256, symmetric: true, bits: [2, 3, 4]}"]
    )
    with pytest.raises(BudgetError, match=r"3\.2 bits a weight cannot be met; the least possible is 3\.875"):
        assign_ahead.check(replace(context, recipe=wide))


def test_a_runtime_that_does_not_load_the_model_has_no_price(tmp_path: Path) -> None:
    """Most read no experts with biases, whatever their widths; that is said, no lack of budget."""
    sizes = {"hidden_size": 128, "intermediate_size": 128}
    model = str(family_models.save("gpt_oss", tmp_path / "model", **sizes))
    recipe = load_recipe(None, [*SMALL[:-1], "assign={method: optimal, quantizer: rtn, bits_per_weight: 8}"])
    context = Context(recipe=recipe, model_name=model, out=tmp_path / "run", reporter=Reporter(quiet=True))
    pipeline.run(context, ("profile", "losses", "assign"))
    prices = {price["target"]: price for price in frontier.prices(context)}
    assert prices["native"]["ratio"] == 1
    loads = where_it_loads(context, assign.load(context))
    for name in ("mlx", "llama.cpp", "llama.cpp-refit"):  # which have a place for biases
        reads = loads.pop(name)
        assert reads is None or "has biases" not in reads["reason"]
        assert prices[name]["refusal"] is None or "has biases" not in prices[name]["refusal"]
    assert prices["mlx"]["ratio"] > 1
    for name, why in loads.items():
        assert why is None or (why["reason"] in prices[name]["refusal"] and prices[name]["ratio"] is None), name
    assert "auto-round" in {name for name, why in loads.items() if why is not None and "has biases" in why["reason"]}


@pytest.mark.parametrize("packed", [{}, {"attention": 8}, {"attention": 8, "embeddings": 8, "head": 8}])
def test_what_is_packed_beside_the_experts_is_told_with_the_prices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], packed: dict[str, int]
) -> None:
    """The price is of the experts alone: a target may load those, and not the rest, as where it loads says."""
    losses = {"methods": ["rtn"], "group_size": 64, "symmetric": True, "bits": [4]}
    assigned = {"method": "uniform", "quantizer": "rtn", "bits": 4}
    sections = {"losses": losses, "assign": assigned, "others": packed}
    recipe = load_recipe(None, [*SMALL, *(f"{name}={json.dumps(section)}" for name, section in sections.items())])
    context = Context(recipe=recipe, model_name="bundled:tiny-mixtral", out=tmp_path, reporter=Reporter(quiet=True))
    pipeline.run(context, ("profile", "losses", "assign"))
    prices = frontier.prices(context)
    priced = {price["target"] for price in prices if not price["refusal"]}
    wanted = {
        name: f"{why['reason']}; {why['do']}"
        for name, why in where_it_loads(context, assign.load(context)).items()
        if why is not None and "`others`" in why["do"] and name in priced
    }
    assert {price["target"]: price["beside"] for price in prices if price["beside"]} == wanted
    assert ("vllm" in wanted, "auto-round" in wanted) == (bool(packed), "head" in packed)
    print_prices(prices)
    lines = " ".join(capsys.readouterr().out.split())
    assert ("packed modules beside the experts; run without `others`" in lines) == bool(packed)
    assert ("auto-round, gptqmodel: packed embeddings and heads; leave" in lines) == ("head" in packed)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("name", "grid"), [("llama.cpp-refit", {"group_size": 16}), ("llama.cpp", {"group_size": 32, "symmetric": True})]
)
@pytest.mark.parametrize("budget", ["bits_per_weight: 6", "size: 3.6MiB", "method: uniform, bits: 8"])
def test_a_price_counts_what_the_target_stores(tmp_path: Path, name: str, grid: dict[str, Any], budget: str) -> None:
    """It is what assigning for the target comes to, on the same budget."""
    free = {"method": "optimal", "quantizer": "rtn"} | yaml.safe_load(f"{{{budget}}}")
    recipe = load_recipe(
        None, [*SMALL, f"losses={json.dumps({'methods': ['rtn'], **grid})}", f"assign={json.dumps(free)}"]
    )
    context = Context(recipe=recipe, model_name="bundled:tiny-mixtral", out=tmp_path, reporter=Reporter(quiet=True))
    pipeline.run(context, ("profile", "losses", "assign"))
    price = {price["target"]: price for price in frontier.prices(context)}[name]
    if free["method"] == "uniform":
        free = {"method": "optimal", "quantizer": "rtn", "expert_bytes": total_bytes(context, assign.load(context))}
    section = AssignSection.model_validate(free | {"target": name})
    found = assign.make(context, section, "targeted")
    assert price["expert_bytes"] == total_loaded_bytes(context, section, found)
    inputs = assign.inputs_of(context, section, "targeted")
    assert price["objective"] == pytest.approx(objective(inputs, found), rel=1e-9)
