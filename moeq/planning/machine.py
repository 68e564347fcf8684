"""What this machine has free: memory (the machine's or its cgroup's), GPU memory, disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from moeq.artifacts.replicas import read_index
from moeq.artifacts.run import STORE
from moeq.errors import ArtifactError
from moeq.planning.probe import existing
from moeq.planning.result import Machine

CGROUP = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60  # cgroup v1 writes about 2**63 for none


def machine(out: Path, device: torch.device, store: Path | None = None, hub: Path | None = None) -> Machine:
    """What is free now; on the disk, what an earlier run left in `out` counts as free: it is replaced.

    Of the run's own replica store, only what the last run had in it. store: another one; hub: the hub's cache, where
    weights are to be downloaded.
    """
    folder = existing(out)
    lying = _freed(_replaced(out))
    others = [existing(other) if other is not None else folder for other in (store, hub)]
    apart = [other if other.stat().st_dev != folder.stat().st_dev else None for other in others]
    store_disk, hub_disk = (None if other is None else shutil.disk_usage(other).free for other in apart)
    gpu = int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else None
    return Machine(
        ram=available_ram(),
        gpu=gpu,
        disk=shutil.disk_usage(folder).free + lying,
        disk_path=str(folder),
        store_disk=store_disk,
        store_path=str(apart[0] or ""),
        hub_disk=hub_disk,
        hub_path=str(apart[1] or ""),
    )


def _freed(paths: Iterable[Path]) -> int:
    """Bytes on the disk of files that go: those alone of which no other name stays."""
    files: dict[tuple[int, int], tuple[os.stat_result, int]] = {}
    for path in paths:
        found = path.stat()
        place = found.st_dev, found.st_ino
        files[place] = found, files.get(place, (found, 0))[1] + 1
    return sum(found.st_blocks * 512 for found, names in files.values() if names >= found.st_nlink)


def _replaced(out: Path) -> Iterator[Path]:
    """Files of an earlier run that a run in the same directory writes again."""
    try:
        last = read_index(out / "losses").set
    except ArtifactError:
        last = None
    for path in out.rglob("*") if out.is_dir() else ():
        folders = path.relative_to(out).parts
        if path.is_file() and not (len(folders) > 2 and folders[0] == STORE and folders[1] != last):
            yield path


def available_ram(root: Path = CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int:
    """The lesser of MemAvailable and what the process's cgroup, or one above it, still allows."""
    rows = (line.partition(":") for line in meminfo.read_text().splitlines())
    free = next(int(value.split()[0]) * 1024 for name, _, value in rows if name == "MemAvailable")
    return min([free, *_cgroup_room(root)])


def _cgroup_room(root: Path) -> list[int]:
    """Limit less usage of every cgroup (v2, or v1's memory controller) that holds this process; caches not counted."""
    room = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        here = (root / "memory" if controllers else root) / path.lstrip("/")
        for folder in (here, *here.parents):
            limit, used = (folder / name for name in names)
            if limit.is_file() and used.is_file() and limit.read_text().strip().isdigit():
                most = int(limit.read_text())
                if most < UNLIMITED:
                    room.append(most - int(used.read_text()) + _file_cache(folder / "memory.stat"))
            if folder == root:
                break
    return room


def _file_cache(stat: Path) -> int:
    """Bytes of file pages that count as used but can be dropped."""
    lines = stat.read_text().splitlines() if stat.is_file() else []
    rows = dict(line.split(" ", 1) for line in lines if " " in line)
    return sum(int(rows.get(f"{which}_file", 0)) for which in ("inactive", "active"))
