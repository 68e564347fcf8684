"""Block sizes of a launch: from a table tuned on this kind of GPU where there is one, else by the shape.

A table is `tuned/DEVICE.json` beside this file, {"device", "unpack_rows", "settings": {key: settings}}, written by
`python benchmarks/gpu_kernels.py --tune` on the machine itself; none is shipped that was not measured.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from moeq_kernels.gpu.strips import FIRST_KIND, name_of
from moeq_kernels.gpu.swizzle import FRAGMENT, TILE

TUNED = Path(__file__).with_name("tuned")
LEAST_ROWS = 8  # of x that a tensor core multiplies with
MOST_SPLITS = 8
PROGRAMS = 264  # two for each of an H100's or H200's 132 multiprocessors: fewer leave some of them idle
UNPACK_ROWS = 512  # not measured: where a dense product takes as long as writing and reading 16 bits a weight would


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a product is cut. block_n: rows of a matrix; block_m: rows of x; splits: of K.

    sort: rows are sorted by expert, else a program takes one row; persistent: programs for each multiprocessor, which
    share all the work by bytes, 0 for a program an item; tiles: of K of matrices with grids, loaded and multiplied
    before the next are waited for; parts: of K within a program, a tile at a time, each by warps of its own, whose sums
    meet at the end.
    """

    sort: bool
    block_n: int
    block_m: int
    warps: int = 4
    stages: int = 3
    splits: int = 1
    persistent: int = 0
    tiles: int = 1
    parts: int = 1

    def __post_init__(self) -> None:
        if self.block_m < LEAST_ROWS or self.block_n % FRAGMENT:
            raise ValueError(f"blocks of {self.block_n} x {self.block_m} are not made of {FRAGMENT} x {LEAST_ROWS}")

    @property
    def ahead(self) -> bool:
        """Whether what look-ups of trellis codes need is brought ahead, through shared memory."""
        return self.stages > 3

    def fits(self, inputs: int) -> bool:
        """Whether so many inputs can be cut so: parts take whole tiles, in every split as many."""
        return self.parts == 1 or inputs % (TILE * self.splits * self.parts) == 0

    def smaller(self) -> Settings | None:
        """Settings that need less shared memory, None where there are none: fewer stages, then fewer tiles
        a step, then fewer rows, then fewer parts."""
        if self.stages > 2:
            return replace(self, stages=max(2, self.stages // 2))
        if self.tiles > 1:
            return replace(self, tiles=self.tiles // 2)
        if self.block_n > FRAGMENT:
            return replace(self, block_n=self.block_n // 2, warps=max(1, self.warps // 2))
        if self.parts > 1:
            return replace(self, parts=self.parts // 2, warps=max(1, self.warps // 2))
        return None


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What settings depend on. pairs: rows of all experts together; widths: as `Stored.widths`; two: two at once; near:
    values of trellis codes may be looked up in shared memory (`Stored.values_near`)."""

    experts: int
    rows: int
    inputs: int
    widths: int
    pairs: int
    two: bool
    near: bool = False

    @property
    def key(self) -> str:
        """Its name in a tuned table: of as many rows, up to the next power of two."""
        bucket = 1 << max(0, self.pairs - 1).bit_length()
        widths = "+".join(name_of(width) for width in range(1, 33) if self.widths >> width & 1)
        return f"{self.experts}x{self.rows}x{self.inputs}{'x2' if self.two else ''}/{widths} bits/{bucket} rows"


def usual(shape: Shape) -> Settings:
    """Settings where no table has any: as many rows a block as an expert has on average, enough programs."""
    average = shape.pairs / max(1, min(shape.experts, shape.pairs))
    active = min(shape.experts, shape.pairs)
    block_m = LEAST_ROWS
    while block_m < 64 and block_m < average:
        block_m *= 2
    block_n, warps, stages = 64, 4, 3
    if block_m == LEAST_ROWS:
        block_n, warps, stages = _decode(shape, active)
    elif block_m == 64:
        block_n, warps = 128, 8  # more sums than 4 warps have registers for
    splits = _splits(shape, active, block_n)
    return Settings(sort=average > 1, block_n=block_n, block_m=block_m, warps=warps, stages=stages, splits=splits)


def _decode(shape: Shape, active: int) -> tuple[int, int, int]:
    """Rows of a matrix, warps and stages where few rows are multiplied: what was fastest of nine on an H200."""
    grids = (1 << FIRST_KIND) - 1
    if shape.widths & ((1 << 16) - 1 - grids):  # trellis codes: ahead where so few programs leave shared memory unused
        few = active * -(-shape.rows // 64) <= PROGRAMS
        if shape.near:  # counted, not measured: two warps at least, else one passes values from thread to thread
            return (32, 2, 4) if few else (64, 4, 3)
        return ((16, 1, 6) if shape.two else (32, 2, 6)) if few else (64, 2, 3)
    if shape.two:  # a warp a program waits for no other, and what it is given serves both matrices
        return (32, 1, 4) if active * -(-shape.rows // 32) >= PROGRAMS else (16, 1, 6)
    return 64, 4, 6


def _splits(shape: Shape, active: int, block_n: int) -> int:
    """As many parts of K as fill the machine; one where two products meet in an activation, which needs whole sums."""
    if shape.two:
        return 1
    programs = active * -(-shape.rows // block_n)
    tiles = -(-shape.inputs // TILE)
    return max(1, min(MOST_SPLITS, tiles // 2, PROGRAMS // max(1, programs)))


def candidates(shape: Shape) -> list[Settings]:
    """Blocks that `--tune` tries first, each a program of its own to compile."""
    average = shape.pairs / max(1, min(shape.experts, shape.pairs))
    blocks = [
        replace(usual(shape), block_n=block_n, block_m=block_m, warps=warps, stages=stages, tiles=tiles)
        for block_n, warps in ((16, 1), (32, 1), (32, 2), (64, 1), (64, 2), (64, 4), (128, 4), (128, 8))
        for block_m in (8, 16, 32, 64, 128)
        for stages, tiles in (((4, 1), (6, 1), (3, 2), (2, 4)) if block_m <= 16 else ((3, 1),))
        if average / 2 < block_m <= 2 * average or block_m == usual(shape).block_m
    ]
    parted = [
        replace(usual(shape), block_n=block_n, warps=parts, parts=parts, stages=stages)
        for block_n in (16, 32)
        for parts in (2, 4, 8)
        for stages in (3, 4)
        if usual(shape).block_m == LEAST_ROWS
    ]
    return [*blocks, *(one for one in parted if one.fits(shape.inputs))]


def variants(shape: Shape, best: Settings) -> list[Settings]:
    """What it tries of the fastest blocks: other splits, no sorting, and persistent programs."""
    most = 1 if shape.two else min(MOST_SPLITS, -(-shape.inputs // TILE))
    sorts = (True, False) if shape.pairs <= 4 * shape.experts else (True,)
    return [
        replace(best, splits=splits, sort=sort, persistent=persistent)
        for splits in (1, 2, 4, 8)
        if splits <= most
        for sort in sorts
        for persistent in (0, 1, 2, 4)
        if replace(best, splits=splits).fits(shape.inputs)
    ]


def file_of(device: str) -> Path:
    """The tuned table of a device by its name."""
    return TUNED / f"{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


@dataclass(frozen=True)
class Table:
    """What was measured on a device: settings by the key of a shape, and the rows an expert from which on to unpack."""

    settings: dict[str, Settings]
    unpack_rows: int | None = None


@cache
def tuned(device: str) -> Table:
    """The table of a device, empty where there is none."""
    path = file_of(device)
    if not path.is_file():
        return Table({})
    read = json.loads(path.read_text("utf-8"))
    settings = {key: Settings(**one) for key, one in read["settings"].items()}
    return Table(settings, read.get("unpack_rows"))


def write(device: str, found: dict[str, Settings], unpack_rows: int | None = None) -> Path:
    """Add to the table of a device; whole or as it was."""
    path = file_of(device)
    path.parent.mkdir(exist_ok=True)
    before = tuned(device)
    every = before.settings | found
    table = {
        "device": device,
        "unpack_rows": unpack_rows or before.unpack_rows,
        "settings": {key: asdict(every[key]) for key in sorted(every)},
    }
    part = path.with_suffix(".part")
    part.write_text(json.dumps(table, indent=1) + "\n", "utf-8")
    part.replace(path)
    tuned.cache_clear()
    return path


def choose(shape: Shape, device: str | None) -> Settings:
    """Tuned settings where the device's table has this shape, else the usual ones; device None: the interpreter."""
    found = None if device is None else tuned(device).settings.get(shape.key)
    return found or usual(shape)


def rows_to_unpack(device: str | None) -> int:
    """From how many rows an expert on average on a layer is unpacked and multiplied by torch."""
    measured = None if device is None else tuned(device).unpack_rows
    return measured or UNPACK_ROWS
