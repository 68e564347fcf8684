"""Memory for packed matrices in huge pages, small ones too: one page table entry for 2 MiB instead of 512.

numpy asks the system for huge pages from 4 MiB on. Smaller buffers lie side by side in a larger one, which is freed
with the last of them.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

HUGE_BYTES = 1 << 22  # from which on numpy asks for huge pages
SHARED_BYTES = 1 << 25  # of a buffer that small ones share; what is not used of it takes no memory
ALIGNED = 64  # bytes, as cache lines

_lock = threading.Lock()
_free = np.zeros(0, np.uint8)  # the rest of the buffer that is shared now


def zeros(size: int) -> Tensor:
    """uint8 [size] of zeros that begins on a cache line or, from HUGE_BYTES on, where numpy's arrays do."""
    global _free
    if size >= HUGE_BYTES:
        return torch.from_numpy(np.zeros(size, np.uint8))
    taken = -(-size // ALIGNED) * ALIGNED
    with _lock:
        if taken > len(_free):
            whole = np.zeros(SHARED_BYTES + ALIGNED, np.uint8)
            _free = whole[-whole.ctypes.data % ALIGNED :][:SHARED_BYTES]
        own, _free = _free[:size], _free[taken:]
    return torch.from_numpy(own)
