"""Which form of the CPU's kernel is fastest here, and from how many rows of an expert on unpacking is faster than it.

Measured once, in some tenths of a second beside compiling, on one 4-bit matrix [768, 2048], and for trellis codes, by
their states, on one of 2 bits; what was found is kept in `kernels.json` of the cache folder (see
`moeq_kernels.caches`), by CPU, number of threads and the versions of this package, numba and torch. A file that is
damaged or cannot be written is ignored: it is measured again.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moeq_kernels import caches
from moeq_kernels.description import Kernel, Matrix
from moeq_kernels.packed import PackedWeight, packed_shapes
from moeq_kernels.version import __version__
from moeq_kernels.widths import Encoding

NAME = "kernels.json"
ROWS, INPUTS, BITS, GROUP, WALKED_BITS = 768, 2048, 4, 128, 2
STEPS = (16, 32, 64, 128, 256, 512, 1024)  # rows at which the form and unpacking are compared
NEVER = 1 << 30  # rows from which on to unpack, where the form was faster at all of them
SLOWER = 2  # steps one after the other at which the form is slower than unpacking: from the first on it is unpacked
REPEATS = 5, 25  # calls of each contender, at least and at most; so many where a first answer is asked again
AGREED = 1.05  # the shortest two calls of a contender do not differ by more, or it is called again
CLEARLY = 1.15  # times as fast as the form expected to be fastest is what another one must be to be taken instead
MOST_ENTRIES = 64
COMPARED = 3  # forms, those expected to be fastest
DECODED = 1, 16  # rows at which they are compared, by the geometric mean of their times

Found = tuple[str, int]  # form, rows from which on to unpack


@cache
def best(make: Callable[[str, int], Kernel], forms: tuple[str, ...], threads: int, state_bits: int = 0) -> Found:
    """The form and the rows from which on to unpack; make(form, rows from which on to unpack) gives a kernel.

    state_bits: of trellis codes, 0 for grids.
    """
    entry, path = _entry(threads, forms[:COMPARED], state_bits), caches.folder() / NAME
    kept = _read(path).get(entry)
    if kept is not None and _is_found(kept, forms):
        return str(kept[0]), int(kept[1])
    found = measure(make, forms, state_bits)
    with contextlib.suppress(OSError):
        _write(path, entry, found)
    return found


def measure(make: Callable[[str, int], Kernel], forms: tuple[str, ...], state_bits: int = 0) -> Found:
    """As `best`, on this machine and now."""
    matrix, generator = _walks(state_bits) if state_bits else _matrix(), torch.Generator().manual_seed(0)
    rows = torch.randn(STEPS[-1], INPUTS, generator=generator).bfloat16()
    compared = forms[:COMPARED]
    form = compared[0] if len(compared) == 1 else _fastest(make, compared, matrix, rows)
    ways = [make(form, NEVER), make(form, 1)]
    slower: list[int] = []
    for step in STEPS:
        fused, unpacked = _seconds(ways, matrix, rows[:step])
        slower = [*slower, step] if fused > unpacked else []
        if len(slower) == SLOWER:
            break
    first = STEPS.index(slower[0]) if slower else len(STEPS)
    while first:  # what one moment of a busy machine has said of the step before decides for good: ask again, longer
        fused, unpacked = _seconds(ways, matrix, rows[: STEPS[first - 1]], REPEATS[1])
        if fused <= unpacked:
            break
        first -= 1
    return form, STEPS[first] if first < len(STEPS) else NEVER


def _fastest(make: Callable[[str, int], Kernel], compared: Sequence[str], matrix: Matrix, rows: Tensor) -> str:
    """Of some forms; the first unless another one is clearly faster."""
    kernels = [make(form, NEVER) for form in compared]
    one, some = (_seconds(kernels, matrix, rows[:count]) for count in DECODED)
    seconds = [math.sqrt(of_one * of_some) for of_one, of_some in zip(one, some, strict=True)]
    fastest = min(seconds)
    return compared[0 if seconds[0] <= CLEARLY * fastest else seconds.index(fastest)]


def _matrix() -> Matrix:
    generator = torch.Generator().manual_seed(1)
    return PackedWeight(
        codes=torch.randint(0, 256, (ROWS, INPUTS * BITS // 8), generator=generator, dtype=torch.uint8),
        scales=torch.full((ROWS, INPUTS // GROUP), 0.01, dtype=torch.float16),
        zeros=torch.full((ROWS, INPUTS // GROUP * BITS // 8), 0x77, dtype=torch.uint8),
        bits=BITS,
        group_size=GROUP,
        inputs=INPUTS,
        symmetric=False,
    )


def _walks(state_bits: int) -> Matrix:
    encoding, generator = Encoding.trellis(state_bits), torch.Generator().manual_seed(1)
    codes, dtype = packed_shapes(ROWS, INPUTS, WALKED_BITS, encoding)["codes"]
    parts = {
        "codes": torch.randint(0, 256, codes, generator=generator, dtype=dtype),
        "scales": torch.full((ROWS, 1), 0.01, dtype=torch.float16),
    }
    return PackedWeight.of(parts, WALKED_BITS, INPUTS, encoding)


def _seconds(kernels: Sequence[Kernel], matrix: Matrix, rows: Tensor, least: int = REPEATS[0]) -> list[float]:
    """The shortest call of each, by turns, after one that compiles, until two agree about it: what else runs on the
    machine only makes them longer. least: calls of each."""
    prepared = [kernel.linear(matrix) for kernel in kernels]
    taken: list[list[float]] = [[] for _ in prepared]
    with torch.inference_mode():
        for one in prepared:
            one(rows)
        while len(taken[0]) < least or (len(taken[0]) < REPEATS[1] and not all(map(_agreed, taken))):
            for one, times in zip(prepared, taken, strict=True):
                begin = time.perf_counter()
                one(rows)
                times.append(time.perf_counter() - begin)
    return [min(times) for times in taken]


def _agreed(times: Sequence[float]) -> bool:
    first, second = sorted(times)[:2]
    return second <= AGREED * first


def _entry(threads: int, compared: Sequence[str], state_bits: int) -> str:
    """What the figures depend on."""
    codes = f", 2**{state_bits} states" if state_bits else ""
    versions = f"moeq {__version__}, numba {version('numba')}, torch {torch.__version__}"
    return f"{cpu_model()}, {threads} threads, {versions}, of {' '.join(compared)}{codes}"


def cpu_model() -> str:
    """The CPU's name and what of its vectors a form may use."""
    from llvmlite import binding

    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    vectors = sorted(name for name, here in dict(binding.get_host_cpu_features()).items() if here and "avx" in name)
    return f"{name} ({binding.get_host_cpu_name()}: {' '.join(vectors)})"


def _is_found(kept: Any, forms: tuple[str, ...]) -> bool:
    return isinstance(kept, list) and len(kept) == 2 and kept[0] in forms and type(kept[1]) is int and kept[1] > 0


def _read(path: Path) -> dict[str, Any]:
    """What the file holds; nothing where it is missing or damaged."""
    try:
        entries = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _write(path: Path, entry: str, found: Found) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    kept = {name: one for name, one in _read(path).items() if name != entry}
    newest = dict(list(kept.items())[1 - MOST_ENTRIES :]) | {entry: list(found)}
    unfinished = path.with_name(f"{NAME}.{os.getpid()}")
    unfinished.write_text(json.dumps(newest), "utf-8")
    unfinished.replace(path)
