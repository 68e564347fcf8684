"""The header of a GGUF file (llama.cpp's), within bounds: nothing is believed that the file's own size does not bear.

Little-endian: the magic, a version, the counts of tensors and of keys; keys with their values; of every tensor its
name, shape (innermost first), type and offset; the tensors, aligned.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeq.artifacts.reading import HEADER_BYTES, MOST
from moeq.numerics.ggml_types import BY_NUMBER, BlockType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_AXES = 4
MOST_ALIGNMENT = 1 << 20
LEAST_TENSOR, LEAST_KEY = 8 + 1 + 4 + 8 + 4 + 8, 8 + 1 + 4 + 1  # bytes of their entries in a header
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """Where a tensor lies: its type, its shape row by row, its offset in the file and its bytes."""

    type: BlockType
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    """A file's keys (of arrays only the range of their places) and its tensors."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]


class _Header:
    """The bytes of a header, read from the start; ValueError where they end too early."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise ValueError(f"truncated: its header needs more than its {len(self.data)} bytes")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def text(self) -> str:
        found = self.take(self.number("Q")).decode("utf-8")
        if "\0" in found:
            raise ValueError("a name with a zero byte")
        return found

    def value(self, kind: int) -> Any:
        """A value; of an array the range of its places, its elements are passed over."""
        if kind == _STRING:
            return self.take(self.number("Q")).decode("utf-8", "replace")
        if kind != _ARRAY:
            return self.number(_code(kind))
        inner, count = self.number("I"), self.number("Q")
        if inner == _STRING:
            if count > (len(self.data) - self.at) // 8:
                raise ValueError(f"an array of {count} strings in {len(self.data) - self.at} bytes")
            for _ in range(count):
                self.take(self.number("Q"))
        else:
            self.take(count * struct.calcsize(f"<{_code(inner)}"))
        return range(count)


def _code(kind: int) -> str:
    if kind not in _NUMBERS:
        raise ValueError(f"a value of unknown type {kind}")
    return _NUMBERS[kind]


def read_gguf(path: Path) -> GgufFile:
    """The header of a file, checked against the file; ValueError of one line where it cannot be, OSError.

    What passes lies inside of the file, aligned and without overlap, in types of `numerics.ggml_types`.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        header = _Header(stream.read(min(size, HEADER_BYTES)))
    if header.take(4) != MAGIC:
        raise ValueError("not a GGUF file")
    version = header.number("I")
    if version not in VERSIONS:
        raise ValueError(f"GGUF version {version}, not {' or '.join(map(str, VERSIONS))}")
    tensors, keys = header.number("Q"), header.number("Q")
    if tensors * LEAST_TENSOR + keys * LEAST_KEY > len(header.data):
        raise ValueError(f"{tensors} tensors and {keys} keys in a header of at most {len(header.data)} bytes")
    fields: dict[str, Any] = {}
    for _ in range(keys):
        name, kind = header.text(), header.number("I")
        if name in fields:
            raise ValueError(f"key {name[:60]!r} is there twice")
        fields[name] = header.value(kind)
    return GgufFile(path=path, fields=fields, tensors=_tensors(header, tensors, _alignment(fields), size))


def _alignment(fields: dict[str, Any]) -> int:
    found = fields.get("general.alignment", 32)
    if not isinstance(found, int) or not 8 <= found <= MOST_ALIGNMENT or found & (found - 1):
        raise ValueError("general.alignment is no power of two")
    return found


def _tensors(header: _Header, count: int, alignment: int, size: int) -> dict[str, GgufTensor]:
    entries: dict[str, tuple[BlockType, tuple[int, ...], int, int]] = {}
    for _ in range(count):
        name = header.text()
        if name in entries:
            raise ValueError(f"tensor {name[:60]!r} is there twice")
        try:
            entries[name] = _entry(header, alignment)
        except ValueError as error:
            raise ValueError(f"tensor {name[:60]!r}: {error}") from None
    start = -(-header.at // alignment) * alignment
    found = {
        name: GgufTensor(type=kind, shape=shape, offset=start + offset, bytes=taken)
        for name, (kind, shape, offset, taken) in entries.items()
    }
    end = start
    for name, tensor in sorted(found.items(), key=lambda one: one[1].offset):
        if tensor.offset < end:
            raise ValueError(f"tensor {name[:60]!r} overlaps another")
        end = tensor.offset + tensor.bytes
        if end > size:
            raise ValueError(f"truncated: {size} bytes, tensor {name[:60]!r} ends at {end}")
    return found


def _entry(header: _Header, alignment: int) -> tuple[BlockType, tuple[int, ...], int, int]:
    """Type, shape, offset among the tensors, and bytes of one tensor."""
    axes = header.number("I")
    if not 1 <= axes <= MOST_AXES:
        raise ValueError(f"{axes} axes")
    sizes = [header.number("Q") for _ in range(axes)]
    number, offset = header.number("I"), header.number("Q")
    kind = BY_NUMBER.get(number)
    if kind is None:
        raise ValueError(f"type {number} is none that moeq reads")
    if not all(sizes) or math.prod(sizes) > MOST or offset > MOST or offset % alignment:
        raise ValueError(f"a shape {sizes} at {offset} cannot be")
    shape = tuple(reversed(sizes))
    return kind, shape, offset, math.prod(shape[:-1]) * kind.row_bytes(shape[-1])
