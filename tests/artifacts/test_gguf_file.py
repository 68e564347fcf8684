"""The headers of GGUF files: those of gguf's own writer are read as it reads them, hostile ones are refused."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import peers
import pytest
from gguf_made import gguf_bytes

import moeq
from moeq.artifacts.gguf_file import read_gguf
from moeq.errors import ArtifactError

FIELDS = {"general.architecture": "llama", "n": 7, "flag": True, "tokens": ["a", "bc"], "sizes": [3, 4]}
TENSORS: dict[str, Any] = {"a": (2, (2, 64), bytes(72)), "b": (0, (3,), bytes(12))}


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_a_file_made_by_hand(tmp_path: Path) -> None:
    data = gguf_bytes(FIELDS, TENSORS)
    found = read_gguf(write(tmp_path / "a.gguf", data))
    assert found.fields == FIELDS | {"tokens": range(2), "sizes": range(2)}
    assert {name: (one.type.name, one.shape, one.bytes) for name, one in found.tensors.items()} == {
        "a": ("Q4_0", (2, 64), 72),
        "b": ("F32", (3,), 12),
    }
    assert found.tensors["b"].offset + 32 == len(data)
    assert found.tensors["a"].offset + 96 == found.tensors["b"].offset


def test_a_file_is_inspected(tmp_path: Path) -> None:
    tensors = {"blk.0.ffn_up_exps.weight": TENSORS["a"], "blk.1.ffn_up_exps.weight": TENSORS["a"], "b": TENSORS["b"]}
    found = moeq.inspect(write(tmp_path / "model.gguf", gguf_bytes(FIELDS, tensors)))
    assert found == {
        "kind": "GGUF file",
        "architecture": "llama",
        "tensors": 3,
        "tensor_bytes": 156,
        "experts_types": {"Q4_0": "2 tensors, 144 B"},
        "experts_bits_per_weight": 4.5,
        "the_rest_types": {"F32": "1 tensor, 12 B"},
        "the_rest_bits_per_weight": 32.0,
    }
    with pytest.raises(ArtifactError, match=r"model\.gguf: not a GGUF file; make or download it again"):
        moeq.inspect(write(tmp_path / "model.gguf", b"GGML" * 9))


def test_what_ggufs_own_writer_writes(tmp_path: Path) -> None:
    gguf = peers.module("gguf")
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_float32("x", 0.5)
    writer.add_array("tokens", ["a", "b", "c"])
    writer.add_tensor("one", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("two", np.arange(64, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_gguf(tmp_path / "a.gguf")
    theirs = gguf.GGUFReader(tmp_path / "a.gguf")
    assert {one.name: (one.tensor_type.name, one.data_offset, one.n_bytes) for one in theirs.tensors} == {
        name: (one.type.name, one.offset, one.bytes) for name, one in found.tensors.items()
    }
    assert found.tensors["one"].shape == (2, 3)
    assert (found.fields["llama.block_count"], found.fields["x"], found.fields["tokens"]) == (3, 0.5, range(3))


def field(kind: int, data: bytes) -> bytes:
    """A file with one key of a type and bytes as they are."""
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", kind) + data


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "another file": (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "GGUF version"),
    "version 1": (gguf_bytes({}, {}, version=1), "GGUF version 1"),
    "many tensors": (gguf_bytes({}, {}, counts=(2**60, 0)), "at most"),
    "many keys": (gguf_bytes({}, {}, counts=(0, 2**63)), "at most"),
    "fewer than it says": (gguf_bytes({}, {}, counts=(3, 0)), "truncated"),
    "long text": (field(8, struct.pack("<Q", 2**62) + b"x"), "truncated"),
    "long array": (field(9, struct.pack("<IQ", 10, 2**61)), "truncated"),
    "many texts": (field(9, struct.pack("<IQ", 8, 2**61)), "strings in"),
    "arrays of arrays": (field(9, struct.pack("<IQ", 9, 1)), "unknown type 9"),
    "unknown type": (field(77, bytes(8)), "unknown type 77"),
    "a name of gigabytes": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**33), "a name of"),
    "unknown tensor type": (gguf_bytes({}, {"a": (99, (32,), bytes(32))}), "type 99 is none that moeq reads"),
    "no whole blocks": (gguf_bytes({}, {"a": (2, (33,), bytes(64))}), "33 inputs are no multiple of the 32 of Q4_0"),
    "no axes": (gguf_bytes({}, {"a": (0, (), bytes(32))}), "0 axes"),
    "five axes": (gguf_bytes({}, {"a": (0, (1,) * 5, bytes(32))}), "5 axes"),
    "no elements": (gguf_bytes({}, {"a": (0, (0, 4), bytes(32))}), "cannot be"),
    "overflow": (gguf_bytes({}, {"a": (0, (2**32, 2**32), bytes(32))}), "cannot be"),
    "too large": (gguf_bytes({}, {"a": (0, (2**20,), bytes(32))}), "truncated"),
    "beyond the end": (gguf_bytes({}, {"a": (0, (8,), bytes(32))}, offsets={"a": 2**40}), "truncated"),
    "not aligned": (gguf_bytes({}, {"a": (0, (8,), bytes(64))}, offsets={"a": 4}), "cannot be"),
    "overlap": (gguf_bytes({}, {"a": (0, (8,), bytes(32)), "b": (0, (8,), bytes(32))}, offsets={"b": 0}), "overlaps"),
    "a gap": (gguf_bytes({}, {"a": (0, (8,), bytes(96)), "b": (0, (8,), bytes(32))}), "'b' lies behind 64 bytes that"),
    "alignment": (gguf_bytes({"general.alignment": 48}, {}), "no power of two"),
    "alignment of 2**31": (gguf_bytes({"general.alignment": 2**31}, {}), "no power of two"),
    "a name of zeros": (gguf_bytes({}, {"a\0b": (0, (8,), bytes(32))}), "zero byte"),
}


@pytest.mark.parametrize("case", list(HOSTILE))
def test_hostile_headers_are_refused(case: str, tmp_path: Path) -> None:
    data, why = HOSTILE[case]
    path = write(tmp_path / "a.gguf", data)
    tracemalloc.start()
    with pytest.raises(ValueError, match=why):
        read_gguf(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


def test_names_that_are_there_twice(tmp_path: Path) -> None:
    two: dict[str, Any] = {"a": (0, (8,), bytes(32)), "b": (0, (8,), bytes(32))}
    data = gguf_bytes({}, two).replace(b"\1" + bytes(7) + b"b", b"\1" + bytes(7) + b"a")
    with pytest.raises(ValueError, match="'a' is there twice"):
        read_gguf(write(tmp_path / "a.gguf", data))
    data = gguf_bytes({"a": 1, "b": 2}, {}).replace(b"\1" + bytes(7) + b"b", b"\1" + bytes(7) + b"a")
    with pytest.raises(ValueError, match="key 'a' is there twice"):
        read_gguf(write(tmp_path / "a.gguf", data))
