"""Folding a model's norms into the linears that they feed: what norms give is observed, then parameters change.

Letters: D channels of a norm, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moeq.models.edges import Edge
from moeq.models.weights import owner
from moeq.numerics.reparam import (
    ChannelQuantizer,
    Fold,
    asymmetric_quantizer,
    channel_range,
    fold_of,
    folded_linear,
    folded_norm,
    symmetric_quantizer,
)


@dataclass(frozen=True, kw_only=True)
class FoldedNorm:
    """One edge with its quantizer; low, high: [D], what calibration saw; why: the reason for scales alone, or None."""

    edge: Edge
    low: Tensor
    high: Tensor
    quantizer: ChannelQuantizer
    fold: Fold
    why: str | None


class Ranges:
    """Ranges of norms' outputs, channel by channel, while a model runs; samples are held where a percentile is taken.

    keep: picks the rows that count of an output [..., D], as [T, D].
    """

    def __init__(self, percentile: float | None, keep: Callable[[Tensor], Tensor]) -> None:
        self._percentile, self._keep = percentile, keep
        self._seen: dict[str, tuple[Tensor, Tensor]] = {}
        self._samples: dict[str, list[Tensor]] = {}

    @contextmanager
    def watching(self, model: nn.Module, norms: Iterable[str]) -> Iterator[None]:
        """Observe these norms within the block."""
        hooks = [model.get_submodule(name).register_forward_hook(self._hook(name)) for name in norms]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda _, __, output: self._add(name, self._keep(output.detach()))

    def _add(self, name: str, rows: Tensor) -> None:
        if self._percentile is not None:
            self._samples.setdefault(name, []).append(rows.cpu())
        elif len(rows):
            low, high = channel_range(rows)
            before = self._seen.get(name, (low, high))
            self._seen[name] = torch.minimum(before[0], low), torch.maximum(before[1], high)

    def settle(self, norms: Iterable[str]) -> None:
        """Take the percentiles of these norms and let their samples go."""
        for name in norms:
            parts = [part for part in self._samples.pop(name, []) if len(part)]
            if parts:
                self._seen[name] = channel_range(torch.cat(parts), self._percentile)

    def of(self, norm: str) -> tuple[Tensor, Tensor] | None:
        """Least and largest value [D], float64 on the CPU; None of a norm that was given nothing."""
        self.settle([norm])
        found = self._seen.get(norm)
        return None if found is None else (found[0].cpu(), found[1].cpu())


def make_fold(edge: Edge, low: Tensor, high: Tensor, bits: int, *, shift: bool = True) -> FoldedNorm:
    """The fold of one norm: with zero points where it may (and `shift`), else of scales alone.

    Raises QuantizationError naming the norm and the channel that is constant or not finite.
    """
    why = edge.why_no_shift() if shift else "reparam.bias is false"
    make = asymmetric_quantizer if why is None else symmetric_quantizer
    quantizer = make(low, high, bits, where=edge.norm.name)
    return FoldedNorm(edge=edge, low=low, high=high, quantizer=quantizer, fold=fold_of(quantizer), why=why)


def folded_parameters(model: nn.Module, folded: FoldedNorm) -> dict[str, Tensor]:
    """The parameters that one fold changes, as they become, float64 by name. The model is left as it is."""
    norm = folded.edge.norm
    fold = _on(folded.fold, model.get_parameter(f"{norm.name}.{norm.weight}").device)
    bias = None if norm.bias is None else model.get_parameter(f"{norm.name}.{norm.bias}").detach()
    weight = model.get_parameter(f"{norm.name}.{norm.weight}").detach()
    gain, beta = folded_norm(weight, bias, fold, plus_one=norm.plus_one)
    found = {f"{norm.name}.{norm.weight}": gain}
    if beta is not None:
        found[f"{norm.name}.{norm.bias}"] = beta
    for consumer in folded.edge.consumers:
        old = None if consumer.bias is None else model.get_parameter(consumer.bias).detach()
        matrix, shifted = folded_linear(model.get_parameter(consumer.weight).detach(), old, fold, axis=consumer.axis)
        found[consumer.weight] = matrix
        if consumer.bias is not None and fold.shifts and shifted is not None:
            found[consumer.bias] = shifted
    return found


def _on(fold: Fold, device: torch.device) -> Fold:
    moved = {name: getattr(fold, name).to(device) for name in ("r1", "r2", "shift")}
    return Fold(**moved, scale=fold.scale, bits=fold.bits)


def apply_folds(model: nn.Module, folds: Sequence[FoldedNorm]) -> None:
    """Fold a model in memory; parameters get new memory and keep their type."""
    for folded in folds:
        for name, value in folded_parameters(model, folded).items():
            module, leaf = owner(model, name)
            parameter = getattr(module, leaf)
            parameter.data = value.to(parameter.dtype)
