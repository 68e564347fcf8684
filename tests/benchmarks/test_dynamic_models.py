"""The generated model of benchmarks/dynamic.py: a dynamic model is the static one with the same mix, bit for bit."""

from __future__ import annotations

import argparse
from typing import Any

import dynamic
import dynamic_models
import torch

OPTIONS = argparse.Namespace(layers=2, experts=8, vocabulary=64)
IDS = torch.tensor([[3, 7, 1, 4, 9]])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


def test_dynamic_is_static_until_experts_change() -> None:
    made = dynamic_models.Generated(OPTIONS, hidden=256, inner=128)
    static, low = logits(made.static(2)), logits(made.static(0))
    assert not torch.equal(static, low)
    with made.dynamic(2, background=False, period=1 << 30) as model:
        assert model.places == 2
        assert torch.equal(logits(model), static)
        dynamic.Changes(model).more()
        counts = model.summary()
        assert counts["planes"]
        assert counts["promotions"] == counts["demotions"] == 2
        assert not torch.equal(logits(model), static)
    with made.dynamic(0, background=False) as model:
        assert torch.equal(logits(model), low)
