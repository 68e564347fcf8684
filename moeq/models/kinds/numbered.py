"""Experts as numbered children, expert_0, expert_1, ...: Switch Transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moeq.models.kinds.base import NON_GATED, Gate, Kind, ReadsParts, Tap, act_alone

_LINEARS = {"up_proj": "wi", "down_proj": "wo"}


class Numbered(Kind):
    """Each expert has wi [I, H] and wo [H, I]; called with a one-hot choice [T, 1, E], all zero over capacity."""

    name = "numbered"
    top_k = 1

    def holds(self, module: nn.Module) -> bool:
        return isinstance(module, nn.ModuleDict) and "expert_0" in module and hasattr(module["expert_0"], "wi")

    def sizes(self, module: nn.Module) -> tuple[int, int, int]:
        of: Any = module
        inter, hidden = of["expert_0"].wi.weight.shape
        return len(of), hidden, inter

    def projections(self, module: nn.Module) -> tuple[str, ...]:
        return NON_GATED

    def parameters(self, module: nn.Module) -> tuple[str, ...]:
        of: Any = module
        return tuple(f"expert_{e}.{name}.weight" for e in range(len(of)) for name in _LINEARS.values())

    def weights(self, module: nn.Module, experts: slice) -> dict[str, Tensor]:
        of: Any = module
        chosen = range(*experts.indices(len(of)))
        return {
            projection: torch.stack([of[f"expert_{e}"].get_submodule(name).weight.data for e in chosen])
            for projection, name in _LINEARS.items()
        }

    def alone(self, module: nn.Module, expert: int, read: ReadsParts) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        _, hidden, inter = self.sizes(module)
        rows = {"up_proj": inter, "down_proj": hidden}
        names = {projection: f"expert_{expert}.{name}.weight" for projection, name in _LINEARS.items()}
        return {projection: read.read_rows(name, 0, rows[projection]) for projection, name in names.items()}, {}

    def views(self, module: nn.Module, expert: int) -> dict[str, Tensor]:
        of: Any = module
        linears = {projection: of[f"expert_{expert}"].get_submodule(name) for projection, name in _LINEARS.items()}
        return {projection: linear.weight.data for projection, linear in linears.items()}

    def remarks(self, module: nn.Module) -> tuple[str, ...]:
        return ("numbered, no gate, capacity",)

    def gate(self, module: nn.Module) -> Gate:
        of: Any = module
        return act_alone(of["expert_0"].act)

    def tap(self, path: str) -> Tap:
        return Tap(path=path, after=False, read=lambda _, arguments, __: routing(*arguments[:3]))


def routing(hidden: Tensor, selected: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One-hot [T, 1, E] -> experts [T, 1], E where the expert was over its capacity."""
    experts = selected.argmax(-1).masked_fill(selected.sum(-1) == 0, selected.shape[-1])
    return hidden.flatten(0, -2), experts.view(-1, 1), weights.view(-1, 1)
