"""Products with packed weights as operators, which a compiler of vLLM's models does not look into.

A compiled graph is kept on disk and used again by other processes, so that it names a module, and vLLM's context of the
forward pass knows which one that is. Letters: T tokens, N output rows, K inputs, H hidden size, k experts a token.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context


class Known(Protocol):
    """What computes: the method of a module, known by its name."""

    def compute(self, *given: Tensor) -> Tensor: ...


def make_known(name: str, method: Known) -> str:
    """Have operators find a method; the name by which they do. ValueError where adapters would be added to it."""
    config = get_current_vllm_config()
    if config.lora_config is not None:
        raise ValueError(f"moeq: {name}: packed weights are served without LoRA; merge the adapter, then quantize")
    called = f"moeq:{name}"
    config.compilation_config.static_forward_context[called] = method
    return called


def _found(name: str) -> Any:
    return get_forward_context().no_compile_layers[name]


@torch.library.custom_op("moeq::routed", mutates_args=())
def routed(hidden: Tensor, weights: Tensor, experts: Tensor, name: str) -> Tensor:
    """hidden [T, H], weights and experts [T, k] -> [T, H]."""
    found: Tensor = _found(name).compute(hidden, weights, experts)
    return found


@routed.register_fake
def _(hidden: Tensor, weights: Tensor, experts: Tensor, name: str) -> Tensor:
    return torch.empty_like(hidden)


@torch.library.custom_op("moeq::product", mutates_args=())
def product(rows: Tensor, name: str, outputs: int) -> Tensor:
    """rows [T, K] -> [T, outputs]."""
    found: Tensor = _found(name).compute(rows)
    return found


@product.register_fake
def _(rows: Tensor, name: str, outputs: int) -> Tensor:
    return rows.new_empty(rows.shape[0], outputs)


@torch.library.custom_op("moeq::looked_up", mutates_args=())
def looked_up(ids: Tensor, name: str, inputs: int, dtype: torch.dtype) -> Tensor:
    """ids [T] -> the rows [T, inputs] of an embedding."""
    found: Tensor = _found(name).look_up(ids)
    return found


@looked_up.register_fake
def _(ids: Tensor, name: str, inputs: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(ids.shape[0], inputs, dtype=dtype, device=ids.device)
