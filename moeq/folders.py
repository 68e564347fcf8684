"""What a directory is that a user names: a run, which stands for its checkpoint wherever one is read."""

from __future__ import annotations

import shlex
from os import PathLike
from os.path import expanduser
from pathlib import Path

from moeq.errors import ArtifactError

RECIPE_COPY = "recipe.yaml"  # in a run's directory
CHECKPOINT = "checkpoint"  # what a run exports
CONFIG = "config.json"  # of a model
GGUF = "model.gguf"  # in a checkpoint for llama.cpp


def as_word(path: Path | str) -> str:
    """A path, or a model's name, as a shell hands it to a command: quoted where it has to be, and like no option."""
    return shlex.quote(f"./{path}" if str(path).startswith("-") else str(path))


def expanded(path: str | PathLike[str]) -> Path:
    """A path with a home in place of its ~; as it is where nobody knows whose that would be."""
    return Path(expanduser(path))


def has_recipe(folder: Path) -> bool:
    """Whether a run's recipe lies there, be it a link that leads to nothing, of which whoever reads it says so."""
    return (folder / RECIPE_COPY).is_file() or (folder / RECIPE_COPY).is_symlink()


def is_run(path: Path) -> bool:
    """Whether a run lies there, begun or ended; a model that has a recipe beside it is none."""
    try:
        folder = expanded(path)
        if (folder / CONFIG).is_file():
            return False
        return has_recipe(folder) or (folder / CHECKPOINT / CONFIG).is_file()
    except OSError:  # no name that can be looked up: whoever reads it says so
        return False


def checkpoint_of(path: Path) -> Path:
    """A run's packed checkpoint where a run is named, else the path as it is; ArtifactError for a run without one."""
    if not is_run(path):
        return path
    inner = path / CHECKPOINT
    if not (expanded(inner) / CONFIG).is_file():
        raise ArtifactError("this run has no checkpoint", where=str(path), do=f"go on with it: moeq run {path}")
    return inner


def bytes_in(folder: Path) -> int:
    """Of all files below a directory."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
