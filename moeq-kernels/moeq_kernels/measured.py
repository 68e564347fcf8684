"""Which form of the CPU's kernel is fastest here, and from how many rows of an expert on unpacking is faster than it.

Measured once, in some tenths of a second beside compiling, on one 4-bit matrix [768, 2048], and for trellis codes, by
their states, on one of 2 bits; from how many rows on a layer's experts are unpacked, on an expert of three such
matrices: on an Intel CPU with AMX 512 rows of a matrix alone are multiplied as fast either way, those of an expert in
half the time that unpacking takes. What was found is kept in `kernels.json` of the cache folder (see
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
from torch import Tensor, nn

from moeq_kernels import caches
from moeq_kernels.description import DOWN, Kernel, LayerOfExperts, Matrix
from moeq_kernels.packed import PackedWeight, packed_shapes
from moeq_kernels.version import __version__
from moeq_kernels.widths import Encoding

NAME = "kernels.json"
ROWS, INPUTS, BITS, GROUP, WALKED_BITS = 768, 2048, 4, 128, 2
STEPS = (16, 32, 64, 128, 256, 512, 1024)  # rows at which the form and unpacking are compared
NEVER = 1 << 30  # rows from which on to unpack, where the form is faster with all
SLOWER = 2  # steps one after the other at which the form is slower than unpacking: from the first on it is unpacked
REPEATS = 5, 25  # calls of each contender, at least and at most
MOST_SECONDS, FEWEST = 0.2, 3  # after so long so many calls of each will do; where a first answer is asked again, twice
AGREED = 1.05  # the shortest two calls of a contender do not differ by more, or it is called again
CLEARLY = 1.15  # times as fast as the form expected to be fastest is what another one must be to be taken instead
MOST_ENTRIES = 64
COMPARED = 3  # forms, those expected to be fastest
DECODED = 1, 16  # rows at which they are compared, by the geometric mean of their times

Found = tuple[str, int]  # form, rows from which on to unpack


@cache
def best(
    make: Callable[[str, int], Kernel], forms: tuple[str, ...], threads: int, state_bits: int = 0, layers: bool = False
) -> Found:
    """The form and the rows from which on to unpack; make(form, rows from which on to unpack) gives a kernel.

    state_bits: of trellis codes, 0 for grids; layers: whether what is unpacked are experts of a layer.
    """
    entry, path = _entry(threads, forms[:COMPARED], state_bits, layers), caches.folder() / NAME
    kept = _read(path).get(entry)
    if kept is not None and _is_found(kept, forms):
        return str(kept[0]), int(kept[1])
    found = measure(make, forms, state_bits, layers)
    with contextlib.suppress(OSError):
        _write(path, entry, found)
    return found


def measure(
    make: Callable[[str, int], Kernel], forms: tuple[str, ...], state_bits: int = 0, layers: bool = False
) -> Found:
    """As `best`, on this machine and now."""
    matrix, generator = matrix_of(ROWS, INPUTS, state_bits), torch.Generator().manual_seed(0)
    rows = torch.randn(STEPS[-1], INPUTS, generator=generator).bfloat16()
    compared = forms[:COMPARED]
    form = compared[0] if len(compared) == 1 else _fastest(make, compared, matrix, rows)
    ways, given = [make(form, NEVER), make(form, 1)], expert_of(state_bits) if layers else matrix
    slower: list[int] = []
    taken: dict[int, list[float]] = {}  # what both took, by the number of rows
    for step in STEPS:
        fused, unpacked = taken[step] = _seconds(ways, given, rows[:step])
        slower = [*slower, step] if fused > unpacked else []
        if len(slower) == SLOWER:
            break
    first = STEPS.index(slower[0]) if slower else len(STEPS)
    while first:  # what one moment of a busy machine has said of the step before decides for good: ask again, longer
        fused, unpacked = taken[STEPS[first - 1]] = _seconds(ways, given, rows[: STEPS[first - 1]], 2)
        if fused <= unpacked:
            break
        first -= 1
    return form, STEPS[first] if first < len(STEPS) else _beyond(*(taken[step] for step in STEPS[-2:]))


def _beyond(before: Sequence[float], last: Sequence[float]) -> int:
    """From how many rows on a form that was faster at all steps would be slower than unpacking, by what a further row
    took both between the last two: unpacking, which is paid once, is paid off by a product that is faster a row."""
    gained = (last[0] - before[0]) - (last[1] - before[1])
    if gained <= 0:
        return NEVER
    return min(NEVER, STEPS[-1] + math.ceil((STEPS[-1] - STEPS[-2]) * (last[1] - last[0]) / gained))


def _fastest(make: Callable[[str, int], Kernel], compared: Sequence[str], matrix: Matrix, rows: Tensor) -> str:
    """Of some forms; the first unless another one is clearly faster."""
    kernels = [make(form, NEVER) for form in compared]
    one, some = (_seconds(kernels, matrix, rows[:count]) for count in DECODED)
    seconds = [math.sqrt(of_one * of_some) for of_one, of_some in zip(one, some, strict=True)]
    fastest = min(seconds)
    return compared[0 if seconds[0] <= CLEARLY * fastest else seconds.index(fastest)]


def matrix_of(rows: int = ROWS, inputs: int = INPUTS, state_bits: int = 0) -> Matrix:
    """What is measured: any codes of 4 bits, or trellis codes of 2."""
    generator = torch.Generator().manual_seed(1)
    if state_bits:
        return _walks(rows, inputs, Encoding.trellis(state_bits), generator)
    return PackedWeight(
        codes=torch.randint(0, 256, (rows, inputs * BITS // 8), generator=generator, dtype=torch.uint8),
        scales=torch.full((rows, inputs // GROUP), 0.01, dtype=torch.float16),
        zeros=torch.full((rows, inputs // GROUP * BITS // 8), 0x77, dtype=torch.uint8),
        bits=BITS,
        group_size=GROUP,
        inputs=inputs,
        symmetric=False,
    )


def _walks(rows: int, inputs: int, encoding: Encoding, generator: torch.Generator) -> Matrix:
    codes, dtype = packed_shapes(rows, inputs, WALKED_BITS, encoding)["codes"]
    parts = {
        "codes": torch.randint(0, 256, codes, generator=generator, dtype=dtype),
        "scales": torch.full((rows, 1), 0.01, dtype=torch.float16),
    }
    return PackedWeight.of(parts, WALKED_BITS, inputs, encoding)


def expert_of(state_bits: int = 0) -> LayerOfExperts:
    """A layer of one expert."""
    first, second = matrix_of(ROWS, INPUTS, state_bits), matrix_of(INPUTS, ROWS, state_bits)
    return LayerOfExperts(
        matrices=[{"gate_proj": first, "up_proj": first, DOWN: second}],
        biases=[{}],
        gate=lambda parts: nn.functional.silu(parts["gate_proj"]) * parts["up_proj"],
        activation="silu",
    )


def _prepared(kernel: Kernel, given: Matrix | LayerOfExperts, rows: int) -> Callable[[Tensor], Tensor]:
    """The products of so many rows with a matrix, or what a layer's only expert makes of them."""
    if not isinstance(given, LayerOfExperts):
        return kernel.linear(given)
    layer, index = kernel.layer(given), torch.zeros(rows, 1, dtype=torch.int64)
    return lambda hidden: layer(hidden, index, torch.ones(rows, 1, dtype=hidden.dtype))


def _seconds(
    kernels: Sequence[Kernel], given: Matrix | LayerOfExperts, rows: Tensor, times_as_many: int = 1
) -> list[float]:
    """The shortest call of each, by turns, after one that compiles, until two agree about it: what else runs on the
    machine only makes them longer. times_as_many: calls as usual."""
    prepared = [_prepared(kernel, given, len(rows)) for kernel in kernels]
    taken: list[list[float]] = [[] for _ in prepared]
    least, most = (times_as_many * repeats for repeats in REPEATS)
    with torch.inference_mode():
        for one in prepared:
            one(rows)
        ends = time.perf_counter() + times_as_many * MOST_SECONDS
        while len(taken[0]) < least or (len(taken[0]) < most and not all(map(_agreed, taken))):
            if len(taken[0]) >= times_as_many * FEWEST and time.perf_counter() > ends:
                break
            for one, times in zip(prepared, taken, strict=True):
                begin = time.perf_counter()
                one(rows)
                times.append(time.perf_counter() - begin)
    return [min(times) for times in taken]


def _agreed(times: Sequence[float]) -> bool:
    first, second = sorted(times)[:2]
    return second <= AGREED * first


def _entry(threads: int, compared: Sequence[str], state_bits: int, layers: bool) -> str:
    """What the figures depend on."""
    codes = (f", 2**{state_bits} states" if state_bits else "") + (", experts" if layers else "")
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
