"""Key and value caches of prefilled contexts, one after the other in a batch.

Letters: B rows, C tokens of a context.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer


def cache_bytes(cache: Any) -> int:
    """Bytes of all tensors that a cache holds."""
    tensors = (value for layer in getattr(cache, "layers", ()) for value in vars(layer).values())
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


def can_join(caches: Sequence[Any]) -> bool:
    """Whether contexts of different lengths can lie in one cache: plain keys and values of every position.

    Sliding windows and the states of linear attention have no place for pads.
    """
    return all(
        isinstance(cache, DynamicCache)
        and all(type(layer) is DynamicLayer and layer.is_initialized for layer in cache.layers)
        for cache in caches
    )


def join(caches: Sequence[Any]) -> Any:
    """One cache of B rows, each padded on its left to the longest; of a single one, a copy."""
    if len(caches) == 1:
        return deepcopy(caches[0])
    longest = max(cache.get_seq_length() for cache in caches)
    joined = DynamicCache()
    for index in range(len(caches[0].layers)):
        layers = [cache.layers[index] for cache in caches]
        parts = [[_left(getattr(layer, name), longest) for layer in layers] for name in ("keys", "values")]
        joined.update(torch.cat(parts[0]), torch.cat(parts[1]), index)
    return joined


def _left(states: Tensor, length: int) -> Tensor:
    """States [1, heads, C, size] with zeros before them, [1, heads, length, size]."""
    missing = length - states.shape[-2]
    return states if missing == 0 else torch.nn.functional.pad(states, (0, 0, missing, 0))
