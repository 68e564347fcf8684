"""Files of object stores, read by ranges through fsspec: a cache of blocks on the disk with a bound in bytes, blocks
that are about to be needed fetched beforehand, requests that fail tried again.

A `RemoteFile` stands where a path stands for whoever reads headers and tensors: it has a name, a size, and opens.
"""

from __future__ import annotations

import atexit
import hashlib
import io
import os
import stat
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from moeq.errors import MissingError, ModelError, RecipeError, StorageError
from moeq.scratch import Scratch
from moeq_kernels import caches

SCHEMES = ("s3", "gs", "gcs", "hf", "file", "memory")
EXTRAS = {"s3": "'moeq[s3]'", "gs": "gcsfs", "gcs": "gcsfs"}  # what pip is told
PLAIN = {"hf": {"cache_type": "none"}}  # of clients that would fetch more than they are asked for
VARIABLE = "MOEQ_REMOTE_CACHE"  # bytes of the cache of blocks
CACHE_BYTES = 8 << 30
BLOCK_BYTES, LEAST_BLOCK_BYTES = 8 << 20, 16 << 10
BLOCKS = 16  # that the cache holds at least: blocks are smaller where the cache is small
AT_ONCE = 16  # requests
ATTEMPTS, FIRST_WAIT, MOST_WAIT = 8, 0.1, 5.0  # of a request, and seconds between them, each twice the one before
FRESH_SECONDS = 10.0  # for which what is known of a file is not asked for again
PREFIX = "remote-"

T = TypeVar("T")


def is_remote(name: str) -> bool:
    """Whether a model's name is an address of an object store."""
    return name.partition("://")[0] in SCHEMES and "://" in name


def cache_bytes() -> int:
    """The bound of the cache: $MOEQ_REMOTE_CACHE in bytes, or with KiB, MiB, GiB, TiB behind; else 8 GiB."""
    text = os.environ.get(VARIABLE, "").strip()
    units = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
    factor = next((size for unit, size in units.items() if text.endswith(unit)), 1)
    number = text[:-3].strip() if factor > 1 else text
    if not text:
        return CACHE_BYTES
    if not number.isdecimal() or int(number) * factor < BLOCKS * LEAST_BLOCK_BYTES:
        do = f"give bytes, at least {BLOCKS * LEAST_BLOCK_BYTES}, such as 20GiB"
        raise RecipeError(f"not a size: {text[:40]!r}", where=VARIABLE, do=do)
    return int(number) * factor


class Store:
    """A file system of fsspec with its cache of blocks; shared by all files of a model.

    fetched: bytes that came over the network; retried: requests that were made again.
    """

    def __init__(self, system: Any, scheme: str, most_bytes: int | None = None) -> None:
        """most_bytes: of blocks on the disk, those that are being fetched among them."""
        self.system, self.scheme = system, scheme
        self.most_bytes = cache_bytes() if most_bytes is None else most_bytes
        self.block_bytes = max(LEAST_BLOCK_BYTES, min(BLOCK_BYTES, self.most_bytes // BLOCKS))
        self.fetched = self.retried = 0
        self._folder: Scratch | None = None
        self._lock = threading.Lock()
        self._blocks: OrderedDict[tuple[str, int], int] = OrderedDict()  # on the disk, the last used last
        self._coming: dict[tuple[str, int], Future[bytes]] = {}
        self._following: deque[tuple[RemoteFile, int]] = deque()  # blocks that will be read, in this order
        self._ahead: set[tuple[str, int]] = set()  # of them, those that were fetched, or come, and are not read yet
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="moeq-remote")

    @property
    def held_bytes(self) -> int:
        """Bytes of the blocks that lie on the disk."""
        with self._lock:
            return sum(self._blocks.values())

    def read(self, file: RemoteFile, start: int, stop: int) -> bytearray:
        """The bytes from `start` to `stop` of a file; StorageError where they cannot be had."""
        stop = min(stop, file.size)
        data = bytearray(max(0, stop - start))
        numbers = self._numbers(start, stop)
        batch = max(1, self.most_bytes // self.block_bytes // 2)
        for first in range(numbers.start, numbers.stop, batch):
            together = range(first, min(first + batch, numbers.stop))
            waiting = [(number, self._ask(file, number)) for number in together]
            for number, block in waiting:
                found = block.result() if isinstance(block, Future) else block
                at = number * self.block_bytes
                low, high = max(start, at), min(stop, at + len(found))
                data[low - start : high - start] = memoryview(found)[low - at : high - at]
        return data

    def follow(self, ranges: Iterable[tuple[RemoteFile, int, int]]) -> None:
        """What will be read next, in this order: fetched from now on, up to three quarters of the cache before it is
        read, more as it is read. What was said before is forgotten."""
        with self._lock:
            blocks = [
                (file, number) for file, start, stop in ranges for number in self._numbers(start, min(stop, file.size))
            ]
            self._following = deque(dict.fromkeys(blocks))
            self._ahead &= {(file.key, number) for file, number in blocks}
            self._fetch_ahead()

    def _fetch_ahead(self) -> None:
        """Begin to fetch what follows, unless what is not read yet, or comes, fills three quarters of the cache; the
        lock is held."""
        most = self.most_bytes * 3 // 4 // self.block_bytes
        while self._following and len(self._ahead) < most and len(self._coming) < most:
            file, number = self._following.popleft()
            if (file.key, number) not in self._blocks and (file.key, number) not in self._coming:
                self._begin(file, number)
                self._ahead.add((file.key, number))

    def _numbers(self, start: int, stop: int) -> range:
        return range(start // self.block_bytes, -(-stop // self.block_bytes)) if stop > start else range(0)

    def _ask(self, file: RemoteFile, number: int) -> bytes | Future[bytes]:
        """A block that lies here, or that comes."""
        name = (file.key, number)
        with self._lock:
            self._ahead.discard(name)
            self._fetch_ahead()
            if name in self._blocks:
                self._blocks.move_to_end(name)
                try:
                    found: bytes = self._path(name).read_bytes()
                    return found
                except OSError:  # somebody cleaned up
                    del self._blocks[name]
            return self._coming[name] if name in self._coming else self._begin(file, number)

    def _begin(self, file: RemoteFile, number: int) -> Future[bytes]:
        """Have a block fetched; the lock is held."""
        future = self._pool.submit(self._fetch, file, number)
        self._coming[file.key, number] = future
        return future

    def _fetch(self, file: RemoteFile, number: int) -> bytes:
        name, start = (file.key, number), number * self.block_bytes
        try:
            data = self._request(file, start, min(start + self.block_bytes, file.size))
            with self._lock:
                self._keep(name, data)
            return data
        finally:
            with self._lock:
                self._coming.pop(name, None)
                self._fetch_ahead()

    def _keep(self, name: tuple[str, int], data: bytes) -> None:
        """Put a block on the disk; those that were used the longest ago go, before those that are still to be read. A
        disk that refuses is done without."""
        while self._blocks and sum(self._blocks.values()) + len(data) > self.most_bytes:
            oldest = next((block for block in self._blocks if block not in self._ahead), next(iter(self._blocks)))
            del self._blocks[oldest]
            self._path(oldest).unlink(missing_ok=True)
        path = self._path(name)
        try:
            path.write_bytes(data)
        except OSError:
            path.unlink(missing_ok=True)
            return
        self._blocks[name] = len(data)

    def _path(self, name: tuple[str, int]) -> Any:
        if self._folder is None:
            parent = caches.folder() / "remote"
            parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._folder = Scratch(parent, PREFIX)
            atexit.register(self._folder.remove)
        return self._folder.path / f"{name[0]}-{name[1]}"

    def _request(self, file: RemoteFile, start: int, stop: int) -> bytes:
        """A range over the network, asked for again where that fails or comes short."""

        def ask() -> bytes:
            data: bytes = self.system.cat_file(file.path, start=start, end=stop, **PLAIN.get(self.scheme, {}))
            if len(data) != stop - start:
                raise OSError(f"{len(data)} bytes came where {stop - start} were asked for")
            with self._lock:
                self.fetched += len(data)
            return data

        what = f"bytes {start} to {stop} cannot be read"
        return insist(ask, str(file), what, refused=lambda error: _refused(file, error), again=self._again)

    def _again(self) -> None:
        with self._lock:
            self.retried += 1


def insist(
    work: Callable[[], T],
    where: str,
    what: str,
    *,
    refused: Callable[[OSError], Exception],
    again: Callable[[], object] = lambda: None,
    do: str = "check the network; the same command goes on",
) -> T:
    """What a request to a store gives, made again where it fails, `again` being called before.

    what: is said of one that always fails, in a StorageError; refused: the error for what is not there or not allowed.
    """
    wait, problem = FIRST_WAIT, ""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(wait)
            wait = min(2 * wait, MOST_WAIT)
            again()
        try:
            return work()
        except (FileNotFoundError, PermissionError) as error:
            raise refused(error) from None
        except Exception as error:  # of the network, of the store's client, of the store
            problem = f"{type(error).__name__}: {error}"
    raise StorageError(f"{what}, {ATTEMPTS} times: {' '.join(problem.split())[:200]}", where=where, do=do)


def _refused(file: RemoteFile, error: OSError) -> MissingError | ModelError:
    if isinstance(error, FileNotFoundError):
        return MissingError("no such object any more", where=str(file), do="check the address")
    return ModelError(f"permission denied ({str(error)[:200]})", where=str(file), do="check the credentials")


@dataclass(frozen=True)
class RemoteFile:
    """A file of an object store. path: as its file system calls it; size: bytes; version: what changes with its bytes
    ("": the store does not say); folder: below the address that was listed, with a slash behind, "" right below."""

    store: Store
    path: str
    size: int
    version: str
    folder: str = ""

    @property
    def name(self) -> str:
        """What it is called below the address that was listed."""
        return self.folder + self.path.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return f".{self.name.rpartition('.')[2]}" if "." in self.name else ""

    @property
    def key(self) -> str:
        """What names its blocks: other bytes have another one."""
        return hashlib.sha256(f"{self.store.scheme} {self.path} {self.size} {self.version}".encode()).hexdigest()[:32]

    def __str__(self) -> str:
        return f"{self.store.scheme}://{self.path}"

    def __lt__(self, other: Any) -> bool:
        return str(self) < str(other)

    def __hash__(self) -> int:
        return hash((self.path, self.version))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteFile) and (str(self), self.version) == (str(other), other.version)

    def is_file(self) -> bool:
        return True

    def stat(self) -> os.stat_result:
        """Size, and numbers that stand for this version where `stat` has device and inode: digests that were taken of
        it are known again. Asked of the store when it was not for some seconds."""
        version = _versions(self)
        size, number = version
        names = int(hashlib.sha256(f"{self} {number}".encode()).hexdigest(), 16)
        mode = stat.S_IFREG | 0o444 if number else 0o444  # without a version nothing is remembered
        inode, device = names % 2**62, (names >> 62) % 2**31
        return os.stat_result((mode, inode, device, 1, 0, 0, size, 0, 0, 0), {"st_mtime_ns": 0, "st_ctime_ns": 0})

    def open(self, mode: str = "rb", buffering: int = -1) -> Any:
        """Its bytes as a stream that is read from any place on."""
        if mode != "rb":
            raise StorageError("is only read", where=str(self), do="choose another --out")
        raw = _Stream(self)
        return raw if buffering == 0 else io.BufferedReader(raw, 1 << 16)


_asked: dict[tuple[str, str], tuple[float, int, str]] = {}  # {file: when, size, version}


def _versions(file: RemoteFile) -> tuple[int, str]:
    """Size and version of a file now, as the store says; as they were where it does not answer."""
    key, now = (file.store.scheme, file.path), time.monotonic()
    known = _asked.get(key)
    if known is None or now - known[0] > FRESH_SECONDS:
        try:
            file.store.system.invalidate_cache()
            info = file.store.system.info(file.path)
        except FileNotFoundError as error:
            raise _refused(file, error) from None
        except Exception:  # the network: whoever reads will see
            return file.size, file.version
        _asked[key] = known = (now, int(info["size"]), version_of(info))
    return known[1], known[2]


def version_of(info: dict[str, Any]) -> str:
    """What changes with a file's bytes, of what its file system says of it; empty where nothing does."""
    for name in ("ETag", "etag", "md5Hash", "crc32c", "blob_id"):
        if info.get(name):
            return str(info[name]).strip('"')
    if "ino" in info and "mtime" in info:
        return f"{info['ino']}-{info['mtime']}"
    return ""


class _Stream(io.RawIOBase):
    """A remote file as a stream; what follows is fetched while it is read on."""

    def __init__(self, file: RemoteFile) -> None:
        self._file, self._at, self._last = file, 0, -1

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, room: Any) -> int:
        store, view = self._file.store, memoryview(room).cast("B")
        stop = min(self._at + len(view), self._file.size)
        if stop <= self._at:
            return 0
        if self._at == self._last:
            store.follow([(self._file, self._at, stop + AT_ONCE * store.block_bytes)])
        view[: stop - self._at] = store.read(self._file, self._at, stop)
        count = stop - self._at
        self._at = self._last = stop
        return count


def listed(url: str, most_bytes: int | None = None, folders: Iterable[str] = ("",)) -> Iterator[RemoteFile]:
    """The files right below an address, or right in these folders below it.

    Raises RecipeError where the package for its scheme is missing, MissingError where there is nothing, ModelError
    where it may not be read, StorageError where the store does not answer.
    """
    system, root, scheme = file_system(url)
    store = Store(system, scheme, most_bytes)
    for folder in folders:
        found = _list(store, f"{root}/{folder}".rstrip("/") if folder else root, f"{url}/{folder}" if folder else url)
        for info in sorted(found, key=lambda info: str(info["name"])):
            if info["type"] == "file":
                path, version = str(info["name"]), version_of(info)
                _asked[scheme, path] = (time.monotonic(), int(info["size"]), version)
                yield RemoteFile(store, path, int(info["size"]), version, folder)


def file_system(url: str) -> tuple[Any, str, str]:
    """fsspec's file system of an address, the path in it, and the scheme; RecipeError where a package is missing."""
    import fsspec

    scheme = url.partition("://")[0]
    try:
        system, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        do = f"pip install {EXTRAS.get(scheme, scheme)}"
        raise RecipeError(f"{scheme}:// needs another package ({str(error)[:120]})", where=url, do=do) from None
    return system, root, scheme


def _list(store: Store, root: str, url: str) -> list[dict[str, Any]]:
    def ask() -> list[dict[str, Any]]:
        store.system.invalidate_cache()
        found: list[dict[str, Any]] = store.system.ls(root, detail=True)
        return found

    do = "check the network, the endpoint and the credentials"
    return insist(ask, url, "the store does not answer", refused=lambda error: not_allowed(url, error), do=do)


def not_allowed(url: str, error: OSError) -> MissingError | ModelError:
    """The error for an address that is not there, or may not be read or written."""
    if isinstance(error, FileNotFoundError):
        return MissingError("nothing there", where=url, do="check the address, and the endpoint")
    return ModelError(f"permission denied ({str(error)[:200]})", where=url, do="check the credentials")
