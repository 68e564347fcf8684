"""Figures as people read them, shared by terminal tables, the report and the model card."""

from __future__ import annotations


def human_bytes(count: float) -> str:
    """Bytes with a binary unit: 3 significant digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def human_seconds(seconds: float) -> str:
    """Seconds as s, min or h."""
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
