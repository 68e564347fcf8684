"""Folders that go with the process that made them; those of processes that were killed go when the next comes."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TextIO

LOCK = ".lock"
UNHELD = f"{LOCK}.new"  # until it is held


class Scratch:
    """A folder of this process below `parent`, until `remove` or until the process is gone and another one comes."""

    def __init__(self, parent: Path, prefix: str, more: str = "") -> None:
        """prefix: of all such folders there; more: behind it in this one's name. OSError where there can be none."""
        remove_stale(parent, prefix)
        lock = None
        while lock is None:
            self.path = Path(tempfile.mkdtemp(prefix=prefix + more, dir=parent))
            with suppress(FileNotFoundError):  # else another process has taken it for one that was left
                lock = _locked(self.path)
        self._lock = lock

    def remove(self) -> None:
        """Remove the folder and what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _locked(folder: Path) -> TextIO:
    """The lock of a new folder, held; FileNotFoundError where the folder has been removed."""
    with ExitStack() as stack:
        lock = stack.enter_context((folder / UNHELD).open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(lock.name, folder / LOCK)  # seen by others only when it is held
        stack.pop_all()
    return lock


def remove_stale(parent: Path, prefix: str) -> None:
    """Remove folders whose processes are gone: their locks are free, or they came to none and are empty."""
    for folder in parent.glob(f"{prefix}*"):
        for name in (LOCK, UNHELD):
            with suppress(OSError), (folder / name).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # one in which something is
            folder.rmdir()
