"""The read bandwidth of this machine, measured in the same run as what is held against it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

LEAST_BYTES, CACHES = 256 << 20, 4  # of the buffer: never smaller, and so many times the last cache
RUNS = 7
CACHE_FILES = Path("/sys/devices/system/cpu/cpu0/cache")


def read_bandwidth(device: torch.device) -> dict[str, Any]:
    """Bytes a second of a streaming read by all threads (the fastest of torch's reductions and the kernels' own reading
    loop, its best run, in huge pages as packed matrices are), on CUDA of a copy, whose reads and writes both count."""
    size = max(LEAST_BYTES, CACHES * last_cache_bytes())
    if device.type == "cuda":
        source = torch.ones(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        seconds, how = _best(lambda: target.copy_(source), device), "a copy, bytes read and written"
        return {"bytes_per_second": 2 * size / seconds, "buffer_bytes": size, "how": how}
    from moeq_kernels.cpu.reading import total

    floats = np.ones(size // 4, np.float32)
    words, buffer = floats.view(np.int64), torch.from_numpy(floats)
    square = buffer.view(1 << 10, -1)
    reads: tuple[Callable[[], object], ...] = (
        lambda: square.sum(1), lambda: torch.dot(buffer, buffer), lambda: total(words),
    )  # fmt: skip
    seconds = min(_best(one, device) for one in reads)
    threads = torch.get_num_threads()
    how = f"a streaming read, {threads} threads" if threads > 1 else "a streaming read, one thread"
    return {"bytes_per_second": buffer.nbytes / seconds, "buffer_bytes": buffer.nbytes, "how": how}


def last_cache_bytes() -> int:
    """Bytes of the largest cache that the system tells of; 0 where it tells of none."""
    sizes = [path.read_text().strip() for path in CACHE_FILES.glob("index*/size")] if CACHE_FILES.is_dir() else []
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=0)


def _best(action: Callable[[], object], device: torch.device) -> float:
    seconds = []
    for _ in range(RUNS + 1):  # the first one warms up
        synchronize(device)
        started = time.perf_counter()
        action()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; a CPU has nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
