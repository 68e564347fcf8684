"""JetMoE: feed-forward experts as two parallel linears; its attention experts are left in full precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moeq.models.kinds.base import Gate, Kind, Tap, act_then_multiply


class JetMoe(Kind):
    """input_linear.weight [E, 2I, H], output_linear.weight [E, H, I] beside the router, in the block itself."""

    name = "jetmoe"

    def holds(self, module: nn.Module) -> bool:
        return type(module).__name__ == "JetMoeMoE"

    def sizes(self, module: nn.Module) -> tuple[int, int, int]:
        of: Any = module
        experts, hidden, inter = of.output_linear.weight.shape
        return experts, hidden, inter

    def parameters(self, module: nn.Module) -> tuple[str, ...]:
        return "input_linear.weight", "output_linear.weight"

    def weights(self, module: nn.Module, experts: slice) -> dict[str, Tensor]:
        of: Any = module
        gate, up = of.input_linear.weight.data[experts].chunk(2, 1)
        return {"gate_proj": gate, "up_proj": up, "down_proj": of.output_linear.weight.data[experts]}

    def remarks(self, module: nn.Module) -> tuple[str, ...]:
        return ("parallel linears",)

    def gate(self, module: nn.Module) -> Gate:
        of: Any = module
        return act_then_multiply(of.activation)

    def tap(self, path: str) -> Tap:
        return Tap(path=f"{path}.router", after=True, read=lambda _, arguments, output: routing(arguments[0], output))


def routing(hidden: Tensor, routed: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The router sorts pairs of token and expert by expert: put them back as experts and weights [T, k]."""
    order, _, gates, sizes, _ = routed
    experts = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(order.device)
    index, weights = torch.empty_like(experts), torch.empty_like(gates)
    index[order], weights[order] = experts, gates
    return hidden, index.view(len(hidden), -1), weights.view(len(hidden), -1)
