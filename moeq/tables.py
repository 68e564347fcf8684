"""Figures as people read them, shared by terminal tables, the report and the model card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

NATS = "nats a token"  # what KL is in


def human_bytes(count: float) -> str:
    """Bytes with a binary unit and three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 999.5:
            return f"{count:.0f} B" if unit == "B" else f"{_three_digits(count)} {unit}"
        count /= 1024
    return f"{_three_digits(count)} TiB"


def human_size(count: int) -> str:
    """As `human_bytes`, but never less than there are: a size that may be given back as a limit, and is then met."""
    if count <= 999:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size <= 999:
            return f"{_three_digits_up(size)} {unit}"
    return f"{_three_digits_up(size / 1024)} TiB"


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 9.995 else f"{value:.1f}" if abs(value) < 99.95 else f"{value:.0f}"


def _three_digits_up(value: float) -> str:
    """The least number of three digits that is not below a value."""
    for digits, most in ((2, 9.99), (1, 99.9)):
        up = ceil(value * 10**digits) / 10**digits
        if up <= most:
            return f"{up:.{digits}f}"
    return f"{ceil(value)}"


def rounded(value: float, digits: int = 4) -> str:
    """Significant digits, more of thousands and millions; in scientific notation only beyond them."""
    size = abs(float(f"{value:.{digits}g}"))
    if 1e3 <= size < 1e7:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}" if value == 0 or 1e-3 <= size < 1e3 else f"{value:.{digits - 2}e}"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number of things, with their name."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def human_seconds(seconds: float) -> str:
    """Seconds as s, min or h."""
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def p_value(p: float) -> str:
    """A p value to three places, with a sign before it: `= 0.012`, `< 0.001`."""
    return "< 0.001" if p < 0.001 else f"= {p:.3f}"


def effective(items: int, independent: float | None) -> str:
    """So many independent items of the items that were measured; where all are independent, or it is not known, all."""
    shown = items if independent is None else max(1, round(independent))
    return f"{items:,}" if shown >= items else f"{shown:,} of {items:,}"


def too_few(items: int, fewest: int | None) -> str:
    """Instead of an interval; of a mean over tasks, one of which has too few."""
    return f"too few: it takes {fewest}" if fewest is None or items < fewest else f"a task has fewer than {fewest}"


def kl_caption(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the columns KL and top-1 of a run's final rows are; nothing where neither was measured."""
    if all(row.get("kl") is None for row in rows):
        return ""
    errors = [row["kl_stderr"] for row in rows if row["kl_stderr"] is not None]
    error = f", standard error at most {max(errors):.1g}" if errors else ""
    return f" KL: nats a token from the original{error}; top-1: tokens whose likeliest is the same."


def kl_notes(row: Mapping[str, Any]) -> list[str]:
    """Why a row of a comparison has no KL, or what it is at most where not all logits were kept."""
    if row.get("not_compared"):
        return [f"no KL: {row['not_compared']}"]
    found = row.get("divergence")
    if found is None or found["kept"] is None:
        return []
    rest = f"{found['kept']:,} logits of each token were kept, of the rest ({found['rest']:.2g}) the sum"
    return [f"KL is at least that, and at most {found['kl_most']:.4g}: {rest}"]
