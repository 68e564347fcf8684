"""Calls of packed modules in a graph of torch.compile: one operator, which the compiler does not look into.

A graph is kept on disk and used again, by other modules of the same shape and by other processes. So it is given the
module's number in a tensor, and the size of the output.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

Size = Callable[[Any, Tensor], tuple[Sequence[int], torch.dtype]]  # of the output, by the module and its first input

_LIBRARY = torch.library.Library("moeq", "FRAGMENT")
_NAME, _SCHEMA = "packed", "(Tensor[] given, Tensor number, str method, SymInt[] size, ScalarType dtype) -> Tensor"
_NUMBERS = itertools.count()
_MODULES: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()


def number_for(module: nn.Module) -> Tensor:
    """The number, [] int64 on the CPU, by which graphs find a module while it is there."""
    number = next(_NUMBERS)
    _MODULES[number] = module
    return torch.tensor(number, device="cpu")


def in_graphs(size: Size) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """A method of tensors which is an operator in the graphs of torch.compile: kernels take addresses, which a graph
    has not. Where gradients may be asked for, and in exports, which are refused, there is a graph before it and one
    after. The module has its number as `number`."""

    def known(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
        between, names = torch.compiler.disable(method), list(signature(method).parameters)[1:]

        @wraps(method)
        def called(module: Any, *given: Tensor, **named: Tensor) -> Tensor:
            if not torch.compiler.is_compiling():
                return method(module, *given, **named)
            if torch.is_grad_enabled() or torch.compiler.is_exporting():
                return between(module, *given, **named)  # type: ignore[no-any-return]
            every = [*given, *(named[name] for name in names[len(given) :])]
            return torch.ops.moeq.packed(every, module.number, method.__name__, *size(module, every[0]))  # type: ignore[no-any-return]

        return called

    return known


def _run(given: list[Tensor], number: Tensor, method: str, size: list[int], dtype: torch.dtype) -> Tensor:
    """As the compiler was told: in autocast what is computed may have another type."""
    output: Tensor = getattr(_MODULES[int(number)], method)(*given)
    return output.to(dtype).contiguous()


def _promised(given: list[Tensor], number: Tensor, method: str, size: list[int], dtype: torch.dtype) -> Tensor:
    return given[0].new_empty(size, dtype=dtype)


_LIBRARY.define(_NAME + _SCHEMA, tags=(torch.Tag.cudagraph_unsafe,))  # which of them wait for a GPU is not known before
_LIBRARY.impl(_NAME, _run, "CompositeExplicitAutograd")
torch.library.register_fake(f"moeq::{_NAME}", _promised, lib=_LIBRARY)
