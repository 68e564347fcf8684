"""Blocks of 16 rows in LLVM's intermediate code: multiplied with rows of activations, or unpacked to values.

What is known when it is compiled stands in a `Spec`, as text, so that numba's cache on disk tells one from another; it
holds a digest of the files that make the code, too. Addresses are whole numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from llvmlite import ir
from llvmlite.ir import Value

from moeq_kernels.cpu.codes import CODES, LANES, Codes
from moeq_kernels.cpu.forms import FORMS, Form
from moeq_kernels.cpu.lanes import F32, I64, Lanes

ACCUMULATORS = 16, 8  # sums side by side, so that no product waits for the last: of 16 lanes, and of fewer
MOST_COPIES = 4  # of them for one row
WORD_BYTES = 4
LINE_BYTES = 64
AHEAD_BYTES = 1 << 13  # that are asked for before they are needed: half as fast again as leaving it to the CPU
ARGUMENTS = (  # of compiled code; those in FLOATS are float32, the others int64
    "codes", "scales", "zeros", "zero_stride", "blocks", "stride", "following", "groups", "units", "last_units",
    "group_inputs", "activations", "sums", "out", "out_stride", "scale_step", "zero_step", "zero_start",
)  # fmt: skip
FLOATS = ("scale_step", "zero_step", "zero_start")


@cache
def _digest() -> str:
    folder = Path(__file__).parent
    text = b"".join(
        (folder / name).read_bytes() for name in ("codes.py", "emit.py", "forms.py", "lanes.py", "tiles.py")
    )
    return hashlib.sha256(text).hexdigest()[:16]


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
        return f"{self.form} {self.codes} {self.unit} {self.rows} {self.dtype or '-'} {_digest()}"

    @classmethod
    def of(cls, text: str) -> Spec:
        form, codes, unit, rows, dtype, _ = text.split()
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
        self.at = Number(builder, argument["codes"])
        self.scales, self.zeros = Number(builder, argument["scales"]), Number(builder, argument["zeros"])
        self.out = Number(builder, argument["out"])
        self.end = builder.add(argument["codes"], builder.mul(argument["blocks"], argument["stride"]))
        self._unit_bytes = spec.unit * sum(self.codes.planes) // 32 * LANES * WORD_BYTES

    @contextmanager
    def _times(self, count: Value) -> Any:
        """A loop that runs at least once."""
        index = Number(self.builder, ir.Constant(I64, 0))
        body = self.builder.append_basic_block()
        done = self.builder.append_basic_block()
        self.builder.branch(body)
        self.builder.position_at_end(body)
        yield index
        index.add(1)
        self.builder.cbranch(self.builder.icmp_signed("<", index.get(), count), body, done)
        self.builder.position_at_end(done)

    def _each(self, block: Callable[[], None], out_step: int) -> None:
        """One block after the other; out_step: bytes from what one puts out to what the next one does."""
        stride, none = self.argument["stride"], ir.Constant(I64, 0)
        shared = self.builder.icmp_signed("==", self.argument["zero_stride"], none)
        zero_step, first = self.builder.select(shared, none, stride), Number(self.builder, self.argument["codes"])
        with self._times(self.argument["blocks"]):
            self.at.set(first.get())
            block()
            first.add(stride)
            self._ask_for_rest(first.get())
            self.scales.add(stride)
            self.zeros.add(zero_step)
            self.out.add(out_step)

    def _ahead(self) -> Value:
        """The address to ask for now: some bytes ahead of the codes, beyond the last block where those end."""
        ahead = self.builder.add(self.at.get(), ir.Constant(I64, AHEAD_BYTES))
        moved = self.builder.sub(self.argument["following"], self.end)
        beyond = self.builder.icmp_unsigned(">=", ahead, self.end)
        return self.builder.add(ahead, self.builder.select(beyond, moved, ir.Constant(I64, 0)))

    def _ask_for_rest(self, end: Value) -> None:
        """What lies ahead as scales and zero points lie behind the codes of a block."""
        if not self.spec.rows:
            return
        lines = self.builder.sdiv(self.builder.sub(end, self.at.get()), ir.Constant(I64, LINE_BYTES))
        with self._times(lines):
            self.lanes.prefetch(self._ahead(), 0)
            self.at.add(LINE_BYTES)

    def _units_of(self, group: Value) -> Value:
        """Units of a group: the last may be shorter."""
        last = self.builder.sub(self.argument["groups"], ir.Constant(I64, 1))
        is_last = self.builder.icmp_signed("==", group, last)
        return self.builder.select(is_last, self.argument["last_units"], self.argument["units"])

    def _words(self, part: int) -> list[list[Value]]:
        """Of each plane the words of one unit."""
        address, offset, words = self.at.get(), part * self.part_bytes, []
        for plane in self.codes.planes:
            count = self.spec.unit * plane // 32
            words.append([self.lanes.words(address, offset + n * LANES * WORD_BYTES) for n in range(count)])
            offset += count * LANES * WORD_BYTES
        return words

    def _next_unit(self) -> None:
        self.at.add(self._unit_bytes)

    def _grid(self, group: Value, part: int, values: tuple[float, float]) -> tuple[Value, Value]:
        """Scale and zero point for `start + step * code` in place of the code: y = scale * (value - zero)."""
        start, step = values
        builder, lanes, skipped = self.builder, self.lanes, part * self.form.lanes
        at_scales = builder.add(self.scales.get(), builder.mul(group, ir.Constant(I64, 2 * LANES)))
        at_zeros = builder.add(self.zeros.get(), builder.mul(group, self.argument["zero_stride"]))
        factor = builder.fmul(self.argument["scale_step"], ir.Constant(F32, 1 / step))
        scale = builder.fmul(lanes.halves(at_scales, 2 * skipped), lanes.in_all(factor))
        zero = builder.fmul(lanes.bytes(at_zeros, skipped), lanes.in_all(self.argument["zero_step"]))
        zero = builder.fadd(zero, lanes.in_all(self.argument["zero_start"]))
        zero = builder.fmul(zero, lanes.in_all(ir.Constant(F32, step)))
        return scale, builder.fadd(zero, lanes.in_all(ir.Constant(F32, start)))

    def multiply(self) -> None:
        """out float32 = sum over groups of scale * (sum of value * activation - zero * sum of activations), [M, 16] of
        one block beside that of the next, rows out_stride bytes apart.

        Activations in int8 are summed as whole numbers; sums are [G, 2, M]: their scale, and their sum times it."""
        self._each(self._multiply_block, LANES * WORD_BYTES)

    def _multiply_block(self) -> None:
        rows = range(self.spec.rows)
        vectors = self.spec.rows * len(self.parts)
        copies = max(1, min(MOST_COPIES, ACCUMULATORS[len(self.parts) > 1] // vectors))
        builder, zero = self.builder, self.lanes.zero
        none = self.lanes.no_word if self.form.int8 else zero
        self.given = Number(builder, self.argument["activations"])
        totals = [[Number(builder, zero) for _ in self.parts] for _ in rows]
        sums = [[[Number(builder, none) for _ in range(copies)] for _ in self.parts] for _ in rows]
        with self._times(self.argument["groups"]) as index:
            group = index.get()
            for number in (one for of_row in sums for of_part in of_row for one in of_part):
                number.set(none)
            with self._times(self._units_of(group)):
                self._multiply_unit(sums)
                self._next_unit()
                self.given.add(self.spec.unit * self.spec.rows * WORD_BYTES // self.form.per_word)
            (self._end_whole_group if self.form.int8 else self._end_group)(group, sums, totals)
        for row in rows:
            to = builder.add(self.out.get(), builder.mul(ir.Constant(I64, row), self.argument["out_stride"]))
            for part in self.parts:
                self.lanes.store(totals[row][part].get(), to, part * self.part_bytes)

    def _multiply_unit(self, sums: Sequence[Sequence[Sequence[Number]]]) -> None:
        given, lanes, rows, ahead = self.given.get(), self.lanes, self.spec.rows, self._ahead()
        for line in range(0, self._unit_bytes, LINE_BYTES):
            lanes.prefetch(ahead, line)
        for part in self.parts:
            words = self._words(part)
            for place in range(self.spec.unit // self.form.per_word):
                values = self._values(words, place)
                for row in range(rows):
                    into, offset = sums[row][part], (place * rows + row) * WORD_BYTES
                    total = into[place % len(into)]
                    if self.form.int8:
                        total.set(lanes.dot_quads(total.get(), values, lanes.word_in_all(given, offset)))
                    elif self.form.pairs:
                        total.set(lanes.dot_pairs(total.get(), values, lanes.word_in_all(given, offset)))
                    else:
                        total.set(lanes.fma(values, lanes.float_in_all(given, offset), total.get()))

    def _values(self, words: Sequence[Sequence[Value]], place: int) -> Value:
        """What is multiplied with a word of activations."""
        if self.form.int8:
            return self.codes.quad(self.lanes, words, place)
        if self.form.pairs:
            return self.codes.pair(self.lanes, words, place)
        return self.codes.single(self.lanes, words, *divmod(place, 2))

    def _end_group(
        self, group: Value, sums: Sequence[Sequence[Sequence[Number]]], totals: Sequence[Sequence[Number]]
    ) -> None:
        builder, lanes, rows = self.builder, self.lanes, self.spec.rows
        at_sums = builder.add(self.argument["sums"], builder.mul(group, ir.Constant(I64, rows * WORD_BYTES)))
        for part in self.parts:
            if self.codes.affine:
                scale, zero = self._grid(group, part, self.codes.values(self.form.pairs))
            for row in range(rows):
                value = sums[row][part][0].get()
                for other in sums[row][part][1:]:
                    value = builder.fadd(value, other.get())
                total = totals[row][part]
                if self.codes.affine:
                    value = builder.fsub(value, builder.fmul(zero, lanes.float_in_all(at_sums, row * WORD_BYTES)))
                    total.set(lanes.fma(scale, value, total.get()))
                else:
                    total.set(builder.fadd(value, total.get()))

    def _end_whole_group(
        self, group: Value, sums: Sequence[Sequence[Sequence[Number]]], totals: Sequence[Sequence[Number]]
    ) -> None:
        builder, lanes, rows = self.builder, self.lanes, self.spec.rows
        scales = builder.add(self.argument["sums"], builder.mul(group, ir.Constant(I64, 2 * rows * WORD_BYTES)))
        for part in self.parts:
            scale, zero = self._grid(group, part, (0.0, 1.0))
            below = builder.fneg(zero)
            for row in range(rows):
                value = sums[row][part][0].get()
                for other in sums[row][part][1:]:
                    value = builder.add(value, other.get())
                moved = builder.fmul(below, lanes.float_in_all(scales, (rows + row) * WORD_BYTES))
                value = lanes.fma(lanes.to_floats(value), lanes.float_in_all(scales, row * WORD_BYTES), moved)
                totals[row][part].set(lanes.fma(scale, value, totals[row][part].get()))

    def unpack(self) -> None:
        """Values of all inputs and some more at the end to out, [K and up to a unit more, 16], rows out_stride bytes
        apart, one block beside the next: exactly those of `PackedWeight.dequantize`."""
        self._each(self._unpack_block, LANES * self._size)

    @property
    def _size(self) -> int:
        """Bytes of an unpacked value."""
        return 2 if self.spec.dtype == "bfloat16" else 4

    def _unpack_block(self) -> None:
        size, stride, out = self._size, self.argument["out_stride"], self.out.get()
        with self._times(self.argument["groups"]) as index:
            group = index.get()
            first = self.builder.mul(group, self.argument["group_inputs"])
            to = Number(self.builder, self.builder.add(out, self.builder.mul(first, stride)))
            values = self.codes.values(False)
            grids = [self._grid(group, part, values) for part in self.parts] if self.codes.affine else []
            with self._times(self._units_of(group)):
                words = [self._words(part) for part in self.parts]
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
