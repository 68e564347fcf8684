"""Exporters: one file a format, found by its name.

`moeq`, the native format, has `export(inputs, directory) -> PlacementManifest`; every other is a conversion of a packed
checkpoint and has `write(source, directory, options)`.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from moeq.artifacts.manifest import PlacementManifest
from moeq.errors import RecipeError
from moeq.recipe import FORMATS

if TYPE_CHECKING:
    from moeq.exporters.foreign import WriteOptions
    from moeq.exporters.moeq import ExportInputs
    from moeq.exporters.packed_source import PackedSource


NATIVE = "moeq"
CONVERTED = tuple(sorted(FORMATS))


def known_formats() -> list[str]:
    """Names of all formats."""
    return sorted((NATIVE, *CONVERTED))


def export(name: str, inputs: ExportInputs, directory: Path) -> PlacementManifest:
    """Write a checkpoint directory in the native format."""
    if name != NATIVE:
        raise RecipeError(f"no export format {name!r}", do=f"use {NATIVE}; others go into export.formats")
    module = importlib.import_module(f"{__name__}.{name}")
    manifest: PlacementManifest = module.export(inputs, directory)
    return manifest


def write(name: str, source: PackedSource, directory: Path, options: WriteOptions) -> None:
    """Convert a packed checkpoint into a directory of another format, which appears when it is whole.

    Raises RecipeError for an unknown format, PlanError for what its runtime would not load as it is meant.
    """
    if name not in CONVERTED:
        raise RecipeError(f"no format {name!r}", do=f"use one of {', '.join(CONVERTED)}")
    importlib.import_module(f"{__name__}.{name.replace('-', '_')}").write(source, directory, options)
