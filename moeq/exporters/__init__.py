"""Exporters: one file a format, which declares an `EXPORTER` and is found by itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from moeq.errors import RecipeError
from moeq.registry import EXPORTERS, converted

if TYPE_CHECKING:
    from moeq.exporters.foreign import WriteOptions
    from moeq.exporters.packed_source import PackedSource


def write(name: str, source: PackedSource, directory: Path, options: WriteOptions) -> None:
    """Convert a packed checkpoint into a directory of another format, which appears when it is whole.

    Raises RecipeError for an unknown format, FormatError for what its runtime would not load as it is meant.
    """
    exporter = EXPORTERS.find(name)
    if exporter is None or exporter.write is None:
        raise RecipeError(f"no format {name!r}", do=f"use one of {', '.join(converted())}")
    from moeq.exporters.foreign import drafting

    with drafting(exporter, source, directory, options) as draft:
        exporter.write(draft)
