"""Building a model without memory for its weights: large ones are never allocated, not even for a moment."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

_MADE = (torch.empty, torch.zeros, torch.ones)
_FILLED = (nn.init.uniform_, nn.init.normal_, nn.init.constant_, nn.init.kaiming_uniform_)
LARGE = 64 << 20  # bytes; smaller ones cost nothing worth a word until they are moved


@contextmanager
def without_weights() -> Iterator[None]:
    """Parameters of modules that are made here lie on the meta device, and nobody draws numbers for them; buffers that
    are computed are real.

    accelerate moves a parameter there when a module gets it, after it was allocated: 30 GB for one matrix of all
    experts of a layer of DeepSeek-V3, 43 GB that are filled with zeros for Llama 4 Maverick. Here tensors of numbers
    with a fraction, from 64 MiB on, are made there at once.
    """
    with init_empty_weights(include_buffers=False), _LargeOnMeta(), _without_numbers():
        yield


@contextmanager
def _without_numbers() -> Iterator[None]:
    """Models of transformers' own make their buffers when they are made, not with the numbers that weights begin with,
    which take four fifths of the time; code of others is left as it is, and so are models of other threads."""
    usual, own = PreTrainedModel.initialize_weights, threading.get_ident()

    def initialize_weights(self: PreTrainedModel) -> None:
        if self.is_custom_code() or threading.get_ident() != own:
            usual(self)

    PreTrainedModel.initialize_weights = initialize_weights
    try:
        yield
    finally:
        PreTrainedModel.initialize_weights = usual


class _LargeOnMeta(TorchFunctionMode):
    """torch.empty, zeros and ones of many bytes, where no device is asked for, are on the meta device; weights are not
    filled with numbers."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in _FILLED and isinstance(filled := (kwargs or {}).get("tensor", *args[:1]), nn.Parameter):
            return filled
        given = dict(kwargs or {})
        if func in _MADE and given.get("device") is None and _bytes(args, given) >= LARGE:
            given["device"] = "meta"
        return func(*args, **given)


def _bytes(args: Sequence[Any], given: dict[str, Any]) -> int:
    """What torch.empty(*args, **given) would allocate; 0 for whole numbers, and where the sizes are none."""
    size = given.get("size", args)
    size = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    dtype = given.get("dtype") or torch.get_default_dtype()
    known = dtype.is_floating_point and all(isinstance(length, int) for length in size)
    return math.prod(size) * dtype.itemsize if known else 0
