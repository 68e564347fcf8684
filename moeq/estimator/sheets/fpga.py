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
    def linears(self) -> tuple[Linear, ...]:
        """All linear layers of a frame, equal ones together; experts get their tokens in equal shares."""
        n, d = self.positions, self.hidden_size
        mlp = 2 * MLP_RATIO * d * d
        sparse = 0 if self.experts is None else self.layers // self.experts.every
        found = [
            Linear(name="patch embedding", weights=self.patch_inputs * d, tokens=n - 1, count=1),
            Linear(name="attention", weights=4 * d * d, tokens=n, count=self.layers),
            Linear(name="MLP", weights=mlp, tokens=n, count=self.layers - sparse),
            Linear(name="head", weights=d * self.classes, tokens=1, count=1),
        ]
        if self.experts is not None:
            one = self.experts
            tokens = n * one.top_k / one.num_experts
            found.append(
                Linear(name="experts", weights=mlp // one.top_k, tokens=tokens, count=sparse * one.num_experts)
            )
        return tuple(found)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, every expert once: the least that a frame reads when none stay on chip."""
        return sum(linear.weights * linear.count for linear in self.linears)


@dataclass(frozen=True, kw_only=True)
class Linear:
    """`count` equal linear layers (or experts) of `weights` weights each, which `tokens` tokens of a frame pass."""

    name: str
    weights: int
    tokens: float
    count: int

    def traffic_bytes(self, order: LinearOrder, units: int) -> int:
        """Off-chip bytes of weights in a frame.

        naive: fetched again for every patch; unified: once for every `units` patches, which as many compute units take
        together; preloaded: never.
        """
        if order == "preloaded":
            return 0
        passes = math.ceil(self.tokens / units) if order == "unified" else math.ceil(self.tokens)
        return self.count * passes * self.weights


def linear_traffic_bytes(model: VisionModel, order: LinearOrder, units: int) -> int:
    """Off-chip bytes of weights that all linear layers fetch in a frame (`Linear.traffic_bytes`)."""
    return sum(linear.traffic_bytes(order, units) for linear in model.linears)


def attention_traffic_bytes(model: VisionModel, order: AttentionOrder, elements: int) -> int:
    """Off-chip bytes of keys and values in a frame, over all heads and layers.

    naive: every query meets all keys and values anew, `elements` of them fetched at a time; broadcast: `elements`
    queries are held, and every key goes to all of them; preloaded: keys and values are read once.
    """
    n, d = model.positions, model.hidden_size
    passes = {"naive": n, "broadcast": math.ceil(n / elements), "preloaded": 1}[order]
    return model.layers * passes * 2 * n * d


def blocks_at_once(order: AttentionOrder, elements: int) -> int:
    """Blocks of keys that one step of `elements` processing elements fetches."""
    return {"naive": elements, "broadcast": 1, "preloaded": 0}[order]


def least_units(model: VisionModel, bytes_per_second: float, seconds: float) -> int | None:
    """The fewest compute units with which the weights of a frame can be streamed in a time; None: no number can."""
    for units in range(1, model.positions + 1):
        if linear_traffic_bytes(model, "unified", units) <= bytes_per_second * seconds:
            return units
    return None
