"""Folding a model's norms into the linears that they feed: what norms give is observed, then parameters change.

Letters: D channels of a norm, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moeq.integers.arithmetic.reparam import (
    ChannelQuantizer,
    Fold,
    asymmetric_quantizer,
    channel_range,
    fold_of,
    folded_linear,
    folded_norm,
    symmetric_quantizer,
)
from moeq.integers.edges import Consumer, Edge
from moeq.models.weights import owner

ROUTER_BIAS = "router_bias"  # a key of the configuration; modules called router or routers gain biases


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
        ends = self._seen.get(norm)
        return None if ends is None else (ends[0].cpu(), ends[1].cpu())


def make_fold(edge: Edge, low: Tensor, high: Tensor, bits: int, *, shift: bool = True) -> FoldedNorm:
    """The fold of one norm: with zero points where it may (and `shift`), else of scales alone.

    Raises QuantizationError naming the norm and the channel that is constant or not finite.
    """
    why = edge.why_no_shift() if shift else "reparam.bias is false"
    make = asymmetric_quantizer if why is None else symmetric_quantizer
    quantizer = make(low, high, bits, where=edge.norm.name)
    return FoldedNorm(edge=edge, low=low, high=high, quantizer=quantizer, fold=fold_of(quantizer), why=why)


def changed_names(folded: FoldedNorm) -> list[str]:
    """The parameters that one fold changes."""
    norm = folded.edge.norm
    own = [f"{norm.name}.{leaf}" for leaf in (norm.weight, norm.bias) if leaf is not None]
    consumers = folded.edge.consumers
    shifted = [consumer.bias for consumer in consumers if consumer.bias is not None and folded.fold.shifts]
    return [*own, *(consumer.weight for consumer in consumers), *shifted]


def apply_folds(model: nn.Module, folds: Iterable[FoldedNorm], wanted: Callable[[str], bool] = lambda _: True) -> None:
    """Change those parameters of a model that folds change and that are wanted; they get new memory, not a new type."""
    for folded in folds:
        norm, fold = folded.edge.norm, folded.fold
        gain, beta = f"{norm.name}.{norm.weight}", None if norm.bias is None else f"{norm.name}.{norm.bias}"
        if wanted(gain):
            old = _data(model, gain)
            bias = None if beta is None else _data(model, beta)
            weight, bias = folded_norm(old, bias, _on(fold, old.device), plus_one=norm.plus_one)
            _set(model, gain, weight)
            _set(model, beta, bias)
        for consumer in folded.edge.consumers:
            if wanted(consumer.weight):
                matrix, shifted = _folded(model, consumer, _on(fold, _data(model, consumer.weight).device))
                _set(model, consumer.weight, matrix)
                _set(model, consumer.bias, shifted)


def gain_router_biases(model: Any, device: torch.device) -> list[str]:
    """Give every router a bias of zeros on a device, where the configuration has a key for it that is off; returns
    their names.

    So that a shift of what a norm gives can be taken back in routers, too: the family has biases there, the checkpoint
    does without.
    """
    if getattr(model.config, ROUTER_BIAS, True):
        return []
    biases: list[str] = []
    for name, module in model.named_modules():
        parts = name.split(".")
        if isinstance(module, nn.Linear) and module.bias is None and {"router", "routers"} & set(parts[-2:]):
            module.bias = nn.Parameter(torch.zeros(module.out_features, device=device), requires_grad=False)
            biases.append(f"{name}.bias")
    return biases


def _folded(model: nn.Module, consumer: Consumer, fold: Fold) -> tuple[Tensor, Tensor | None]:
    """A consumer's new weight and bias in their own types; stacks expert by expert, since folds compute in float64."""
    old = _data(model, consumer.weight)
    bias = None if consumer.bias is None or not fold.shifts else _data(model, consumer.bias)
    if old.dim() < 3 or consumer.axis == 0:
        return folded_linear(old, bias, fold, axis=consumer.axis)
    new, shifted = torch.empty_like(old), None if bias is None else torch.empty_like(bias)
    for place, expert in enumerate(old):
        own = None if bias is None else bias[place]
        matrix, moved = folded_linear(expert, own, fold, axis=consumer.axis - 1)
        new[place] = matrix.to(new.dtype)
        if shifted is not None and moved is not None:
            shifted[place] = moved.to(shifted.dtype)
    return new, shifted


def _data(model: nn.Module, name: str) -> Tensor:
    return model.get_parameter(name).detach()


def _set(model: nn.Module, name: str | None, value: Tensor | None) -> None:
    if name is not None and value is not None:
        module, leaf = owner(model, name)
        parameter = getattr(module, leaf)
        parameter.data = value.to(parameter.dtype)


def _on(fold: Fold, device: torch.device) -> Fold:
    moved = {name: getattr(fold, name).to(device) for name in ("r1", "r2", "shift")}
    return Fold(**moved, scale=fold.scale, bits=fold.bits)
