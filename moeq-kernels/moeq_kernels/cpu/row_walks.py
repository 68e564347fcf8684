"""One row of activations times trellis codes with AVX2, row by row: one load finds the values of several inputs.

Where other blocks have a row of the matrix in every lane, here lanes are inputs side by side: what a table gives for
two or four steps goes into the vector as it is, is multiplied with as many activations, and a row is added up at the
end of its block. Tables have 2**14 places at most: of four steps as bytes, 64 KiB, where k and L are small, else of two
as bf16, which are the upper halves of float32.

Letters: k bits of a step, L of a state, n steps of a table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llvmlite import ir
from llvmlite.ir import Value
from numpy.typing import NDArray

from moeq_kernels import trellis
from moeq_kernels.cpu import lookups
from moeq_kernels.cpu.codes import CODES, LANES, UNIT
from moeq_kernels.cpu.emit import ARGUMENTS, WORD_BYTES, Blocks, Number, Spec
from moeq_kernels.cpu.forms import AVX2_LANES, FORMS
from moeq_kernels.cpu.lanes import I8, I16, I32, I64
from moeq_kernels.cpu.walks import MIDDLE, Walk, table

PLACE_BITS = 14  # of a table, at most
MOST_STEPS, LEAST_STEPS = 4, 2
WIDE = 8  # inputs of a vector
HALVES = (0, 2, 1, 3)  # quarters of a tile's row in the order in which halves of both registers' lanes take them


def takes(spec: Spec) -> bool:
    """Whether a spec is compiled by this file."""
    codes, form = CODES[spec.codes], FORMS[spec.form]
    floats = form.lanes == AVX2_LANES and not form.slices
    return floats and spec.rows == 1 and isinstance(codes, Walk) and codes.trained


def table_of(walk: Walk, steps: int) -> NDArray[np.generic]:
    """What n steps have, [places, n]: int8 of four, the bits of bf16 of two."""
    values = lookups.several(table(walk.bits, walk.state_bits), walk.bits, walk.state_bits, steps)
    signed = values.astype(np.int16) - MIDDLE
    if steps == MOST_STEPS:
        return signed.astype(np.int8)
    return (signed.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


class RowWalks(Blocks):
    """The code of one spec of one row of activations, whose codes have one group."""

    def __init__(self, builder: ir.IRBuilder, spec: Spec, argument: dict[str, Value]) -> None:
        super().__init__(builder, spec, argument)
        walk = self.codes
        assert isinstance(walk, Walk)
        self.walk = walk
        fits = walk.state_bits + (MOST_STEPS - 1) * walk.bits <= PLACE_BITS
        self.steps = MOST_STEPS if fits else LEAST_STEPS
        given = table_of(walk, self.steps)
        self.table = lookups.address_of(self.lanes, f"moeq_{walk.name}_rows", given)
        self.entry = ir.IntType(8 * self.steps * given.itemsize)
        self.slots = lookups.slots(builder, UNIT // self.steps)

    def multiply(self) -> None:
        """As `Blocks.multiply`; zero points count for nothing."""
        self._each(self._multiply_block, LANES * WORD_BYTES, 1)

    def _multiply_block(self, width: int) -> None:
        first = self.at.get()
        self._ask_for_grids(ir.Constant(I64, 0), width)
        for part in self.parts:
            self.at.set(first)
            self.given = Number(self.builder, self.argument["activations"])
            totals = [Number(self.builder, self.lanes.zero) for _ in range(self.form.lanes)]
            with self._times(self.argument["last_units"]):
                self._multiply_rows(totals, part)
                self._next_unit()
                self.given.add(UNIT * WORD_BYTES)
            scale, _ = self._grid(ir.Constant(I64, 0), part, (0.0, 1.0))
            result = self.builder.fmul(self._added_up([total.get() for total in totals]), scale)
            self.lanes.store(result, self.out.get(), part * self.part_bytes)

    def _multiply_rows(self, totals: Sequence[Number], part: int) -> None:
        """A unit of one part's rows."""
        lanes, steps, given = self.lanes, self.steps, self.given.get()
        if not part:
            self._ask_for_codes(1)
        words = self._words(self.at.get(), part)
        for number in range(UNIT // steps):
            tile, first = divmod(number * steps, trellis.TILE)
            place = self.walk.place(lanes, words, tile, first + steps - 1, steps)
            lanes.store(place, self.slots, number * AVX2_LANES * WORD_BYTES)
        for lane, total in enumerate(totals):
            for tile in range(UNIT // trellis.TILE):
                for half, values in enumerate(self._values_of(lane, tile)):
                    at = (tile * trellis.TILE + half * WIDE) * WORD_BYTES
                    total.set(lanes.fma(values, lanes.as_floats(lanes.words(given, at)), total.get()))

    def _values_of(self, lane: int, tile: int) -> list[Value]:
        """A row of a tile, as two vectors."""
        builder, lanes, count = self.builder, self.lanes, trellis.TILE // self.steps
        first = tile * count
        if self.steps == MOST_STEPS:
            halves = [range(first, first + count // 2), range(first + count // 2, first + count)]
            eights = [builder.bitcast(self._entries(lane, half), ir.VectorType(I8, WIDE)) for half in halves]
            return [lanes.to_floats(builder.sext(eight, lanes.word_type)) for eight in eights]
        each = count // len(HALVES)
        order = [first + quarter * each + one for quarter in HALVES for one in range(each)]
        shorts = ir.VectorType(I16, trellis.TILE)
        found, zeros = builder.bitcast(self._entries(lane, order), shorts), ir.Constant(shorts, [0] * trellis.TILE)
        made = []
        for half in (0, 4):
            mask = [place for low in (0, 8) for one in range(4) for place in (0, trellis.TILE + low + half + one)]
            upper = builder.shuffle_vector(zeros, found, ir.Constant(ir.VectorType(I32, trellis.TILE), mask))
            made.append(builder.bitcast(upper, lanes.float_type))
        return made

    def _entries(self, lane: int, numbers: Sequence[int]) -> Value:
        offsets = [(number * AVX2_LANES + lane) * WORD_BYTES for number in numbers]
        places = [lookups.place_at(self.builder, self.slots, offset) for offset in offsets]
        return lookups.entries(self.builder, self.table, self.entry, places)

    def _added_up(self, rows: list[Value]) -> Value:
        """The sum of each vector, side by side."""
        builder, count = self.builder, len(rows)
        even, odd = (ir.Constant(self.lanes.word_type, list(range(first, 2 * count, 2))) for first in (0, 1))
        while len(rows) > 1:
            rows = [
                builder.fadd(*(builder.shuffle_vector(one, other, mask) for mask in (even, odd)))
                for one, other in zip(rows[::2], rows[1::2], strict=True)
            ]
        return rows[0]


def emit(builder: ir.IRBuilder, spec: Spec, arguments: Sequence[Value]) -> None:
    """As `emit.emit`, of a spec that `takes` says."""
    RowWalks(builder, spec, dict(zip(ARGUMENTS, arguments, strict=True))).multiply()
