"""What came of making a checkpoint again: which files are equal, and how far the others are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moeq.bounded import shortened
from moeq.errors import GateError
from moeq.tables import counted

LINE = 2000  # characters
SHOWN = 4  # of a kind that are named on a terminal


@dataclass(frozen=True, kw_only=True)
class MatrixDifference:
    """A matrix whose stored parts differ.

    layer, expert, projection: where it is known; name: of the module or the tensor. codes: how many differ, and of how
    many, None where it is not packed, or packed otherwise (what: how). max_abs, relative: of the values, the largest
    difference and ||again - here|| / ||here||; None where the shapes differ.
    """

    name: str
    layer: str | None = None
    expert: int | None = None
    projection: str | None = None
    what: str | None = None
    codes: tuple[int, int] | None = None
    max_abs: float | None = None
    relative: float | None = None

    def __str__(self) -> str:
        parts = [] if self.what is None else [self.what]
        if self.codes is not None:
            parts.append(f"{self.codes[0]} of {self.codes[1]} codes differ")
        if self.max_abs is not None:
            parts.append(f"values by up to {self.max_abs:.2g}, {self.relative:.2g} relative")
        return f"{self.name}: {', '.join(parts)}"


@dataclass(frozen=True, kw_only=True)
class FileDifference:
    """A file that is not the same: what is different in it, a phrase each (keys of JSON, tensors)."""

    file: str
    what: tuple[str, ...]

    def __str__(self) -> str:
        more = f" and {len(self.what) - SHOWN} more" if len(self.what) > SHOWN else ""
        return f"{self.file}: {', '.join(self.what[:SHOWN])}{more}"


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """A checkpoint that was made again.

    out: the run that made it, None where it was equal and in a temporary directory; remade: the checkpoint in it.
    equal: files that are the same, byte by byte. files: those that are not; matrices: whose values differ, the worst
    first; unread: why values could not be compared, None where they could. stage: the first that did not write what the
    statement says, None where all did. notes: versions, machine and digests that are not those of the statement.
    """

    checkpoint: Path
    remade: Path
    out: Path | None
    equal: tuple[str, ...]
    files: tuple[FileDifference, ...] = ()
    matrices: tuple[MatrixDifference, ...] = ()
    unread: str | None = None
    stage: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether every file is the same, byte by byte."""
        return not self.files

    def as_json(self) -> dict[str, Any]:
        """All of it, for `--json`."""
        return {
            "checkpoint": str(self.checkpoint),
            "out": None if self.out is None else str(self.out),
            "is_equal": self.is_equal,
            "equal": list(self.equal),
            "files": [asdict(one) for one in self.files],
            "matrices": [asdict(one) for one in self.matrices],
            "unread": self.unread,
            "stage": self.stage,
            "notes": list(self.notes),
        }

    def lines(self) -> Iterator[str]:
        """For people: groups of equal files, then what differs and how far; without control characters."""
        yield from (shortened(line, LINE) for line in self._lines())

    def _lines(self) -> Iterator[str]:
        for group, count in Counter(map(group_of, self.equal)).items():
            yield f"{group}: {counted(count, 'file')}, the same bytes"
        yield from self.notes
        if self.is_equal:
            yield f"the same {len(self.equal)} files, byte by byte"
            return
        if self.stage is not None:
            yield f"first to differ: {self.stage}"
        yield from map(str, self.files)
        yield from map(str, self.matrices[:SHOWN])
        if len(self.matrices) > SHOWN:
            yield f"{len(self.matrices) - SHOWN} more matrices differ, by less; --json has all"
        if self.unread is not None:
            yield f"values are not compared: {self.unread}"

    def error(self) -> GateError:
        """The error of one that differs."""
        every = len(self.files) + len(self.equal)
        first = "" if self.stage is None else f", from {self.stage} on"
        what = f"made again, {len(self.files)} of {every} files differ{first}"
        return GateError(what, where=str(self.checkpoint), do=f"compare it with {self.remade}")


def group_of(file: str) -> str:
    """What a file of a checkpoint is part of."""
    if file.startswith(("experts-", "replicas-")):
        return "experts"
    if file.endswith((".safetensors", ".gguf")):
        return "weights"
    return "tokenizer and settings" if not file.startswith("placement") else "manifest"
