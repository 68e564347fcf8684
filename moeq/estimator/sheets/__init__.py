"""Sheets: what a paper prints, worked out again from its own figures; one module a paper, found by itself.

A module here with `TABLES`, a function without arguments, is the sheet of its name: `paper_004` is "paper-004".
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from moeq.bounded import read_yaml
from moeq.errors import EstimateError, nearest

Cell = str | int | float | None


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table to print: columns name the unit where there is one; notes say what a reader must know of it.

    None stands for what the paper does not print.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), f"{self.title}: a row of another length"


def known_sheets() -> list[str]:
    """Names of the sheets, sorted."""
    return sorted(_sheets())


def sheet(name: str) -> list[Table]:
    """The tables of a sheet; EstimateError with the nearest known name."""
    known = _sheets()
    if name not in known:
        close = nearest(name, known)
        hint = f"did you mean {close!r}? known: " if close else "known: "
        raise EstimateError(f"unknown sheet {name!r}", do=f"{hint}{', '.join(sorted(known))}")
    return known[name]()


@cache
def _sheets() -> Mapping[str, Callable[[], list[Table]]]:
    found: dict[str, Callable[[], list[Table]]] = {}
    for module in pkgutil.iter_modules(__path__):
        tables = getattr(importlib.import_module(f"{__name__}.{module.name}"), "TABLES", None)
        if tables is not None:
            found[module.name.replace("_", "-")] = tables
    return found


@cache
def printed(name: str) -> Mapping[str, Any]:
    """What a paper prints: the YAML file of that name beside this module."""
    tree: Mapping[str, Any] = read_yaml(Path(__file__).with_name(f"{name}.yaml")).value
    return tree
