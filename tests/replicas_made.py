"""Replicas of a model's experts, rounded to nearest as they are asked for, and losses that say nothing of it."""

from __future__ import annotations

import hashlib
from typing import Any, ClassVar

import numpy as np
import torch

from moeq.artifacts.assignment import FULL
from moeq.models.experts import ExpertLayer, find_expert_layers, stacked_biases, stacked_weights
from moeq.quantizers.layer import made_on_demand
from moeq.recipe import LossesSection

GRID = LossesSection(group_size=16)


class Made:
    """A ReplicaSource over a model in memory; what is rounded once is not rounded again for another model of the same
    weights."""

    rounded: ClassVar[dict[str, dict[str, Any]]] = {}

    def __init__(self, model: Any, bits: tuple[int, ...] = (1, 2, 3, 4)) -> None:
        self.layers = find_expert_layers(model)
        self.bits = bits
        self.original = {
            layer.index: {name: stack.clone() for name, stack in stacked_weights(model, layer, slice(None)).items()}
            for layer in self.layers
        }
        self.biases = {
            layer.index: {name: stack.clone() for name, stack in stacked_biases(model, layer, slice(None)).items()}
            for layer in self.layers
        }

    def widths(self) -> frozenset[int]:
        return frozenset({*self.bits, FULL})

    def expert(self, layer: ExpertLayer, expert: int, key: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        mine = {name: stack[expert] for name, stack in self.original[layer.index].items()}
        biases = {name: stack[expert] for name, stack in self.biases[layer.index].items()}
        if key == FULL:
            return mine, biases
        named = hashlib.sha256(f"{key} {sorted(mine)}".encode())
        for _, one in sorted(mine.items()):
            named.update(one.cpu().contiguous().view(torch.uint8).numpy())
        digest = named.hexdigest()
        if digest not in self.rounded:
            floats = {name: one.float() for name, one in mine.items()}
            self.rounded[digest] = dict(made_on_demand("rtn", floats, GRID, key, layer=layer, expert=expert))
        return {name: weight.map(torch.clone) for name, weight in self.rounded[digest].items()}, biases


def losses_of(layers: list[ExpertLayer]) -> np.ndarray:
    """[L, E, 4] that fall with the width and differ from expert to expert."""
    generator = np.random.default_rng(0)
    size = generator.uniform(0.5, 2, (len(layers), layers[0].num_experts, 1))
    return size * np.array([8.0, 3.0, 1.0, 0.25])
