"""SHA-256 of files, every byte at every size: taken while they are written, checked when they are read.

`digest_of_file` is what everybody calls. It reads the file; with cached=True, for a stage that only skips, the digest
that was taken of this very file before stands in: of the same device, inode, size, mtime_ns and ctime_ns, the last of
which no program can set. A bit that the disk itself turned is therefore seen where the file is read, or with `--check`.

Known digests are kept in the user's cache folder ($MOEQ_CACHE, else $XDG_CACHE_HOME/moeq, else ~/.cache/moeq), not
beside the files: a model may lie where nobody may write and is shared by runs, to look at a run writes nothing in it,
and a directory that comes from elsewhere cannot bring digests of its own. A cache that is damaged or cannot be written
is ignored: files are read again. Files below 1 MiB are always read.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeq.artifacts.storage import storage_errors
from moeq.errors import StorageError
from moeq.progress import Reporter
from moeq_kernels import caches

READ_BYTES = 1 << 20
SMALL_BYTES = 1 << 20  # files below are never remembered
BAR_BYTES = 128 << 20  # from so much on, reading may take two seconds and shows progress
BLOCK_BYTES = 16 << 20  # a step of the bar
THREAD_BYTES = 4 << 20  # of what is read for every further thread: to start one takes as long as to hash 1 MB
TICK_NS = 20_000_000  # two changes of a file that are less apart may have the same ctime
SHARDS, MOST_ENTRIES = 64, 4096  # files of the cache, and entries of each; the oldest go
_SHA256 = 64  # hexadecimal digits
Key = tuple[int, int, int, int, int]  # device, inode, size, mtime_ns, ctime_ns
_known: dict[tuple[Key, str], str] = {}  # of this process
_spent_lock = threading.Lock()


@dataclass
class Spent:
    """What hashing took in this process: bytes, and seconds added up over threads."""

    bytes: int = 0
    seconds: float = 0.0

    def since(self, earlier: Spent) -> Spent:
        return Spent(bytes=self.bytes - earlier.bytes, seconds=self.seconds - earlier.seconds)


_spent = Spent()


def spent() -> Spent:
    """What hashing has taken so far."""
    with _spent_lock:
        return Spent(bytes=_spent.bytes, seconds=_spent.seconds)


class Hashing:
    """SHA-256 of bytes as they pass; other threads run meanwhile."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def update(self, data: Any) -> None:
        started = time.perf_counter()
        self._digest.update(data)
        seconds = time.perf_counter() - started
        with _spent_lock:
            _spent.bytes += len(data) if isinstance(data, bytes) else memoryview(data).nbytes
            _spent.seconds += seconds

    def passing(self, chunks: Iterable[Any]) -> Iterator[Any]:
        """The chunks, hashed on their way."""
        for chunk in chunks:
            self.update(chunk)
            yield chunk

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def digest_of_chunks(chunks: Iterable[Any]) -> str:
    """Hexadecimal SHA-256 of bytes that come in pieces."""
    hashing = Hashing()
    for chunk in chunks:
        hashing.update(chunk)
    return hashing.hexdigest()


def digest_of_file(path: Path, *, cached: bool = False, advance: Callable[[], None] | None = None) -> str:
    """Hexadecimal SHA-256 of a file's bytes; StorageError where it cannot be read.

    cached: a digest that was taken of exactly this file before will do. advance: called for every BLOCK_BYTES read.
    """

    def read() -> str:
        hashing, count = Hashing(), 0
        with storage_errors(path, "read"), path.open("rb", buffering=0) as stream:
            room = memoryview(bytearray(min(READ_BYTES, path.stat().st_size + 1)))
            while got := stream.readinto(room):
                hashing.update(room[:got])
                count += got
                if advance is not None and count % BLOCK_BYTES < got:
                    advance()
        return hashing.hexdigest()

    return digest_of_part(path, "", read, cached=cached)


def digest_of_part(path: Path, part: str, read: Callable[[], str], *, cached: bool = False) -> str:
    """The digest of a part of a file ("": of the whole) that `read` takes, remembered for this very file."""
    with storage_errors(path, "read"):
        before = path.stat()
        known = remembered(path, part) if cached else None
        if known is not None:
            return known
        _settle(before)
        digest = read()
        if _key(path.stat()) == _key(before):
            _remember(before, part, digest)
    return digest


def digests_of_files(
    paths: Iterable[Path], *, cached: bool = False, reporter: Reporter | None = None, title: str = "hashing"
) -> dict[Path, str]:
    """Digests of files, on all cores where there is much to read; what may take seconds shows progress."""
    files = list(dict.fromkeys(paths))
    with storage_errors(files[0] if files else Path(), "read"):
        sizes = [path.stat().st_size for path in files if not cached or remembered(path) is None]
    blocks = sum(size // BLOCK_BYTES for size in sizes)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = min(cores, 1 + sum(sizes) // THREAD_BYTES)
    with _bar(reporter, title, blocks) as advance, ThreadPoolExecutor(threads) as pool:
        each = map if threads == 1 else pool.map  # a pool that is asked for nothing starts no thread
        digests = each(lambda path: digest_of_file(path, cached=cached, advance=advance), files)
        return dict(zip(files, digests, strict=True))


@contextmanager
def _bar(reporter: Reporter | None, title: str, blocks: int) -> Iterator[Callable[[], None] | None]:
    if reporter is None or blocks < BAR_BYTES // BLOCK_BYTES:
        yield None
        return
    lock = threading.Lock()
    with reporter.bar(title, blocks) as advance:

        def step() -> None:
            with lock:
                advance()

        yield step


def remember(path: Path, digest: str, part: str = "") -> None:
    """Keep what the writer of a file found while it wrote it."""
    with contextlib.suppress(StorageError):
        digest_of_part(path, part, lambda: digest)


def remembered(path: Path, part: str = "") -> str | None:
    """The digest that was taken of this very file, None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    if status.st_size < SMALL_BYTES:
        return None
    key = _key(status)
    if (key, part) not in _known:
        stored = _read_shard(_shard(key)).get(_entry(key, part))
        if stored is not None:
            _known[key, part] = stored
    return _known.get((key, part))


@contextmanager
def linking(path: Path) -> Iterator[None]:
    """A link that is made of a file within changes its ctime, not its bytes: what was known stays known."""
    known = remembered(path)
    before = path.stat()
    yield
    after = path.stat()
    if known is not None and _key(before)[:4] == _key(after)[:4]:
        remember(path, known)


def file_key(path: Path) -> Key | None:
    """What tells a file from another one that takes its place; None where there is none."""
    try:
        return _key(path.stat())
    except OSError:
        return None


def _key(status: os.stat_result) -> Key:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _settle(status: os.stat_result) -> None:
    """Wait until another change of a file would have another ctime."""
    left = status.st_ctime_ns + TICK_NS - time.time_ns()
    if status.st_size >= SMALL_BYTES and 0 < left <= TICK_NS:
        time.sleep(left / 1e9)


def _remember(status: os.stat_result, part: str, digest: str) -> None:
    if status.st_size < SMALL_BYTES or not stat.S_ISREG(status.st_mode) or status.st_ctime_ns > time.time_ns():
        return  # cheap to read again; or a clock that cannot be trusted
    key = _key(status)
    if _known.get((key, part)) == digest:
        return
    _known[key, part] = digest
    with contextlib.suppress(OSError):
        _add_to_shard(_shard(key), _entry(key, part), digest)


def _entry(key: Key, part: str) -> str:
    return f"{'-'.join(map(str, key))}:{part}"


def folder() -> Path:
    """Where digests are kept."""
    return caches.folder() / "digests"


def _shard(key: Key) -> Path:
    return folder() / f"{key[1] % SHARDS:02d}.json"


def _read_shard(path: Path) -> Mapping[str, str]:
    """What a file of the cache holds; nothing where it is missing or damaged."""
    try:
        digests = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return digests if isinstance(digests, dict) and all(map(_is_digest, digests.values())) else {}


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and len(value) == _SHA256 and not set(value) - set("0123456789abcdef")


def _add_to_shard(path: Path, entry: str, digest: str) -> None:
    """Write a file of the cache anew with one more entry, under its lock; older states of the same file go."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        device, inode, *_ = entry.split("-")
        state = entry.partition(":")[0]
        kept = {
            name: value
            for name, value in _read_shard(path).items()
            if not name.startswith(f"{device}-{inode}-") or name.startswith(f"{state}:")
        }
        kept.pop(entry, None)
        newest = dict(list(kept.items())[1 - MOST_ENTRIES :]) | {entry: digest}
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(newest, separators=(",", ":")), "utf-8")
        os.replace(partial, path)
