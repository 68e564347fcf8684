"""What a disk refuses, as a StorageError that names the path and what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moeq.errors import StorageError

_ADVICE = {
    errno.ENOSPC: "free some space or choose another --out",
    errno.EDQUOT: "free some space or choose another --out",
    errno.EFBIG: "the file system or a limit of this shell forbids files of this size; choose another --out",
    errno.EROFS: "choose an --out on a writable disk",
    errno.EACCES: "check the permissions or choose another --out",
    errno.EPERM: "check the permissions or choose another --out",
}


@contextmanager
def storage_errors(path: Path, doing: str = "write") -> Iterator[None]:
    """Turn an OSError into a StorageError that names the path and what to do."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "check the path or choose another --out")
        raise StorageError(f"cannot {doing}: {error.strerror or error}", where=str(path), do=advice) from error
