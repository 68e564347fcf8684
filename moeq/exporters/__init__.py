"""Exporters: one file a format, found by its name; each with `export(inputs, directory) -> PlacementManifest`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from moeq.artifacts.manifest import PlacementManifest
from moeq.errors import RecipeError

if TYPE_CHECKING:
    from moeq.exporters.moeq import ExportInputs


FORMATS = ("moeq",)  # as a recipe writes them


def known_formats() -> list[str]:
    """Names of all formats."""
    return sorted(FORMATS)


def export(name: str, inputs: ExportInputs, directory: Path) -> PlacementManifest:
    """Write a checkpoint directory in the named format."""
    if name not in known_formats():
        raise RecipeError(f"no export format {name!r}", do=f"use one of {', '.join(known_formats())}")
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    manifest: PlacementManifest = module.export(inputs, directory)
    return manifest
