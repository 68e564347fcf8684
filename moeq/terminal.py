"""Tables and summaries on standard output, readable in narrow windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moeq.models.support import Support
from moeq.pipeline import Outcome
from moeq.tables import human_bytes

NARROW = 78  # columns below which the table leaves out what the others imply
WIDE = 130  # columns from which the table of families shows everything
SMALL = 56  # columns below which it leaves out the speed-up, too


def print_families(rows: list[Support]) -> None:
    """Families as a table; in a narrow window without the class and the way in which experts are kept."""
    console = Console(highlight=False)
    wide = console.width >= WIDE
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    table.add_column("model_type", no_wrap=True)
    for title in ("class", "experts") if wide else ():
        table.add_column(title, overflow="fold")
    for title in ("streams", "quantizes"):
        table.add_column(title)
    table.add_column("remark", overflow="fold")
    mark = {True: "yes", False: "no"}
    for row in rows:
        more = [row.model, row.experts] if wide else []
        cells = [row.model_type, *more, mark[row.streamed], mark[row.quantized], row.remark]
        table.add_row(*cells, style=None if row.quantized else "dim")
    console.print(table)
    good = sum(row.quantized for row in rows)
    console.print(
        f"{good} of {len(rows)} quantize, export and load; measured on tiny random models by moeq's own tests.",
        style="dim",
    )


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """One stage's outcome for --json."""
    record = outcome.record
    return {
        "stage": outcome.stage,
        "skipped": outcome.skipped,
        "seconds": round(outcome.seconds, 3),
        "digest": record.digest,
        "summary": record.summary,
    }


def print_final(rows: list[dict[str, Any]], paths: dict[str, Path], outcomes: list[Outcome]) -> None:
    """The table at the end of a run, and where things are."""
    console = Console(highlight=False)
    wide = console.width >= NARROW
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    table.add_column("assignment", overflow="fold")
    small = console.width < SMALL
    titles = ["bits", "experts", *(["original"] if wide else []), "ppl", *(["+"] if wide else []), "acc"]
    for title in [*titles, *([] if small else ["speed-up"])]:
        table.add_column(title, justify="right", no_wrap=True)
    largest = max(row["expert_bytes"] for row in rows)
    for row in rows:
        cells = [
            f"{row['name']} *" if row["exported"] else row["name"],
            "-" if row["average_bits"] is None else f"{row['average_bits']:.3g}",
            human_bytes(row["expert_bytes"]),
            *([f"{row['expert_bytes'] / largest:.1%}"] if wide else []),
            _number(row["perplexity"], "{:.2f}"),
            *([_number(row["perplexity_change"], "{:+z.1%}")] if wide else []),
            _number(row["accuracy"], "{:.1%}"),
            *([] if small else [_speed(row)]),
        ]
        table.add_row(*cells, style="bold" if row["exported"] else None)
    console.print(table)
    estimated = next(outcome.record.summary for outcome in outcomes if outcome.stage == "estimate")
    of = "this model" if estimated["geometry_is_the_models"] else f"{estimated['geometry']} with this bit mix"
    console.print(
        "* exported. experts: bytes with scales and zero points. speed-up: estimated decode speed over MoNDE by its "
        f"bandwidth rule / cost-optimal, for {of}.{_error_note(rows)}",
        style="dim",
    )
    for name, path in paths.items():
        console.print(f"{name:11}{path}", soft_wrap=True, markup=False)


def _error_note(rows: list[dict[str, Any]]) -> str:
    errors = [row["accuracy_stderr"] for row in rows if row["accuracy_stderr"] is not None]
    return f" acc: standard error {100 * max(errors):.1f} points." if errors else ""


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _speed(row: dict[str, Any]) -> str:
    rule, best = row["speedup_over_monde_bandwidth_rule"], row["speedup_over_monde_cost_optimal"]
    return "-" if rule is None else f"{rule:.1f}x / {best:.1f}x"


def print_summary(summary: dict[str, Any], indent: int = 0) -> None:
    """Nested figures as indented lines."""
    console = Console(highlight=False)
    for key, value in summary.items():
        label = f"{' ' * indent}{str(key).replace('_', ' ')}"
        if isinstance(value, dict) and value:
            console.print(label)
            print_summary(value, indent + 2)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            console.print(label)
            for entry in value:
                line = ", ".join(f"{k.replace('_', ' ')} {_plain(k, v)}" for k, v in entry.items())
                console.print(f"{' ' * indent}  {line}", soft_wrap=True)
        else:
            console.print(f"{label}: {_plain(str(key), value)}", soft_wrap=True, markup=False)


def _plain(key: str, value: Any) -> str:
    if value == {} or value == []:
        return "none"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int) and "bytes" in key:
        return f"{value:,} ({human_bytes(value)})" if value >= 1024 else f"{value}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
