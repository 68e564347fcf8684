"""Blocks of 16 rows in LLVM's intermediate code: multiplied with rows of activations, or unpacked to values.

What is known when it is compiled stands in a `Spec`, as text, so that what is kept on disk tells one from another.
Addresses are whole numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Any

from llvmlite import ir
from llvmlite.ir import Value

from moeq_kernels.cpu.codes import CODES, LANES, Codes
from moeq_kernels.cpu.forms import FORMS, Form, is_zen
from moeq_kernels.cpu.lanes import F32, I8, I64, Lanes

ACCUMULATORS = 16, 8  # sums side by side, so that no product waits for the last: of 16 lanes, and of fewer
MOST_COPIES = 4  # of them for one row
TOGETHER = {1: 4, 2: 2}  # blocks side by side, by rows: Intel's CPUs read several places in turn; a Zen 4 lost a fifth
WORD_BYTES = 4
LINE_BYTES = 64
AHEAD, AGAIN = 8 << 10, 4 << 10  # bytes of codes that are asked for before they are needed, see `_ask_for_codes`
ARGUMENTS = (  # of compiled code; those in FLOATS are float32, the others int64
    "codes", "scales", "zeros", "zero_stride", "blocks", "stride", "following", "groups", "units", "last_units",
    "group_inputs", "activations", "sums", "out", "out_stride", "scale_step", "zero_step", "zero_start",
)  # fmt: skip
FLOATS = ("scale_step", "zero_step", "zero_start")


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a block is compiled for: a form, a kind of codes, inputs of a unit, and either rows of activations [M] or,
    with rows 0, the dtype that it is unpacked to: `bfloat16` or `float32`."""

    form: str
    codes: str
    unit: int
    rows: int
    dtype: str = ""

    def text(self) -> str:
        return f"{self.form} {self.codes} {self.unit} {self.rows} {self.dtype or '-'}"

    @classmethod
    def of(cls, text: str) -> Spec:
        form, codes, unit, rows, dtype = text.split()
        return cls(form=form, codes=codes, unit=int(unit), rows=int(rows), dtype=dtype.strip("-"))


class Number:
    """A variable of the compiled code."""

    def __init__(self, builder: ir.IRBuilder, first: Value) -> None:
        self.builder = builder
        with builder.goto_entry_block():
            self.place = builder.alloca(first.type)
        self.set(first)

    def get(self) -> Value:
        return self.builder.load(self.place)

    def set(self, value: Value) -> None:
        self.builder.store(value, self.place)

    def add(self, more: Value | int) -> None:
        self.set(self.builder.add(self.get(), ir.Constant(I64, more) if isinstance(more, int) else more))


Sums = dict[tuple[int, int, int], list[list[Number]]]  # of a block, part and row, those of each byte side by side
Totals = dict[tuple[int, int, int], Number]


class Blocks:
    """The code of one spec; `argument`: the values of ARGUMENTS by name.

    Codes, scales and zero points of the next of `blocks` lie `stride` bytes further on; what is read after the last of
    them begins at `following`, so that it has been asked for, too.
    """

    def __init__(self, builder: ir.IRBuilder, spec: Spec, argument: dict[str, Value]) -> None:
        self.builder, self.spec, self.argument = builder, spec, argument
        self.form: Form = FORMS[spec.form]
        self.codes: Codes = CODES[spec.codes]
        self.lanes = Lanes(builder, self.form.lanes)
        self.parts = range(LANES // self.form.lanes)
        self.part_bytes = self.form.lanes * WORD_BYTES
        self.stride, none = argument["stride"], ir.Constant(I64, 0)
        shared = builder.icmp_signed("==", argument["zero_stride"], none)
        self.zero_step = builder.select(shared, none, self.stride)
        self.first = Number(builder, argument["codes"])
        self.at = Number(builder, argument["codes"])
        self.scales, self.zeros = Number(builder, argument["scales"]), Number(builder, argument["zeros"])
        self.out = Number(builder, argument["out"])
        self._unit_bytes = spec.unit * sum(self.codes.planes) // 32 * LANES * WORD_BYTES

    def _space(self, nbytes: int) -> Value:
        """The address of some memory on the stack."""
        with self.builder.goto_entry_block():
            place = self.builder.alloca(ir.ArrayType(I8, nbytes))
            place.align = LINE_BYTES
        return self.builder.ptrtoint(place, I64)

    def _plus(self, address: Value, offset: int) -> Value:
        return self.builder.add(address, ir.Constant(I64, offset)) if offset else address

    @contextmanager
    def _times(self, count: Value) -> Any:
        """A loop."""
        builder, index = self.builder, Number(self.builder, ir.Constant(I64, 0))
        body, done = builder.append_basic_block(), builder.append_basic_block()
        builder.cbranch(builder.icmp_signed(">", count, ir.Constant(I64, 0)), body, done)
        builder.position_at_end(body)
        yield index
        index.add(1)
        builder.cbranch(builder.icmp_signed("<", index.get(), count), body, done)
        builder.position_at_end(done)

    def _each(self, block: Callable[[int], None], out_step: int, together: int) -> None:
        """One block after the other, so many side by side and then what is left; out_step: bytes from what one puts out
        to what the next one does."""
        blocks, several = self.argument["blocks"], ir.Constant(I64, together)
        if together > 1:
            self._some(block, out_step, together, self.builder.sdiv(blocks, several))
        self._some(block, out_step, 1, self.builder.srem(blocks, several) if together > 1 else blocks)

    def _some(self, block: Callable[[int], None], out_step: int, width: int, times: Value) -> None:
        builder, argument = self.builder, self.argument
        end = builder.add(argument["codes"], builder.mul(argument["blocks"], self.stride))
        with self._times(times):
            first = self.first.get()
            after = builder.add(first, self._of(width, self.stride))
            self.next = builder.select(builder.icmp_unsigned(">=", after, end), argument["following"], after)
            self.at.set(first)
            block(width)
            self.first.set(after)
            self.scales.add(self._of(width, self.stride))
            self.zeros.add(self._of(width, self.zero_step))
            self.out.add(width * out_step)

    def _of(self, count: int, step: Value) -> Value:
        return self.builder.mul(step, ir.Constant(I64, count))

    def _units_of(self, group: Value) -> Value:
        """Units of a group: the last may be shorter."""
        last = self.builder.sub(self.argument["groups"], ir.Constant(I64, 1))
        is_last = self.builder.icmp_signed("==", group, last)
        return self.builder.select(is_last, self.argument["last_units"], self.argument["units"])

    def _words(self, address: Value, part: int) -> list[list[Value]]:
        """Of each plane the words of one unit."""
        offset, words = part * self.part_bytes, []
        for plane in self.codes.planes:
            count = self.spec.unit * plane // 32
            words.append([self.lanes.words(address, offset + n * LANES * WORD_BYTES) for n in range(count)])
            offset += count * LANES * WORD_BYTES
        if self.codes.walked:
            skipped = part * self.part_bytes - (part - 1) % len(self.parts) * self.part_bytes
            before = self.builder.sub(address, ir.Constant(I64, skipped))
            offsets = [part * self.part_bytes + n * LANES * WORD_BYTES for n in range(len(words[0]))]
            others = [self.lanes.words(before, offset) for offset in offsets]
            words.append([self.lanes.after(*both) for both in zip(words[0], others, strict=True)])
        return words

    def _next_unit(self) -> None:
        self.at.add(self._unit_bytes)

    def _grid(self, group: Value, part: int, values: tuple[float, float], block: int = 0) -> tuple[Value, Value]:
        """Scale and zero point for `start + step * code` in place of the code: y = scale * (value - zero)."""
        start, step = values
        builder, lanes, skipped = self.builder, self.lanes, part * self.form.lanes
        at_scales = builder.add(self.scales.get(), builder.mul(group, ir.Constant(I64, 2 * LANES)))
        at_zeros = builder.add(self.zeros.get(), builder.mul(group, self.argument["zero_stride"]))
        at_scales = builder.add(at_scales, self._of(block, self.stride))
        at_zeros = builder.add(at_zeros, self._of(block, self.zero_step))
        factor = builder.fmul(self.argument["scale_step"], ir.Constant(F32, 1 / step))
        scale = builder.fmul(lanes.halves(at_scales, 2 * skipped), lanes.in_all(factor))
        of_zero = builder.fmul(self.argument["zero_step"], ir.Constant(F32, step))
        moved = builder.fmul(self.argument["zero_start"], ir.Constant(F32, step))
        moved = builder.fadd(moved, ir.Constant(F32, start))
        return scale, lanes.fma(lanes.bytes(at_zeros, skipped), lanes.in_all(of_zero), lanes.in_all(moved))

    def multiply(self) -> None:
        """out float32 = sum over groups of scale * (sum of value * activation - zero * sum of activations), [M, 16] of
        one block beside that of the next, rows out_stride bytes apart.

        Activations that are whole numbers are summed as such, the bytes of each apart; sums are [G, 2, M]: their scale,
        and their sum times it."""
        together = TOGETHER.get(self.spec.rows, 1) if self.form.slices and not is_zen() else 1
        self._each(self._multiply_blocks, LANES * WORD_BYTES, together)

    def _multiply_blocks(self, width: int) -> None:
        """So many blocks side by side."""
        slices = max(1, self.form.slices)
        vectors = self.spec.rows * len(self.parts) * width * slices
        copies = range(max(1, min(MOST_COPIES, ACCUMULATORS[len(self.parts) > 1] // vectors)))
        builder, zero = self.builder, self.lanes.zero
        none = self.lanes.no_word if self.form.slices else zero
        self.given = Number(builder, self.argument["activations"])
        every = list(product(range(width), self.parts, range(self.spec.rows)))
        totals = {one: Number(builder, zero) for one in every}
        sums = {one: [[Number(builder, none) for _ in copies] for _ in range(slices)] for one in every}
        with self._times(self.argument["groups"]) as index:
            group = index.get()
            for number in (number for of_one in sums.values() for of_slice in of_one for number in of_slice):
                number.set(none)
            self._ask_for_grids(group, width)
            with self._times(self._units_of(group)):
                self._multiply_unit(sums, width)
                self._next_unit()
                self.given.add(self.spec.unit * self.spec.rows * self.form.words // 4 * WORD_BYTES)
            for block, part in product(range(width), self.parts):
                (self._end_whole_group if self.form.slices else self._end_group)(group, block, part, sums, totals)
        for (block, part, row), total in totals.items():
            to = builder.add(self.out.get(), builder.mul(ir.Constant(I64, row), self.argument["out_stride"]))
            self.lanes.store(total.get(), to, block * LANES * WORD_BYTES + part * self.part_bytes)

    def _ask_for_grids(self, group: Value, width: int) -> None:
        """Scales and zero points of a group of the next blocks, which lie behind their codes."""
        if not self.codes.affine:
            return
        builder, step = self.builder, self.argument["zero_stride"]
        moved = builder.sub(self.next, self.first.get())
        scales = builder.add(builder.add(self.scales.get(), moved), builder.mul(group, ir.Constant(I64, 2 * LANES)))
        own = builder.icmp_signed("==", step, ir.Constant(I64, 0))  # zero points that all blocks share
        moved = builder.select(own, ir.Constant(I64, 0), moved)
        zeros = builder.add(builder.add(self.zeros.get(), moved), builder.mul(group, step))
        for block in range(width):
            self.lanes.prefetch(builder.add(scales, self._of(block, self.stride)), 0)
            self.lanes.prefetch(builder.add(zeros, self._of(block, self.zero_step)), 0)

    def _ask_for_codes(self, width: int) -> None:
        """Of all blocks side by side together, AHEAD bytes ahead of a unit into the second level of cache, and AGAIN
        bytes ahead of it once more: a Zen 4 does not bring all that is asked for. Layers are read 1.1 to 1.25 times as
        fast as with the second time 512 bytes ahead into the first level, which would hold little else if all came
        there."""
        builder = self.builder
        asked = [self._codes_ahead(distance // width) for distance in (AHEAD, AGAIN)]
        for block in range(width):
            moved = self._of(block, self.stride)
            for line, at in product(range(0, self._unit_bytes, LINE_BYTES), asked):
                self.lanes.prefetch(builder.add(at, moved), line, level=2)

    def _codes_ahead(self, distance: int) -> Value:
        """The address so many bytes ahead of a unit, a whole block's codes at most; beyond the end of the first block
        in the next one."""
        builder, end = self.builder, self.scales.get()
        reach, most = builder.sub(end, self.first.get()), ir.Constant(I64, distance)
        reach = builder.select(builder.icmp_unsigned("<", reach, most), reach, most)
        ahead = builder.add(self.at.get(), reach)
        beyond = builder.icmp_unsigned(">=", ahead, end)
        return builder.add(ahead, builder.select(beyond, builder.sub(self.next, end), ir.Constant(I64, 0)))

    def _multiply_unit(self, sums: Sums, width: int) -> None:
        given, rows = self.given.get(), self.spec.rows
        steps = [self._of(block, self.stride) for block in range(width)]
        self._ask_for_codes(width)
        per_value = 4 // (self.form.words // max(1, self.form.slices))
        for part in self.parts:
            words = [self._words(self.builder.add(self.at.get(), step), part) for step in steps]
            for place in range(self.spec.unit // per_value):
                for block in range(width):
                    values = self._values(words[block], place)
                    for row in range(rows):
                        for number, copies in enumerate(sums[block, part, row]):
                            at = number * (self.spec.unit // per_value) + place
                            self._add(copies[place % len(copies)], values, given, (at * rows + row) * WORD_BYTES)

    def _add(self, total: Number, values: Value, given: Value, offset: int) -> None:
        """The products of values and a word of activations."""
        lanes = self.lanes
        if self.form.slices:
            total.set(lanes.dot_quads(total.get(), values, lanes.word_in_all(given, offset)))
        elif self.form.pairs:
            total.set(lanes.dot_pairs(total.get(), values, lanes.word_in_all(given, offset)))
        else:
            total.set(lanes.fma(values, lanes.float_in_all(given, offset), total.get()))

    def _values(self, words: Sequence[Sequence[Value]], place: int) -> Value:
        """What is multiplied with a word of activations."""
        if self.form.slices:
            return self.codes.quad(self.lanes, words, place)
        if self.form.pairs:
            return self.codes.pair(self.lanes, words, place)
        return self.codes.single(self.lanes, words, *divmod(place, 2))

    def _end_group(self, group: Value, block: int, part: int, sums: Sums, totals: Totals) -> None:
        builder, lanes, rows = self.builder, self.lanes, self.spec.rows
        at_sums = builder.add(self.argument["sums"], builder.mul(group, ir.Constant(I64, rows * WORD_BYTES)))
        if self.codes.affine:
            scale, zero = self._grid(group, part, self.codes.values(self.form.pairs), block)
        for row in range(rows):
            value = reduce(builder.fadd, [one.get() for one in sums[block, part, row][0]])
            total = totals[block, part, row]
            if self.codes.affine:
                value = builder.fsub(value, builder.fmul(zero, lanes.float_in_all(at_sums, row * WORD_BYTES)))
                total.set(lanes.fma(scale, value, total.get()))
            else:
                total.set(builder.fadd(value, total.get()))

    def _end_whole_group(self, group: Value, block: int, part: int, sums: Sums, totals: Totals) -> None:
        builder, lanes, rows = self.builder, self.lanes, self.spec.rows
        scales = builder.add(self.argument["sums"], builder.mul(group, ir.Constant(I64, 2 * rows * WORD_BYTES)))
        scale, zero = self._grid(group, part, (0.0, 1.0), block)
        below = builder.fneg(zero)
        byte = lanes.in_all(ir.Constant(F32, 256.0))
        for row in range(rows):
            slices = [reduce(builder.add, [one.get() for one in copies]) for copies in sums[block, part, row]]
            value = lanes.to_floats(slices[0])
            for lower in slices[1:]:
                value = lanes.fma(value, byte, lanes.to_floats(lower))
            moved = builder.fmul(below, lanes.float_in_all(scales, (rows + row) * WORD_BYTES))
            value = lanes.fma(value, lanes.float_in_all(scales, row * WORD_BYTES), moved)
            total = totals[block, part, row]
            total.set(lanes.fma(scale, value, total.get()))

    def unpack(self) -> None:
        """Values of all inputs and some more at the end to out, [K and up to a unit more, 16], rows out_stride bytes
        apart, one block beside the next: exactly those of `PackedWeight.dequantize`."""
        self._each(self._unpack_block, LANES * self._size, 1)

    @property
    def _size(self) -> int:
        """Bytes of an unpacked value."""
        return 2 if self.spec.dtype == "bfloat16" else 4

    def _unpack_block(self, width: int) -> None:
        size, stride, out = self._size, self.argument["out_stride"], self.out.get()
        with self._times(self.argument["groups"]) as index:
            group = index.get()
            first = self.builder.mul(group, self.argument["group_inputs"])
            to = Number(self.builder, self.builder.add(out, self.builder.mul(first, stride)))
            values = self.codes.values(False)
            grids = [self._grid(group, part, values) for part in self.parts] if self.codes.affine else []
            with self._times(self._units_of(group)):
                words = [self._words(self.at.get(), part) for part in self.parts]
                for at in range(self.spec.unit):
                    for part in self.parts:
                        values = self.codes.single(self.lanes, words[part], *divmod(at, 2))
                        if grids:
                            values = self.builder.fmul(self.builder.fsub(values, grids[part][1]), grids[part][0])
                        stored = self.lanes.to_bf16(values, self.form.pairs) if size == 2 else values
                        self.lanes.store(stored, to.get(), part * self.form.lanes * size)
                    to.add(stride)
                self._next_unit()


def emit(builder: ir.IRBuilder, spec: Spec, arguments: Sequence[Value]) -> None:
    """The code of a spec, which ends where the builder stands; arguments: as ARGUMENTS."""
    blocks = Blocks(builder, spec, dict(zip(ARGUMENTS, arguments, strict=True)))
    work: Callable[[], None] = blocks.multiply if spec.rows else blocks.unpack
    work()
