"""Inputs and weights rounded as integers would be: what a mode notes, and what products it makes of it."""

from __future__ import annotations

from typing import Any

import torch
from family_models import build, inputs
from torch import nn

from moeq.integers.edges.watching import ParameterMap
from moeq.integers.static_int8 import StaticInputs, linears, round_experts, round_rows, scale_of
from moeq.models.experts import find_expert_layers
from moeq.models.non_experts import find_others
from moeq.models.streaming import blocks_of


class Two(nn.Module):
    """Two linears of which one is rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 4), nn.Linear(4, 3, bias=False)

    def get_expanded_tied_weights_keys(self, all_submodels: bool) -> dict[str, str]:
        return {}

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(values))  # type: ignore[no-any-return]


def test_a_mode_notes_and_then_rounds_the_inputs_of_one_linear() -> None:
    model, values = Two(), torch.randn(5, 6)
    chosen = frozenset({"two.weight"})
    with torch.no_grad(), StaticInputs(model, (), chosen) as noted:
        wanted = model(values)
    inner = model.one(values).detach()
    assert torch.equal(wanted, model.two(inner))
    assert noted.largest == {"two.weight": float(inner.abs().max())}
    scale, bits = scale_of(noted.largest["two.weight"], 4)
    with torch.no_grad(), StaticInputs(model, (), chosen, {"two.weight": (scale, bits)}):
        found = model(values)
    rounded = (inner / scale).round().clamp(-8, 7) * scale
    assert torch.allclose(found, model.two(rounded), atol=1e-6)
    assert not torch.allclose(found, wanted, atol=1e-3)


def test_rows_are_rounded_to_127_steps_of_their_largest() -> None:
    weight = torch.randn(3, 50)
    weight[1] = 0
    rounded = round_rows(weight)
    steps = weight.abs().amax(1, keepdim=True) / 127
    assert ((rounded - weight).abs() <= 0.5001 * steps).all()
    assert torch.equal(rounded[1], weight[1])
    assert rounded[0].div(steps[0]).round().unique().numel() > 30


def test_experts_and_linears_of_layers_are_chosen_and_routers_are_not() -> None:
    model: Any = build("qwen2_moe")
    layers = find_expert_layers(model)
    chosen = linears(find_others(model, layers), layers)
    assert "model.layers.1.mlp.experts.down_proj" in chosen
    assert "model.layers.1.mlp.shared_expert.down_proj.weight" in chosen
    assert "model.layers.1.self_attn.o_proj.weight" in chosen
    assert not any("gate.weight" in name or "embed" in name or "lm_head" in name for name in chosen)
    with torch.no_grad(), StaticInputs(model, blocks_of(model), chosen) as noted:
        model(**inputs("qwen2_moe"))
    assert set(noted.largest) == chosen
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    before = model.model.layers[1].mlp.experts.down_proj.clone()
    with torch.no_grad():
        round_experts(model, layers[0])
    assert torch.equal(model.model.layers[1].mlp.experts.down_proj, round_rows(before))


def test_views_of_a_parameter_are_found_and_other_memory_is_not() -> None:
    model = Two()
    parameters = ParameterMap(model, ())
    with parameters.watching():
        found = parameters.find(model.one.weight.detach().t()[2:])
        assert found is not None
        assert found[1] == "one.weight"
        assert parameters.find(model.one.weight.clone()) is None
    assert parameters.find(model.one.weight) is None
