"""Files of text as streams: decompressed on the way, counted, and bounded, so that no file decides how much is held."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from moeq.errors import CorpusError
from moeq.tables import human_bytes

COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
AT_ONCE = 1 << 20  # bytes or characters
LONGEST_ROW = 64 << 20  # characters of one line
MOST_RATIO = 100  # bytes after decompression for one before: text comes to 3 to 20, what is more is no text
FREE_BYTES = 64 << 20  # that may be decompressed at any ratio
MARK = "\ufeff"  # with which programs on Windows begin a file of UTF-8
SHOWN_BYTES = 32 << 20  # reading less than this is over before a bar could be read

Advance = Callable[[int], None]  # told of bytes of the file that were read
Bar = Callable[[str, int], AbstractContextManager[Callable[[], None]]]  # Reporter.bar


class Bytes(io.RawIOBase):
    """The bytes of a file, decompressed where its name says that it is compressed.

    CorpusError once more comes out of a compressed file than text can be: some hundred bytes may stand for gigabytes.
    """

    def __init__(self, path: Path, advance: Advance | None = None) -> None:
        """advance: told of the bytes of the file itself."""
        self._path, self._advance = path, advance
        self._file = path.open("rb", buffering=0)
        self._given, self._told = 0, 0
        self._size, self._most = path.stat().st_size, math.inf
        self._source: Any = self._file
        if path.suffix in COMPRESSED:
            import pyarrow as pa

            self._most = max(FREE_BYTES, MOST_RATIO * self._size)
            self._source = pa.CompressedInputStream(self._file, COMPRESSED[path.suffix])

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Raises OSError for what cannot be read or decompressed, CorpusError beyond the bound."""
        count = self._source.readinto(buffer) or 0
        self._given += count
        if self._given > self._most:
            what = f"over {human_bytes(self._most)} in a compressed file of {human_bytes(self._size)}"
            raise CorpusError(what, where=str(self._path), do="check the file, or give it decompressed")
        if self._advance is not None:
            place = self._file.tell()
            self._advance(place - self._told)
            self._told = place
        return count

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


@contextmanager
def opened(path: Path, advance: Advance | None = None) -> Iterator[io.TextIOWrapper]:
    """The text of a file behind its byte order mark, if any; CorpusError when it is not UTF-8 or cannot be read."""
    try:
        with io.TextIOWrapper(io.BufferedReader(Bytes(path, advance), AT_ONCE), "utf-8-sig") as stream:
            yield stream
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"cannot be read as UTF-8 ({error})", where=str(path), do="convert it") from None


def read_text(path: Path) -> str:
    """A whole text file."""
    with opened(path) as stream:
        return stream.read()


def pieces(path: Path, advance: Advance | None = None) -> Iterator[tuple[str, bool, bool]]:
    """(text, whether the file begins, ends with it): a file of at most a MiB as a whole, more cut between lines."""
    with opened(path, advance) as stream:
        held, begins = stream.read(AT_ONCE), True
        while more := stream.read(AT_ONCE):
            end = max(held.rfind("\n"), 0) or held.rfind(" ")
            cut = end + 1 if end > 0 else len(held)
            yield held[:cut], begins, False
            held, begins = held[cut:] + more, False
        yield held, begins, True


def lines(path: Path, advance: Advance | None = None) -> Iterator[tuple[int, str]]:
    """(number, line) of those that are not blank; CorpusError for one that no memory should be spent on."""
    with opened(path, advance) as stream:
        for number, line in enumerate(iter(lambda: stream.readline(LONGEST_ROW), ""), 1):
            if len(line) == LONGEST_ROW:
                what, where = f"longer than {LONGEST_ROW >> 20} MiB", f"{path}, row {number}"
                raise CorpusError(what, where=where, do="check the file")
            if line.strip():
                yield number, line


def size_up_to(path: Path, most: int) -> int:
    """Bytes of a file after decompression, counted no further than just above `most`."""
    if path.suffix not in COMPRESSED:
        return path.stat().st_size
    size = 0
    try:
        with Bytes(path) as stream:
            buffer = bytearray(min(AT_ONCE, most + 1))
            while size <= most and (count := stream.readinto(buffer)):
                size += count
    except OSError as error:
        raise CorpusError(
            f"cannot be decompressed ({error})", where=str(path), do="compress or download it again"
        ) from None
    return size


@contextmanager
def shown(bar: Bar | None, title: str, size: int) -> Iterator[Advance]:
    """Show how far `size` bytes have been read while the block runs; of little nothing is shown."""
    if bar is None or size < SHOWN_BYTES:
        yield lambda _: None
        return
    done = 0
    with bar(title, -(-size // AT_ONCE)) as advance:

        def read(count: int) -> None:
            nonlocal done
            before, done = done, done + count
            for _ in range(done // AT_ONCE - before // AT_ONCE):
                advance()

        yield read
