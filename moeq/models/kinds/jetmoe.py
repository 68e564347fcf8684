"""JetMoE: feed-forward experts as two parallel linears; its attention experts are left in full precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moeq.models.kinds.base import Experts, Kind, Routing, Tap


class JetMoe(Kind):
    """input_linear.weight [E, 2I, H], output_linear.weight [E, H, I] beside the router, in the block itself."""

    name = "jetmoe"
    activation = "activation"
    remark = "parallel linears"

    def holds(self, module: Experts) -> bool:
        return type(module).__name__ == "JetMoeMoE"

    def sizes(self, module: Experts) -> tuple[int, int, int]:
        experts, hidden, inter = module.output_linear.weight.shape
        return experts, hidden, inter

    def parameters(self, module: Experts) -> tuple[str, ...]:
        return "input_linear.weight", "output_linear.weight"

    def weights(self, module: Experts, experts: slice) -> dict[str, Tensor]:
        gate, up = module.input_linear.weight.data[experts].chunk(2, 1)
        return {"gate_proj": gate, "up_proj": up, "down_proj": module.output_linear.weight.data[experts]}

    def tap(self, path: str) -> Tap:
        return Tap(path=f"{path}.router", after=True, read=lambda _, arguments, output: routing(arguments[0], output))


def routing(hidden: Tensor, routed: Any) -> Routing:
    """hidden [T, H] with experts and weights [T, k]; the router gives pairs of token and expert, sorted by expert."""
    order, _, gates, sizes, _ = routed
    experts = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(order.device)
    index, weights = torch.empty_like(experts), torch.empty_like(gates)
    index[order], weights[order] = experts, gates
    return hidden, index.view(len(hidden), -1), weights.view(len(hidden), -1)
