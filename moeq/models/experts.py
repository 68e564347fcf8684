"""Finding the routed experts of a transformers model by structure, and computing one expert.

Pattern P0 of transformers 5 (Mixtral, Qwen3-MoE and about 50 families): a module that holds `gate_up_proj` [E, 2I, H]
and `down_proj` [E, H, I], no biases, called as `experts(hidden[T, H], top_k_index[T, k], top_k_weights[T, k])`.

Letters: E experts, T tokens, H hidden size, I intermediate size, k experts a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations import moe as hf_moe

from moeq.errors import ModelError

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class ExpertLayer:
    """One MoE layer: its place among the MoE layers, the experts module's path, and its sizes."""

    index: int
    name: str
    num_experts: int
    hidden_size: int
    intermediate_size: int

    def shape(self, projection: str) -> tuple[int, int]:
        """Rows (outputs) and inputs of one expert's matrix."""
        if projection == "down_proj":
            return self.hidden_size, self.intermediate_size
        return self.intermediate_size, self.hidden_size

    @property
    def parameters_per_expert(self) -> int:
        return 3 * self.hidden_size * self.intermediate_size


def refusal(module: nn.Module) -> str | None:
    """Why an experts module is not of pattern P0, or None when it is."""
    flags = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    for flag, wanted in flags.items():
        if getattr(module, flag, wanted) is not wanted:
            return f"{flag} is {not wanted}"
    if getattr(module, "has_post_expert_norm", False):
        return "it norms each expert's output"
    stacked = dict(module.named_parameters(recurse=False))
    if any(name not in stacked or stacked[name].dim() != 3 for name in ("gate_up_proj", "down_proj")):
        return "its weights are not gate_up_proj [E, 2I, H] and down_proj [E, H, I]"
    if getattr(type(module), "_apply_gate", None) is not hf_moe._default_apply_gate:
        return "it has a gate function of its own"
    return None


def _holds_experts(module: nn.Module) -> bool:
    stacked = [p for _, p in module.named_parameters(recurse=False) if p.dim() == 3]
    return len(stacked) >= 2 or (hasattr(module, "num_experts") and bool(stacked))


def find_expert_layers(model: nn.Module) -> list[ExpertLayer]:
    """All routed-expert layers in order of execution.

    Raises ModelError when there are none (not an MoE) or when one is of a pattern that is not supported yet.
    """
    layers: list[ExpertLayer] = []
    kind = type(model).__name__
    for name, module in model.named_modules():
        if not _holds_experts(module):
            continue
        reason = refusal(module)
        if reason is not None:
            raise ModelError(
                f"experts of this kind ({type(module).__name__}) are not supported yet: {reason}",
                where=f"{kind}, {name}",
                do="see the table of families in the README",
            )
        experts, hidden, intermediate = module.down_proj.shape
        layers.append(
            ExpertLayer(
                index=len(layers),
                name=name,
                num_experts=experts,
                hidden_size=hidden,
                intermediate_size=intermediate,
            )
        )
    if not layers:
        raise ModelError(
            "not a Mixture-of-Experts model: no module holds stacked expert weights",
            where=kind,
            do="moeq quantizes routed experts; use a dense quantizer for this model",
        )
    return layers


def activation(model: nn.Module, layer: ExpertLayer) -> nn.Module:
    """The layer's activation function (act in act(gate) * up)."""
    found = model.get_submodule(layer.name).act_fn
    return found  # type: ignore[return-value]


def expert_weights(model: nn.Module, layer: ExpertLayer, expert: int) -> dict[str, Tensor]:
    """One expert's three matrices as views: gate_proj, up_proj [I, H], down_proj [H, I]."""
    module: Any = model.get_submodule(layer.name)
    gate, up = module.gate_up_proj.data[expert].chunk(2, 0)
    return {"gate_proj": gate, "up_proj": up, "down_proj": module.down_proj.data[expert]}


def stacked_weights(model: nn.Module, layer: ExpertLayer, experts: slice) -> dict[str, Tensor]:
    """The matrices of some experts: gate_proj, up_proj [e, I, H], down_proj [e, H, I], as views."""
    module: Any = model.get_submodule(layer.name)
    gate, up = module.gate_up_proj.data[experts].chunk(2, 1)
    return {"gate_proj": gate, "up_proj": up, "down_proj": module.down_proj.data[experts]}


def set_expert_weights(model: nn.Module, layer: ExpertLayer, expert: int, weights: dict[str, Tensor]) -> None:
    """Overwrite some of one expert's matrices in place (cast to the model's dtype)."""
    mine = expert_weights(model, layer, expert)
    with torch.no_grad():
        for projection, value in weights.items():
            mine[projection].copy_(value)
