"""Searches on the terminal: what meets the speed, what was asked about beside it, what was refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from moeq.estimator.search import Point, SearchResult
from moeq.progress import PlainConsole
from moeq.reporting import formats
from moeq.reporting.search_page import asked_text, best_text, unpriced_text
from moeq.tables import human_bytes

SMALL = 100  # columns below which a table leaves out what the files have
ROWS = 16  # of the front
REASONS = 4


def print_searches(searches: Sequence[SearchResult], cases: Sequence[str], paths: Mapping[str, Path]) -> None:
    """Every search, then where the files are."""
    console = PlainConsole()
    for case, found in zip(cases, searches, strict=True):
        console.print(case, style="bold")
        _print_search(console, found)
        console.print()
    for name, path in paths.items():
        console.print(f"{name:9} {path}", soft_wrap=True)


def _print_search(console: Console, found: SearchResult) -> None:
    small = console.width < SMALL
    several = len({point.hardware for point in found.points}) > 1
    batches = len({point.batch for point in found.points}) > 1
    console.print(best_text(found))
    console.print(asked_text(found))
    if unpriced := unpriced_text(found):
        console.print(unpriced)
    rows = found.front
    if rows:
        table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
        known = [field for field in ("loss", "joules", "dollars") if any(getattr(p, field) is not None for p in rows)]
        titles = ["tokens/s", "loss" if "loss" in known else "bits", "GPU", *([] if small else ["beside it"])]
        titles += (
            [] if small else [{"joules": "J/token", "dollars": "$/M"}[field] for field in known if field != "loss"]
        )
        texts = [*(["hardware"] if several else []), "policy", "expertsxbits"]
        for title in (*titles, *(["batch"] if batches else [])):
            table.add_column(title, justify="right")
        for title in texts:
            table.add_column(title, overflow="fold")
        shown = _spread(rows)
        for point in shown:
            table.add_row(*_cells(point, found, known, small=small, several=several, batches=batches))
        console.print(table)
        left = len(rows) - len(shown)
        beside = "" if small else "; beside it: experts in host or near-data memory"
        more = f" {left} more of them are in the files of --out." if left else ""
        console.print(
            "expertsxbits: code bits, on the GPU first; bits: mean stored bits of a weight that experts compute "
            f"with; GPU: experts, the rest, keys and values of {found.context:,} tokens{beside}. Nothing is better "
            f"than these in one respect without being worse in another.{more} Computed by a model of the hardware, not "
            "measured.",
            style="dim",
        )
    refused = sum(row.points for row in found.refused)
    fits = f"{len(found.points):,} of {found.evaluated:,} points fit"
    console.print(f"{fits}, {sum(point.meets for point in found.points):,} meet the speed", style="dim")
    for row in sorted(found.refused, key=lambda row: -row.points)[: REASONS if refused else 0]:
        console.print(f"{row.hardware}, {row.policy}: {row.points:,} refused, as {row.example}", style="dim")


def _spread(rows: Sequence[Point]) -> list[Point]:
    """At most ROWS of them, evenly from the fastest to the slowest."""
    if len(rows) <= ROWS:
        return list(rows)
    return [rows[round(index * (len(rows) - 1) / (ROWS - 1))] for index in range(ROWS)]


def _cells(
    point: Point, found: SearchResult, known: Sequence[str], *, small: bool, several: bool, batches: bool
) -> list[str]:
    keeps = f"{point.loss:.3g}" if point.loss is not None else f"{point.bits:.2f}"
    cells = [formats.number(point.tokens_per_second), keeps, human_bytes(point.gpu_bytes)]
    if not small:
        cells.append(human_bytes(point.near_bytes))
        values = [getattr(point, field) for field in known if field != "loss"]
        cells += ["-" if value is None else formats.number(value) for value in values]
    cells += [str(point.batch)] if batches else []
    return [*cells, *([point.hardware] if several else []), point.policy, point.short(found.num_experts)]
