"""What every token chose, collected layer by layer while a walk goes through the model."""

from __future__ import annotations

import numpy as np
import torch

from moeq.artifacts.trace import NONE, RoutingTrace
from moeq.models.corpus import Sequences
from moeq.models.experts import ExpertLayer
from moeq.models.walk import LayerInputs


class Recorder:
    """Collects what every token chose, layer by layer, of some sequences; prefill: [S] tokens of each prompt.

    image_tokens: the ids that stand for parts of images; without any, or where no sequence has images, nothing is said
    of them.
    """

    def __init__(self, sequences: Sequences, prefill: torch.Tensor, image_tokens: frozenset[int] = frozenset()) -> None:
        self.lengths, self.prefill, self.domains = sequences.mask.sum(1), prefill, sequences.domains
        self.starts = self.lengths.cumsum(0) - self.lengths
        self.images: np.ndarray | None = None
        if image_tokens and sequences.extra is not None:
            tokens = sequences.ids[sequences.mask]
            self.images = torch.isin(tokens, torch.tensor(sorted(image_tokens))).numpy().astype(np.uint8)
        self.layers: list[ExpertLayer] = []
        self.chosen: list[np.ndarray] = []
        self.weights: list[np.ndarray] = []

    def add(self, inputs: LayerInputs) -> None:
        """Record one layer: tokens that were left out keep no expert."""
        shape = (int(self.lengths.sum()), inputs.experts.shape[1])
        chosen, weights = np.full(shape, NONE, dtype=np.int16), np.zeros(shape, dtype=np.float16)
        rows = (self.starts[inputs.sequence] + inputs.position).numpy()
        experts = inputs.experts.cpu().numpy()
        there = experts < inputs.layer.num_experts
        chosen[rows] = np.where(there, experts, NONE)
        weights[rows] = np.where(there, inputs.weights.cpu().numpy(), 0)
        self.layers.append(inputs.layer)
        self.chosen.append(chosen)
        self.weights.append(weights)

    def trace(self) -> RoutingTrace:
        """The trace of the layers so far; what was collected is given up for it."""
        top_k = max(chosen.shape[1] for chosen in self.chosen)
        return RoutingTrace(
            layers=tuple(layer.name for layer in self.layers),
            num_experts=tuple(layer.num_experts for layer in self.layers),
            top_k=top_k,
            experts=_stacked(self.chosen, top_k, NONE),
            weights=_stacked(self.weights, top_k, 0),
            images=self.images,
            lengths=self.lengths.numpy().astype(np.int32),
            prefill=self.prefill.numpy().astype(np.int32),
            domains=self.domains,
        )


def _stacked(layers: list[np.ndarray], width: int, fill: int) -> np.ndarray:
    """One array [N, L, width] of a layer's [N, k] each, which are removed from the list one by one."""
    stacked = np.full((len(layers[0]), len(layers), width), fill, dtype=layers[0].dtype)
    for index in reversed(range(len(layers))):
        layer = layers.pop()
        stacked[:, index, : layer.shape[1]] = layer
    return stacked
