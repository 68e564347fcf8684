"""Reading what others may have written: JSON within bounds, names that stay in their directory, safetensors headers.

Everything here refuses before it allocates: a file's own size is the only size that is believed. Errors are ValueErrors
of one line; the rooms that know the file turn them into theirs.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from moeq.bounded import read_bounded as read_bounded

JSON_BYTES = 512 << 20  # the largest JSON file that is read
RECORD_CHARACTERS = 32 << 20  # the longest line of JSON lines that is parsed
RECORD_PARTS = 1 << 20  # lists, mappings and values in one
HEADER_BYTES = 100_000_000  # the largest header that safetensors itself reads
NAME_BYTES = 255  # of a file's name
MOST = 2**63 - 1  # the largest size or count that means anything
MOST_AXES = 64
METADATA = "__metadata__"
BYTES_PER_OPENING, BYTES_PER_COMMA = 12, 4  # at least, in a header of tensors
SMALL_HEADER = 256  # bytes of headers that are parsed whatever they hold
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
STRING = re.compile(r'"(?:[^"\\]|\\.)*+"', re.DOTALL)

ELEMENT_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TensorHeader:
    """Where one tensor lies on disk: file, dtype as safetensors writes it, shape, offset in the file, bytes."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


def plain_name(name: Any) -> str:
    """A name of a file in a directory as it is; ValueError for a path, for `..`, and for what is no name at all."""
    if not isinstance(name, str) or name in ("", ".", "..") or set(name) & {"/", "\\", "\0"}:
        raise ValueError(f"not a plain file name: {_short(name)}")
    if len(name.encode()) > NAME_BYTES:
        raise ValueError(f"a file name of more than {NAME_BYTES} bytes: {_short(name)}")
    return name


def relative_name(name: Any) -> str:
    """A path below a directory as it is, parts separated by `/`; ValueError where any part is no plain name."""
    if not isinstance(name, str):
        raise ValueError(f"not a file name: {_short(name)}")
    for part in name.split("/"):
        plain_name(part)
    return name


PlainName = Annotated[str, AfterValidator(plain_name)]
RelativeName = Annotated[str, AfterValidator(relative_name)]


def inside(directory: Path, name: Any) -> Path:
    """The file of a plain name in a directory; ValueError for other names, and for a link that leads out of it.

    Links to links, absolute links and links by way of a linked folder are judged by where they end. In a snapshot of
    the hub's cache files are links into the same model's `blobs`, which counts as inside.
    """
    path = directory / plain_name(name)
    if path.is_symlink():
        whole = directory.resolve()
        roots = [whole]
        if whole.parent.name == "snapshots":
            roots.append(whole.parent.parent / "blobs")
        end = Path(os.path.realpath(path))  # which, unlike `resolve`, gives an end to links in a circle
        if not any(end.is_relative_to(root) for root in roots):
            raise ValueError(f"{_short(name)} is a link that leads out of the directory, to {str(end)[:NAME_BYTES]!r}")
    return path


def parse_json(text: str, *, tag_constants: bool = False) -> Any:
    """A text of JSON; ValueError for anything else, for a key that is there twice, for NaN and infinities.

    tag_constants: NaN and infinities become {"__float__": NAME}, as transformers writes them in configurations.
    """
    try:
        value = json.loads(
            text,
            object_pairs_hook=_without_twins,
            parse_constant=_tagged if tag_constants else _refused,
            parse_float=_finite,
        )
        if SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()  # halves of pairs cannot be written again
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def parse_record(line: str) -> Any:
    """One line of JSON lines; ValueError for anything else, and for what is longer or of more parts than rows are.

    Keys that are there twice, NaN and infinities pass: rows of other people's data have them.
    """
    if len(line) > RECORD_CHARACTERS:
        raise ValueError(f"a line of more than {RECORD_CHARACTERS} characters")
    if _marks(line, "[{,", RECORD_PARTS) > RECORD_PARTS:
        raise ValueError(f"a line of more than {RECORD_PARTS} parts")
    try:
        value = json.loads(line)
        if SURROGATE.search(line):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair, which is no text") from None
    return value


def _marks(text: str, marks: str, enough: int) -> int:
    """How many of these marks stand outside of strings; looked at closely only where there are more than `enough`."""
    count = sum(map(text.count, marks))
    if count > enough:
        count -= sum(string[0].count(mark) for string in STRING.finditer(text) for mark in marks)
    return count


def read_json_file(path: Path, *, most: int = JSON_BYTES, tag_constants: bool = False) -> Any:
    """`parse_json` of a file; ValueError and OSError."""
    return parse_json(read_bounded(path, most).decode("utf-8"), tag_constants=tag_constants)


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twin = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {_short(twin)} is there twice")
    return values


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _tagged(name: str) -> dict[str, str]:
    return {"__float__": name}


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{_short(text)} is too large")
    return value


def _short(value: Any) -> str:
    """What stood there, on one line and not longer than that allows."""
    if not isinstance(value, str):
        return type(value).__name__
    return repr(value if len(value) <= 60 else value[:57] + "...")


def is_count(value: Any) -> bool:
    """Whether a value of JSON is a size: a whole number from 0 that 64 bits hold."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST


def tensor_bytes(dtype: Any, shape: Any) -> int:
    """Bytes of a tensor as safetensors counts them; ValueError for a type or a shape that cannot be."""
    if not isinstance(dtype, str) or dtype not in ELEMENT_BITS:
        raise ValueError(f"dtype {_short(dtype)} is not known")
    if not isinstance(shape, (list, tuple)) or len(shape) > MOST_AXES or not all(map(is_count, shape)):
        raise ValueError("a shape is not a list of sizes")
    bits = ELEMENT_BITS[dtype]
    for size in shape:
        bits *= max(size, 1)
        if bits > 8 * MOST:
            raise ValueError("a tensor of more elements than can be counted")
    if 0 in shape:
        return 0
    if bits % 8:
        raise ValueError(f"{dtype} of an odd number of elements")
    return bits // 8


def safetensors_header(path: Path) -> tuple[dict[str, TensorHeader], dict[str, str]]:
    """Tensors and metadata of a safetensors file, checked against the file; ValueError where they cannot be, OSError.

    Known dtypes, sizes that are counts, bytes that are shape times type, data that begins at the header's end and fills
    the file without overlap and without holes: what passes can be read by anyone without a further check.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"truncated: {size} bytes, the header alone needs {length + 8}")
        if length > HEADER_BYTES:
            raise ValueError(f"a header of {length} bytes, at most {HEADER_BYTES} are read")
        text = stream.read(length).decode("utf-8")
    if length > SMALL_HEADER:
        _check_density(text)
    header = parse_json(text)
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{METADATA} is not an object of strings")
    tensors = {key: _tensor(path, key, entry, 8 + length) for key, entry in header.items()}
    _check_order(tensors.values(), 8 + length, size)
    return tensors, metadata


def _check_density(text: str) -> None:
    """ValueError for a header that would take many times its bytes in memory: one of brackets and commas alone."""
    for marks, least in (("[{", BYTES_PER_OPENING), (",", BYTES_PER_COMMA)):
        if _marks(text, marks, len(text) // least) > len(text) // least:
            raise ValueError("its header is not one of tensors")


def _tensor(path: Path, key: str, entry: Any, data: int) -> TensorHeader:
    """One tensor of a header; data: where the tensors' bytes begin in the file."""
    try:
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise ValueError("it needs dtype, shape and data_offsets")
        offsets = entry["data_offsets"]
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_count, offsets)):
            raise ValueError("data_offsets are not two counts")
        start, stop = offsets
        wanted = tensor_bytes(entry["dtype"], entry["shape"])
        if stop - start != wanted:
            raise ValueError(f"its type and shape take {wanted} bytes, its offsets {stop - start}")
    except ValueError as error:
        raise ValueError(f"tensor {_short(key)}: {error}") from None
    return TensorHeader(file=path, dtype=entry["dtype"], shape=tuple(entry["shape"]), offset=data + start, bytes=wanted)


def _check_order(tensors: Iterable[TensorHeader], data: int, size: int) -> None:
    """ValueError unless the tensors fill the file from `data` on, one after the other."""
    end = data
    for header in sorted(tensors, key=lambda header: (header.offset, header.bytes)):
        if header.offset != end:
            what = "overlap" if header.offset < end else "leave a hole"
            raise ValueError(f"its tensors {what} at byte {min(header.offset, end) - data} of the data")
        end += header.bytes
        if end > size:
            break
    if end != size:
        raise ValueError(f"truncated: {size} bytes, its header says {end}")
