"""A layer of two experts, of which one has all tokens and the other none."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moeq.models.experts import ExpertLayer, ExpertMath
from moeq.models.kinds import GATED
from moeq.models.kinds.base import ActThenMultiply
from moeq.models.walk import LayerInputs

DEAD = 1  # an expert without a token
SEQUENCES = 8
SILU = ExpertMath(gate=ActThenMultiply(nn.SiLU()))


def layer_of(side: int) -> ExpertLayer:
    return ExpertLayer(index=3, name="layers.3.experts", num_experts=2, hidden_size=side, intermediate_size=side)


def layer_inputs(layer: ExpertLayer, tokens: int) -> LayerInputs:
    """tokens: of each of the sequences."""
    generator = torch.Generator().manual_seed(0)
    count = tokens * SEQUENCES
    hidden = torch.randn(count, layer.hidden_size, generator=generator)
    index = torch.arange(count)
    return LayerInputs(
        layer=layer, hidden=hidden + 0.8 * hidden.roll(1, -1), experts=torch.zeros(count, 1, dtype=torch.long),
        weights=torch.ones(count, 1), sequence=index // tokens, position=index % tokens,
    )  # fmt: skip


def layer_weights(layer: ExpertLayer) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: 0.1 * torch.randn(layer.num_experts, *layer.shape(name), generator=generator) for name in GATED}
