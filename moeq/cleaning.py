"""moeq gc: what no run needs any more leaves the replica store.

A run needs the replicas and loss rows that its index names (losses/replicas.json: what its recipe asked for, written
before the first of them is made). Nothing else is looked at in a store but files that moeq names itself, and no
checkpoint is touched.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from moeq.artifacts import non_experts as others
from moeq.artifacts import replica_store, replicas
from moeq.artifacts.files import BEGUN, PARTIAL, held, locked
from moeq.artifacts.replicas import INDEX, LayerReplicas, ReplicaIndex
from moeq.artifacts.run import DIRECTORIES, OLDER, RECIPE_COPY, STAGES, STORE, store_folder
from moeq.artifacts.storage import check_links, storage_errors
from moeq.errors import ArtifactError, RecipeError, missing
from moeq.folders import bytes_in, has_recipe
from moeq.recipe import load_recipe

SET = re.compile(r"[0-9a-f]{64}")
LAYER = re.compile(r"layer-\d{3,}\.safetensors")
ROWS = re.compile(r"layer-\d{3,}\.([\w-]+\.\d+\.[0-9a-f]{16})\.json")


@dataclass(kw_only=True)
class _Sweep:
    """What is dropped, and how: nothing is done in a dry run."""

    dry_run: bool
    freed: list[dict[str, Any]] = field(default_factory=list)
    kept_bytes: int = 0

    @property
    def freed_bytes(self) -> int:
        return sum(item["bytes"] for item in self.freed)

    def drop(self, path: Path, what: str, size: int, act: Callable[[], object]) -> None:
        self.freed.append({"path": str(path), "what": what, "bytes": size})
        if not self.dry_run:
            with storage_errors(path, "remove"):
                act()

    def delete(self, path: Path, what: str) -> None:
        """Drop a file or a folder whole."""
        act = partial(shutil.rmtree, path) if path.is_dir() else partial(path.unlink, missing_ok=True)
        self.drop(path, what, _bytes(path), act)


def collect(runs: Sequence[Path], store: Path | None, *, dry_run: bool) -> dict[str, Any]:
    """Drop what neither these runs nor others that a store knows of refer to; returns what was freed.

    runs: run directories; store: a store that several runs share. Raises RecipeError when neither is given,
    ArtifactError for a folder that is no run or no store or whose index cannot be read, and StorageError while a run
    is going on in one of the run directories, and where a store is a link that leads to nothing.
    """
    if not runs and store is None:
        raise RecipeError("nothing to clean", do="give a RUN or --store DIR")
    stores = _stores(runs, store)
    sweep = _Sweep(dry_run=dry_run)
    with ExitStack() as stack:
        known = {run.resolve() for run in runs}
        for folder in stores:
            stack.enter_context(held(folder))
            known |= replica_store.runs_of(folder)
        for run in sorted(known):
            stack.enter_context(locked(run))
        folders = [run / f"losses{end}" for run in sorted(known) for end in ("", BEGUN)]
        indices = [replicas.read_index(folder) for folder in folders if (folder / INDEX).is_file()]
        indices += [others.read_index(folder) for folder in folders if (folder / others.INDEX).is_file()]
        for run in () if dry_run else runs:
            if (used := _used_store(run)) in stores and used != run.resolve() / STORE:
                replica_store.note_run(used, run)  # which may have been moved since it was noted
        for folder in stores:
            _clean_store(folder, indices, sweep)
        for run in sorted(run.resolve() for run in runs):
            _clean_run(run, sweep)
    return {
        "dry_run": dry_run,
        "stores": [str(folder) for folder in stores],
        "runs": [str(run) for run in sorted(known)],
        "freed_bytes": sweep.freed_bytes,
        "kept_bytes": sweep.kept_bytes,
        "freed": sweep.freed,
    }


def _stores(runs: Sequence[Path], store: Path | None) -> list[Path]:
    """The stores to clean: the one that is named, those that the runs use, and their own."""
    stores = [] if store is None else [store]
    for run in runs:
        if not run.exists():
            raise missing(run, "give the --out of a run")
        if not has_recipe(run):
            raise ArtifactError("not a run directory", where=str(run), do="give the --out of a run")
        wanted = (_used_store(run), run.resolve() / STORE)
        check_links(wanted[1])
        stores += [folder for folder in wanted if (folder / replica_store.MARKER).is_file()]
    for folder in stores:
        replica_store.check_store(folder)
    return sorted({folder.resolve() for folder in stores})


def _used_store(run: Path) -> Path:
    """The store that a run's recipe names."""
    folder = store_folder(load_recipe(run / RECIPE_COPY), run)
    check_links(folder)
    return folder.resolve()


def _clean_store(store: Path, indices: Sequence[ReplicaIndex], sweep: _Sweep) -> None:
    for note, run in replica_store.noted_runs(store).items():
        if not run.is_dir():
            sweep.delete(note, "note of a run that is gone")
    for path in sorted(store.glob(f"*{PARTIAL}")) + sorted((store / replica_store.RUNS).glob(f"*{PARTIAL}")):
        sweep.delete(path, "partial file")
    for folder in sorted(path for path in store.iterdir() if path.is_dir() and SET.fullmatch(path.name)):
        own = [index for index in indices if index.set == folder.name]
        if not own:
            sweep.delete(folder, "replicas and losses of other inputs")
            continue
        before, freed = _bytes(folder), sweep.freed_bytes
        _clean_set(folder, own, sweep)
        sweep.kept_bytes += before - (sweep.freed_bytes - freed)


def _clean_set(folder: Path, indices: Sequence[ReplicaIndex], sweep: _Sweep) -> None:
    """Drop entries and rows of one set that none of the indices names, and what cannot be read."""
    entries = {entry for index in indices for entry in index.entries()}
    rows = {made.rows for index in indices for made in index.made}
    for path in sorted(folder.rglob(f"*{PARTIAL}")):
        sweep.delete(path, "partial file")
    for path in sorted((folder / replicas.ROWS).glob("*.json")):
        name = ROWS.fullmatch(path.name)
        if name is not None and name[1] not in rows:
            sweep.delete(path, "losses")
    for path in sorted(folder.glob("*.safetensors")):
        if LAYER.fullmatch(path.name) is None:
            continue
        layer = replicas.layer_number(path)
        try:
            there = LayerReplicas(folder, layer)
        except ArtifactError:
            sweep.delete(path, "damaged replicas")
            continue
        gone = sorted(set(there.entries) - entries)
        if gone:
            act = partial(replicas.drop_replicas, folder, layer, entries)
            sweep.drop(path, f"replicas {', '.join(gone)}", sum(map(there.bytes, gone)), act)


def _clean_run(run: Path, sweep: _Sweep) -> None:
    """Drop what a killed run left half-written, but for its checkpoint, and what older versions kept of replicas."""
    for path in sorted(run.glob(f"{RECIPE_COPY}{PARTIAL}")):
        sweep.delete(path, "partial file")
    for stage in sorted(set(STAGES) - set(DIRECTORIES)):
        if (run / f"{stage}{PARTIAL}").is_dir():
            sweep.delete(run / f"{stage}{PARTIAL}", "partial folder")
        for path in sorted((run / stage).rglob(f"*{PARTIAL}")):
            sweep.delete(path, "partial file")
    for name in OLDER:
        if (run / "losses" / name).is_dir():
            sweep.delete(run / "losses" / name, "replicas and losses of schema version 1")


def _bytes(path: Path) -> int:
    if path.is_dir():
        return bytes_in(path)
    return path.stat().st_size if path.is_file() else 0
