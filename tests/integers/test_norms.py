"""Norms are known by what they compute, whatever they are called; what is none of them is nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from family_models import build
from torch import Tensor, nn

from moeq.integers.edges import find_norms
from moeq.integers.edges.norms import Norm, probe


class Scaled(nn.Module):
    """x over its root mean square, times 1 + weight, in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.gamma, self.eps = nn.Parameter(torch.zeros(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.gamma.float())).to(x)


class Multiplied(nn.Module):
    """x times a weight a channel, or its hyperbolic tangent: no norm."""

    def __init__(self, width: int, squash: bool) -> None:
        super().__init__()
        self.weight, self.squash = nn.Parameter(torch.ones(width)), squash

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(x) if self.squash else x) * self.weight


class Gated(nn.Module):
    """A norm that is given a gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight) * gate


@pytest.mark.parametrize(
    ("module", "wanted"),
    [
        (nn.LayerNorm(9, eps=1e-5), ("LayerNorm", 1e-5, False, "weight", "bias")),
        (nn.LayerNorm(9, eps=1e-6, bias=False), ("LayerNorm", 1e-6, False, "weight", None)),
        (nn.RMSNorm(9, eps=1e-4), ("RMSNorm", 1e-4, False, "weight", None)),
        (Scaled(9, 1e-5), ("RMSNorm", 1e-5, True, "gamma", None)),
    ],
)
def test_a_norm_is_what_it_computes(module: nn.Module, wanted: tuple[Any, ...]) -> None:
    kind, eps, plus_one, weight, bias = wanted
    found = probe("somewhere", module)
    assert found is not None
    assert found == Norm(
        name="somewhere", kind=kind, width=9, eps=found.eps, plus_one=plus_one, weight=weight, bias=bias
    )
    assert found.eps == pytest.approx(eps, rel=0.05)


@pytest.mark.parametrize(
    "module",
    [nn.Linear(9, 9), Multiplied(9, False), Multiplied(9, True), Gated(9), nn.LayerNorm(9, elementwise_affine=False)],
)
def test_other_modules_are_none(module: nn.Module) -> None:
    assert probe("somewhere", module) is None


def test_structure_alone_is_enough() -> None:
    model = build("qwen3_next").to("meta")
    found = find_norms(model)
    assert {norm.plus_one for norm in found if "layernorm" in norm.name} == {True}
    assert len([norm for norm in found if norm.width == 40]) == 7
