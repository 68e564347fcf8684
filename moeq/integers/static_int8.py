"""Simulated W8A8: linears whose inputs are rounded by one static scale each, and whose weights row by row, to int8.

Under `StaticInputs` a model runs as it is; every matrix product with a chosen parameter first rounds what it is given.
Letters: T tokens, D inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moeq.integers.arithmetic.reparam import symmetric_codes
from moeq.integers.edges.watching import PRODUCTS, Watching
from moeq.models.experts import ExpertLayer
from moeq.models.non_experts import ATTENTION, DENSE, SHARED, OtherModules

BITS = 8
Scale = tuple[float | None, int]  # of an input: what one code stands for (None: taken of every row), the bits of codes


def scale_of(largest: float, bits: int) -> Scale:
    """The scale of inputs whose largest magnitude is that of the highest code."""
    return largest / (2 ** (bits - 1) - 1), bits


class StaticInputs(Watching):
    """Rounds the inputs of chosen parameters' products by their scales; without scales, notes the largest magnitude.

    largest: {parameter: the largest magnitude of what it was given}, of a mode without scales.
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[str], chosen: frozenset[str], scales: Mapping[str, Scale] | None = None
    ) -> None:
        super().__init__(model, blocks)
        self._chosen, self._scales = chosen, scales
        self.largest: dict[str, float] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        places = PRODUCTS.get(func._schema.name)
        if places is not None:
            left, right, _ = places
            weight = self._map.find(args[right])
            if weight is not None and weight[1] in self._chosen and args[left].numel():
                args = [*args[:left], self._input(weight[1], args[left]), *args[left + 1 :]]
        return func(*args, **(kwargs or {}))

    def _input(self, name: str, given: Tensor) -> Tensor:
        if self._scales is None:
            self.largest[name] = max(self.largest.get(name, 0.0), float(given.abs().max()))
            return given
        scale, bits = self._scales.get(name, (0.0, BITS))  # 0: calibration never saw an input, or only zeros
        if scale is None:
            return round_rows(given)
        return symmetric_codes(given, scale, bits).mul_(scale).to(given.dtype) if scale else torch.zeros_like(given)


def linears(others: OtherModules, layers: Sequence[ExpertLayer]) -> frozenset[str]:
    """The weights that are quantized: all linears of decoder layers and the experts; not routers, gates, embeddings or
    the head, which are small or compute in full precision on every target."""
    experts = {f"{layer.name}.{name}" for layer in layers for name in layer.parameters if not name.endswith("_bias")}
    return frozenset({module.weight for module in others.of((ATTENTION, DENSE, SHARED))} | experts)


def row_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 codes of [..., N, D], whole numbers in float64, and the scale of every row [..., N, 1] in the
    weight's type, 1 where all of a row is 0."""
    scale = weight.abs().amax(-1, keepdim=True) / (2 ** (BITS - 1) - 1)
    safe = torch.where(scale > 0, scale, torch.ones_like(scale))
    return symmetric_codes(weight, safe, BITS), safe


def round_rows(weight: Tensor) -> Tensor:
    """What the codes of `row_codes` stand for, [..., N, D] in the weight's own type."""
    codes, scale = row_codes(weight)
    return (codes * scale).to(weight.dtype)


def round_experts(model: nn.Module, layer: ExpertLayer) -> None:
    """Round all matrices of one layer's experts in place."""
    module = model.get_submodule(layer.name)
    for expert in range(layer.num_experts):
        for view in layer.kind.views(module, expert).values():
            view.copy_(round_rows(view))
