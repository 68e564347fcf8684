"""The model of a run: whatever is put into it for a while, its weights are the checkpoint's again afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from moeq.models.experts import ExpertLayer
from moeq.models.forward import forward
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.runtime.swapping import ExpertPlace, Replacement
from moeq.stages.context import Context
from moeq.stages.model import RunModel

IDS = torch.arange(24).view(2, 12)
FAILED = pytest.raises(KeyError, match="halfway")


@pytest.fixture(params=["never", "always"])
def model(request: pytest.FixtureRequest, tiny_mixtral: Path, tmp_path: Path) -> RunModel:
    recipe = load_recipe(None, [f"stream={request.param}", "dtype=float32"])
    return Context(recipe=recipe, model_name=str(tiny_mixtral), out=tmp_path, reporter=Reporter(quiet=True)).model


@torch.no_grad()
def logits(module: torch.nn.Module) -> Tensor:
    found: Tensor = forward(module, IDS).logits
    return found


def zeros(layer: ExpertLayer) -> dict[str, Tensor]:
    return {projection: torch.zeros(layer.shape(projection)) for projection in layer.projections}


def test_experts_that_are_replaced_come_back(model: RunModel) -> None:
    before, layer = logits(model.module), model.layers[1]
    with FAILED, model.replacing(layer, [0, 2], lambda _: zeros(layer)):
        assert not torch.equal(logits(model.module), before)
        raise KeyError("halfway")
    assert torch.equal(logits(model.module), before)


def test_an_overlay_has_what_was_set_last_and_leaves_nothing(model: RunModel) -> None:
    before = logits(model.module)
    head = model.skeleton.get_submodule("lm_head").get_parameter("weight").shape

    def experts(layer: ExpertLayer, _: torch.nn.Module | None) -> dict[ExpertPlace, Replacement]:
        return {(layer.name, 0): Replacement(key="zeros", make=lambda: zeros(layer))}

    nothing = Replacement(key="nothing", make=lambda: {"weight": torch.zeros(head)})
    with FAILED, model.overlay() as overlay:
        changed = logits(overlay.set(experts))
        assert not torch.equal(changed, before)
        assert not bool(logits(overlay.set(None, {"lm_head": nothing})).any())
        assert torch.equal(logits(overlay.set()), before)
        assert torch.equal(logits(overlay.set(experts)), changed)
        raise KeyError("halfway")
    assert torch.equal(logits(model.module), before)
