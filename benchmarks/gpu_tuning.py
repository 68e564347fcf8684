"""The fastest settings of the GPU's kernels by measuring: what `gpu_kernels.py --tune` writes for a device.

Of a shape the blocks are tried first (each is compiled), then splits, sorting and persistent programs of the fastest
blocks. What was found is written after every shape, so that a run that is stopped has done something.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from moeq_kernels.gpu.settings import Settings, Shape, candidates, usual, variants, write

Measure = Callable[[Settings], float]  # seconds; RuntimeError: these settings do not fit the machine


def fastest(shape: Shape, measure: Measure) -> Settings:
    """The usual settings of a shape, or what is measured to be faster."""
    times: dict[Settings, float] = {}

    def best_of(some: Iterable[Settings]) -> Settings:
        for one in some:
            if one not in times:
                times[one] = _seconds(measure, one)
        return min(times, key=times.__getitem__)

    return best_of(variants(shape, best_of([usual(shape), *candidates(shape)])))


def _seconds(measure: Measure, settings: Settings) -> float:
    try:
        return measure(settings)
    except RuntimeError as error:  # too much shared memory, or too many registers
        print(f"{settings}: {(str(error).strip().splitlines() or ['no message'])[-1]}", flush=True)
        return math.inf


def tune(device: str | None, shapes: Iterable[tuple[Shape, Measure]], seconds: float) -> dict[str, Settings]:
    """What is fastest for each shape, until the time is over; written at once where there is a device."""
    found: dict[str, Settings] = {}
    ends = time.monotonic() + seconds
    for shape, measure in shapes:
        if shape.key in found:
            continue
        if time.monotonic() > ends:
            print(f"{shape.key} and what follows not tuned: {seconds:.0f} s are over", flush=True)
            break
        found[shape.key] = fastest(shape, measure)
        print(f"{shape.key}: {found[shape.key]}", flush=True)
        if device is not None:
            write(device, {shape.key: found[shape.key]})
    return found


def rows_to_unpack(fused: Callable[[int], float], unpacked: Callable[[int], float]) -> int | None:
    """The least number of rows an expert from which on unpacking is faster; None where it never is."""
    best = None
    for rows in (1024, 512, 256, 128, 64):
        if unpacked(rows) >= fused(rows):
            break
        best = rows
    return best
