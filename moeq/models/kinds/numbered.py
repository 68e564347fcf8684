"""Experts as numbered children, expert_0, expert_1, ...: Switch Transformers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moeq.models.kinds.base import NON_GATED, Experts, Kind, Matrices, ReadsParts, Routing, Tap


class Numbered(Kind):
    """Each expert has wi [I, H] and wo [H, I]; called with a one-hot choice [T, 1, E], all zero over capacity."""

    name = "numbered"
    activation = "expert_0.act"
    remark = "numbered, no gate, capacity"
    top_k = 1

    def holds(self, module: Experts) -> bool:
        return isinstance(module, nn.ModuleDict) and "expert_0" in module and hasattr(module["expert_0"], "wi")

    def sizes(self, module: Experts) -> tuple[int, int, int]:
        inter, hidden = module["expert_0"].wi.weight.shape
        return len(module), hidden, inter

    def projections(self, module: Experts) -> tuple[str, ...]:
        return NON_GATED

    def parameters(self, module: Experts) -> tuple[str, ...]:
        return tuple(name for expert in range(len(module)) for name in _names(expert).values())

    def weights(self, module: Experts, experts: slice) -> dict[str, Tensor]:
        chosen = [self.views(module, expert) for expert in range(*experts.indices(len(module)))]
        return {projection: torch.stack([matrices[projection] for matrices in chosen]) for projection in NON_GATED}

    def alone(self, module: Experts, path: str, expert: int, reader: ReadsParts) -> tuple[Matrices, Matrices]:
        _, hidden, inter = self.sizes(module)
        rows = {"up_proj": inter, "down_proj": hidden}
        names = {projection: f"{path}.{name}" for projection, name in _names(expert).items()}
        return {projection: reader.read_rows(name, 0, rows[projection]) for projection, name in names.items()}, {}

    def views(self, module: Experts, expert: int) -> dict[str, Tensor]:
        return {projection: module.get_parameter(name).data for projection, name in _names(expert).items()}

    def tap(self, path: str) -> Tap:
        return Tap(path=path, after=False, read=lambda _, arguments, __: routing(*arguments[:3]))


def _names(expert: int) -> dict[str, str]:
    """{projection: name of its parameter below the module}."""
    return {"up_proj": f"expert_{expert}.wi.weight", "down_proj": f"expert_{expert}.wo.weight"}


def routing(hidden: Tensor, selected: Tensor, weights: Tensor) -> Routing:
    """hidden [T, H], experts [T, 1] of a one-hot choice [T, 1, E] (E: over its capacity), and weights [T, 1]."""
    experts = selected.argmax(-1).masked_fill(selected.sum(-1) == 0, selected.shape[-1])
    return hidden.flatten(0, -2), experts.view(-1, 1), weights.view(-1, 1)
