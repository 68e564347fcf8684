"""GPTQ's layout, as GPTQModel, AutoGPTQ and auto-round write it.

qweight int32 [ceil(K*b/32), N]; qzeros int32 [G, ceil(N*b/32)], zero points less one in the first format (`gptq`,
`auto_gptq`) and as they are in the second (`gptq_v2`, auto-round's own); scales [G, N]; g_idx int32 [K], the group of
every input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from moeq.artifacts.reading import is_count
from moeq.bounded import shown
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
from moeq_kernels.widths import SUPPORTED_BITS, WORD, group_count

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
        version = declared.get("checkpoint_format", declared.get("format", FIRST))  # GPTQModel's two names of it
        if declared.get("is_marlin_format"):  # as older AutoGPTQ says it
            version = "marlin"
        if version not in (FIRST, SECOND):
            raise ValueError(f"checkpoint_format {version}")
        self.first = version == FIRST
        if "bits" not in declared:
            raise ValueError("config.json declares no bits")
        self.whole = _grid(declared, None)
        self.rules = [
            (
                Pattern(name.removeprefix("-:").removeprefix("+:")),
                None if name.startswith("-:") else _grid(own, self.whole),
            )
            for name, own in dict(declared.get("dynamic") or {}).items()
        ]

    def grid(self, names: Sequence[str]) -> Grid | None:
        rules = (grid for matcher, grid in self.rules if any(matcher.match(name) for name in names))
        return next(rules, self.whole)

    def shape(self, headers: Mapping[str, TensorHeader], grid: Grid) -> tuple[int, int]:
        packed = headers["qweight"].shape
        inputs = headers["g_idx"].shape if "g_idx" in headers else ()  # the last word of a column may be filled up
        if len(packed) != 2 or (not inputs and packed[0] * WORD % grid.bits):
            raise ValueError(f"qweight {list(packed)} is no matrix of {grid.bits} bits")
        return packed[1], inputs[0] if inputs else packed[0] * WORD // grid.bits

    def check(self, headers: Mapping[str, TensorHeader], grid: Grid, rows: int, inputs: int) -> None:
        if grid.bits not in self.widths:
            raise ValueError(f"moeq reads {', '.join(map(str, self.widths))} bits of {self.name}")
        groups = group_count(inputs, group_length(grid, inputs))
        expect(headers, "qweight", ("I32",), (-(-inputs * grid.bits // WORD), rows))
        expect(headers, "qzeros", ("I32",), (groups, -(-rows * grid.bits // WORD)))
        expect(headers, "scales", FLOATS, (groups, rows))
        if "g_idx" in headers:
            expect(headers, "g_idx", ("I32",), (inputs,))

    def read(self, parts: Parts, grid: Grid, rows: int, inputs: int) -> Stored:
        from moeq.numerics.layouts import column_stream, zeros_of

        zeros = zeros_of(parts["qzeros"], grid.bits, rows, less_one=self.first)
        codes = column_stream(parts["qweight"], grid.bits, inputs)
        return read_back(codes, parts["scales"].mT.contiguous(), zeros, grid, inputs, parts.get("g_idx"))


class AutoRound(Gptq):
    """quant_method auto-round: `packing_format` says which zero points, `extra_config` what differs from module to
    module; a key of it is a module's name, or else a pattern that is searched for in the names."""

    name = "auto-round"
    widths: tuple[int, ...] = SUPPORTED_BITS[1:]
    kinds: tuple[str, ...] = ("", "auto_gptq", "gptqmodel", "gptq")  # of packing_format

    def __init__(self, declared: Mapping[str, Any]) -> None:
        packing = str(declared.get("packing_format", "auto_round:auto_gptq"))
        kind = packing.partition(":")[2]
        if kind not in self.kinds:
            raise ValueError(f"packing_format {packing}")
        if declared.get("data_type", "int") != "int":
            raise ValueError(f"data_type {declared['data_type']}")
        if declared.get("rotation_config"):
            raise ValueError("rotation_config, a transform of what goes into every matrix,")
        super().__init__({"checkpoint_format": FIRST if kind in ("auto_gptq", "gptq") else SECOND, **_basic(declared)})
        own = dict(declared.get("extra_config") or {})
        self.exact = {name: _grid(block, self.whole) for name, block in own.items()}
        self.searched = [(Pattern(name), self.exact[name]) for name in own if own[name] and _is_pattern(name)]

    def grid(self, names: Sequence[str]) -> Grid | None:
        named = (self.exact[name] for name in names if name in self.exact)
        found = (grid for matcher, grid in self.searched if any(matcher.search(name) for name in names))
        return next(chain(named, found), self.whole)


def _basic(declared: Mapping[str, Any]) -> dict[str, Any]:
    return {name: declared[name] for name in ("bits", "group_size", "sym") if name in declared}


def _is_pattern(name: str) -> bool:
    try:
        Pattern(name)
    except ValueError:
        return False
    return True


def _grid(own: Any, default: Grid | None) -> Grid | None:
    """The grid of a block of the configuration; what it leaves out is the default's; None: not packed.

    ValueError for a block that states none.
    """
    if not isinstance(own, Mapping):
        raise ValueError(f"{shown(own)} in the place of a grid")
    bits = own.get("bits", default.bits if default else FULL_BITS)
    if is_count(bits) and bits >= FULL_BITS:
        return None
    size = own.get("group_size", default.group_size if default else -1)
    return checked_grid(bits, size, own.get("sym", default.symmetric if default else True))
