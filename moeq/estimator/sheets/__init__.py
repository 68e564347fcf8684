"""Sheets: what a paper prints, worked out again from its own figures; one module a paper, found by itself.

A module beside a YAML file of its name is a sheet: `paper_004` is "paper-004". The file holds what the paper prints and
what its tables are called, column by column; the module's function `tables` works out their rows.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from moeq.bounded import read_yaml
from moeq.errors import EstimateError, nearest

Cell = str | int | float | None
Row = tuple[Cell, ...]
TOLERANCE = 0.05  # a printed figure further from its recomputed one than this share of it is flagged


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table to print: columns name the unit where there is one; notes say what a reader must know of it.

    None stands for what the paper does not print.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), f"{self.title}: a row of another length"


def known_sheets() -> list[str]:
    """Names of the sheets, sorted."""
    stems = {path.stem for path in Path(__file__).parent.glob("*.yaml")}
    return sorted(name.replace("_", "-") for _, name, _ in pkgutil.iter_modules(__path__) if name in stems)


def sheet(name: str) -> list[Table]:
    """The tables of a sheet; EstimateError with the nearest known name."""
    known = known_sheets()
    if name not in known:
        close = nearest(name, known)
        hint = f"did you mean {close!r}? known: " if close else "known: "
        raise EstimateError(f"unknown sheet {name!r}", do=f"{hint}{', '.join(known)}")
    tables: list[Table] = import_module(f"{__name__}.{name.replace('-', '_')}").tables()
    return tables


@cache
def printed(name: str) -> Mapping[str, Any]:
    """What a paper prints: the YAML file of that name beside this module."""
    tree: Mapping[str, Any] = read_yaml(Path(__file__).with_name(f"{name}.yaml")).value
    return tree


def filled(name: str, rows: Mapping[str, Iterable[Row]], **figures: Any) -> list[Table]:
    """The tables of the YAML file of a name with their rows, by its keys; figures: what {braces} in notes stand for."""
    return [
        Table(
            title=table["title"],
            columns=tuple(table["columns"]),
            rows=tuple(rows[key]),
            notes=tuple(note.format(**figures) for note in table.get("notes", ())),
        )
        for key, table in printed(name)["tables"].items()
    ]


def differs(given: float, recomputed: float) -> bool:
    """Whether a printed figure is further than TOLERANCE from the recomputed one."""
    return abs(given / recomputed - 1) > TOLERANCE
