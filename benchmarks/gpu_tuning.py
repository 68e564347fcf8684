"""The fastest settings of the GPU's kernels by measuring: what `gpu_kernels.py --tune` writes for a device.

Of every launch the blocks are tried first, each a program to compile, which several processes may have done before
(`share`), with the splits of the fastest; then, where time is left, sorting and persistent programs. What was found is
written after every launch, so that a run that is stopped has done something.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from moeq_kernels.gpu.settings import Settings, Shape, candidates, usual, variants, write

Measure = Callable[[Settings], float]  # seconds; RuntimeError: these settings do not fit the machine
Launch = tuple[Shape, Measure]


class Search:
    """The times of one launch with settings tried so far, the usual ones first."""

    def __init__(self, shape: Shape, measure: Measure) -> None:
        self.shape, self.measure = shape, measure
        self.times: dict[Settings, float] = {}

    def best_of(self, some: Iterable[Settings] = (), ends: float = math.inf) -> Settings:
        """The fastest, after these were tried until the time is over."""
        for one in (usual(self.shape), *some):
            if one not in self.times and (not self.times or time.monotonic() < ends):
                self.times[one] = _seconds(self.measure, one)
        return min(self.times, key=self.times.__getitem__)

    def blocks(self, ends: float = math.inf) -> Settings:
        """The fastest blocks, with as many splits as are fastest."""
        best = self.best_of(candidates(self.shape), ends)
        alike = (best.sort, best.persistent)
        return self.best_of((one for one in variants(self.shape, best) if (one.sort, one.persistent) == alike), ends)

    def programs(self, ends: float = math.inf) -> Settings:
        """What the fastest blocks gain by other splits, no sorting and persistent programs."""
        return self.best_of(variants(self.shape, self.best_of()), ends)


def _seconds(measure: Measure, settings: Settings) -> float:
    try:
        return measure(settings)
    except RuntimeError as error:  # too much shared memory, or too many registers
        print(f"{settings}: {(str(error).strip().splitlines() or ['no message'])[-1]}", flush=True)
        return math.inf


def tune(device: str | None, launches: Iterable[Launch], seconds: float) -> dict[str, Settings]:
    """What is fastest for each shape, until the time is over; written at once where there is a device."""
    found: dict[str, Settings] = {}
    ends = time.monotonic() + seconds
    searches: dict[str, Search] = {}
    for shape, measure in launches:
        searches.setdefault(shape.key, Search(shape, measure))
    for way in (Search.blocks, Search.programs):
        for key, search in searches.items():
            if time.monotonic() > ends:
                print(f"{way.__name__} of {key} and what follows not tuned: {seconds:.0f} s are over", flush=True)
                return found
            best = way(search, ends)
            if found.get(key) != best:
                found[key] = best
                print(f"{key}: {best}", flush=True)
                if device is not None:
                    write(device, {key: best})
    return found


def share(launches: Iterable[Launch], number: int, of: int, seconds: float) -> None:
    """Have one of so many parts of the blocks' programs compiled, until the time is over; one program serves all shapes
    that differ in sizes alone."""
    programs: dict[tuple[int, bool, Settings], Measure] = {}
    for shape, measure in launches:
        for one in (usual(shape), *candidates(shape)):
            programs.setdefault((shape.widths, shape.two, one), measure)
    ends = time.monotonic() + seconds
    mine = [*programs.items()][number * len(programs) // of : (number + 1) * len(programs) // of]
    for (_, _, one), measure in mine:
        if time.monotonic() < ends:
            _seconds(measure, one)


def rows_to_unpack(fused: Callable[[int], float], unpacked: Callable[[int], float]) -> int | None:
    """The least number of rows an expert from which on unpacking is faster; None where it never is."""
    best = None
    for rows in (1024, 512, 256, 128, 64):
        if unpacked(rows) >= fused(rows):
            break
        best = rows
    return best
