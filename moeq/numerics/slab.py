"""Memory: small results apart from their temporaries, large results on large pages.

Letters: E experts, N rows and K columns of a matrix.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

BLOCK_BYTES = 64 << 20  # over 32 MiB, glibc maps an allocation by itself, apart from the heap
ALIGNMENT = 64


def large_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor [...] in main memory, its contents undefined, aligned as torch's own are.

    On Linux numpy asks for huge pages from 4 MiB on, torch does not: to touch fresh memory costs a seventh then.
    """
    size = math.prod(shape) * dtype.itemsize
    memory = torch.from_numpy(np.empty(size + ALIGNMENT, np.uint8))
    begin = -memory.data_ptr() % ALIGNMENT
    return memory[begin : begin + size].view(dtype).view(*shape)


def transposed(matrices: Tensor, into: Tensor | None = None) -> Tensor:
    """Matrices [E, N, K] as [E, K, N], contiguous; into: where they are copied.

    One at a time and from contiguous ones: these torch copies in blocks, others element by element.
    """
    columns = matrices.new_empty(matrices.shape[0], matrices.shape[2], matrices.shape[1]) if into is None else into
    for matrix, into in zip(matrices.contiguous(), columns, strict=True):
        into.copy_(matrix.T)
    return columns


class Spaces(threading.local):
    """Memory for temporaries that each thread keeps and fills again, since fresh memory costs time to touch."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def space(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """This thread's memory of a name as a tensor [...], its contents undefined."""
        size = math.prod(shape)
        held = self._held.get(name)
        if held is None or held.numel() < size or held.dtype != dtype:
            held = self._held[name] = large_empty((size,), dtype)
        return held[:size].view(*shape)


class Slab:
    """Copies of tensors in main memory, side by side in a few large blocks.

    A small tensor that is left where it was computed lies in the gap of a freed temporary, which no temporary fits into
    any more: the heap grows by a temporary (8 bytes a weight in packing) for every matrix, whatever is freed.
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def keep(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of a tensor [...] of any dtype; it keeps its whole block alive."""
        size = tensor.numel() * tensor.element_size()
        if self._used + size > len(self._block):
            self._block = torch.empty(max(size, BLOCK_BYTES), dtype=torch.uint8)
            self._used = 0
        copy = self._block[self._used : self._used + size].view(tensor.dtype).view(tensor.shape)
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return copy.copy_(tensor)
