"""humming's own layout (quant_method humming), which vLLM and SGLang read.

weight int32 [N, K*b/32], a row's codes as one little-endian bit stream; weight_scale [N, G], [N, 1] of whole rows;
zero_point int32 [N*b/32, G] packed alike along the rows, absent where the grid is symmetric, whose codes stand for
themselves less 2**(b-1). A setting may be called by any of the names that humming takes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

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
    shape_of_words,
)
from moeq.models.source import TensorHeader
from moeq_kernels.widths import SUPPORTED_BITS, WORD, group_count

WIDTHS = SUPPORTED_BITS[1:]  # its one bit has another zero point than moeq's
INTEGER = re.compile(r"u?int(\d{1,2})")
BITS, GROUP, GROUP_ROWS = "b_dtype", "weight_scale_group_size", "weight_scale_group_size_n"
KIND, SECOND, ZEROS = "weight_scale_type", "weight_scale_2_type", "has_zero_point"
CALLED = {
    BITS: ("weight_dtype", "dtype"),
    GROUP: ("group_size",),
    GROUP_ROWS: ("group_size_n",),
    KIND: ("scale_type",),
    SECOND: ("scale_2_type",),
}
IGNORED = ("ignored_layers", "ignore", "modules_to_not_convert")


class Humming:
    """One grid for all modules; `dynamic` has what differs (`+:`) and what is left out (`-:`), the first that matches;
    the lists of ignored modules hold parts of names, or patterns after `re:`."""

    anchor = "weight_scale"
    parts: tuple[str, ...] = ("weight", "weight_scale", "zero_point")

    def __init__(self, declared: Mapping[str, Any]) -> None:
        """ValueError for numbers or scales that moeq's grids do not have."""
        self.whole = _grid(declared)
        rules = dict(declared.get("dynamic") or {})
        self.left_out = [Pattern(name[2:]) for name in rules if name.startswith("-")]
        own = {name: rule for name, rule in rules.items() if name.startswith("+")}
        self.rules = [(Pattern(name[2:]), _grid({**declared, **rule})) for name, rule in own.items()]
        ignored = next((list(declared[key]) for key in IGNORED if declared.get(key)), [])
        self.left_out += [Pattern(name[3:] if name.startswith("re:") else f".*{re.escape(name)}") for name in ignored]

    def grid(self, names: Sequence[str]) -> Grid | None:
        if any(matcher.match(name) for matcher in self.left_out for name in names):
            return None
        rules = (grid for matcher, grid in self.rules if any(matcher.match(name) for name in names))
        return next(rules, self.whole)

    def shape(self, headers: Mapping[str, TensorHeader], grid: Grid) -> tuple[int, int]:
        return shape_of_words(headers, grid)

    def check(self, headers: Mapping[str, TensorHeader], grid: Grid, rows: int, inputs: int) -> None:
        if grid.bits not in WIDTHS:
            raise ValueError(f"moeq reads {WIDTHS[0]} to {WIDTHS[-1]} bits of humming")
        if inputs * grid.bits % WORD or (not grid.symmetric and rows * grid.bits % WORD):
            raise ValueError(f"{rows} x {inputs} codes of {grid.bits} bits are no whole number of {WORD}-bit words")
        groups = group_count(inputs, group_length(grid, inputs))
        expect(headers, "weight", ("I32",), (rows, inputs * grid.bits // WORD))
        expect(headers, "weight_scale", FLOATS, (rows, groups))
        if not grid.symmetric:
            expect(headers, "zero_point", ("I32",), (rows * grid.bits // WORD, groups))

    def read(self, parts: Parts, grid: Grid, rows: int, inputs: int) -> Stored:
        from moeq.numerics.layouts import row_stream, zeros_of

        zeros = None if grid.symmetric else zeros_of(parts["zero_point"].mT, grid.bits, rows, less_one=False)
        return read_back(
            row_stream(parts["weight"], grid.bits, inputs), parts["weight_scale"], zeros, grid, inputs, None
        )


def _grid(declared: Mapping[str, Any]) -> Grid:
    """The grid of a configuration; ValueError for one whose numbers are no integers by groups or rows."""
    said = {name: _said(declared, name) for name in CALLED}
    found = INTEGER.fullmatch(str(said[BITS]).lower())
    if found is None:
        raise ValueError(f"{shown(said[BITS])} weights")
    size = said[GROUP] or 0
    if said[KIND] not in (None, "group" if size else "channel") or (said[GROUP_ROWS] or 0) > 1:
        raise ValueError(f"scales by {shown(said[KIND] or 'block')}")
    if said[SECOND] not in (None, "none"):
        raise ValueError(f"second scales by {shown(said[SECOND])}")
    if declared.get("is_fp_zero_point"):
        raise ValueError("zero points between the codes")
    if (declared.get("hadamard_block_size") or 0) > 1:
        raise ValueError("weights that were multiplied by Hadamard matrices")
    return checked_grid(int(found[1]), size or -1, not declared.get(ZEROS))


def _said(declared: Mapping[str, Any], name: str) -> Any:
    """A setting by the first of its names that is there."""
    return next((declared[one] for one in (name, *CALLED[name]) if one in declared), None)
