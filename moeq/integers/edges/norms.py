"""Finding norms by what they compute: a module is run on numbers, with weights of our own, whatever it is called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from moeq.models.kinds.base import with_parameters

ROWS = 4
TOLERANCE = 1e-4  # relative; some norms compute in float32 whatever they are given
SIZE = 8.0  # of inputs, so that eps hardly counts
SMALL = 1e-3  # times these, eps shows beside their mean square


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A module that gives n(x) * weight + bias, or n(x) * (1 + weight) + bias.

    name: its path; width: channels; kind: n subtracts the mean of the channels (LayerNorm) or does not (RMSNorm);
    weight and bias: names of its parameters below it, bias None for none.
    """

    name: str
    kind: Literal["LayerNorm", "RMSNorm"]
    width: int
    eps: float
    plus_one: bool
    weight: str
    bias: str | None


def find_norms(model: nn.Module) -> list[Norm]:
    """All norms of a model, which may lie on the meta device, in the order of its modules."""
    return [norm for name, module in model.named_modules() if (norm := probe(name, module)) is not None]


def probe(name: str, module: nn.Module) -> Norm | None:
    """What a module computes as a norm, None for every other module."""
    names = _parameters(module)
    if names is None:
        return None
    weight, bias = names
    width = module.get_parameter(weight).shape[0]
    made = torch.Generator().manual_seed(0)
    inputs = torch.randn(ROWS, width, generator=made, dtype=torch.float64) * SIZE + SIZE / 2

    def run(values: Tensor, of_weight: Tensor, of_bias: Tensor) -> Tensor:
        own = {weight: of_weight} if bias is None else {weight: of_weight, bias: of_bias}
        return with_parameters(module, own).forward(values)  # type: ignore[no-any-return]

    zeros, ones = (torch.full((width,), value, dtype=torch.float64) for value in (0.0, 1.0))
    gain, shift = (torch.randn(width, generator=made, dtype=torch.float64) for _ in range(2))
    try:
        with torch.no_grad():
            at_zero, at_one = run(inputs, zeros, zeros), run(inputs, ones, zeros)
            anywhere = run(inputs, gain, shift)
            small = run(inputs * SMALL, ones, zeros)
    except Exception:  # whatever a module of another sort says when it is given one matrix
        return None
    outputs = (at_zero, at_one, anywhere, small)
    if not all(isinstance(output, Tensor) and output.shape == inputs.shape for output in outputs):
        return None
    normal = at_one - at_zero
    plus_one = not _close(at_zero, torch.zeros_like(normal), normal)
    if plus_one and not _close(at_zero, normal, normal):
        return None
    expected = normal * (gain + plus_one) + (0 if bias is None else shift)
    kind = _kind(inputs, normal)
    if kind is None or not _close(anywhere, expected, expected):
        return None
    eps = _eps(inputs * SMALL, small / (1 + plus_one), centred=kind == "LayerNorm")
    return Norm(name=name, kind=kind, width=width, eps=eps, plus_one=plus_one, weight=weight, bias=bias)


def _parameters(module: nn.Module) -> tuple[str, str | None] | None:
    """Names of a norm's weight and bias: its only parameters, of one dimension and size; None for other modules."""
    own = dict(module.named_parameters())
    sizes = {tuple(parameter.shape) for parameter in own.values()}
    if len(own) not in (1, 2) or len(sizes) != 1 or any("." in name for name in own):
        return None
    shape = sizes.pop()
    if len(shape) != 1 or shape[0] < 2:
        return None
    biases = [name for name in own if "bias" in name or name == "beta"]
    weights = [name for name in own if name not in biases]
    return (weights[0], biases[0] if biases else None) if len(weights) == 1 else None


def _kind(inputs: Tensor, normal: Tensor) -> Literal["LayerNorm", "RMSNorm"] | None:
    """Which norm, without weights, makes `normal` of the inputs: every row times a number, centred or not."""
    if _close(normal, _unit(inputs - inputs.mean(-1, keepdim=True)), normal):
        return "LayerNorm"
    return "RMSNorm" if _close(normal, _unit(inputs), normal) else None


def _unit(rows: Tensor) -> Tensor:
    """Rows whose mean square is 1; eps beside inputs of SIZE lies within the tolerance."""
    return rows / rows.square().mean(-1, keepdim=True).sqrt()


def _close(values: Tensor, wanted: Tensor, scale: Tensor) -> bool:
    return bool((values.double() - wanted).norm() <= TOLERANCE * scale.double().norm())


def _eps(inputs: Tensor, normal: Tensor, *, centred: bool) -> float:
    """What is added to the mean square, from how much shorter than 1 the rows come out."""
    rows = inputs - inputs.mean(-1, keepdim=True) if centred else inputs
    square = rows.square().mean(-1)
    eps = float((square / normal.double().square().mean(-1) - square).mean())
    return float(f"{max(eps, 0.0):.1e}")
