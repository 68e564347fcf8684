"""GGUF files made by hand, from the description of the format."""

from __future__ import annotations

import struct
from typing import Any

ALIGNMENT = 32


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def value(found: Any) -> bytes:
    """The type and the bytes of a value: text, bool, a whole number or a list of texts or numbers."""
    if isinstance(found, str):
        return struct.pack("<I", 8) + text(found)
    if isinstance(found, bool):
        return struct.pack("<I?", 7, found)
    if isinstance(found, int):
        return struct.pack("<II", 4, found)
    if found and isinstance(found[0], str):
        return struct.pack("<IIQ", 9, 8, len(found)) + b"".join(map(text, found))
    return struct.pack("<IIQ", 9, 4, len(found)) + b"".join(struct.pack("<I", one) for one in found)


def entry(name: str, kind: int, shape: tuple[int, ...], offset: int) -> bytes:
    sizes = b"".join(struct.pack("<Q", size) for size in reversed(shape))
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


def gguf_bytes(
    fields: dict[str, Any],
    tensors: dict[str, tuple[int, tuple[int, ...], bytes]],
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    offsets: dict[str, int] | None = None,
) -> bytes:
    """A file; tensors: {name: (type, shape, data)}; counts and offsets: what it says instead of what is so."""
    stated = counts or (len(tensors), len(fields))
    head = b"GGUF" + struct.pack("<IQQ", version, *stated)
    head += b"".join(text(name) + value(found) for name, found in fields.items())
    data = b""
    for name, (kind, shape, mine) in tensors.items():
        head += entry(name, kind, shape, (offsets or {}).get(name, len(data)))
        data += mine + bytes(-len(mine) % ALIGNMENT)
    return head + bytes(-len(head) % ALIGNMENT) + data
