"""What a disk refuses, as a StorageError that names the path and what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from os import readlink
from os.path import exists
from pathlib import Path

from moeq.errors import NOWHERE, StorageError, address_of

_ADVICE = {
    errno.ENOSPC: "free some space or choose another place",
    errno.EDQUOT: "free some space or choose another place",
    errno.EFBIG: "the file system or a limit of this shell forbids files of this size; choose another place",
    errno.EROFS: "choose a place on a writable disk",
    errno.EACCES: "check the permissions or choose another place",
    errno.EPERM: "check the permissions or choose another place",
}


def check_no_address(path: Path) -> None:
    """StorageError for an address, which would be a folder of that name here."""
    if (address := address_of(path)) is not None:
        do = "give a path; `mirror` keeps a copy of a run at an address"
        raise StorageError("an address, and files are written to paths alone", where=address, do=do)


def check_file(path: Path) -> None:
    """StorageError for an address, and for a device or a pipe, or a link to one: a file would take its place."""
    check_no_address(path)
    is_open = path.is_symlink() and readlink(path).startswith("/proc/")  # /dev/stdout, whatever it leads to today
    if is_open or (path.exists() and not path.is_file() and not path.is_dir()):
        raise StorageError("a device or a pipe, which a file would replace", where=str(path), do="give a file's path")


def check_links(folder: Path) -> None:
    """StorageError for a link that leads to nothing, where a folder should lie or above it."""
    for part in (folder, *folder.parents):
        if is_dangling(part):
            raise _dangling(part)


def is_dangling(path: Path) -> bool:
    """Whether a path is a link that leads to nothing."""
    return path.is_symlink() and not path.exists()


def _dangling(link: Path | str) -> StorageError:
    return StorageError(NOWHERE, where=str(link), do="remove it, or make what it names")


@contextmanager
def storage_errors(path: Path, doing: str = "write") -> Iterator[None]:
    """Turn an OSError into a StorageError that names what to do and the path, or what lies below it and is refused."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "check the path or choose another place")
        if isinstance(error, FileExistsError) and error.filename and not exists(error.filename):
            raise _dangling(error.filename) from error
        where = str(_refused(error, path))
        raise StorageError(f"cannot {doing}: {error.strerror or error}", where=where, do=advice) from error


def _refused(error: OSError, path: Path) -> Path:
    """What an error names, where it lies below a path; else the path."""
    if not isinstance(error.filename, str | Path):
        return path
    named = Path(error.filename)
    return named if named.is_relative_to(path) else path
