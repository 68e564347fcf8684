"""Which files one's own lm-eval tasks are made of: their folder, what its YAML includes, and the data it names."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from itertools import chain, islice
from os.path import isdir, isfile
from pathlib import Path

import yaml

from moeq.bounded import LOADER, YAML_BYTES, read_bounded, shortened
from moeq.errors import EvaluationError

DATA = ("dataset_path", "data_dir", "data_files")  # keys whose text may name what lies on this machine
INCLUDE = "include"
MOST = 10_000  # files and folders that one name may stand for
EVERYWHERE, SEARCHED = "**", 100_000  # files and folders among which it is looked for


def files_of(folder: Path) -> dict[str, Path]:
    """Every file by the name it has for the tasks: below the folder, else as the YAML names it.

    Data are looked for as lm-eval does: from the working directory, `*` and `**` included. YAML that cannot be read
    names nothing: whoever loads the task says so. Raises EvaluationError for data of more files than MOST.
    """
    own = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    found = {str(path.relative_to(folder)): path for path in sorted(own)}
    left = [path for path in found.values() if path.suffix == ".yaml"]
    seen = {path.resolve() for path in left}
    while left:
        path = left.pop()
        for key, text in _named(path):
            if key == INCLUDE:
                other = path.parent / text
                if isfile(other) and other.resolve() not in seen:
                    seen.add(other.resolve())
                    found[text] = other
                    left.append(other)
            else:
                found |= _data(text)
    return found


def _data(text: str) -> dict[str, Path]:
    """The files that a name or pattern stands for on this machine, those of folders included."""
    _check_searched(text)
    places = map(Path, glob.iglob(text, recursive=True))
    every = list(islice(chain.from_iterable([place, *_inside(place)] for place in places), MOST + 1))
    if len(every) > MOST:
        do = "name what the task reads, not a folder around it"
        raise EvaluationError(f"more than {MOST:,} files and folders", where=shortened(text), do=do)
    return {str(path): path for path in sorted({*every}) if isfile(path)}


def _check_searched(text: str) -> None:
    """EvaluationError for a pattern whose `**` would look through more than SEARCHED files and folders of this machine;
    one that begins nowhere may be of a hub dataset's files."""
    parts, looked = Path(text).parts, 0
    if EVERYWHERE not in parts or not Path(text).is_absolute():
        return
    for place in glob.iglob(str(Path(*parts[: parts.index(EVERYWHERE)]))):
        for _, folders, files in os.walk(place, followlinks=True):
            folders[:] = [name for name in folders if not name.startswith(".")]  # which it passes by
            looked += len(folders) + len(files)
            if looked > SEARCHED:
                what = f"{EVERYWHERE} would look through more than {SEARCHED:,} files and folders"
                raise EvaluationError(what, where=shortened(text), do="name the folder that holds what the task reads")


def _inside(place: Path) -> list[Path]:
    return list(islice(place.rglob("*"), MOST + 1)) if isdir(place) else []


def _named(path: Path) -> Iterator[tuple[str, str]]:
    """Every text that stands under a key which may name a file, with its key."""
    try:
        root = yaml.compose(read_bounded(path, YAML_BYTES), Loader=LOADER)
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return
    left, seen = [("", root)], set()
    while left:
        key, node = left.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            inside = [(key if key in DATA else str(name.value), value) for name, value in node.value]
            left += inside
        elif isinstance(node, yaml.SequenceNode):
            left += [(key, value) for value in node.value]
        elif isinstance(node, yaml.ScalarNode) and key in (*DATA, INCLUDE):
            yield key, node.value
