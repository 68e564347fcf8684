"""Exporters: one file a format, which declares an `EXPORTER` and is found by itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from moeq.runtimes import NATIVE, named, runtimes, written

if TYPE_CHECKING:
    from moeq.exporters.foreign import WriteOptions
    from moeq.exporters.packed_source import PackedSource


def write(name: str, source: PackedSource, directory: Path, options: WriteOptions) -> list[str]:
    """Convert a packed checkpoint into a directory for another runtime, which appears when it is whole.

    Returns lines on what is not as it was in the checkpoint.

    Raises RecipeError for an unknown runtime, FormatError for what that runtime would not load as it is meant.
    """
    from moeq.exporters.foreign import drafting

    runtime = runtimes()[named(name, (NATIVE, *written()))]
    with drafting(runtime, source, directory, options) as draft:
        runtime.exporter.write(draft)
    return draft.notes
