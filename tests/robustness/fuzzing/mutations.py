"""How valid inputs are changed: values of JSON, bytes, headers of tensors, columns of Parquet, cells of text."""

from __future__ import annotations

import io
import json
import random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

HOSTILE: list[Any] = [
    0, 1, -1, 3, 2**31, 2**40, 10**12, 2**63, 2**64, 10**400, -(10**12), True, False, None, 0.5, -0.0, 1e308, "", ".",
    "..", "../x", "/etc/passwd", "a/b", "a\\b", "a\0b", "\ud800", "x" * 300, "F4", "U8", "F32", [], {}, [[]], [2**40],
    [2**32, 2**32], [-1], [0, 2**62], [1] * 70, [0, 8], [8, 0], {"a": 1}, {"dtype": "U8"}, "model.safetensors",
    "a\nb", "re:(", "\x1b[31m", [None], "nan", "1e999",
]  # fmt: skip
SNIPPETS = [
    b"NaN", b"Infinity", b"-Infinity", b"1e999", b"[" * 5000, b'{"a":' * 3000, b"9" * 5000, b"[]," * 400, b"\\ud800",
    b"\xff", b'"a":1,"a":2,', b"{", b"}", b'"', b"\0", b" " * 64, b"&a", b"*a", b"- " * 40, b"? ", b": ", b"<<: ",
    b"!!python/name:os.system ", b"!!int ", b"---\n", b"2001-99-99", b"0x_", b"1:2:3", b".inf", b"|\n", b"\n  ",
    b"\r", b"\n", b",", b"\t", b"\xef\xbb\xbf", b"\xe2\x80\xa8",
]  # fmt: skip
CELLS = [
    "", " ", "0", "-1", "1", "1e999", "nan", "inf", "1_000", "9" * 30, "9" * 5000, "0x10", "\N{SUPERSCRIPT TWO}", '"',
    "a\nb", "\t", ",", "\0", "x" * 300, "\N{ARABIC-INDIC DIGIT THREE}", "1e-400", "=1", "1/2", "1/0", "..", "null",
]  # fmt: skip
NUMBERS = [0, 1, -1, 2, 7, 100, 127, -128, 2**31 - 1, -(2**31), 2**62, None, 0.5, float("nan"), float("inf"), 1e300]


def mutate_json(value: Any, chance: random.Random) -> Any:
    """A copy with one place changed: another value, none at all, one of another place."""
    copy = json.loads(json.dumps(value))
    places: list[tuple[Any, Any]] = []
    parts = [copy]
    while parts:
        part = parts.pop()
        for key in part if isinstance(part, dict) else range(len(part)):
            places.append((part, key))
            if isinstance(part[key], (dict, list)):
                parts.append(part[key])
    if not places:
        return chance.choice(HOSTILE)
    part, key = chance.choice(places)
    action = chance.randrange(5)
    if action == 0:
        del part[key]
    elif action == 1:
        other, name = chance.choice(places)
        part[key] = json.loads(json.dumps(other[name])) if name in other or isinstance(other, list) else None
    elif action == 2 and isinstance(part[key], int):
        part[key] += chance.choice([-1, 1, 8, -8])
    elif isinstance(part, dict) and action == 3:
        part[chance.choice(["..", "", "__metadata__", "extra", "schema_version"])] = part.pop(key)
    else:
        part[key] = chance.choice(HOSTILE)
    return copy


def mutate_bytes(data: bytes, chance: random.Random) -> bytes:
    """A copy with some bytes flipped, cut out, put twice, or a snippet put in."""
    at = chance.randrange(len(data) + 1)
    action = chance.randrange(4)
    if action == 0:
        return data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]
    if action == 1:
        return data[:at]
    if action == 2:
        return data[:at] + data[at : at + chance.randrange(64)] + data[at:]
    return data[:at] + chance.choice(SNIPPETS) + data[at:]


def json_bytes(value: Any, chance: random.Random) -> bytes:
    """The text of a value that was changed in one to three places, of its structure or of its bytes."""
    rounds, raw = chance.randrange(1, 4), chance.random() < 0.3
    for _ in range(0 if raw else rounds):
        value = mutate_json(value, chance) if isinstance(value, (dict, list)) else value
    text = json.dumps(value).encode()
    for _ in range(rounds if raw else 0):
        text = mutate_bytes(text, chance)
    return text


def text_bytes(data: bytes, chance: random.Random) -> bytes:
    """Bytes that were changed in one to three places."""
    for _ in range(chance.randrange(1, 4)):
        data = mutate_bytes(data, chance)
    return data


def tensors_bytes(data: bytes, chance: random.Random, inner: str | None = None) -> bytes:
    """A safetensors file with another header, or another JSON text in its metadata (inner), or other bytes of data."""
    length = int.from_bytes(data[:8], "little")
    head, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    draw = chance.random()
    if inner is not None and draw < 0.5:
        said = json_bytes(json.loads(head["__metadata__"][inner]), chance)
        head["__metadata__"][inner] = said.decode("utf-8", "replace")
        text = json.dumps(head).encode()
    elif draw < 0.75:
        text = json_bytes(head, chance)
    else:
        flipped = bytearray(rest)
        for _ in range(chance.randrange(1, 4) if flipped else 0):
            flipped[chance.randrange(len(flipped))] = chance.randrange(256)
        return data[: 8 + length] + bytes(flipped)
    stated = len(text) if chance.random() < 0.9 else chance.choice([0, 2**31, 2**63, 10**8 + 1])
    return stated.to_bytes(8, "little") + text + rest


def parquet_bytes(table: pa.Table, chance: random.Random) -> bytes:
    """A Parquet file of a table with other values, columns, rows, types or metadata, or with other bytes."""
    raw = chance.random() < 0.3
    for _ in range(0 if raw else chance.randrange(1, 3)):
        table = _mutate_table(table, chance)
    data = table_bytes(table)
    return text_bytes(data, chance) if raw else data


def table_bytes(table: pa.Table) -> bytes:
    """A table as Parquet."""
    stream = io.BytesIO()
    pq.write_table(table, stream)
    return stream.getvalue()


def _mutate_table(table: pa.Table, chance: random.Random) -> pa.Table:
    if not table.num_columns:
        return table
    at, action = chance.randrange(table.num_columns), chance.randrange(7)
    name, column = table.schema.names[at], table.column(at)
    if action == 0:
        return table.remove_column(at)
    if action == 1:
        kept = [chance.randrange(table.num_rows) for _ in range(chance.randrange(4))] if table.num_rows else []
        return table.take(pa.array(kept, pa.int64()))
    if action == 2:
        metadata = dict(table.schema.metadata or {})
        key = chance.choice([*metadata, b"extra"])
        return table.replace_schema_metadata(metadata | {key: chance.choice([b"", b"\xff", b"1", b"2", b"99"])})
    if action == 3:
        kind = chance.choice([pa.int64(), pa.float32(), pa.string(), pa.binary(), pa.null(), pa.list_(pa.int64())])
        return table.set_column(at, name, pa.nulls(table.num_rows, kind))
    if action == 4:
        other = chance.choice(table.schema.names)
        return table.rename_columns([other if each == name else each for each in table.schema.names])
    values = column.to_pylist()
    if not values:
        return table
    row = chance.randrange(len(values))
    texts = pa.types.is_string(column.type)
    values[row] = chance.choice(["", "x", "best", "expert", None, "none"] if texts else NUMBERS)
    try:
        return table.set_column(at, table.schema.field(at), pa.array(values, column.type))
    except (pa.ArrowException, TypeError, ValueError, OverflowError):  # a type that does not hold it
        return table.set_column(at, name, pa.array([str(value) for value in values]))


def cells_bytes(text: str, chance: random.Random, apart: str = ",") -> bytes:
    """Text of rows with other cells, or other bytes."""
    if chance.random() < 0.4:
        return text_bytes(text.encode(), chance)
    rows = [line.split(apart) for line in text.splitlines()]
    for _ in range(chance.randrange(1, 4)):
        row = chance.choice(rows)
        action = chance.randrange(5)
        if action == 0 and row:
            del row[chance.randrange(len(row))]
        elif action == 1:
            row.insert(chance.randrange(len(row) + 1), chance.choice(CELLS))
        elif action == 2:
            rows.append([*chance.choice(rows)])
        elif row:
            row[chance.randrange(len(row))] = chance.choice(CELLS)
    return "\n".join(apart.join(row) for row in rows).encode()
