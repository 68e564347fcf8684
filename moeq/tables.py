"""Figures as people read them, shared by terminal tables, the report and the model card."""

from __future__ import annotations

from math import ceil


def human_bytes(count: float) -> str:
    """Bytes with a binary unit and three digits, rounded up, so that what is read here is enough as a limit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) <= 999:
            return f"{ceil(count)} B" if unit == "B" else f"{_three_digits(count)} {unit}"
        count /= 1024
    return f"{_three_digits(count)} TiB"


def _three_digits(value: float) -> str:
    """The least number of three digits that is not below a value."""
    for digits, most in ((2, 9.99), (1, 99.9)):
        up = ceil(value * 10**digits) / 10**digits
        if abs(up) <= most:
            return f"{up:.{digits}f}"
    return f"{ceil(value)}"


def human_seconds(seconds: float) -> str:
    """Seconds as s, min or h."""
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
