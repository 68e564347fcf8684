"""The rows of a file: Parquet, JSON lines (also compressed) and, from the hub, a JSON list."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moeq.artifacts.reading import parse_record
from moeq.errors import CorpusError
from moeq.models.corpus.streams import COMPRESSED, Advance, lines, read_text

ROWS_AT_ONCE = 256  # of a Parquet file


def kind_of(name: str) -> str:
    """`.txt`, `.jsonl`, `.json`, `.parquet`, or whatever else a file is after taking off its compression."""
    return _decompressed(name).suffix


def stem_of(name: str) -> str:
    """A file's name without its kind and compression."""
    return _decompressed(name).stem


def _decompressed(name: str) -> Path:
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return Path(name)


def rows(path: Path, advance: Advance | None = None, *, naming: str | None = None) -> Iterator[tuple[int, Any]]:
    """(row number, row), numbered as an editor does; CorpusError naming file and row for what cannot be read.

    advance: told of the bytes of the file that were read. naming: only rows in which this field may be.
    """
    kind = kind_of(path.name)
    if kind == ".parquet":
        yield from _parquet(path, advance, naming)
    elif kind == ".json" and (text := read_text(path)).lstrip().startswith("["):
        yield from enumerate(_json(path, 1, text, json.loads), 1)
    else:
        for number, line in lines(path, advance):
            if naming is None or naming in line:
                yield number, _json(path, number, line)


def _parquet(path: Path, advance: Advance | None, naming: str | None) -> Iterator[tuple[int, Any]]:
    number = 0
    with _parquet_file(path) as file:
        if naming is not None and naming not in file.schema_arrow.names:
            return
        each = path.stat().st_size / max(1, file.metadata.num_rows)
        for batch in file.iter_batches(batch_size=ROWS_AT_ONCE):
            if advance is not None:
                advance(int(each * batch.num_rows))
            for row in batch.to_pylist():
                number += 1
                yield number, row


def held_bytes(path: Path) -> int:
    """Bytes of a Parquet file's columns after decompression; CorpusError for a file that is damaged."""
    with _parquet_file(path) as file:
        sizes = [file.metadata.row_group(group).total_byte_size for group in range(file.metadata.num_row_groups)]
        if min(sizes, default=0) < 0:
            raise OSError("a group of rows of less than 0 bytes")
        return sum(sizes)


@contextmanager
def _parquet_file(path: Path) -> Iterator[Any]:
    """An open Parquet file; CorpusError for what cannot be read of it while the block runs."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            yield file
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise CorpusError(
            f"not a Parquet file ({error})", where=str(path), do="write it anew, or give .jsonl"
        ) from None


def _json(path: Path, number: int, text: str, parse: Callable[[str], Any] = parse_record) -> Any:
    try:
        return parse(text)
    except (ValueError, RecursionError) as error:
        where = f"{path}, row {number}"
        raise CorpusError(f"not JSON lines ({error})", where=where, do="write one JSON object a line") from None
