"""Safetensors files: written whole or tensor by tensor; their bytes depend only on names, values and metadata."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from moeq.artifacts.digests import Hashing, digest_of_chunks
from moeq.artifacts.files import CHUNK_BYTES, read_back, write_atomically
from moeq.artifacts.reading import TensorHeader
from moeq.artifacts.storage import storage_errors
from moeq.errors import ArtifactError

ALIGNMENT = 8  # of tensors in a file
ENTRY_BYTES = 160  # of a tensor in a header beside its name: type, up to four sizes, two offsets
Headers = Mapping[str, tuple[str, tuple[int, ...], int]]  # {name: dtype as safetensors writes it, shape, bytes}

_DTYPE_NAMES = {  # torch's dtypes as safetensors names them
    "torch.float64": "F64", "torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16",
    "torch.int64": "I64", "torch.int32": "I32", "torch.int16": "I16", "torch.int8": "I8", "torch.uint8": "U8",
    "torch.uint16": "U16", "torch.uint32": "U32", "torch.uint64": "U64", "torch.bool": "BOOL",
    "torch.float8_e4m3fn": "F8_E4M3", "torch.float8_e5m2": "F8_E5M2", "torch.float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip


def write_tensors(path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors as safetensors, atomically; the bytes depend only on names, values and metadata.

    Not through safetensors' own writer: it orders metadata by a random hash, and leaves `.tmp*` files when killed.
    """
    write_in_chunks(path, layout_of(tensors), lambda name: [tensor_bytes(tensors[name])], metadata)


def layout_of(tensors: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """What a file's header says of tensors in memory."""
    return {
        name: (dtype_name(tensor.dtype), tuple(tensor.shape), tensor.numel() * tensor.element_size())
        for name, tensor in tensors.items()
    }


def safetensors_bytes(
    tensors: Mapping[str, tuple[Any, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> int:
    """Bytes of the file that `write_tensors` makes of tensors given by {name: (torch dtype, shape)}."""
    entries = {
        name: (dtype_name(dtype), tuple(shape), math.prod(shape) * dtype.itemsize)
        for name, (dtype, shape) in tensors.items()
    }
    _, header = _layout(entries, dict(metadata or {}))
    size: int = len(header) + sum(stored for _, _, stored in entries.values())
    return size


def write_in_chunks(
    path: Path,
    tensors: Headers,
    chunks: Callable[[str], Iterable[bytes | memoryview]],
    metadata: Mapping[str, str] | None = None,
    *,
    hashed: bool = True,
) -> None:
    """Write tensors {name: dtype, shape, bytes} atomically, one after the other, each as its chunks come.

    The file is the one that `write_tensors` would make of them. hashed: whether the whole file's SHA-256 is of use.
    """
    order, head = _layout(tensors, dict(metadata or {}))

    def write(partial: Path) -> str | None:
        hashing = Hashing()
        with partial.open("wb") as stream:
            for chunk in chain([head], (chunk for name in order for chunk in chunks(name))):
                if hashed:
                    hashing.update(chunk)
                stream.write(chunk)
        return hashing.hexdigest() if hashed else None

    write_atomically(path, write)


class TensorFile:
    """A safetensors file of an unfinished folder whose tensors are written as they come, their sizes unknown before.

    The header lies in room that was kept for it, filled up with spaces as the format allows. A tensor whose bytes would
    leave the next one unaligned is kept and written last. Neither atomic nor synced: `building` is both.

    The header is known last and stands first, so that the digest is taken of the finished file, whose tensors must
    have the CRC-32 of what was written: a bit that turned on the way is seen.
    """

    def __init__(self, path: Path, names: Iterable[str], metadata: Mapping[str, str]) -> None:
        """names: of all tensors that may come."""
        self._path, self._metadata = path, dict(metadata)
        least = (
            ENTRY_BYTES + len(json.dumps(self._metadata)) + sum(len(json.dumps(name)) + ENTRY_BYTES for name in names)
        )
        self._room = least + -least % ALIGNMENT
        self._entries: dict[str, dict[str, Any]] = {}
        self._end = self._crc = 0
        self._kept: dict[str, Any] = {}
        with storage_errors(path):
            self._stream = path.open("wb", buffering=0)
            self._stream.seek(8 + self._room)

    def add(self, name: str, tensor: Any) -> None:
        """Write a tensor, or keep a copy for the end."""
        if tensor.numel() * tensor.element_size() % ALIGNMENT:
            self._kept[name] = tensor.clone()
        else:
            self._write(name, tensor)

    def finish(self) -> None:
        """Write what was kept and the header; ValueError for more names than were given."""
        for name in sorted(self._kept, key=lambda name: (-self._kept[name].element_size(), name)):
            self._write(name, self._kept[name])
        header = {"__metadata__": self._metadata} | self._entries if self._metadata else self._entries
        text = json.dumps(header, separators=(",", ":")).encode()
        if len(text) > self._room:
            raise ValueError(f"{self._path.name}: a header of {len(text)} bytes where {self._room} were kept")
        with storage_errors(self._path):
            self._stream.seek(0)
            write_all(self._stream, memoryview(self._room.to_bytes(8, "little") + text.ljust(self._room)))
            self._stream.close()

    def check(self) -> None:
        """Read a finished file back and keep its digest; StorageError where it is not what was written."""
        read_back(self._path, 8 + self._room, self._crc)

    def close(self) -> None:
        """Close a file that is given up."""
        self._stream.close()

    def _write(self, name: str, tensor: Any) -> None:
        data = tensor_bytes(tensor)
        start, self._end = self._end, self._end + data.nbytes
        self._crc = zlib.crc32(data, self._crc)
        dtype = dtype_name(tensor.dtype)
        self._entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, self._end]}
        with storage_errors(self._path):
            write_all(self._stream, data)


def write_all(stream: Any, data: memoryview) -> None:
    """Write to an unbuffered stream, which may take less than it is given."""
    while data:
        data = data[stream.write(data) :]


def stored_chunks(tensor: TensorHeader) -> Iterator[bytes]:
    """The bytes of a tensor in a safetensors file, a few megabytes at a time; ArtifactError when it is cut off."""
    left = tensor.bytes
    with storage_errors(tensor.file, "read"), tensor.file.open("rb") as source:
        source.seek(tensor.offset)
        while left:
            chunk = source.read(min(CHUNK_BYTES, left))
            if not chunk:
                raise ArtifactError("cut off", where=str(tensor.file), do="make or download it again")
            left -= len(chunk)
            yield chunk


def tensors_sha256(headers: Iterable[TensorHeader]) -> str:
    """SHA-256 of tensors' bytes, one after the other, read from their files."""
    return digest_of_chunks(chunk for header in headers for chunk in stored_chunks(header))


def torch_dtype(name: str) -> Any:
    """The torch dtype that safetensors calls so."""
    import torch

    return getattr(torch, next(own for own, written in _DTYPE_NAMES.items() if written == name).removeprefix("torch."))


def dtype_name(dtype: Any) -> str:
    """What safetensors calls a torch dtype."""
    return _DTYPE_NAMES[str(dtype)]


def tensor_bytes(tensor: Any) -> memoryview:
    """The bytes of a tensor as a safetensors file has them; without a copy where it is contiguous and in memory."""
    import torch

    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def _layout(tensors: Headers, metadata: dict[str, str]) -> tuple[list[str], bytes]:
    """The order of tensors in a file and what stands before them.

    8 bytes length, JSON header padded to 8, then the tensors, widest types first so that all are aligned.
    """
    order = sorted(tensors, key=lambda name: (-_element_bits(tensors[name][0]), name))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for name in order:
        dtype, shape, size = tensors[name]
        start, end = end, end + size
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return order, len(text).to_bytes(8, "little") + text


def _element_bits(dtype: str) -> int:
    """Bits of one element of a type as safetensors names it: the first number in the name, 8 for BOOL."""
    digits = re.search(r"[0-9]+", dtype)
    return int(digits[0]) if digits else 8
