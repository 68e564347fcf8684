"""What a model needs of memory beside its experts: its other weights, and keys and values of some tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moeq.models.experts import ExpertLayer
from moeq.models.forward import drawn_inputs
from moeq.models.messages import quiet_transformers
from moeq.runtime.prefixes import cache_bytes

FEW, MANY = 4, 12  # tokens whose caches are measured
SEED = 0


def other_weights_bytes(model: nn.Module, layers: Sequence[ExpertLayer]) -> int:
    """Bytes of parameters and buffers outside of experts modules, what is shared once."""
    experts = {id(inner) for layer in layers for inner in model.get_submodule(layer.name).modules()}
    held: dict[int, int] = {}
    for module in model.modules():
        if id(module) not in experts:
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                held[tensor.data_ptr()] = tensor.nbytes
    return sum(held.values())


def kept_bytes(model: Any, layers: Sequence[ExpertLayer], tokens: int) -> int:
    """Bytes of keys, values and states of so many tokens of one sequence, by what its caches hold of a few.

    The model runs twice without its experts. Keys of a sliding window are counted as if it had no end.
    """
    with without_experts(model, layers):
        few, many = (_cached(model, length) for length in (FEW, MANY))
    each = (many - few) / (MANY - FEW)
    return max(0, round(few + each * (tokens - FEW)))


def _cached(model: Any, length: int) -> int:
    inputs = drawn_inputs(model, 1, length, SEED)
    with torch.no_grad(), quiet_transformers():
        return cache_bytes(model(**inputs, use_cache=True).past_key_values)


class _Nothing(nn.Module):
    """In the place of experts: zeros."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.zeros_like(hidden)


@contextmanager
def without_experts(model: nn.Module, layers: Sequence[ExpertLayer]) -> Iterator[None]:
    """The model with zeros in the place of its experts' outputs."""
    before = {layer.name: model.get_submodule(layer.name) for layer in layers}
    try:
        for name in before:
            model.set_submodule(name, _Nothing())
        yield
    finally:
        for name, module in before.items():
            model.set_submodule(name, module)
