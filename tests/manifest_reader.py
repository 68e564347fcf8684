"""The stand-in of another runtime: rebuilds every expert from placement.json and the safetensors, without moeq.

Nothing here imports moeq, torch or safetensors: what it needs to know it reads from the manifest's own description, and
of i-quants from gguf.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np

DTYPES = {"U8": np.uint8, "F16": np.float16, "F32": np.float32, "BF16": np.uint16}


def read_tensor(path: Path, key: str) -> tuple[np.ndarray, bytes]:
    """One tensor of a safetensors file, and its bytes."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        entry = json.loads(stream.read(length))[key]
        start, stop = entry["data_offsets"]
        stream.seek(8 + length + start)
        data = stream.read(stop - start)
    array = np.frombuffer(data, DTYPES[entry["dtype"]]).reshape(entry["shape"])
    if entry["dtype"] == "BF16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array, data


def unpack(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Little-endian bit stream of each row -> codes [rows, count]."""
    stream = np.unpackbits(packed, axis=1, bitorder="little")[:, : count * bits]
    return (stream.reshape(len(packed), count, bits) * (1 << np.arange(bits))).sum(-1)


def matrix(
    parts: dict[str, np.ndarray], inputs: int, bits: int, layout: dict[str, Any], leading_bits_of: int | None = None
) -> np.ndarray:
    """Values [rows, inputs] of one matrix."""
    if "dense" in parts:
        return parts["dense"].astype(np.float64)
    if layout.get("codebook") in ("nvfp4", "mxfp4"):
        return floating(parts, inputs, bits, layout["codebook"])
    if "types" in layout:
        return blocks(parts, layout["types"][str(bits)])
    if "codebook" in layout:
        return turned(parts, inputs, bits)
    if "state_bits" in layout:
        return walked(parts, inputs, bits, layout)
    group = inputs if layout["group_size"] == -1 else min(layout["group_size"], inputs)
    groups = -(-inputs // group)
    of = np.arange(inputs) // group
    zero = np.array(0.5 if bits == 1 else 2.0 ** (bits - 1))
    nested = layout.get("nested") and bits in (2, 3, 4)
    if "zeros" in parts and not nested:
        zero = unpack(parts["zeros"], bits, groups)[:, of]
    stored = leading_bits_of or bits
    codes = unpack(parts["codes"], stored, inputs) >> (stored - bits)
    scales = parts["scales"].astype(np.float64)[:, of]
    if nested:
        zero = unpack(parts["zeros"], 4, groups)[:, of] if "zeros" in parts else 8
        k = 2 ** (4 - bits)
        return (codes * k + (k - 1) / 2 - zero) * scales
    return (codes - zero) * scales


def walked(parts: dict[str, np.ndarray], inputs: int, bits: int, layout: dict[str, Any]) -> np.ndarray:
    """Values [rows, inputs] of trellis codes."""
    value = np.frombuffer(b64decode(layout["values"][str(bits)]), np.int8).astype(np.float64) / 32
    tiles, long = parts["codes"].shape[0], layout["state_bits"]
    whole = np.empty((16 * tiles, parts["codes"].shape[1] // (32 * bits) * 16))
    for row, line in enumerate(parts["codes"].reshape(tiles, -1, 32 * bits)):
        for column, tile in enumerate(line):
            ring = np.unpackbits(tile, bitorder="little")
            ends = np.arange(1, 257) * bits
            state = sum(ring[(ends - long + place) % len(ring)].astype(np.int64) << place for place in range(long))
            whole[16 * row : 16 * row + 16, 16 * column : 16 * column + 16] = value[state].reshape(16, 16)
    return whole[: len(parts["scales"]), :inputs] * parts["scales"].astype(np.float64)


def small(code: np.ndarray, exponent: int, mantissa: int, bias: int) -> np.ndarray:
    """Floating-point numbers of a few bits."""
    sign = 1.0 - 2.0 * (code >> exponent + mantissa & 1)
    power, rest = code >> mantissa & (1 << exponent) - 1, (code & (1 << mantissa) - 1) / (1 << mantissa)
    return sign * np.where(power == 0, rest * 2.0 ** (1 - bias), (1 + rest) * 2.0 ** (power.astype(float) - bias))


def floating(parts: dict[str, np.ndarray], inputs: int, bits: int, codebook: str) -> np.ndarray:
    """Values [rows, inputs] of codes that are floating-point numbers."""
    codes = unpack(parts["codes"], bits, inputs)
    if bits == 8:
        return small(codes, 4, 3, 7) * parts["scales"].astype(np.float64)
    of = np.arange(inputs) // (16 if codebook == "nvfp4" else 32)
    scales = parts["scales"].astype(np.int64)
    if codebook == "mxfp4":
        return small(codes, 2, 1, 1) * (2.0 ** (scales - 127.0))[:, of]
    return small(codes, 2, 1, 1) * (small(scales, 4, 3, 7) * parts["unit"].astype(np.float64))[:, of]


def blocks(parts: dict[str, np.ndarray], kind: str) -> np.ndarray:
    """Values [rows, inputs] of i-quants, by gguf, which llama.cpp's makers publish."""
    import gguf

    rows, count = parts["scales"].shape
    numbers = parts["scales"].view(np.uint8).reshape(rows, count, 2)
    whole = np.concatenate([numbers, parts["codes"].reshape(rows, count, -1)], -1).reshape(rows, -1)
    return gguf.quants.dequantize(whole, gguf.GGMLQuantizationType[kind]).astype(np.float64)


def turned(parts: dict[str, np.ndarray], inputs: int, bits: int) -> np.ndarray:
    """Values [rows, inputs] of EXL3's codes."""
    rows, step = len(parts["scales"]), np.arange(256)
    own, thread = step % 8, step // 8
    hashed = np.arange(1 << 16, dtype=np.uint64) * 0x83DCD12D % 2**32
    total = 1024 + sum(hashed >> np.uint64(shift) & np.uint64(255) for shift in (0, 8, 16, 24))
    unit, bias = np.array([0x1EEE, 0xC931], np.uint16).view(np.float16).astype(np.float64)
    value = (total.astype(np.float64) * unit + bias).astype(np.float16).astype(np.float64)
    inner = np.empty((inputs, rows))
    for (row, column), words in np.ndenumerate(parts["codes"].view(f"V{32 * bits}")):
        ring = np.unpackbits(np.frombuffer(words.tobytes(), "<u4").astype(">u4").view(np.uint8))
        ends = (step + 1) * bits
        word = sum(ring[(ends - 16 + place) % len(ring)].astype(np.int64) << 15 - place for place in range(16))
        at = 16 * column + thread % 4 * 2 + own % 2 + own // 2 % 2 * 8, 16 * row + thread // 4 + own // 4 * 8
        inner[at] = value[word]
    common = np.arange(128)[:, None] & np.arange(128)
    odd = sum(common >> place & 1 for place in range(7)) % 2
    for of in (inner, inner.T):
        for start in range(0, len(of), 128):
            of[start : start + 128] = (1.0 - 2 * odd) @ of[start : start + 128]
    places = np.arange(max(rows, inputs)) % 128
    sign = 1.0 - 2 * np.array([0x243F6A8885A308D313198A2E03707344 >> int(place) & 1 for place in places])
    return (inner / 128 * sign[:inputs, None] * (sign[:rows] * parts["scales"][:, 0].astype(np.float64))).T


def relative_error(values: np.ndarray, exact: np.ndarray) -> float:
    """How far a matrix is from the weights that it was made of, as the manifest writes it down."""
    wanted = exact.astype(np.float32)
    difference = (values.astype(np.float32) - wanted).astype(np.float64)
    return float(np.sqrt((difference**2).sum() / (wanted.astype(np.float64) ** 2).sum()))


def read_expert(folder: Path, layer: dict[str, Any], replica: dict[str, Any], layout: dict[str, Any]) -> dict[str, Any]:
    """The matrices {projection: [rows, inputs]} and biases {projection.bias: [rows]} of one replica.

    Its bytes and SHA-256 are checked first.
    """
    digest, size = hashlib.sha256(), 0
    parts: dict[str, dict[str, np.ndarray]] = {}
    for stamp in replica["tensors"]:
        array, data = read_tensor(folder / replica["file"], replica["key_prefix"] + stamp["name"])
        assert list(array.shape) == stamp["shape"]
        digest.update(data)
        size += len(data)
        projection, part = stamp["name"].split(".")
        parts.setdefault(projection, {})[part] = array
    assert (digest.hexdigest(), size) == (replica["sha256"], replica["bytes"])
    inputs = dict.fromkeys(layer["projections"], layer["hidden_size"]) | {"down_proj": layer["intermediate_size"]}
    bits = dict.fromkeys(layer["projections"], replica["bits"]) | replica.get("projections", {})
    how = (layout, replica.get("leading_bits_of"))
    found = {name: matrix(parts[name], inputs[name], bits[name], *how) for name in layer["projections"]}
    return found | {f"{name}.bias": mine["bias"] for name, mine in parts.items() if "bias" in mine}
