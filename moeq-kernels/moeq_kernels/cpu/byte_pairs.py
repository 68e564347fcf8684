"""Blocks of 16 rows times whole numbers where the CPU has no dot product of four bytes: AVX2 without AVX-VNNI.

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

from moeq_kernels.cpu.emit import ARGUMENTS, WORD_BYTES, Blocks, Spec
from moeq_kernels.cpu.lanes import F32, I64
from moeq_kernels.cpu.panels import Panels

MOST = (1 << 15) - 1  # of an int16
MOST_ACTIVATION = 128  # of a byte of activations, without its sign
HALF, LOW_HALVES = 4, 0x0F0F0F0F  # bits of one of two parts of a code, and the mask of four of them
SUMS, UNPACKING_SUMS = 12, 8  # of 16 bits that registers hold, and beside what unpacks codes
TOGETHER = {1: 2, 2: 2}  # blocks whose codes are read in turn, by rows


def most_products(largest: int) -> int:
    """How many sums of two products of codes, at most `largest`, an int16 holds: 0 if not even one."""
    return MOST // (2 * MOST_ACTIVATION * max(1, largest))


class BytePairs(Panels):
    """The code of one spec whose form has `byte_pairs`. Kinds of sums are those of each byte of activations; unpacked
    codes lie as [quads, halves, parts]."""

    def __init__(self, builder: ir.IRBuilder, spec: Spec, argument: dict[str, Value]) -> None:
        super().__init__(builder, spec, argument)
        self.quads, self.slices = spec.unit // 4, range(self.form.slices)
        most = most_products(self.codes.largest)
        self.most = most or most_products((1 << HALF) - 1)
        self.factors = (1,) if most else (1, 1 << HALF)
        self.side = min(self.rows, SUMS // len(self.slices) // len(self.parts))  # rows at a time
        while self.rows % self.side:
            self.side -= 1
        self.kinds, self.together = len(self.slices), TOGETHER.get(self.rows, 1)
        self.unpacked_bytes = self.quads * len(self.factors) * self.row_bytes

    def _multiply_codes(self, at: Value, sums: Value) -> None:
        """The products of a unit of codes of one block, added to its sums."""
        few = self.rows == self.side and self.rows * len(self.slices) * len(self.parts) <= UNPACKING_SUMS
        if few and not self.codes.walked:  # what is looked up is looked up once
            self._multiply_rows(self.given.get(), sums, partial(self._codes, at))
            return
        for place, part in product(range(self.quads), self.parts):
            for half, codes in enumerate(self._halves(at, place, part)):
                self.lanes.store(codes, self.unpacked, self._unpacked_at(place, half, part))
        self.lanes.fence()
        with self._times(ir.Constant(I64, self.rows // self.side)) as index:
            given = self.builder.add(self.given.get(), self._of(self.side * WORD_BYTES, index.get()))
            more = self._of(self.side * self.row_bytes * len(self.slices), index.get())
            self._multiply_rows(given, self.builder.add(sums, more), self._unpacked_codes)

    def _codes(self, at: Value, place: int, half: int, part: int) -> Value:
        """Four codes a lane, or a half of each."""
        return self._halves(at, place, part)[half]

    def _halves(self, at: Value, place: int, part: int) -> list[Value]:
        codes = self.codes.quad(self.lanes, self._words(at, part), place)
        if len(self.factors) == 1:
            return [codes]
        return [self.lanes.masked(self.lanes.shifted(codes, half * HALF), LOW_HALVES) for half in (0, 1)]

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
        """As `Blocks._end_whole_group`."""
        builder, lanes = self.builder, self.lanes
        first = builder.add(self.argument["sums"], self._of(2 * self.rows * WORD_BYTES, group))
        grids = [self._grid(group, part, (0.0, 1.0), block) for part in self.parts]
        byte = lanes.in_all(ir.Constant(F32, 256.0))
        with self._times(ir.Constant(I64, self.rows)) as index:
            sums, totals = self._of_row(block, index.get())
            scales = builder.add(first, self._of(WORD_BYTES, index.get()))
            own_scale, own_sum = lanes.float_in_all(scales, 0), lanes.float_in_all(scales, self.rows * WORD_BYTES)
            for part, (scale, zero) in enumerate(grids):
                at = [(slice_ * len(self.parts) + part) * self.part_bytes for slice_ in self.slices]
                value = lanes.to_floats(lanes.words(sums, at[0]))
                for lower in at[1:]:
                    value = lanes.fma(value, byte, lanes.to_floats(lanes.words(sums, lower)))
                value = lanes.fma(value, own_scale, builder.fmul(builder.fneg(zero), own_sum))
                total = lanes.as_floats(lanes.words(totals, part * self.part_bytes))
                lanes.store(lanes.fma(scale, value, total), totals, part * self.part_bytes)


def emit(builder: ir.IRBuilder, spec: Spec, arguments: Sequence[Value]) -> None:
    """As `emit.emit`."""
    argument = dict(zip(ARGUMENTS, arguments, strict=True))
    if spec.rows:
        BytePairs(builder, spec, argument).multiply()
    else:
        Blocks(builder, spec, argument).unpack()
