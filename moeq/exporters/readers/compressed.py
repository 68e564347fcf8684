"""compressed-tensors, format pack-quantized.

weight_packed int32 [N, ceil(K*b/32)], a row's codes (the signed value plus 2**(b-1)) as one bit stream; weight_scale
[N, G]; weight_zero_point int32 [ceil(N*b/32), G] packed alike along the rows, absent where the grid is symmetric;
weight_shape int64 [2]; weight_g_idx int32 [K] where activations were ordered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from moeq.artifacts.tensor_files import stored_chunks
from moeq.exporters.readers.layout import (
    FLOATS,
    Grid,
    Parts,
    Pattern,
    Stored,
    checked_grid,
    expect,
    group_length,
    read_back,
)
from moeq.models.source import TensorHeader
from moeq_kernels.widths import WORD, group_count

FORMAT = "pack-quantized"
LINEAR = "Linear"


class CompressedTensors:
    """config_groups, each with the modules that it is for: names, `re:` patterns, or the class Linear."""

    anchor = "weight_packed"
    parts: tuple[str, ...] = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")

    def __init__(self, declared: Mapping[str, Any]) -> None:
        """ValueError for groups whose weights lie in another format."""
        self.ignored = [_matcher(name) for name in declared.get("ignore") or ()]
        self.targets: list[tuple[Pattern | None, Grid]] = []
        for name, group in (declared.get("config_groups") or {}).items():
            form = group.get("format") or declared.get("format")
            if form != FORMAT:
                raise ValueError(f"format {form} ({name})")
            grid = _grid(name, group["weights"])
            self.targets += [(_matcher(target), grid) for target in group["targets"]]

    def grid(self, names: Sequence[str]) -> Grid | None:
        if any(_matches(matcher, names) for matcher in self.ignored):
            return None
        named = [grid for matcher, grid in self.targets if _matches(matcher, names)]
        whole = [grid for matcher, grid in self.targets if matcher is None]
        return next(iter([*named, *whole]), None)

    def shape(self, headers: Mapping[str, TensorHeader], grid: Grid) -> tuple[int, int]:
        stated = headers.get("weight_shape")
        if stated is None or stated.shape != (2,) or stated.dtype not in ("I64", "I32"):
            raise ValueError("weight_shape is missing, or no two numbers")
        data, size = b"".join(stored_chunks(stated)), stated.bytes // 2
        return int.from_bytes(data[:size], "little"), int.from_bytes(data[size:], "little")

    def check(self, headers: Mapping[str, TensorHeader], grid: Grid, rows: int, inputs: int) -> None:
        groups = group_count(inputs, group_length(grid, inputs))
        expect(headers, "weight_packed", ("I32",), (rows, -(-inputs * grid.bits // WORD)))
        expect(headers, "weight_scale", FLOATS, (rows, groups))
        expect(headers, "weight_shape", ("I64", "I32"), (2,))
        if not grid.symmetric:
            expect(headers, "weight_zero_point", ("I32",), (-(-rows * grid.bits // WORD), groups))
        if "weight_g_idx" in headers:
            expect(headers, "weight_g_idx", ("I32",), (inputs,))

    def read(self, parts: Parts, grid: Grid, rows: int, inputs: int) -> Stored:
        if parts["weight_shape"].tolist() != [rows, inputs]:
            raise ValueError(f"weight_shape says {parts['weight_shape'].tolist()}, the matrix is {[rows, inputs]}")
        from moeq.numerics.layouts import row_stream
        from moeq_kernels.packing import unpack

        zeros = None
        if "weight_zero_point" in parts:
            words = parts["weight_zero_point"].mT.contiguous()
            zeros = unpack(row_stream(words, grid.bits, rows), grid.bits, rows).mT.contiguous()
        codes = row_stream(parts["weight_packed"], grid.bits, inputs)
        index = parts.get("weight_g_idx")
        unset = index is None or bool((index < 0).all())
        return read_back(codes, parts["weight_scale"], zeros, grid, inputs, None if unset else index)


def _matches(matcher: Pattern | None, names: Sequence[str]) -> bool:
    return matcher is not None and any(matcher.match(name) for name in names)


def _matcher(target: str) -> Pattern | None:
    """What a target matches; None: every linear."""
    if target == LINEAR:
        return None
    return Pattern(target.removeprefix("re:") if target.startswith("re:") else f"{re.escape(target)}$")


def _grid(name: str, weights: Mapping[str, Any] | None) -> Grid:
    """ValueError for what is not an integer grid by groups or rows."""
    weights = weights or {}
    strategy = weights.get("strategy")
    if weights.get("type") != "int" or strategy not in ("group", "channel"):
        raise ValueError(f"{weights.get('type')} weights by {strategy} ({name})")
    size = weights.get("group_size") if strategy == "group" else -1
    return checked_grid(weights["num_bits"], size or -1, weights["symmetric"])
