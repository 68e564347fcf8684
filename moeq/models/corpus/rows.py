"""The rows of a file: Parquet, JSON lines (also compressed) and, from the hub, a JSON list."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moeq.artifacts.reading import parse_record
from moeq.errors import CorpusError

COMPRESSED = (".gz", ".zst", ".bz2")
ROWS_AT_ONCE = 256  # of a Parquet file


def kind_of(name: str) -> str:
    """`.txt`, `.jsonl`, `.json`, `.parquet`, or whatever else a file is after taking off its compression."""
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return Path(name).suffix


def stem_of(name: str) -> str:
    """A file's name without its kind and compression."""
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return Path(name).stem


def read_text(path: Path) -> str:
    """A whole text file; CorpusError when it is not UTF-8."""
    try:
        with _stream(path) as stream:
            return stream.read()
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"cannot be read as UTF-8 ({error})", where=str(path), do="convert it") from None


def rows(path: Path) -> Iterator[tuple[int, Any]]:
    """(row number, row), numbered as an editor does; CorpusError naming file and row for what cannot be read."""
    kind = kind_of(path.name)
    if kind == ".parquet":
        yield from _parquet(path)
    elif kind == ".json" and read_text(path).lstrip().startswith("["):
        yield from enumerate(_json(path, 1, read_text(path), json.loads), 1)
    else:
        yield from _lines(path)


def _stream(path: Path) -> io.TextIOWrapper:
    import pyarrow as pa

    plain = path.suffix not in COMPRESSED
    binary = path.open("rb") if plain else pa.input_stream(str(path), compression="detect")
    return io.TextIOWrapper(binary, "utf-8")


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (OSError, pa.ArrowException) as error:
        raise CorpusError(f"not a Parquet file ({error})", where=str(path), do="check the file") from None


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        with _stream(path) as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield number, _json(path, number, line)
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"cannot be read as UTF-8 ({error})", where=str(path), do="convert it") from None


def _json(path: Path, number: int, text: str, parse: Callable[[str], Any] = parse_record) -> Any:
    try:
        return parse(text)
    except (ValueError, RecursionError) as error:
        where = f"{path}, row {number}"
        raise CorpusError(f"not JSON lines ({error})", where=where, do="check the file") from None
