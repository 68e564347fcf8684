"""What becomes of a norm's output is seen operation by operation: consumers, their axes and biases, and other uses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from folded_models import edges_of
from torch import Tensor, nn
from torch.nn import functional

from moeq.integers.edges import Consumer, Edges

Body = Callable[["Small", Tensor], Tensor]


class Small(nn.Module):
    """A norm of 6 channels, and parameters that a body uses as it likes."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.norm, self.body = nn.LayerNorm(6), body
        self.flat, self.tall, self.stack = (
            nn.Parameter(torch.randn(shape)) for shape in ((4, 6), (6, 4), (3, 6, 4))
        )  # fmt: skip
        self.bias = nn.Parameter(torch.randn(4))

    def get_expanded_tied_weights_keys(self, all_submodels: bool) -> dict[str, str]:
        return {}

    def forward(self, values: Tensor) -> Tensor:
        return self.body(self, self.norm(values))


def found(body: Body) -> Edges:
    model = Small(body)
    return edges_of(model, lambda: model(torch.randn(2, 5, 6)))


def added_in_place(model: Small, x: Tensor) -> Tensor:
    product = functional.linear(x, model.flat)
    return product.add_(model.bias).relu()


def corrected_choice(model: Small, x: Tensor) -> Tensor:
    """As routers do: a correction is added for the choice alone."""
    scores = functional.linear(x, model.flat)
    chosen = (scores + model.bias).topk(2, -1).indices
    return scores.gather(-1, chosen)


def to_experts(model: Small, x: Tensor) -> Tensor:
    rows = x.flatten(0, -2)[torch.tensor([3, 1, 4])]
    return torch.cat([rows[:2], rows[2:]]) @ model.stack[1]


def scaled_rows(model: Small, x: Tensor) -> Tensor:
    return torch.bmm((x.flatten(0, 1) * torch.rand(10, 1)).expand(3, 10, 6), model.stack)


@pytest.mark.parametrize(
    ("body", "weight", "axis", "bias", "scaled"),
    [
        (lambda m, x: functional.linear(x, m.flat, m.bias), "flat", 1, "bias", False),
        (lambda m, x: functional.linear(x, m.flat) + m.bias, "flat", 1, "bias", False),
        (added_in_place, "flat", 1, "bias", False),
        (lambda m, x: torch.addmm(m.bias, x.flatten(0, 1), m.tall), "tall", 0, "bias", False),
        (lambda m, x: torch.addmm(m.bias, x.flatten(0, 1), m.tall, beta=2), "tall", 0, None, False),
        (corrected_choice, "flat", 1, None, False),
        (lambda m, x: m.flat @ x.transpose(1, 2), "flat", 1, None, False),
        (lambda m, x: functional.linear(x.double(), m.flat.double()), "flat", 1, None, False),
        (to_experts, "stack", 1, None, False),
        (scaled_rows, "stack", 1, None, True),
        (lambda m, x: functional.linear(x.masked_fill(torch.rand(2, 5, 1) > 0.5, 0), m.flat), "flat", 1, None, True),
        (lambda m, x: functional.linear(functional.pad(x, (0, 0, 1, 0)), m.flat), "flat", 1, None, True),
    ],
)
def test_a_consumer_its_axis_and_its_bias(body: Body, weight: str, axis: int, bias: str | None, scaled: bool) -> None:
    edges = found(body)
    assert not edges.refused
    assert [edge.consumers for edge in edges.edges] == [(Consumer(weight=weight, axis=axis, bias=bias, scaled=scaled),)]


@pytest.mark.parametrize(
    ("body", "operation"),
    [
        (lambda m, x: functional.linear(x, m.flat).sum() + x, "add in the model"),
        (lambda m, x: functional.linear(x, m.flat) * x.relu().sum(), "relu in the model"),
        (lambda m, x: functional.linear(x * torch.rand(6), m.flat) + functional.linear(x, m.flat), "mul in the model"),
        (lambda m, x: functional.linear(x, m.flat) @ x[0, :4, :4], "slice in the model"),
        (lambda m, x: functional.linear(x, m.flat).sum() + x.view(2, 5, 2, 3).sum(), "view in the model"),
        (lambda m, x: functional.linear(x, m.flat).sum() + torch.cat([x, x], -1).sum(), "cat in the model"),
        (lambda m, x: functional.linear(x, m.flat).sum() + torch.cat([x, x + 1], 0).sum(), "add in the model"),
        (lambda m, x: functional.linear(x, m.flat).sum() + (x.transpose(1, 2) @ x).sum(), "bmm with what is no param"),
        (lambda m, x: functional.linear(x.sort(-1).values, m.flat) + functional.linear(x, m.flat), "sort in the model"),
    ],
)
def test_any_other_use_keeps_a_norm_from_being_folded(body: Body, operation: str) -> None:
    edges = found(body)
    assert not edges.edges
    assert f"also used by {operation}" in edges.refused["norm"]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (lambda m, x: functional.linear(x, m.flat) + m.flat.sum(), "flat, which it feeds, is also used by sum"),
        (lambda m, x: functional.linear(x, m.flat).sum() + functional.linear(torch.rand(2, 6), m.flat), "used by mm"),
        (lambda m, x: functional.linear(x, m.flat) * m.norm.weight.sum(), "its weight is also used by sum"),
    ],
)
def test_parameters_with_another_use_are_not_changed(body: Body, why: str) -> None:
    edges = found(body)
    assert not edges.edges
    assert why in edges.refused["norm"]


def test_a_norm_without_linears_is_left() -> None:
    edges = found(lambda m, x: x * m.flat[0])
    assert edges.left == {"norm": "no linear takes its output (mul in the model)"}
