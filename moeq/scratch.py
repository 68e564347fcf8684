"""Folders that go with the process that made them; those of processes that were killed go when the next comes."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

LOCK = ".lock"


class Scratch:
    """A folder of this process below `parent`, until `remove` or until the process is gone and another one comes."""

    def __init__(self, parent: Path, prefix: str, more: str = "") -> None:
        """prefix: of all such folders there; more: behind it in this one's name. OSError where there can be none."""
        remove_stale(parent, prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix + more, dir=parent))
        self._lock = (self.path / f"{LOCK}.new").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(self._lock.name, self.path / LOCK)  # seen by others only when it is held

    def remove(self) -> None:
        """Remove the folder and what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def remove_stale(parent: Path, prefix: str) -> None:
    """Remove folders whose processes are gone: their locks are free."""
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError), (folder / LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
