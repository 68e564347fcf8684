"""Blocks of 16 rows multiplied with whole numbers where the CPU has no dot product of four bytes: AVX2 without AVX-VNNI.

It sums two products of bytes in 16 bits. Such sums are added up as they are for as long as no codes and activations can
fill them, eight times for 4 bits, and widened then; codes of 8 bits, of which two products may be too much already, are
multiplied as two of 4. Sums of 32 bits and of float32 lie in memory, in the first level of cache: registers are there
for those of 16. So are the codes of a unit, unpacked, where they are multiplied with more rows of activations at a time
than there are registers for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

from llvmlite import ir
from llvmlite.ir import Value

from moeq_kernels.cpu.codes import LANES
from moeq_kernels.cpu.emit import ARGUMENTS, LINE_BYTES, WORD_BYTES, Blocks, Number, Spec
from moeq_kernels.cpu.lanes import F32, I64

MOST = (1 << 15) - 1  # of an int16
MOST_ACTIVATION = 128  # of a byte of activations, without its sign
HALF, LOW_HALVES = 4, 0x0F0F0F0F  # bits of one of two parts of a code, and the mask of four of them
SUMS, UNPACKING_SUMS = 12, 8  # of 16 bits that registers hold, and beside what unpacks codes
TOGETHER = {1: 4, 2: 2}  # blocks whose codes are read in turn, by rows


def most_products(largest: int) -> int:
    """How many sums of two products of codes, at most `largest`, an int16 holds: 0 if not even one."""
    return MOST // (2 * MOST_ACTIVATION * largest)


class BytePairs(Blocks):
    """The code of one spec whose form has `byte_pairs`. Sums lie as [blocks, M, slices, parts], totals without slices,
    unpacked codes as [quads, halves, parts]."""

    def __init__(self, builder: ir.IRBuilder, spec: Spec, argument: dict[str, Value]) -> None:
        super().__init__(builder, spec, argument)
        self.quads, self.rows, self.slices = spec.unit // 4, spec.rows, range(self.form.slices)
        most = most_products(self.codes.largest)
        self.most = most or most_products((1 << HALF) - 1)
        self.factors = (1,) if most else (1, 1 << HALF)
        self.side = min(self.rows, SUMS // len(self.slices) // len(self.parts))  # rows at a time
        while self.rows % self.side:
            self.side -= 1
        self.together = TOGETHER.get(self.rows, 1)
        self.row_bytes = len(self.parts) * self.part_bytes  # of totals
        totals = self.together * self.rows * self.row_bytes
        self.totals, self.sums = self._space(totals), self._space(totals * len(self.slices))
        self.unpacked = self._space(self.quads * len(self.factors) * self.row_bytes)
        self.given = Number(builder, argument["activations"])

    def multiply(self) -> None:
        """As `Blocks.multiply`."""
        self._each(self._multiply_blocks, LANES * WORD_BYTES, self.together)

    def _multiply_blocks(self, width: int) -> None:
        builder, totals = self.builder, width * self.rows * self.row_bytes
        self.given.set(self.argument["activations"])
        self._clear(self.totals, totals)
        with self._times(self.argument["groups"]) as index:
            group = index.get()
            self._clear(self.sums, totals * len(self.slices))
            self._ask_for_grids(group, width)
            with self._times(self._units_of(group)):
                ahead = self._ahead(width)
                with self._times(ir.Constant(I64, width)) as block:
                    moved = builder.mul(block.get(), self.stride)
                    for line in range(0, self._unit_bytes, LINE_BYTES):
                        self.lanes.prefetch(builder.add(ahead, moved), line)
                    sums = self._of(self.rows * self.row_bytes * len(self.slices), block.get())
                    self._multiply_unit(builder.add(self.at.get(), moved), builder.add(self.sums, sums))
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

    def _multiply_unit(self, at: Value, sums: Value) -> None:
        """The products of a unit of codes of one block, added to its sums."""
        if self.rows == self.side and self.rows * len(self.slices) * len(self.parts) <= UNPACKING_SUMS:
            self._multiply_rows(self.given.get(), sums, partial(self._codes, at))
            return
        for place, half, part in product(range(self.quads), range(len(self.factors)), self.parts):
            self.lanes.store(self._codes(at, place, half, part), self.unpacked, self._unpacked_at(place, half, part))
        self.lanes.fence()
        with self._times(ir.Constant(I64, self.rows // self.side)) as index:
            given = self.builder.add(self.given.get(), self._of(self.side * WORD_BYTES, index.get()))
            more = self._of(self.side * self.row_bytes * len(self.slices), index.get())
            self._multiply_rows(given, self.builder.add(sums, more), self._unpacked_codes)

    def _codes(self, at: Value, place: int, half: int, part: int) -> Value:
        """Four codes a lane, or a half of each."""
        codes = self.codes.quad(self.lanes, self._words(at, part), place)
        if len(self.factors) == 1:
            return codes
        return self.lanes.masked(self.lanes.shifted(codes, half * HALF), LOW_HALVES)

    def _unpacked_at(self, place: int, half: int, part: int) -> int:
        return ((place * len(self.factors) + half) * len(self.parts) + part) * self.part_bytes

    def _unpacked_codes(self, place: int, half: int, part: int) -> Value:
        return self.lanes.words(self.unpacked, self._unpacked_at(place, half, part))

    def _multiply_rows(self, given: Value, sums: Value, codes_of: Callable[[int, int, int], Value]) -> None:
        """The products of a unit and of as many rows as one goes through; codes_of: a place, a half and a part."""
        lanes = self.lanes
        for half, factor in enumerate(self.factors):
            for first in range(0, self.quads, self.most):
                held: dict[tuple[int, int, int], Value] = {}
                for place in range(first, min(first + self.most, self.quads)):
                    codes = [codes_of(place, half, part) for part in self.parts]
                    for row, slice_ in product(range(self.side), self.slices):
                        word = lanes.word_in_all(given, ((slice_ * self.quads + place) * self.rows + row) * WORD_BYTES)
                        for part in self.parts:
                            found, one = lanes.dot_bytes(codes[part], word), (row, slice_, part)
                            held[one] = lanes.added_shorts(held[one], found) if one in held else found
                    lanes.fence()
                for place, shorts in enumerate(held.values()):
                    total = lanes.words(sums, place * self.part_bytes)
                    lanes.store(lanes.dot_shorts(total, shorts, factor), sums, place * self.part_bytes)

    def _end_block(self, group: Value, block: int) -> None:
        """Totals with the sums of a group; as `Blocks._end_whole_group`."""
        builder, lanes, rows = self.builder, self.lanes, self.rows
        first = builder.add(self.argument["sums"], self._of(2 * rows * WORD_BYTES, group))
        grids = [self._grid(group, part, (0.0, 1.0), block) for part in self.parts]
        byte = lanes.in_all(ir.Constant(F32, 256.0))
        with self._times(ir.Constant(I64, rows)) as index:
            row = builder.add(index.get(), ir.Constant(I64, block * rows))
            sums = builder.add(self.sums, self._of(self.row_bytes * len(self.slices), row))
            totals = builder.add(self.totals, self._of(self.row_bytes, row))
            scales = builder.add(first, self._of(WORD_BYTES, index.get()))
            own_scale, own_sum = lanes.float_in_all(scales, 0), lanes.float_in_all(scales, rows * WORD_BYTES)
            for part, (scale, zero) in enumerate(grids):
                at = [(slice_ * len(self.parts) + part) * self.part_bytes for slice_ in self.slices]
                value = lanes.to_floats(lanes.words(sums, at[0]))
                for lower in at[1:]:
                    value = lanes.fma(value, byte, lanes.to_floats(lanes.words(sums, lower)))
                value = lanes.fma(value, own_scale, builder.fmul(builder.fneg(zero), own_sum))
                total = lanes.as_floats(lanes.words(totals, part * self.part_bytes))
                lanes.store(lanes.fma(scale, value, total), totals, part * self.part_bytes)

    def _put_out(self, block: int) -> None:
        builder = self.builder
        with self._times(ir.Constant(I64, self.rows)) as index:
            row = builder.add(index.get(), ir.Constant(I64, block * self.rows))
            totals = builder.add(self.totals, self._of(self.row_bytes, row))
            out = builder.add(self.out.get(), builder.mul(index.get(), self.argument["out_stride"]))
            for part in self.parts:
                total = self.lanes.words(totals, part * self.part_bytes)
                self.lanes.store(total, out, block * LANES * WORD_BYTES + part * self.part_bytes)


def emit(builder: ir.IRBuilder, spec: Spec, arguments: Sequence[Value]) -> None:
    """As `emit.emit`."""
    argument = dict(zip(ARGUMENTS, arguments, strict=True))
    if spec.rows:
        BytePairs(builder, spec, argument).multiply()
    else:
        Blocks(builder, spec, argument).unpack()
