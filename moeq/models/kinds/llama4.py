"""Llama 4: transposed stacks; every expert is given every token, multiplied by its score (zero when not chosen)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from moeq.models.kinds.base import Gate, Kind, Tap, act_then_multiply


class Llama4(Kind):
    """gate_up_proj [E, H, 2I], down_proj [E, I, H], called with [E*T, H]; the router beside it says who was chosen."""

    name = "llama4"
    scales_inputs = True

    def holds(self, module: nn.Module) -> bool:
        return type(module).__name__ == "Llama4TextExperts"

    def sizes(self, module: nn.Module) -> tuple[int, int, int]:
        of: Any = module
        experts, inter, hidden = of.down_proj.shape
        return experts, hidden, inter

    def parameters(self, module: nn.Module) -> tuple[str, ...]:
        return "gate_up_proj", "down_proj"

    def weights(self, module: nn.Module, experts: slice) -> dict[str, Tensor]:
        of: Any = module
        gate, up = of.gate_up_proj.data[experts].mT.chunk(2, 1)
        return {"gate_proj": gate, "up_proj": up, "down_proj": of.down_proj.data[experts].mT}

    def remarks(self, module: nn.Module) -> tuple[str, ...]:
        return ("scaled inputs",)

    def gate(self, module: nn.Module) -> Gate:
        of: Any = module
        return act_then_multiply(of.act_fn)

    def tap(self, path: str) -> Tap:
        return Tap(path=f"{path.rpartition('.')[0]}.router", after=True, read=_chosen)


def _chosen(router: Any, arguments: tuple[Any, ...], output: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The router returns scores [T, E], zero where not chosen, and logits [T, E]."""
    scores = output[0]
    weights, experts = scores.topk(router.top_k, -1)
    return arguments[0], experts.masked_fill(weights == 0, scores.shape[-1]), weights
