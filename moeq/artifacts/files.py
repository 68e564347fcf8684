"""The one place where moeq touches files: digests, atomic writes, locks.

A file is written to a temporary name beside its place, synced and renamed last; a directory likewise. So an artifact is
either whole or not there, whatever happens to the process.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, BinaryIO

from moeq.artifacts.digests import Hashing, digest_of_file, linking, remember
from moeq.artifacts.reading import read_json_file
from moeq.artifacts.storage import check_file, check_no_address, storage_errors
from moeq.errors import ArtifactError, MoeqError, StorageError
from moeq.scratch import LOCK

PARTIAL = ".partial"  # suffix of everything that is not finished
BEGUN = ".begun"  # suffix of a directory that is not finished, and that whoever comes next goes on with
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux's renameat2
CHUNK_BYTES = 1 << 22
GONE, AGAIN = "deleted while moeq was writing it", "run the same command again"


def sync(path: Path) -> None:
    """Flush a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> Path:
    """Create a directory and its parents; StorageError where that is impossible, and for an address."""
    check_no_address(path)
    with storage_errors(path, "create the directory"):
        path.mkdir(parents=True, exist_ok=True)
    return path


def make_writable(path: Path) -> Path:
    """`make_directory`, and StorageError where nothing can be written in it: before minutes are spent on what cannot be
    kept."""
    make_directory(path)
    with storage_errors(path), TemporaryFile(dir=path):
        return path


def write_atomically(path: Path, write: Callable[[Path], str | None]) -> None:
    """Let `write` fill a temporary file, then sync it and rename it to `path`; nothing is left behind on failure.

    A writer that gives back the SHA-256 of what it wrote saves the next one who wants to know it a reading.
    """
    check_file(path)  # the parent of an address may be a scheme alone, as that of s3://FILE
    make_directory(path.parent)
    partial = path.with_name(path.name + PARTIAL)
    with storage_errors(path):
        _drop_link(partial)
        try:
            digest = write(partial)
            sync(partial)
            os.replace(partial, path)
            sync(path.parent)
            if digest is not None:
                remember(path, digest)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def _drop_link(path: Path) -> None:
    """Remove a link that lies where something is to be written: what it leads to is not moeq's."""
    if path.is_symlink():
        path.unlink()


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    write_atomically(path, lambda partial: _write(partial, data))


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def canonical_json(value: Any) -> str:
    """JSON whose bytes depend only on the value: sorted keys, fixed indentation, no NaN."""
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    write_text(path, canonical_json(value))


def read_json(path: Path, *, remedy: str = "make it again") -> Any:
    """Read JSON; ArtifactError when it is missing or damaged: no JSON, too large or deep, keys there twice, NaN."""
    try:
        return read_json_file(path)
    except FileNotFoundError:
        raise ArtifactError("no such file", where=str(path), do=remedy) from None
    except (OSError, ValueError) as error:
        raise ArtifactError(f"cannot be read as JSON ({error})", where=str(path), do=remedy) from None


def read_back(path: Path, start: int, crc: int) -> None:
    """Read a finished file and keep its digest; StorageError unless what follows `start` has the CRC-32 of what was
    written: for files whose first bytes are known last."""
    hashing, crc_read = Hashing(), 0
    with storage_errors(path, "read"), path.open("rb") as stream:
        hashing.update(stream.read(start))
        for chunk in hashing.passing(_pieces(stream)):
            crc_read = zlib.crc32(chunk, crc_read)
    if crc_read != crc:
        do = "check the disk, and run the same command again"
        raise StorageError("reads otherwise than it was written", where=str(path), do=do)
    remember(path, hashing.hexdigest())


def digest_of(value: Any) -> str:
    """Hexadecimal SHA-256 of a JSON-serializable value."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def place(source: Path, target: Path) -> None:
    """Put a copy of a file at `target`: a hard link where the file system allows, else a copy."""
    with storage_errors(target):
        try:
            with linking(source):
                os.link(os.path.realpath(source), target)  # of a link what it leads to: its own would lead astray
        except OSError:
            copy_file(source, target, digest_of_file(source, cached=True))
            sync(target)


def _pieces(stream: BinaryIO) -> Iterator[bytes]:
    while piece := stream.read(CHUNK_BYTES):
        yield piece


def copy_file(source: Path, target: Path, sha256: str | None = None) -> None:
    """Copy a file's bytes; ArtifactError where they have not the digest that they must have."""
    hashing = Hashing()
    with storage_errors(target), source.open("rb") as stream, target.open("wb") as copy:
        copy.writelines(hashing.passing(_pieces(stream)))
    if sha256 is not None and hashing.hexdigest() != sha256:
        raise ArtifactError("changed while it was copied", where=str(source), do="run the same command again")
    remember(target, hashing.hexdigest())


@contextmanager
def building(directory: Path, *, progress: Sequence[str] = ()) -> Iterator[Path]:
    """Yield a directory beside `directory` that takes its place, at once, when the block ends well.

    Until then, and whatever happens in the block, the old one stands as it is. progress: patterns of files that the
    block can go on with: they are there as the old one has them, and what a block that was broken off leaves stays for
    the next. A MoeqError of the block names the directory by its last name.
    """
    unfinished = directory.with_name(directory.name + (BEGUN if progress else PARTIAL))
    with storage_errors(directory):
        _drop_link(unfinished)
        if unfinished.exists() and not progress:
            shutil.rmtree(unfinished)
        goes_on, before, descriptor = unfinished.exists(), None, None
        old = [] if goes_on else [path for pattern in progress for path in sorted(directory.glob(pattern))]
        try:
            with storage_errors(unfinished):
                unfinished.mkdir(parents=True, exist_ok=True)
                for path in old:
                    place(path, unfinished / path.name)
                before = _inodes(unfinished)
                descriptor = os.open(unfinished, os.O_RDONLY | os.O_DIRECTORY)
                yield unfinished
                _check_there(unfinished, descriptor)
                for path in unfinished.rglob("*"):
                    sync(path)
                _swap(unfinished, directory)
        except MoeqError as error:
            error.rename(str(unfinished), str(directory))
            raise
        finally:
            if descriptor is not None:
                os.close(descriptor)
            if not progress or (not goes_on and unfinished.exists() and before in (None, _inodes(unfinished))):
                shutil.rmtree(unfinished, ignore_errors=True)


def _check_there(path: Path, descriptor: int) -> None:
    """StorageError unless what was opened still lies at `path`: a writer makes folders anew that were deleted."""
    with suppress(FileNotFoundError):
        if os.path.samestat(os.stat(path), os.fstat(descriptor)):
            return
    raise StorageError(GONE, where=str(path), do=AGAIN)


def _inodes(directory: Path) -> dict[str, int]:
    """What lies in a directory, and which file each is: one that was written anew is another."""
    return {path.name: path.stat().st_ino for path in directory.iterdir()}


@contextmanager
def filling(directory: Path) -> Iterator[Path]:
    """Yield `directory` itself where it is there and empty, as in a block of `building`; else do as that does."""
    if directory.is_dir() and not any(directory.iterdir()):
        with storage_errors(directory):
            yield directory
        return
    with building(directory) as unfinished:
        yield unfinished


def _swap(unfinished: Path, directory: Path) -> None:
    """Put a finished directory in the place of another, which goes."""
    retired = _retired(directory)
    shutil.rmtree(retired, ignore_errors=True)
    _drop_link(directory)
    if not directory.exists():
        os.replace(unfinished, directory)
    elif _exchange(unfinished, directory):
        retired = unfinished
    else:  # killed between the two, `remove_partials` puts the old one back
        os.replace(directory, retired)
        os.replace(unfinished, directory)
    sync(directory.parent)
    shutil.rmtree(retired, ignore_errors=True)


def _retired(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.old{PARTIAL}")


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names at once; False where the system or the file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError):  # not on Linux, or of an old C library
        return False
    done: int = renameat2(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE)
    return done == 0


def remove_partials(directory: Path, names: Iterable[str], kept: Iterable[str] = ()) -> None:
    """Delete what a killed run left half-written of `names` in `directory`; nothing else that lies there.

    kept: names whose progress stays (see `building`). A directory that was about to be replaced is put back.
    """
    going_on = set(kept)
    for name in names:
        path = directory / name
        if _retired(path).exists() and not path.exists():
            with storage_errors(path):
                os.replace(_retired(path), path)
        begun = directory / f"{name}{BEGUN}"
        beside = [directory / f"{name}{PARTIAL}", _retired(path), *([] if name in going_on else [begun])]
        inside = [old for whole in (path, begun) for old in sorted(whole.rglob(f"*{PARTIAL}"), reverse=True)]
        for old in [*beside, *inside]:
            if old.is_dir():
                shutil.rmtree(old, ignore_errors=True)
            elif os.path.lexists(old):  # a disk that is only read says no to removing what is not there
                with storage_errors(old):
                    old.unlink(missing_ok=True)


@contextmanager
def claimed(directory: Path) -> Iterator[None]:
    """Hold the right to make a directory that is not there yet; StorageError while another process has it.

    The lock is a file beside it, which goes again.
    """
    make_directory(directory.parent)
    path = directory.with_name(f".{directory.name}.lock")
    with storage_errors(path):
        stream = _lock_file(path, directory)
    with stream:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _open_lock(path: Path) -> IO[str]:
    """A file to lock, made where it is not there, as it is where it is, to be read alone where no more is allowed;
    OSError for a link."""
    try:
        return open(path, "r+", opener=lambda name, flags: os.open(name, flags | os.O_CREAT | os.O_NOFOLLOW, 0o666))
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES) or not path.is_file():
            raise
        return open(path, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW))


def _lock_file(path: Path, directory: Path) -> IO[str]:
    """A locked file at `path`: not one that who had the lock before has just removed."""
    while True:
        stream = _open_lock(path)
        try:
            _lock(stream, directory)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path), os.fstat(stream.fileno())):
                    return stream
        except BaseException:
            stream.close()
            raise
        stream.close()


@contextmanager
def locked(directory: Path) -> Iterator[IO[str]]:
    """Hold the directory's lock, an open file; StorageError when another process holds it. The kernel frees it when we
    die.

    StorageError also when the directory was deleted meanwhile, with what had been finished in it.
    """
    make_directory(directory)
    path = directory / LOCK
    with storage_errors(path):
        stream = _open_lock(path)
    with stream:
        with storage_errors(path):
            _lock(stream, directory)
        yield stream
        try:
            _check_there(path, stream.fileno())
        except StorageError as error:
            raise StorageError(error.what, where=str(directory), do=error.do) from None


def _lock(stream: IO[str], directory: Path) -> None:
    """StorageError when another process holds the lock of a directory."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        do = "wait for it or choose another --out"
        raise StorageError("another moeq run is working here", where=str(directory), do=do) from None


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory that several runs share, for the moment of a write; waits for whoever has it."""
    make_directory(directory)
    path = directory / LOCK
    with storage_errors(path):
        stream = _open_lock(path)
    with stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
