"""A second device on a machine that has none: tensors that say `maia` and compute on the CPU, and a list of moves.

As on a real device, an operation on tensors of both devices fails (but for scalars), and only `.to` crosses over.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("maia", 0)
CPU = torch.device("cpu")


class There(Tensor):
    """A tensor of the second device; `inner` holds its values."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device="meta",
        )  # fmt: skip
        made.inner = inner
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE  # torch itself takes it for a tensor of the device meta, which needs no driver

    def tolist(self) -> Any:
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("used outside of SecondDevice")


class SecondDevice(TorchDispatchMode):
    """While it is entered, the device exists; `moves` are (from, to, shape) of every tensor that crossed over."""

    def __init__(self) -> None:
        super().__init__()
        self.moves: list[tuple[str, str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
        places = {tensor.device.type for tensor in tensors if tensor.dim()} or {t.device.type for t in tensors}
        target = options.get("device")
        copies = "_to_copy" in str(func)
        if len(places) > 1 and "copy_" not in str(func):
            raise RuntimeError(f"{func}: tensors on {' and '.join(sorted(places))}")
        place = torch.device(target).type if target is not None else next(iter(places), "cpu")
        if copies and target is not None and place not in places:
            self.moves.append((next(iter(places)), place, tuple(tensors[0].shape)))
        if target is not None:
            options["device"] = CPU
        known = {id(tensor.inner): tensor for tensor in tensors if isinstance(tensor, There)}
        inside = tree_map(lambda leaf: leaf.inner if isinstance(leaf, There) else leaf, (args, options))
        found = func(*inside[0], **inside[1])
        if place != DEVICE.type:
            return found
        return tree_map(lambda leaf: _there(leaf, known), found)


def _there(value: Any, known: dict[int, There]) -> Any:
    """An operation's result on the second device: its own argument where it wrote in place."""
    if not isinstance(value, Tensor):
        return value
    return known[id(value)] if id(value) in known else There(value)
