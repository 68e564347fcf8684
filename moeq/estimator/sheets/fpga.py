"""Bounds of a vision transformer on an FPGA: work, weights, off-chip traffic in the orders of paper 004, section 4.2.

Everything is INT8, one byte a weight and an activation, of one frame. Letters: N positions, D hidden size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

AttentionOrder = Literal["naive", "broadcast", "preloaded"]
LinearOrder = Literal["naive", "unified", "preloaded"]
MLP_RATIO = 4


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Experts in every `every`-th block in place of its MLP; top_k of them together are as large as that MLP."""

    num_experts: int
    top_k: int
    every: int


@dataclass(frozen=True)
class Linear:
    """`count` equal linear layers (or experts) of `weights` weights each, which `tokens` tokens of a frame pass."""

    weights: int
    tokens: float
    count: int


@dataclass(frozen=True, kw_only=True)
class VisionModel:
    """A vision transformer; `patch_inputs`: values of one patch; experts None: every block has an MLP."""

    hidden_size: int
    layers: int
    positions: int = 197
    patch_inputs: int = 768
    classes: int = 1000
    experts: Experts | None = None

    @property
    def macs(self) -> int:
        """Multiply-accumulates of a frame; a token's experts do the work of the MLP."""
        n, d = self.positions, self.hidden_size
        block = (4 + 2 * MLP_RATIO) * n * d * d + 2 * n * n * d
        return self.layers * block + (n - 1) * self.patch_inputs * d + d * self.classes

    @property
    def operations(self) -> int:
        """Operations of a frame: two for each multiply-accumulate."""
        return 2 * self.macs

    @property
    def linears(self) -> list[Linear]:
        """All linear layers of a frame, equal ones together; experts get their tokens in equal shares."""
        n, d, experts = self.positions, self.hidden_size, self.experts
        mlp = 2 * MLP_RATIO * d * d
        sparse = 0 if experts is None else self.layers // experts.every
        linears = [
            Linear(self.patch_inputs * d, n - 1, 1),  # patch embedding
            Linear(4 * d * d, n, self.layers),  # attention
            Linear(mlp, n, self.layers - sparse),
            Linear(d * self.classes, 1, 1),  # head
        ]
        if experts is not None:
            tokens = n * experts.top_k / experts.num_experts
            linears.append(Linear(mlp // experts.top_k, tokens, sparse * experts.num_experts))
        return linears

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, every expert once: the least that a frame reads when none stay on chip."""
        return sum(linear.weights * linear.count for linear in self.linears)


def linear_traffic_bytes(model: VisionModel, order: LinearOrder, units: int) -> int:
    """Off-chip bytes of weights that all linear layers fetch in a frame.

    naive: fetched again for every patch; unified: once for every `units` patches, which as many compute units take
    together; preloaded: never.
    """
    if order == "preloaded":
        return 0
    at_once = units if order == "unified" else 1
    return sum(linear.count * math.ceil(linear.tokens / at_once) * linear.weights for linear in model.linears)


def attention_traffic_bytes(model: VisionModel, order: AttentionOrder, elements: int) -> int:
    """Off-chip bytes of keys and values in a frame, over all heads and layers.

    naive: every query meets all keys and values anew, `elements` blocks of them fetched in a step; broadcast:
    `elements` queries are held, and every key goes to all of them, one block in a step; preloaded: keys and values are
    read once.
    """
    n, d = model.positions, model.hidden_size
    passes = {"naive": n, "broadcast": math.ceil(n / elements), "preloaded": 1}[order]
    return model.layers * passes * 2 * n * d


def least_units(model: VisionModel, bytes_per_second: float, seconds: float) -> int | None:
    """The fewest compute units with which the weights of a frame can be streamed in a time; None: no number can."""
    for units in range(1, model.positions + 1):
        if linear_traffic_bytes(model, "unified", units) <= bytes_per_second * seconds:
            return units
    return None
