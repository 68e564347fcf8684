"""Measured points: a CSV in which every row is a run, read into points that an estimate can be held against.

Columns: `policy` (as the estimate calls it), `batch`, `input_tokens`, `output_tokens`, and at least one measure of
MEASURES, all in seconds; a row may leave measures empty, each other one is a point. `geometry` (a preset's name),
`bits`, `gpu_experts` and `context` may be there too; what a row leaves out is as the whole estimate is given it.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from moeq.artifacts.reading import read_bounded
from moeq.bounded import LARGEST, is_number
from moeq.errors import EstimateError, hint
from moeq.estimator.policies import by_label
from moeq.registry import POLICIES

LENGTHS: Mapping[str, tuple[str, ...]] = {  # of every measure: the lengths that it hangs on
    "prefill_seconds": ("input_tokens",),
    "migration_seconds": (),
    "time_to_first_token_seconds": ("input_tokens",),
    "decode_seconds_per_token": (),
    "end_to_end_seconds": ("input_tokens", "output_tokens"),
}
MEASURES = tuple(LENGTHS)
NEEDED = ("policy", "batch")
SETTINGS = ("input_tokens", "output_tokens", "geometry", "bits", "gpu_experts", "context")
MOST_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measured figure: `row` of the file (2 the first after the header), seconds of `measure`.

    None stands for what the row leaves to the estimate's own setting.
    """

    row: int
    policy: str
    batch: int
    measure: str
    seconds: float
    input_tokens: int | None = None
    output_tokens: int | None = None
    geometry: str | None = None
    bits: float | None = None
    gpu_experts: int | None = None
    context: int | None = None


def read_points(path: Path) -> tuple[Point, ...]:
    """The points of a CSV file in its order; EstimateError of one line naming the row for what cannot be read."""
    try:
        text = read_bounded(path, MOST_BYTES).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise EstimateError(f"cannot be read ({reason})", where=str(path), do="give a CSV of measured points") from None
    try:
        rows = list(csv.reader(io.StringIO(text), strict=True))
    except csv.Error as error:
        raise EstimateError(
            f"not a CSV file ({error})", where=str(path), do="save it as CSV in UTF-8, with a header"
        ) from None
    header = [name.strip() for name in rows[0]] if rows else []
    _check_header(header, path)
    points: list[Point] = []
    for number, cells in enumerate(rows[1:], start=2):
        if not any(cell.strip() for cell in cells):
            continue
        where = f"{path}, row {number}"
        if len(cells) != len(header):
            raise EstimateError(
                f"{len(cells)} cells for {len(header)} columns",
                where=where,
                do="give the row a cell for every column, empty where there is nothing",
            )
        values = {name: cell.strip() for name, cell in zip(header, cells, strict=True)}
        points += _points(values, number, where)
    if not points:
        raise EstimateError("no measured point in it", where=str(path), do=f"fill one of {', '.join(MEASURES)}")
    return tuple(points)


def _check_header(header: list[str], path: Path) -> None:
    where = f"{path}, row 1"
    known = (*NEEDED, *SETTINGS, *MEASURES)
    for name in header:
        if name not in known:
            raise EstimateError(f"unknown column {name!r}", where=where, do=hint(name, known))
        if header.count(name) > 1:
            raise EstimateError(f"column {name!r} is there twice", where=where, do="remove one")
    for name in NEEDED:
        if name not in header:
            raise EstimateError(f"no column {name!r}", where=where, do="add it")
    if not set(header) & set(MEASURES):
        raise EstimateError("no measured column", where=where, do=f"add one of {', '.join(MEASURES)}")


def _points(values: Mapping[str, str], row: int, where: str) -> Iterator[Point]:
    """The points of one row."""
    policy = values["policy"]
    if policy not in by_label():
        raise POLICIES.refused(policy, by_label(), EstimateError, where)
    batch = _whole(values, "batch", 1, where)
    if batch is None:
        raise EstimateError("batch is empty", where=where, do="give a whole number")
    measured = [name for name in MEASURES if values.get(name)]
    if not measured:
        raise EstimateError("nothing measured in it", where=where, do=f"fill one of {', '.join(MEASURES)}")
    for measure in measured:
        point = Point(
            row=row,
            policy=policy,
            batch=batch,
            measure=measure,
            seconds=_number(values, measure, where),
            input_tokens=_whole(values, "input_tokens", 1, where),
            output_tokens=_whole(values, "output_tokens", 1, where),
            geometry=values.get("geometry") or None,
            bits=_number(values, "bits", where) if values.get("bits") else None,
            gpu_experts=_whole(values, "gpu_experts", 0, where),
            context=_whole(values, "context", 0, where),
        )
        for name in LENGTHS[measure]:
            if getattr(point, name) is None:
                raise EstimateError(f"{measure} without {name}", where=where, do="fill it")
        yield point


def _whole(values: Mapping[str, str], name: str, least: int, where: str) -> int | None:
    text = values.get(name)
    if not text:
        return None
    if not (is_number(text) and int(text) >= least):
        do = f"give a whole number from {least} to {LARGEST}"
        raise EstimateError(f"{name} is {text!r}", where=where, do=do)
    return int(text)


def _number(values: Mapping[str, str], name: str, where: str) -> float:
    text = values[name]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise EstimateError(f"{name} is {text!r}", where=where, do="give a number above 0, in the unit of its name")
    return value
