"""Folding models in memory, and how far the folded one's outputs are off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from moeq.errors import ModelError
from moeq.integers.edges import Edges, find_edges
from moeq.integers.folding import FoldedNorm, Ranges, apply_folds, make_fold
from moeq.models.experts import ExpertLayer, find_expert_layers
from moeq.models.streaming import blocks_of


class Wide(TorchDispatchMode):
    """Lets a float64 model compute in float64 where its code asks for float32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("dtype") == torch.float32:
            kwargs |= {"dtype": torch.float64}
        return func(*args, **kwargs)


def layers_of(model: nn.Module) -> list[ExpertLayer]:
    """The MoE layers; none of a dense model, or of one whose experts moeq refuses."""
    try:
        return find_expert_layers(model)
    except ModelError:
        return []


def edges_of(model: nn.Module, *calls: Callable[[], object]) -> Edges:
    return find_edges(model, layers_of(model), blocks_of(model), calls)


def fold(
    model: nn.Module, call: Callable[[], Any], edges: Edges, *, bits: int = 8, shift: bool = True
) -> tuple[float, Sequence[FoldedNorm]]:
    """Fold all edges in place; returns the relative error of what `call` gives, and the folds."""
    ranges = Ranges(None, lambda output: output.flatten(0, -2))
    wide = next(model.parameters()).dtype == torch.float64
    with torch.no_grad(), Wide() if wide else torch.no_grad():
        with ranges.watching(model, [edge.norm.name for edge in edges.edges]):
            before = call().logits
        seen = [(edge, ranges.of(edge.norm.name)) for edge in edges.edges]
        folds = [make_fold(edge, *one, bits, shift=shift) for edge, one in seen if one is not None]
        apply_folds(model, folds)
        found = Ranges(None, lambda output: output.flatten(0, -2))
        with found.watching(model, [folded.edge.norm.name for folded in folds]):
            after = call().logits
    assert not any(module._forward_hooks for module in model.modules())
    for folded in folds:
        check_scale(folded, found)
    assert before.dtype == next(model.parameters()).dtype
    return float((after - before).double().norm() / before.double().norm()), folds


def check_scale(folded: FoldedNorm, found: Ranges) -> None:
    """Every channel of the folded norm fills the codes of its one scale, which is what the fold is for."""
    ends = found.of(folded.edge.norm.name)
    assert ends is not None
    low, high = (end / folded.fold.scale for end in ends)
    bits, name = folded.fold.bits, folded.edge.norm.name
    width, wanted = (high - low, 2**bits - 1) if folded.why is None else (
        torch.maximum(low.abs(), high.abs()), 2 ** (bits - 1) - 1
    )  # fmt: skip
    assert torch.allclose(width, torch.full_like(width, wanted), rtol=1e-3), name
    if folded.why is None:
        assert float((low + 2 ** (bits - 1)).abs().max()) <= 0.51, name


def eager(model: Any) -> Any:
    """The model with experts that run one by one, which float64 needs."""
    model.set_experts_implementation("eager")
    return model
