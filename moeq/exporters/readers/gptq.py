"""GPTQ's layout, as GPTQModel, AutoGPTQ and auto-round write it.

qweight int32 [K*b/32, N]; qzeros int32 [G, N*b/32], zero points less one in the first format (`gptq`, `auto_gptq`) and
as they are in the second (`gptq_v2`, auto-round's own); scales [G, N]; g_idx int32 [K], the group of every input.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moeq.exporters.readers.layout import Grid, Parts, Stored, expect, group_length, kept_scales
from moeq.models.source import TensorHeader
from moeq.numerics import grids
from moeq.numerics.layouts import WORD, column_stream, zeros_of
from moeq.numerics.packed import PackedWeight
from moeq.numerics.packing import pack
from moeq.numerics.widths import SUPPORTED_BITS

FLOATS = ("F16", "BF16", "F32")
FIRST, SECOND = "gptq", "gptq_v2"
FULL_BITS = 16  # and more: a module that config.json leaves as it is


class Gptq:
    """quant_method gptq: one grid for all modules, and what `dynamic` says of some."""

    name = "gptq"
    widths: tuple[int, ...] = (2, 3, 4, 8)  # GPTQModel keeps codes of other widths in planes of bits
    anchor = "qweight"
    parts: tuple[str, ...] = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, declared: Mapping[str, Any]) -> None:
        """ValueError for a format whose layout is another one."""
        version = declared.get("checkpoint_format", FIRST)
        if version not in (FIRST, SECOND):
            raise ValueError(f"checkpoint_format {version}")
        self.lessened = version == FIRST
        self.whole = _grid(declared, None)
        self.rules = [(_pattern(name), name.startswith("-:"), own) for name, own in _dynamic(declared).items()]

    def grid(self, names: Sequence[str]) -> Grid | None:
        for pattern, negative, own in self.rules:
            if any(pattern.match(name) for name in names):
                return None if negative else _grid(own, self.whole)
        return self.whole

    def check(self, headers: Mapping[str, TensorHeader], grid: Grid, rows: int, inputs: int) -> None:
        if grid.bits not in self.widths:
            raise ValueError(f"moeq reads {', '.join(map(str, self.widths))} bits of {self.name}")
        if inputs * grid.bits % WORD or rows * grid.bits % WORD:
            raise ValueError(f"{rows} x {inputs} codes of {grid.bits} bits are no whole number of {WORD}-bit words")
        groups = grids.group_count(inputs, group_length(grid, inputs))
        expect(headers, "qweight", ("I32",), (inputs * grid.bits // WORD, rows))
        expect(headers, "qzeros", ("I32",), (groups, rows * grid.bits // WORD))
        expect(headers, "scales", FLOATS, (groups, rows))
        if "g_idx" in headers:
            expect(headers, "g_idx", ("I32",), (inputs,))

    def read(self, parts: Parts, grid: Grid, rows: int, inputs: int) -> Stored:
        size = group_length(grid, inputs)
        groups = _groups(parts, inputs, size)
        zeros = zeros_of(parts["qzeros"], grid.bits, rows)
        zeros = zeros if self.lessened else (zeros.to(torch.int64) - 1).remainder(2**grid.bits).to(torch.uint8)
        middle = bool((zeros == 2 ** (grid.bits - 1)).all())
        weight = PackedWeight(
            codes=column_stream(parts["qweight"], grid.bits, inputs).contiguous(),
            scales=kept_scales(parts["scales"].mT.contiguous()),
            zeros=None if middle else pack(zeros, grid.bits),
            bits=grid.bits,
            group_size=size,
            inputs=inputs,
            symmetric=middle,
        )
        return Stored(weight=weight, groups=groups)


class AutoRound(Gptq):
    """quant_method auto-round: `packing_format` says which zero points, `extra_config` what differs from module to
    module; a key of it is a module's name, or else a pattern that is searched for in the names."""

    name = "auto-round"
    widths = SUPPORTED_BITS[1:]

    def __init__(self, declared: Mapping[str, Any]) -> None:
        packing = str(declared.get("packing_format", "auto_round:auto_gptq"))
        kind = packing.partition(":")[2]
        if kind not in ("", "auto_gptq", "gptqmodel", "gptq"):
            raise ValueError(f"packing_format {packing}")
        if declared.get("data_type", "int") != "int":
            raise ValueError(f"data_type {declared['data_type']}")
        super().__init__({"checkpoint_format": FIRST if kind in ("auto_gptq", "gptq") else SECOND, **_basic(declared)})
        self.exact: dict[str, Any] = dict(declared.get("extra_config") or {})
        self.searched = [(re.compile(name), own) for name, own in self.exact.items() if _is_pattern(name)]

    def grid(self, names: Sequence[str]) -> Grid | None:
        own = next((self.exact[name] for name in names if name in self.exact), None)
        if own is None:
            found = (own for pattern, own in self.searched if own and any(pattern.search(name) for name in names))
            own = next(found, {})
        return _grid(own, self.whole)


def _basic(declared: Mapping[str, Any]) -> dict[str, Any]:
    return {name: declared[name] for name in ("bits", "group_size", "sym") if name in declared}


def _is_pattern(name: str) -> bool:
    try:
        re.compile(name)
    except re.error:
        return False
    return True


def _grid(own: Mapping[str, Any], default: Grid | None) -> Grid | None:
    """The grid of a block of the configuration; what it leaves out is the default's; None: not packed."""
    if default is None and "bits" not in own:
        raise ValueError("config.json declares no bits")
    bits = int(own.get("bits", default.bits if default else 0))
    if bits >= FULL_BITS:
        return None
    size = own.get("group_size", default.group_size if default else -1)
    symmetric = own.get("sym", default.symmetric if default else True)
    return Grid(bits=bits, group_size=int(size), symmetric=bool(symmetric))


def _dynamic(declared: Mapping[str, Any]) -> dict[str, Any]:
    return dict(declared.get("dynamic") or {})


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(name.removeprefix("-:").removeprefix("+:"))


def _groups(parts: Parts, inputs: int, size: int) -> Tensor | None:
    """The group of every input where activations were ordered; None where groups are consecutive inputs."""
    if "g_idx" not in parts:
        return None
    length = grids.resolved_group_size(inputs, size)
    found = parts["g_idx"].long()
    if torch.equal(found, torch.arange(inputs) // length):
        return None
    if int(found.min()) < 0 or int(found.max()) >= grids.group_count(inputs, size):
        raise ValueError("g_idx names groups that there are not")
    return found
