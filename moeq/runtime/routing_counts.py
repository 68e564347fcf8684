"""Routing statistics of one sequence while a model runs: what paper 000's importance is made of.

Letters: L MoE layers, E experts of a layer, T tokens, k experts a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from moeq.models.experts import ExpertLayer
from moeq.models.kinds.base import Routing
from moeq.models.walk import tap


@dataclass(frozen=True, kw_only=True)
class RoutingCounts:
    """[L, E] each. counts: how often every expert was chosen; scores: the sum of its routing weights."""

    counts: np.ndarray
    scores: np.ndarray


@contextmanager
def counting(model: nn.Module, layers: Sequence[ExpertLayer]) -> Iterator[RoutingCounts]:
    """What the routers choose for every token of the forward passes within, none of them a pad.

    Every layer has as many experts as the first. Sums are taken on the CPU in float64, in the order of the tokens, so
    that the same passes give the same bits.
    """
    shape = (len(layers), layers[0].num_experts)
    routing = RoutingCounts(counts=np.zeros(shape, np.int64), scores=np.zeros(shape))

    def see(layer: ExpertLayer, seen: Routing) -> None:
        _, experts, weights = seen
        chosen, share = experts.detach().reshape(-1).cpu().long(), weights.detach().reshape(-1).cpu().double()
        real = chosen < layer.num_experts
        chosen, share = chosen[real], share[real]
        routing.counts[layer.index] += torch.bincount(chosen, minlength=layer.num_experts).numpy()
        routing.scores[layer.index] += torch.bincount(chosen, share, minlength=layer.num_experts).numpy()

    with ExitStack() as stack:
        for layer in layers:
            stack.callback(tap(model, layer, see))
        yield routing
