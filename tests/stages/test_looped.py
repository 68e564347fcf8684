"""What is said of a looped model before it runs: refusals, and the sizes that estimates and plans are made of.

A Mixtral whose configuration has the keys of one stands for it; walks over one that does loop are in models/.
"""

from __future__ import annotations

import gc
import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from family_models import FAMILIES, save
from tiny_models import save_tiny

from moeq import pipeline
from moeq.errors import RecipeError
from moeq.estimation.subject import read_model
from moeq.estimator import Grid, estimate, load_hardware, uniform_placement
from moeq.estimator.timeline import timeline
from moeq.models.experts import ExpertLayer
from moeq.models.visits import LOOP
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages.context import Context
from moeq.stages.finite import say_left_out_of
from moeq.stages.needs import STATES, Rates, Sizes

VISITS = 3


def tensor_bytes() -> int:
    """Of all tensors that there are, but those that a trace in another test of this process left: they hold nothing."""
    found = {}
    for one in gc.get_objects():
        if type(one) not in (torch.Tensor, torch.nn.Parameter) or torch._is_functional_tensor(one):
            continue
        if one.device.type == "cpu":
            found[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    return sum(found.values())


@pytest.fixture(scope="module")
def looped(tiny_mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, of which a token goes through the second three times."""
    folder = tmp_path_factory.mktemp("looped") / "model"
    shutil.copytree(tiny_mixtral, folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config |= dict(zip(LOOP, (VISITS, 1, 2), strict=True))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (("quantize.refine={}",), "quantize.refine: "),
        (("quantize.tune={}", "stream=always"), "quantize.tune: "),
        (("profile.trace=true",), "profile.trace: true: "),
    ],
)
def test_what_takes_layers_one_by_one_is_refused_before_anything_runs(
    overrides: tuple[str, ...], where: str, looped: Path, tmp_path: Path
) -> None:
    recipe = load_recipe(None, overrides)
    context = Context(recipe=recipe, model_name=str(looped), out=tmp_path / "run", reporter=Reporter(quiet=True))
    with pytest.raises(RecipeError) as refused:
        pipeline.run(context)
    assert str(refused.value).startswith(f"{where}a token goes through model.layers.1.mlp.experts 3 times: ")
    assert not context.out.exists()


def test_tokens_that_are_left_out_are_said_to_be_counted_at_every_visit() -> None:
    said: list[str] = []
    context: Any = SimpleNamespace(reporter=SimpleNamespace(say=said.append))
    layer = ExpertLayer(index=0, name="experts", num_experts=4, hidden_size=8, intermediate_size=8)
    for visits in (1, VISITS):
        say_left_out_of(context, replace(layer, visits=visits), 2, 10 * visits)
    assert "2 of 10 tokens left out" in said[0]
    assert "2 of 30 tokens at 3 visits left out" in said[1]


def test_an_estimate_has_the_steps_of_a_model_with_as_many_layers(looped: Path, tmp_path: Path) -> None:
    """Experts, other weights, keys and values are read at every visit; the memory holds weights once."""
    whole = save_tiny(tmp_path / "whole", "mixtral", num_hidden_layers=1 + VISITS)
    one, other = (read_model(str(folder)).geometry for folder in (looped, whole))
    assert (one.num_layers, one.visits, one.in_turn()) == (2, (1, VISITS), [0, 1, 1, 1])
    assert one.all_layers == other.all_layers == 1 + VISITS
    assert one.kv_bytes(100) == other.kv_bytes(100)
    placement, hardware = uniform_placement(one, hot_experts=1, bits=2), load_hardware("paper-ctxmoe")
    settings = {"grid": Grid(batches=(1, 4), inputs=(64,), outputs=(16,)), "changes": False}
    found, wanted = (estimate(each, hardware, placement, **settings) for each in (one, other))
    for point, like in zip(found.points, wanted.points, strict=True):
        decode, as_much = (each.end_to_end_seconds - each.migration_seconds for each in (point, like))
        assert point.prefill_seconds == pytest.approx(like.prefill_seconds, rel=1e-9), point.policy
        assert decode == pytest.approx(as_much, rel=1e-9), point.policy
    assert 2 * found.capacity.gpu_expert_bytes == wanted.capacity.gpu_expert_bytes
    intervals = timeline(one, hardware, placement, policy="context_aware")
    assert [part.layer for part in intervals if part.name == "dense"] == [0, 1, 1, 1]


def test_a_plan_counts_what_is_held_read_and_computed_at_every_visit(looped: Path, tmp_path: Path) -> None:
    whole = save_tiny(tmp_path / "whole", "mixtral", num_hidden_layers=1 + VISITS)
    recipe = load_recipe(None, ["stream=always", "dtype=float32", "corpus={sequences: 8, sequence_length: 32}"])
    one, other = (
        Sizes(Context(recipe=recipe, model_name=str(folder), out=tmp_path / "run", reporter=Reporter(quiet=True)))
        for folder in (looped, whole)
    )
    rates = Rates(**dict.fromkeys((field.name for field in fields(Rates)), 1.0))
    assert one.forward(rates, 64, 3, head=True) == other.forward(rates, 64, 3, head=True)
    assert (one.walked, other.walked) == (pytest.approx(other.disk, rel=1e-3), other.disk)
    tokens, each = 8 * 32, 40 * 4 + 2 * 12 + 16  # hidden states, experts and their weights, sequence and position
    held = [sizes.stopped(2, 1)["inputs of a layer"] for sizes in (one, other)]
    assert held == [VISITS * tokens * each, tokens * each]
    routing = one.stopped(2, 1, kept=False)["inputs of a layer"]  # of which profile counts, and keeps no hidden states
    assert routing == VISITS * tokens * each - (VISITS - 1) * tokens * 40 * 4
    assert (one.layer_tokens, other.layer_tokens) == (VISITS * tokens, tokens)


@pytest.mark.parametrize("family", [name for name in ("inkling2_text", "inkling2_loop_text") if name in FAMILIES])
def test_a_plan_counts_what_residuals_by_attention_keep_of_a_stopped_batch(family: str, tmp_path: Path) -> None:
    """Against all tensors that live while a walk stands in a layer."""
    folder = save(family, tmp_path / "model", hidden_size=512)
    recipe = load_recipe(None, ["dtype=float32", "corpus={sequences: 8, sequence_length: 64, batch_size: 2}"])
    context = Context(recipe=recipe, model_name=str(folder), out=tmp_path / "run", reporter=Reporter(quiet=True))
    batches, _ = context.text.calibration.batches(2), context.model.module
    gc.collect()
    before = tensor_bytes()
    held = []
    for inputs in context.model.walk(batches):
        held.append(tensor_bytes() - before)
        del inputs
    sizes = Sizes(context)
    assert 0.9 < sum(sizes.stopped(STATES, 1).values()) / max(held) < 1.4
