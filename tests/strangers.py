"""Packages of other people, made for a test: modules, and a dist-info folder with their entry points."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moeq.registry import Registry

ROOT = Path(__file__).parents[1]


def write_package(folder: Path, group: str, entries: Mapping[str, str], modules: Mapping[str, str]) -> None:
    """Entry points {name: value} of a group and modules {name: source}, as a folder that stands on the path."""
    info = folder / "strangers-1.0.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: strangers\nVersion: 1.0\n")
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    info.joinpath("entry_points.txt").write_text("\n".join(lines) + "\n")
    for name, source in modules.items():
        folder.joinpath(f"{name}.py").write_text(source)


def started(package: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`moeq WORDS` in a fresh process, where a package is there; `ForkServer.run(package=...)` forks one instead."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (package, ROOT)))}
    command = [sys.executable, "-m", "moeq", *words]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)


def changed(patch: pytest.MonkeyPatch, registry: Registry, name: str, **fields: Any) -> None:
    """A member has other fields, as long as the patch lasts."""
    patch.setitem(registry._loaded, name, replace(registry.get(name), **fields))


@contextmanager
def on_path(folder: Path, registry: Registry, modules: Mapping[str, str]) -> Iterator[None]:
    """The package of a folder is there, for this registry and as long as this lasts."""
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    registry.reset()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in modules:
            sys.modules.pop(name, None)
        registry.reset()
