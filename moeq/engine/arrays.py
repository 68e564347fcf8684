"""A value and tensors in one piece of memory, so that another process reads them there: no copy, no pickle of numbers.

    8 bytes length, the pickled value and table of tensors, then blocks of bytes.

Tensors keep strides, shared storage and their address modulo 64: products of floating-point numbers may depend on all
three, and a worker is to find what the caller would have. Pickles come from moeq's own processes alone.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64
LENGTH = 8


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor in a block: where its first element lies in it, in bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """What is to be written: `nbytes` of it. blocks: where each begins, and its bytes [n] uint8."""

    nbytes: int
    head: bytes
    blocks: list[tuple[int, Tensor]]

    def pieces(self) -> Iterator[tuple[int, Any]]:
        """Where each piece begins, and its bytes, one after the other."""
        yield 0, len(self.head).to_bytes(LENGTH, "little") + self.head
        for begin, block in self.blocks:
            yield begin, block.numpy()

    def write(self, memory: memoryview) -> None:
        """Write it to memory of that size."""
        whole = np.frombuffer(memory, np.uint8)
        for begin, piece in self.pieces():
            whole[begin : begin + len(piece)] = np.frombuffer(piece, np.uint8)


def encode(value: Any, tensors: Mapping[str, Tensor]) -> Encoded:
    """A value and tensors [...] of any dtype, from any device, as one piece."""
    pieces: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu()
        pieces.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    entries: list[Entry] = []
    blocks: list[Tensor] = []
    begins: list[int] = []
    end = 0
    for group in pieces.values():
        for together in _blocks(group):
            low, high = min(_extent(t)[0] for _, t in together), max(_extent(t)[1] for _, t in together)
            end += (low - end) % ALIGNMENT
            for name, tensor in together:
                entries.append(
                    Entry(
                        name=name,
                        dtype=tensor.dtype,
                        shape=tuple(tensor.shape),
                        strides=tensor.stride(),
                        block=len(blocks),
                        offset=_extent(tensor)[0] - low,
                    )
                )
            begins.append(end)
            blocks.append(_raw(together[0][1], low, high))
            end += high - low
    order = {name: place for place, name in enumerate(tensors)}
    entries.sort(key=lambda entry: order[entry.name])
    head = pickle.dumps((value, entries, begins), protocol=pickle.HIGHEST_PROTOCOL)
    start = -(-(LENGTH + len(head)) // ALIGNMENT) * ALIGNMENT
    placed = [(start + begin, block) for begin, block in zip(begins, blocks, strict=True)]
    return Encoded(nbytes=max(start + end, 1), head=head, blocks=placed)


def decode(memory: Any) -> tuple[Any, dict[str, Tensor]]:
    """What `encode` wrote; the tensors are views of the memory, which they keep alive.

    memory: whatever has the interface of a buffer, aligned to 64 bytes.
    """
    view = memoryview(memory)
    length = int.from_bytes(view[:LENGTH], "little")
    value, entries, begins = pickle.loads(view[LENGTH : LENGTH + length])
    start = -(-(LENGTH + length) // ALIGNMENT) * ALIGNMENT
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")  # nor is it written to
        whole = torch.from_numpy(np.frombuffer(view, np.uint8))
    tensors = {}
    for entry in entries:
        if 0 in entry.shape:
            tensors[entry.name] = torch.empty_strided(entry.shape, entry.strides, dtype=entry.dtype)
            continue
        size = _span(entry.shape, entry.strides) * entry.dtype.itemsize
        begin = start + begins[entry.block] + entry.offset
        flat = whole[begin : begin + size].view(entry.dtype)
        tensors[entry.name] = flat.as_strided(entry.shape, entry.strides)
    return value, tensors


def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last of a tensor, both counted; 0 of an empty one."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte and behind its last one."""
    begin = tensor.data_ptr() if tensor.numel() else 0
    return begin, begin + _span(tuple(tensor.shape), tensor.stride()) * tensor.element_size()


def _blocks(group: list[tuple[str, Tensor]]) -> list[list[tuple[str, Tensor]]]:
    """Tensors of one storage as one block, each alone where most of what lies between them is none of theirs."""
    there = [(name, tensor) for name, tensor in group if tensor.numel()]
    alone = [[(name, tensor)] for name, tensor in group if not tensor.numel()]
    if not there:
        return alone
    low, high = min(_extent(t)[0] for _, t in there), max(_extent(t)[1] for _, t in there)
    own = sum(tensor.numel() * tensor.element_size() for _, tensor in there)
    if high - low <= own + ALIGNMENT * len(there) and all(_extent(t)[0] % t.element_size() == 0 for _, t in there):
        return [there, *alone]
    return [[(name, tensor.clone(memory_format=torch.contiguous_format))] for name, tensor in there] + alone


def _raw(tensor: Tensor, low: int, high: int) -> Tensor:
    """The bytes [high - low] of a tensor's storage between two addresses."""
    if high == low:
        return torch.empty(0, dtype=torch.uint8)
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, low - storage.data_ptr(), (high - low,))  # type: ignore[call-overload, no-any-return]
