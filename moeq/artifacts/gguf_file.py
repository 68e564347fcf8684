"""The header of a GGUF file (llama.cpp's), within bounds: nothing is believed that the file's own size does not bear.

Little-endian: the magic, a version, the counts of tensors and of keys; keys with their values; of every tensor its
name, shape (innermost first), type and offset; the tensors, aligned.
"""

from __future__ import annotations

import math
import mmap
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeq.artifacts.reading import HEADER_BYTES, MOST
from moeq.errors import ArtifactError
from moeq.numerics.ggml_types import BY_NUMBER, BlockType
from moeq.tables import human_bytes

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_AXES = 4
MOST_ALIGNMENT = 1 << 20
MOST_TENSORS, MOST_KEYS = 1 << 16, 1 << 12
MOST_NAME, MOST_TEXT = 1 << 10, 1 << 12  # bytes
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _FLOAT, _ARRAY = 8, 6, 9
EXPERTS = "_exps.weight"  # how the names of stacks of experts end
MOST_KEPT = 1 << 12  # numbers of an array of float32 that is kept


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """Where a tensor lies: its type, its shape row by row, its offset in the file and its bytes."""

    type: BlockType
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    """A file's keys (of arrays only the range of their places, but for short ones of float32) and its tensors."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def expert_stacks(self) -> dict[str, GgufTensor]:
        """The matrices of all experts of a layer."""
        return {name: tensor for name, tensor in self.tensors.items() if name.endswith(EXPERTS)}


class _Header:
    """A header in a file that is mapped, read from the start; ValueError where it ends too early.

    size: how much of the file may be header.
    """

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at, self.size = data, 0, min(len(data), HEADER_BYTES)

    def skip(self, count: int) -> None:
        if count > self.size - self.at:
            raise ValueError(f"truncated: its header needs more than {self.size} bytes")
        self.at += count

    def take(self, count: int) -> bytes:
        self.skip(count)
        return self.data[self.at - count : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def text(self) -> str:
        """A name."""
        length = self.number("Q")
        if length > MOST_NAME:
            raise ValueError(f"a name of {length} bytes")
        name = self.take(length).decode("utf-8")
        if "\0" in name:
            raise ValueError("a name with a zero byte")
        return name

    def value(self, kind: int) -> Any:
        """A value, of a text its first bytes; of an array the range of its places, its elements are passed over; but a
        short one of float32 whole."""
        if kind == _STRING:
            length = self.number("Q")
            text = self.take(min(length, MOST_TEXT)).decode("utf-8", "replace")
            self.skip(length - min(length, MOST_TEXT))
            return text
        if kind != _ARRAY:
            return self.number(_code(kind))
        inner, count = self.number("I"), self.number("Q")
        if inner == _STRING:
            if count > (self.size - self.at) // 8:
                raise ValueError(f"an array of {count} strings in {self.size - self.at} bytes")
            for _ in range(count):
                self.skip(self.number("Q"))
        elif inner == _FLOAT and count <= MOST_KEPT:
            return array("f", struct.unpack(f"<{count}f", self.take(4 * count)))
        else:
            self.skip(count * struct.calcsize(f"<{_code(inner)}"))
        return range(count)


def _code(kind: int) -> str:
    if kind not in _NUMBERS:
        raise ValueError(f"a value of unknown type {kind}")
    return _NUMBERS[kind]


def read_gguf(path: Path) -> GgufFile:
    """The header of a file, checked against the file; ValueError of one line where it cannot be, OSError.

    What passes lies inside of the file, aligned, without overlap and without a gap, in types of `numerics.ggml_types`.
    """
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _parsed(path, _Header(data), len(data))


def described(path: Path) -> dict[str, Any]:
    """What a file holds: of which model, and tensors, bytes and bits a weight of each type, of experts and of the rest;
    ArtifactError for a damaged one."""
    try:
        found = read_gguf(path)
    except (OSError, ValueError) as error:
        raise ArtifactError(str(error), where=str(path), do="make or download it again") from None
    keys = {name: found.fields.get(f"general.{name}") for name in ("architecture", "name")}
    told: dict[str, Any] = {"kind": "GGUF file", **{name: value for name, value in keys.items() if value is not None}}
    told |= {"tensors": len(found.tensors), "tensor_bytes": sum(one.bytes for one in found.tensors.values())}
    stacks = found.expert_stacks
    rest = {name: one for name, one in found.tensors.items() if name not in stacks}
    for what, tensors in (("experts", stacks), ("the_rest", rest)):
        if tensors:
            told |= {f"{what}_{name}": value for name, value in _types(list(tensors.values())).items()}
    return told


def _types(tensors: Sequence[GgufTensor]) -> dict[str, Any]:
    """Tensors and bytes of each type, and bits a weight of all."""
    types: dict[str, list[int]] = {}
    for one in tensors:
        types.setdefault(one.type.name, []).append(one.bytes)
    rows = {
        name: f"{len(sizes)} tensor{'s' if len(sizes) > 1 else ''}, {human_bytes(sum(sizes))}"
        for name, sizes in sorted(types.items())
    }
    bits = 8 * sum(one.bytes for one in tensors) / sum(math.prod(one.shape) for one in tensors)
    return {"types": rows, "bits_per_weight": round(bits, 4)}


def _parsed(path: Path, header: _Header, size: int) -> GgufFile:
    """`read_gguf` of a header in a file of `size` bytes."""
    if header.take(4) != MAGIC:
        raise ValueError("not a GGUF file")
    version = header.number("I")
    if version not in VERSIONS:
        raise ValueError(f"GGUF version {version}, not {' or '.join(map(str, VERSIONS))}")
    tensors, keys = header.number("Q"), header.number("Q")
    if tensors > MOST_TENSORS or keys > MOST_KEYS:
        raise ValueError(f"{tensors} tensors and {keys} keys, at most {MOST_TENSORS} and {MOST_KEYS} are read")
    fields: dict[str, Any] = {}
    for _ in range(keys):
        name, kind = header.text(), header.number("I")
        if name in fields:
            raise ValueError(f"key {name[:60]!r} is there twice")
        fields[name] = header.value(kind)
    return GgufFile(path=path, fields=fields, tensors=_tensors(header, tensors, _alignment(fields), size))


def _alignment(fields: dict[str, Any]) -> int:
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 8 <= alignment <= MOST_ALIGNMENT or alignment & (alignment - 1):
        raise ValueError("general.alignment is no power of two")
    return alignment


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
    tensors = {
        name: GgufTensor(type=kind, shape=shape, offset=start + offset, bytes=taken)
        for name, (kind, shape, offset, taken) in entries.items()
    }
    end = start
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset < end:
            raise ValueError(f"tensor {name[:60]!r} overlaps another")
        gap, end = tensor.offset - -(-end // alignment) * alignment, tensor.offset + tensor.bytes
        if end > size:
            raise ValueError(f"truncated: {size} bytes, tensor {name[:60]!r} ends at {end}")
        if gap:
            raise ValueError(f"tensor {name[:60]!r} lies behind {gap} bytes that are no tensor's")
    return tensors


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
