"""Llama 4: transposed stacks; every expert is given every token, multiplied by its score (zero when not chosen)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moeq.models.kinds.base import Experts, Kind, Routing, Tap


class Llama4(Kind):
    """gate_up_proj [E, H, 2I], down_proj [E, I, H], called with [E*T, H]; the router beside it says who was chosen."""

    name = "llama4"
    activation = "act_fn"
    remark = "scaled inputs"
    scales_inputs = True

    def holds(self, module: Experts) -> bool:
        return type(module).__name__ == "Llama4TextExperts"

    def sizes(self, module: Experts) -> tuple[int, int, int]:
        experts, inter, hidden = module.down_proj.shape
        return experts, hidden, inter

    def parameters(self, module: Experts) -> tuple[str, ...]:
        return "gate_up_proj", "down_proj"

    def weights(self, module: Experts, experts: slice) -> dict[str, Tensor]:
        gate, up = module.gate_up_proj.data[experts].mT.chunk(2, 1)
        return {"gate_proj": gate, "up_proj": up, "down_proj": module.down_proj.data[experts].mT}

    def tap(self, path: str) -> Tap:
        return Tap(path=f"{path.rpartition('.')[0]}.router", after=True, read=_chosen)


def _chosen(router: Any, arguments: tuple[Any, ...], output: Any) -> Routing:
    """The router returns scores [T, E], zero where not chosen, and logits [T, E]."""
    scores = output[0]
    weights, experts = scores.topk(router.top_k, -1)
    return arguments[0], experts.masked_fill(weights == 0, scores.shape[-1]), weights
