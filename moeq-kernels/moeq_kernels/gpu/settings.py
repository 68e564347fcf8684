"""Block sizes of a launch: from a table tuned on this kind of GPU where there is one, else by the shape.

A table is `tuned/DEVICE.json` beside this file, {"device": name, "settings": {key: settings}}, written by
`python benchmarks/gpu_kernels.py --tune` on the machine itself; none is shipped that was not measured.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from moeq_kernels.gpu.swizzle import TILE

TUNED = Path(__file__).with_name("tuned")
MOST_SPLITS = 8
PROGRAMS = 264  # two for each of an H100's or H200's 132 multiprocessors: fewer leave some of them idle


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a product is cut. dot: whether tensor cores multiply, else one row of x a program; splits: of K."""

    dot: bool
    block_n: int
    block_m: int
    warps: int = 4
    stages: int = 2
    splits: int = 1

    def __post_init__(self) -> None:
        if self.dot != (self.block_m >= 16) or (not self.dot and self.block_m != 1):
            raise ValueError(f"blocks of {self.block_m} rows {'with' if self.dot else 'without'} tensor cores")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What settings depend on. pairs: rows of all experts together; widths: as `Stored.widths`; pair: two at once."""

    experts: int
    rows: int
    inputs: int
    widths: int
    pairs: int
    two: bool

    @property
    def key(self) -> str:
        """Its name in a tuned table: of as many rows, up to the next power of two."""
        bucket = 1 << max(0, self.pairs - 1).bit_length()
        widths = "+".join(str(width) for width in range(1, 33) if self.widths >> width & 1)
        return f"{self.experts}x{self.rows}x{self.inputs}{'x2' if self.two else ''}/{widths} bits/{bucket} rows"


def usual(shape: Shape) -> Settings:
    """Settings that no measurement chose: as many rows a block as an expert has on average, enough programs."""
    average = shape.pairs / max(1, min(shape.experts, shape.pairs))
    if average <= 1:
        splits = _splits(shape, shape.pairs, 32)
        return Settings(dot=False, block_n=32, block_m=1, splits=splits)
    block_m = 16
    while block_m < 64 and block_m < average:
        block_m *= 2
    active = min(shape.experts, shape.pairs)
    block_n = 64 if block_m < 64 else 128
    warps = 4 if block_m < 64 else 8  # more sums than 4 warps have registers for
    return Settings(dot=True, block_n=block_n, block_m=block_m, warps=warps, splits=_splits(shape, active, block_n))


def _splits(shape: Shape, active: int, block_n: int) -> int:
    """As many parts of K as fill the machine; one where two products meet in an activation, which needs whole sums."""
    if shape.two:
        return 1
    programs = active * -(-shape.rows // block_n)
    tiles = -(-shape.inputs // TILE)
    return max(1, min(MOST_SPLITS, tiles // 2, PROGRAMS // max(1, programs)))


def candidates(shape: Shape) -> list[Settings]:
    """What `--tune` tries."""
    most = 1 if shape.two else min(MOST_SPLITS, -(-shape.inputs // TILE))
    splits = [one for one in (1, 2, 4, 8) if one <= most]
    rows = [
        Settings(dot=False, block_n=block_n, block_m=1, warps=warps, splits=split)
        for block_n in (16, 32, 64)
        for warps in (2, 4)
        for split in splits
        if shape.pairs <= 4 * shape.experts
    ]
    average = shape.pairs / max(1, min(shape.experts, shape.pairs))
    blocks = [
        Settings(dot=True, block_n=block_n, block_m=block_m, warps=warps, stages=stages, splits=split)
        for block_n in (32, 64, 128)
        for block_m in (16, 32, 64)
        for warps in (4, 8)
        for stages in (2, 3)
        for split in splits
        if block_m == 16 or block_m <= 2 * average
    ]
    return rows + blocks


def file_of(device: str) -> Path:
    """The tuned table of a device by its name."""
    return TUNED / f"{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


@cache
def tuned(device: str) -> dict[str, Settings]:
    """The table of a device, empty where there is none."""
    path = file_of(device)
    if not path.is_file():
        return {}
    return {key: Settings(**one) for key, one in json.loads(path.read_text("utf-8"))["settings"].items()}


def write(device: str, found: dict[str, Settings]) -> Path:
    """Add to the table of a device."""
    path = file_of(device)
    path.parent.mkdir(exist_ok=True)
    every = tuned(device) | found
    settings = {key: asdict(every[key]) for key in sorted(every)}
    path.write_text(json.dumps({"device": device, "settings": settings}, indent=1) + "\n", "utf-8")
    tuned.cache_clear()
    return path


def choose(shape: Shape, device: str | None) -> Settings:
    """Tuned settings where the device's table has this shape, else the usual ones; device None: the interpreter."""
    found = None if device is None else tuned(device).get(shape.key)
    return found or usual(shape)
