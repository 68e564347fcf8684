"""The reference's experts, a group at a time: the same outputs, and never more than a group in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from family_models import build, inputs

from moeq.models.experts import (
    find_expert_layers,
    set_expert_biases,
    set_expert_weights,
    stacked_biases,
    stacked_weights,
)
from moeq.verification import reference

FAMILIES = (
    "mixtral", "gpt_oss", "deepseek_v3", "llama4", "longcat_flash", "dbrx", "jetmoe", "switch_transformers",
    "gemma4_text", "aria",
)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_groups_of_experts_add_up_to_the_layer(family: str) -> None:
    model: Any = build(family).eval()
    layers = find_expert_layers(model)
    given = inputs(family)
    most = 0

    def store(layer: Any) -> Any:
        matrices, biases = (of(model, layer, slice(None)) for of in (stacked_weights, stacked_biases))
        kept = [{name: stack.clone() for name, stack in of.items()} for of in (matrices, biases)]

        def fill(experts: range) -> None:
            nonlocal most
            for expert in experts:
                found = [{name: stack[expert] for name, stack in of.items()} for of in kept]
                set_expert_weights(model, layer, expert, found[0])
                set_expert_biases(model, layer, expert, found[1])
            there = next(iter(stacked_weights(model, layer, slice(None)).values()))
            most = max(most, int(there.flatten(1).any(1).sum()))

        return fill

    with torch.no_grad():
        wanted = model(**given).logits
        rows = {layer.name: torch.randn(3, layer.hidden_size) for layer in layers}
        stacked = [layer for layer in layers if layer.kind.name == "stacked"]
        alone = {one.name: reference.run_alone(model, one, rows[one.name], 2) for one in stacked}
        for layer in layers:
            fill = store(layer)
            reference.empty(model, layer)
            reference.run_in_groups(model, layer, 2, fill)
        found = model(**given).logits
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
        for one in stacked:
            again = reference.run_alone(model, one, rows[one.name], 2)
            torch.testing.assert_close(again, alone[one.name], rtol=1e-4, atol=1e-5 * float(again.abs().max()))
            assert float((again[0] - again[1]).norm()) > 0  # each expert's own rows
    assert most == 2


def test_the_size_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = find_expert_layers(build("mixtral"))[0]
    one = 4 * layer.parameters_per_expert
    for limit, size in ((one // 2, 1), (2 * one, 2), (100 * one, layer.num_experts)):
        monkeypatch.setattr(reference, "GROUP_BYTES", limit)
        assert reference.group_size(layer, torch.float32) == size


def test_an_error_relative_to_nothing_is_a_number() -> None:
    nothing, one = torch.zeros(3), torch.tensor([0.0, 3.0, 4.0])
    assert reference.relative(nothing, nothing) == 0
    assert reference.relative(one, nothing) == 5
    assert reference.relative(2 * one, one) == 1
    assert reference.relative(one / 0, one) == float("inf")
