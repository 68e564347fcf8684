"""The folder of a replica store: the mark that makes it one, and the runs that use it; see `artifacts.replicas`."""

from __future__ import annotations

import os
from pathlib import Path

from moeq.artifacts.files import digest_of, held, make_directory, read_json, write_json
from moeq.artifacts.reading import NAME_BYTES
from moeq.artifacts.replicas import REMEDY, SCHEMA_VERSION, SHORT
from moeq.artifacts.run import RECIPE_COPY, STORE
from moeq.artifacts.stage import check_schema_version
from moeq.errors import ArtifactError, missing

MARKER = "store.json"
MARK = {"kind": "moeq replica store", "schema_version": SCHEMA_VERSION}
PATH_BYTES = 4096  # of Linux, the end of it counted
RUNS = "runs"


def open_store(store: Path, run: Path | None = None) -> None:
    """Make the folder a store; `run`: a run directory outside of it, which is noted."""
    make_directory(store)
    with held(store):
        if not is_marked(store):
            write_json(store / MARKER, MARK)
        if run is not None:
            note_run(store, run)


def note_run(store: Path, run: Path) -> None:
    """Note in a store that is held the directory of a run elsewhere, so that `moeq gc` knows who uses it."""
    name = str(run.resolve())
    write_json(store / RUNS / f"{digest_of(name)[:SHORT]}.json", {"run": name})


def is_marked(store: Path) -> bool:
    """Whether the folder says that it is a store; ArtifactError when it says so of another schema version."""
    try:
        marker = read_json(path := store / MARKER)
    except ArtifactError:  # not there, or damaged
        return False
    if isinstance(marker, dict) and marker.get("kind") == MARK["kind"]:
        check_schema_version(marker.get("schema_version"), SCHEMA_VERSION, path, remedy="use the moeq that wrote it")
    return bool(marker == MARK)


def check_store(store: Path) -> None:
    """ArtifactError when the folder is no store, a damaged one, or one of another schema version."""
    if not (path := store / MARKER).is_file():
        do = "give the folder that runs used as their store"
        raise ArtifactError("not a replica store", where=str(store), do=do) if store.exists() else missing(store, do)
    if not is_marked(store):
        raise ArtifactError("damaged", where=str(path), do=REMEDY)


def noted_runs(store: Path) -> dict[Path, Path]:
    """{note: run directory} of the runs elsewhere that use the store."""
    return {path: _noted_run(path) for path in sorted((store / RUNS).glob("*.json"))}


def is_shared(store: Path) -> bool:
    """Whether runs elsewhere use the store, or did."""
    return any((store / RUNS).glob("*.json"))


def runs_of(store: Path) -> set[Path]:
    """Run directories that use the store and are there: those noted in it, and the one whose own it is."""
    runs = {run.resolve() for run in noted_runs(store).values() if run.is_dir()}
    owned = store.name == STORE and (store.parent / RECIPE_COPY).is_file()
    return runs | ({store.parent.resolve()} if owned else set())


def _noted_run(path: Path) -> Path:
    note = read_json(path)
    run = note.get("run") if isinstance(note, dict) else None
    if not isinstance(run, str) or not Path(run).is_absolute() or "\0" in run or not _can_be(Path(run)):
        raise ArtifactError("does not name a run directory", where=str(path), do="delete it, and run `moeq run` there")
    return Path(run)


def _can_be(path: Path) -> bool:
    """Whether there may be such a path: not where it or a part of it is too long."""
    return len(os.fsencode(path)) < PATH_BYTES and all(len(os.fsencode(part)) <= NAME_BYTES for part in path.parts)
