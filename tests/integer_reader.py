"""The stand-in of a hardware team: replays an integer forward from its files, by moeq/INTEGER.md, without moeq.

Nothing here imports moeq, torch or safetensors; all arithmetic is numpy's int64 and Python's own integers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

DTYPES = {"U8": "<u1", "I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
Arrays = dict[str, np.ndarray]


def read_tensors(path: Path) -> Arrays:
    """All tensors of a safetensors file as int64."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    found = {}
    for key, entry in json.loads(data[8 : 8 + length]).items():
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        array = np.frombuffer(data[start:stop], DTYPES[entry["dtype"]]).reshape(entry["shape"])
        found[key] = array.astype(np.int64)
    return found


def round_shift(a: Any, n: Any) -> Any:
    return (a + ((1 << np.asarray(n, np.int64)) >> 1)) >> n


def scale(a: Any, m: Any, s: Any) -> Any:
    return round_shift(a * m, s)


def sat(a: np.ndarray, bits: int) -> np.ndarray:
    return np.clip(a, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def power(n: np.ndarray, table: np.ndarray) -> np.ndarray:
    return np.where(n // 256 >= 62, 0, table[n % 256] >> np.minimum(n // 256, 62))


def patches(x: np.ndarray, t: Arrays, a: dict[str, Any], values: Arrays) -> Arrays:
    _, channels, height, width = x.shape
    p = a["patch_size"]
    cut = [x[:, :, i : i + p, j : j + p].reshape(len(x), channels * p * p)
           for i in range(0, height, p) for j in range(0, width, p)]  # fmt: skip
    return {"out": np.stack(cut, 1)}


def linear(x: np.ndarray, t: Arrays, a: dict[str, Any], values: Arrays) -> Arrays:
    sums = x @ t["weight"].T + t["bias"]
    return {"accumulators": sums, "out": sat(scale(sums, t["multiplier"], t["shift"]), a["bits"])}


def tokens(x: np.ndarray, t: Arrays, a: dict[str, Any], values: Arrays) -> Arrays:
    front = np.broadcast_to(t["prefix"], (len(x), *t["prefix"].shape))
    return {"out": np.concatenate([front, sat(x + t["position"], a["bits"])], 1)}


def layer_norm(x: np.ndarray, t: Arrays, a: dict[str, Any], values: Arrays) -> Arrays:
    rows = np.empty_like(x)
    for place in np.ndindex(x.shape[:-1]):
        row = [int(one) for one in x[place]]
        size, total = len(row), sum(row)
        v = size * sum(one * one for one in row) - total * total + a["epsilon"]
        u = (52 - v.bit_length()) & ~1
        q = 2**50 // math.isqrt(v << u)
        shift = 32 - u // 2
        rows[place] = [((size * one - total) * q + ((1 << shift) >> 1)) >> shift for one in row]
    return {"rows": rows, "out": sat(round_shift(rows * t["gain"] + t["bias"], a["gain_bits"] + 18), a["bits"])}


def split(values: Arrays, heads: int) -> list[np.ndarray]:
    found = []
    for part in ("query", "key", "value"):
        images, positions, channels = values[part].shape
        found.append(values[part].reshape(images, positions, heads, channels // heads).transpose(0, 2, 1, 3))
    return found


def whole(x: np.ndarray, bits: int) -> np.ndarray:
    images, heads, positions, channels = x.shape
    return sat(x.transpose(0, 2, 1, 3).reshape(images, positions, heads * channels), bits)


def log_attention(x: np.ndarray, t: Arrays, a: dict[str, Any], values: Arrays) -> Arrays:
    query, key, value = split(values, a["heads"])
    scores = query @ key.swapaxes(-1, -2)
    difference = scores.max(-1, keepdims=True) - scores
    codes = np.minimum(scale(difference, a["code_multiplier"], a["code_shift"]), 2 ** a["attention_bits"] - 1)
    half = a["softmax"] == "log-sqrt2"
    k, odd = ((codes + 1) >> 1, codes % 2 == 1) if half else (codes, np.zeros_like(codes, bool))
    kept = k <= a["left"]
    if a["dropped_from"] is not None:
        kept &= codes < a["dropped_from"]
    moved = (value << a["left"])[:, :, None] >> np.where(kept, k, 0)[..., None]  # [images, heads, queries, keys, d]
    even_sum = np.where((kept & ~odd)[..., None], moved, 0).sum(-2)
    odd_sum = np.where((kept & odd)[..., None], moved, 0).sum(-2)
    joined = even_sum + round_shift(odd_sum * 46341, 15)
    if a["denominator"] == "exact":
        steps = scale(difference, a["power_multiplier"], a["power_shift"])
        denominator = power(steps, t["power_table"]).sum(-1)
    else:
        w = np.where(kept, 1 << np.maximum(a["left"] - k, 0), 0)
        denominator = np.where(odd, 0, w).sum(-1) + round_shift(np.where(odd, w, 0).sum(-1) * 46341, 15)
    row = round_shift((1 << (a["unit_bits"] + a["reciprocal_bits"])) // denominator * a["out_multiplier"], 16)
    out = round_shift(joined * row[..., None], a["left"] + a["reciprocal_bits"] + a["out_shift"] - 16)
    return {"scores": scores, "codes": codes, "even": even_sum, "odd": odd_sum, "denominator": denominator,
            "row": row, "out": whole(out, a["bits"])}  # fmt: skip


def uniform_attention(x: np.ndarray, t: Arrays, a: dict[str, Any], values: Arrays) -> Arrays:
    query, key, value = split(values, a["heads"])
    scores = query @ key.swapaxes(-1, -2)
    difference = scores.max(-1, keepdims=True) - scores
    numerators = power(scale(difference, a["power_multiplier"], a["power_shift"]), t["power_table"])
    denominator = numerators.sum(-1)
    row = round_shift((1 << (15 + a["reciprocal_bits"])) // denominator * a["code_multiplier"], 16)
    codes = round_shift(numerators * row[..., None], 15 + a["reciprocal_bits"] + a["code_shift"] - 16)
    codes = np.minimum(codes, 2 ** a["attention_bits"] - 1)
    sums = codes @ value
    out = whole(scale(sums, a["out_multiplier"], a["out_shift"]), a["bits"])
    return {"scores": scores, "numerators": numerators, "denominator": denominator, "row": row, "codes": codes,
            "accumulators": sums, "out": out}  # fmt: skip


def table(x: np.ndarray, t: Arrays, a: dict[str, Any], values: Arrays) -> Arrays:
    return {"out": t["table"][x + len(t["table"]) // 2]}


def add(x: np.ndarray, t: Arrays, a: dict[str, Any], values: Arrays) -> Arrays:
    return {"out": sat(x + values["y"], a["bits"])}


def router(x: np.ndarray, t: Arrays, a: dict[str, Any], values: Arrays) -> Arrays:
    made = linear(x, t, a, values)
    logits = made["out"]
    index = np.empty((*logits.shape[:-1], a["top_k"]), np.int64)
    weights = np.empty_like(index)
    for place in np.ndindex(logits.shape[:-1]):
        row = logits[place].tolist()
        chosen = sorted(range(len(row)), key=lambda expert: (-row[expert], expert))[: a["top_k"]]
        counted = chosen if a["over"] == "chosen" else range(len(row))

        def numerator(expert: int, row: list[int] = row) -> int:
            return int(power(scale(np.int64(max(row) - row[expert]), a["power_multiplier"], a["power_shift"]),
                             t["power_table"]))  # fmt: skip

        reciprocal = 2 ** (15 + a["reciprocal_bits"]) // sum(map(numerator, counted))
        index[place] = chosen
        weights[place] = [round_shift(numerator(one) * reciprocal, a["reciprocal_bits"]) for one in chosen]
    return {"accumulators": made["accumulators"], "logits": logits, "index": index, "weights": weights}


def experts(x: np.ndarray, t: Arrays, a: dict[str, Any], values: Arrays) -> Arrays:
    index, slots = values["index"], values["index"].shape[-1]
    shape = (*x.shape[:2], slots)
    inner, size = t["up_bias"].shape[1], t["down_bias"].shape[1]
    found = {"up_accumulators": inner, "hidden": inner, "active": inner, "down_accumulators": size, "outputs": size}
    made = {role: np.empty((*shape, width), np.int64) for role, width in found.items()}
    for place in np.ndindex(shape):
        e = index[place]
        up = t["up_weight"][e] @ x[place[:2]] + t["up_bias"][e]
        hidden = sat(scale(up, t["up_multiplier"][e], t["up_shift"][e]), a["hidden_bits"])
        active = t["table"][hidden + len(t["table"]) // 2]
        down = t["down_weight"][e] @ active + t["down_bias"][e]
        outputs = sat(scale(down, t["down_multiplier"][e], t["down_shift"][e]), a["bits"])
        for role, array in zip(found, (up, hidden, active, down, outputs), strict=True):
            made[role][place] = array
    total = (made["outputs"] * values["weights"][..., None]).sum(-2)
    return made | {"out": sat(round_shift(total, a["unit_bits"]), a["bits"])}


def first_token(x: np.ndarray, t: Arrays, a: dict[str, Any], values: Arrays) -> Arrays:
    return {"out": x[:, 0]}


def mean_tokens(x: np.ndarray, t: Arrays, a: dict[str, Any], values: Arrays) -> Arrays:
    return {"out": sat(scale(x[:, a["prefix"] :].sum(1), a["multiplier"], a["shift"]), a["bits"])}


KINDS: dict[str, Callable[..., Arrays]] = {
    step.__name__: step
    for step in (patches, linear, tokens, layer_norm, log_attention, uniform_attention, table, add, router, experts,
                 first_token, mean_tokens)
}  # fmt: skip


def replay(folder: Path) -> tuple[list[str], Arrays]:
    """Names of the values that differ from their vectors, and all values, from the folder's files alone."""
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    assert (manifest["format"], manifest["schema_version"], manifest["rounding"]) == ("moeq-integer", 1, "half_up")
    files = {entry["file"] for entry in manifest["tensors"] + manifest["values"]}
    read = {name: read_tensors(folder / name) for name in files}
    constants = {entry["name"]: read[entry["file"]][entry["key"]] for entry in manifest["tensors"]}
    vectors = {entry["name"]: read[entry["file"]][entry["key"]] for entry in manifest["values"]}
    values = {"pixels": vectors["pixels"]}
    for operation in manifest["operations"]:
        given = {role: values[name] for role, name in operation["inputs"].items()}
        held = {role: constants[name] for role, name in operation["tensors"].items()}
        made = KINDS[operation["kind"]](given.get("x"), held, operation["attributes"], given)
        values.update({operation["outputs"][role]: array for role, array in made.items()})
    assert set(values) == set(vectors)
    return [name for name in values if not np.array_equal(values[name], vectors[name])], values
