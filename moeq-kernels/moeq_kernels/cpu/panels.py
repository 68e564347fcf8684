"""Blocks of 16 rows where registers are few: sums lie in memory, in the first level of cache, and so do unpacked codes.

The codes of a unit are unpacked once, whatever number of rows of activations they are multiplied with, as many of these
at a time as there are registers for.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from llvmlite import ir
from llvmlite.ir import Value

from moeq_kernels.cpu.codes import LANES
from moeq_kernels.cpu.emit import ARGUMENTS, WORD_BYTES, Blocks, Number, Spec
from moeq_kernels.cpu.lanes import I64

SIDE = 4  # rows at a time whose sums in float32 registers hold
FENCED = 4  # inputs, after which nothing that was loaded for them is kept


class Panels(Blocks):
    """The code of one spec: what a unit adds to sums, and a group's sums to totals, is its own kinds'.

    Sums lie as [blocks, M, kinds, parts], totals without kinds; each is a vector.
    """

    kinds = 1  # of sums of a row and part
    together = 1  # blocks whose codes are read in turn
    unpacked_bytes = 0  # of a unit

    def __init__(self, builder: ir.IRBuilder, spec: Spec, argument: dict[str, Value]) -> None:
        super().__init__(builder, spec, argument)
        self.rows = spec.rows
        self.row_bytes = len(self.parts) * self.part_bytes  # of totals
        self.given = Number(builder, argument["activations"])

    def multiply(self) -> None:
        """As `Blocks.multiply`."""
        totals = self.together * self.rows * self.row_bytes
        self.totals, self.sums = self._space(totals), self._space(totals * self.kinds)
        self.unpacked = self._space(self.unpacked_bytes)
        self._each(self._multiply_blocks, LANES * WORD_BYTES, self.together)

    def _multiply_blocks(self, width: int) -> None:
        builder, totals = self.builder, width * self.rows * self.row_bytes
        self.given.set(self.argument["activations"])
        self._clear(self.totals, totals)
        with self._times(self.argument["groups"]) as index:
            group = index.get()
            self._clear(self.sums, totals * self.kinds)
            self._ask_for_grids(group, width)
            with self._times(self._units_of(group)):
                self._ask_for_codes(width)
                with self._times(ir.Constant(I64, width)) as block:
                    moved = builder.mul(block.get(), self.stride)
                    sums = self._of(self.rows * self.row_bytes * self.kinds, block.get())
                    self._multiply_codes(builder.add(self.at.get(), moved), builder.add(self.sums, sums))
                self._next_unit()
                self.given.add(self.spec.unit * self.rows * self.form.words // 4 * WORD_BYTES)
            for block in range(width):
                self._end_block(group, block)
        for block in range(width):
            self._put_out(block)

    def _clear(self, address: Value, nbytes: int) -> None:
        """Zeros in place of sums."""
        step = LANES * WORD_BYTES
        with self._times(ir.Constant(I64, nbytes // step)) as index:
            for offset in range(0, step, self.part_bytes):
                self.lanes.store(self.lanes.no_word, self.builder.add(address, self._of(step, index.get())), offset)

    def _multiply_codes(self, at: Value, sums: Value) -> None:
        """The products of a unit of codes of one block, added to its sums."""
        raise NotImplementedError

    def _end_block(self, group: Value, block: int) -> None:
        """Totals with the sums of a group."""
        raise NotImplementedError

    def _of_row(self, block: int, row: Value) -> tuple[Value, Value]:
        """Addresses of the sums and totals of a row of a block."""
        row = self.builder.add(row, ir.Constant(I64, block * self.rows))
        sums = self.builder.add(self.sums, self._of(self.row_bytes * self.kinds, row))
        return sums, self.builder.add(self.totals, self._of(self.row_bytes, row))

    def _put_out(self, block: int) -> None:
        with self._times(ir.Constant(I64, self.rows)) as index:
            _, totals = self._of_row(block, index.get())
            out = self.builder.add(self.out.get(), self.builder.mul(index.get(), self.argument["out_stride"]))
            for part in self.parts:
                total = self.lanes.words(totals, part * self.part_bytes)
                self.lanes.store(total, out, block * LANES * WORD_BYTES + part * self.part_bytes)


class FloatPanels(Panels):
    """Activations are float32 as they are; unpacked values lie as [inputs, parts]."""

    def __init__(self, builder: ir.IRBuilder, spec: Spec, argument: dict[str, Value]) -> None:
        super().__init__(builder, spec, argument)
        self.unpacked_bytes = spec.unit * self.row_bytes
        self.side = min(SIDE, spec.rows)

    def _multiply_codes(self, at: Value, sums: Value) -> None:
        for part in self.parts:
            words = self._words(at, part)
            for place in range(self.spec.unit):
                value = self.codes.single(self.lanes, words, *divmod(place, 2))
                self.lanes.store(value, self.unpacked, place * self.row_bytes + part * self.part_bytes)
        self.lanes.fence()
        with self._times(ir.Constant(I64, self.rows // self.side)) as index:
            given = self.builder.add(self.given.get(), self._of(self.side * WORD_BYTES, index.get()))
            self._multiply_rows(given, self.builder.add(sums, self._of(self.side * self.row_bytes, index.get())))

    def _floats(self, address: Value, offset: int) -> Value:
        return self.lanes.as_floats(self.lanes.words(address, offset))

    def _multiply_rows(self, given: Value, sums: Value) -> None:
        lanes, every = self.lanes, list(product(range(self.side), self.parts))
        held = {(row, part): self._floats(sums, row * self.row_bytes + part * self.part_bytes) for row, part in every}
        for place in range(self.spec.unit):
            values = [
                self._floats(self.unpacked, place * self.row_bytes + part * self.part_bytes) for part in self.parts
            ]
            for row in range(self.side):
                one = lanes.float_in_all(given, (place * self.rows + row) * WORD_BYTES)
                for part in self.parts:
                    held[row, part] = lanes.fma(values[part], one, held[row, part])
            if place % FENCED == FENCED - 1:
                lanes.fence()
        for (row, part), total in held.items():
            lanes.store(total, sums, row * self.row_bytes + part * self.part_bytes)

    def _end_block(self, group: Value, block: int) -> None:
        builder, lanes = self.builder, self.lanes
        of_group = builder.add(self.argument["sums"], self._of(self.rows * WORD_BYTES, group))
        grids = [self._grid(group, part, self.codes.values(False), block) for part in self.parts if self.codes.affine]
        with self._times(ir.Constant(I64, self.rows)) as index:
            sums, totals = self._of_row(block, index.get())
            given = lanes.float_in_all(builder.add(of_group, self._of(WORD_BYTES, index.get())), 0)
            for part in self.parts:
                value, total = (self._floats(address, part * self.part_bytes) for address in (sums, totals))
                if grids:
                    scale, zero = grids[part]
                    total = lanes.fma(scale, builder.fsub(value, builder.fmul(zero, given)), total)
                else:
                    total = builder.fadd(value, total)
                lanes.store(total, totals, part * self.part_bytes)


def emit(builder: ir.IRBuilder, spec: Spec, arguments: Sequence[Value]) -> None:
    """As `emit.emit`, of a form's rows from `panels` on."""
    FloatPanels(builder, spec, dict(zip(ARGUMENTS, arguments, strict=True))).multiply()
