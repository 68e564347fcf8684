"""The folder through which processes of one machine hand each other tensors: in shared memory, else on the disk.

It is the driver's: whoever finds one whose driver is gone may remove it, which a lock in it shows.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from moeq.engine.arrays import Encoded, decode
from moeq.errors import StorageError
from moeq.scratch import Scratch

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "moeq-engine-"
FULL = (errno.ENOSPC, errno.EDQUOT)
ATTEMPTS = 100  # to remove a folder: one fails where a file was being made or others remove it


class Folders:
    """Where files of one engine go: the first folder that has room. Picklable, for workers."""

    def __init__(self, folders: list[Path]) -> None:
        self.folders = folders
        self._numbers = count()

    def write(self, what: str, encoded: Encoded) -> Path:
        """Write a file that workers map; StorageError where no folder has room."""
        name = f"{what}-{os.getpid()}-{next(self._numbers)}"
        for folder in self.folders:
            path = folder / name
            try:
                with path.open("wb") as stream:  # not through a mapping: a full memory would be a signal
                    for begin, piece in encoded.pieces():
                        stream.seek(begin)
                        stream.write(piece)
                    stream.truncate(encoded.nbytes)
                return path
            except OSError as error:
                path.unlink(missing_ok=True)
                if error.errno not in FULL:
                    raise StorageError(str(error.strerror), where=str(path), do="check the folder") from None
        size = encoded.nbytes / 2**20
        where = " and ".join(map(str, self.folders))
        raise StorageError(f"no room for {size:.1f} MiB", where=where, do="free some, or use fewer workers")

    def remove_of(self, pid: int, kept: set[Path]) -> None:
        """Remove what a process that is gone wrote, but for outcomes that are still to be read."""
        for folder in self.folders:
            for path in set(folder.glob(f"outcome-{pid}-*")) - kept:
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove all of it, though tasks still write to it and others remove it, too."""
        for folder in self.folders:
            going = folder.with_name(f"{folder.name}-going")
            with suppress(OSError):  # another process did
                folder.rename(going)  # what is written from now on finds no folder
            for _ in range(ATTEMPTS):
                shutil.rmtree(going, ignore_errors=True)
                if not going.exists():
                    break


class Spool(Folders):
    """The driver's folders, made when it begins, removed when it ends."""

    def __init__(self, beside: Path) -> None:
        """beside: a folder on a disk with room, for what shared memory does not take."""
        parents = [parent for parent in (SHARED_MEMORY, beside) if parent.is_dir() and os.access(parent, os.W_OK)]
        self._scratch = [Scratch(parent, PREFIX, f"{os.getpid()}-") for parent in parents]
        made = [scratch.path for scratch in self._scratch]
        if not made:
            raise StorageError("no folder to hand tensors through", where=str(beside), do="check the path")
        super().__init__(made)

    def for_workers(self) -> Folders:
        """The same folders, without the locks."""
        return Folders(self.folders)

    def remove(self) -> None:
        for scratch in self._scratch:
            scratch.remove()


def read(path: Path) -> tuple[Any, dict[str, Any]]:
    """What a file of a spool holds; what is written to the tensors stays this process's own."""
    with path.open("rb") as stream:
        memory = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    return decode(memory)
