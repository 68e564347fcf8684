"""Rows of activations as compiled blocks read them, with their sums by group; compiled.

Activations stay as they are, one a word, or are rounded to bf16, two a word; or those of a group become whole numbers
of one or three bytes with a common scale, four a word for each byte, as dot products of bytes want them:

    1 byte    the scale is the largest divided by 127: it rounds activations to int8
    3 bytes   the scale is a power of two, so that the largest is between 2**21 and 2**22: bf16 activations of at least
              1/16384 of the largest are exact, others are moved by 2**-22 of it at most. The bytes are those of a
              number to the base 256 whose digits are signed.

Words of a unit of whole numbers: for each byte, the highest first, those of all fours, in the order 0, 2, 1, 3 of the
codes. Letters as in `schedule`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.ir import Value
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from moeq_kernels.cpu.codes import UNIT as FULL_UNIT
from moeq_kernels.cpu.columns import (
    ALIKE,
    COUNT,
    EXPERT,
    FILLED,
    FIRST,
    GROUP,
    GROUPS,
    LAST,
    LAST_UNITS,
    PLACE,
    SIZE,
    SLOT,
    UNIT,
    UNITS,
)
from moeq_kernels.cpu.forms import TILED
from moeq_kernels.cpu.kept_code import internal
from moeq_kernels.cpu.memory import address_of, bits_of, float_of, zero_uint32s
from moeq_kernels.cpu.tile_rows import lay_out_units

WORDS = TILED - 1  # what a layout has of its number of words
VECTOR = 16  # activations that become whole numbers at once
SIZE_BITS = 0x7FFFFFFF  # of a float32, without its sign
ORDER = 0, 2, 1, 3  # of four in a word
DIGITS = 0x808080  # added, and taken as bits that differ, it makes the bytes of a number signed digits
TO_WHOLE = 1.5 * 2**23  # added, it leaves a whole number in the low bits of a float32, moved by those of itself
TO_WHOLE_BITS = 0x4B400000

_compile = internal()
_sums = internal(fastmath={"reassoc", "nsz", "contract"})


@_compile  # type: ignore[untyped-decorator]
def is_whole(layout):  # type: ignore[no-untyped-def]
    """Whether activations become whole numbers."""
    return layout == 1 or layout == 3


@_compile  # type: ignore[untyped-decorator]
def shared(table, tile, which, layouts):  # type: ignore[no-untyped-def]
    """Whether a matrix takes a tile's rows as they are laid out for the expert's first one."""
    expert, place = tile[EXPERT], tile[PLACE]
    first, own = table[expert, 0, SLOT], table[expert, which, SLOT]
    return table[expert, which, ALIKE] and layouts[own, place] == layouts[first, place]


@_compile  # type: ignore[untyped-decorator]
def _bf16(value):  # type: ignore[no-untyped-def]
    """The bits of a float32 rounded to bf16, to nearest, halves to even."""
    bits = bits_of(value)
    if value != value:
        return np.uint32(0x7FC0)
    return (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


@_compile  # type: ignore[untyped-decorator]
def from_short(short, into):  # type: ignore[no-untyped-def]
    """The bits of bf16 [n] as float32 [n]."""
    for k in range(into.shape[0]):
        into[k] = float_of(np.uint32(short[k]) << np.uint32(16))


@_compile  # type: ignore[untyped-decorator]
def to_short(values, into):  # type: ignore[no-untyped-def]
    """float32 [n] as the bits of bf16 [n]."""
    for k in range(into.shape[0]):
        into[k] = np.uint16(_bf16(values[k]))


@_sums  # type: ignore[untyped-decorator]
def _lay_out(source, into, pairs, how, sums, size, row):  # type: ignore[no-untyped-def]
    """One row of activations [K] as words, one an input or, in bf16, one a pair of them, and its sums by group among
    those of `size` rows, [G, size]; into: uint32, 0 where groups are filled up."""
    at = 0
    for group in range(how[GROUPS]):
        last = group == how[GROUPS] - 1
        first, count = group * how[GROUP], how[LAST] if last else how[GROUP]
        filled = (how[LAST_UNITS] if last else how[UNITS]) * how[UNIT]
        given = source[first : first + count]
        total = np.float32(0)
        if pairs:
            own = into[at : at + filled // 2]
            for pair in range(count >> 1):
                low, high = _bf16(given[2 * pair]), _bf16(given[2 * pair + 1])
                total += float_of(low << np.uint32(16)) + float_of(high << np.uint32(16))
                own[pair] = low | high << np.uint32(16)
            if count & 1:
                own[count >> 1] = _bf16(given[count - 1])
                total += float_of(own[count >> 1] << np.uint32(16))
        else:
            own = into[at : at + filled]
            for k in range(count):
                total += given[k]
                own[k] = bits_of(given[k])
        sums[group * size + row] = total
        at += own.shape[0]


@_compile  # type: ignore[untyped-decorator]
def _whole(value):  # type: ignore[no-untyped-def]
    """A float32 between -2**22 and 2**22 rounded to the nearest whole number, halves to even."""
    return np.int32(bits_of(value + np.float32(TO_WHOLE))) - np.int32(TO_WHOLE_BITS)


def _reduced(builder: ir.IRBuilder, operation: str, vector: Value) -> Value:
    """One number of all of a vector's."""
    element, name = vector.type.element, f"llvm.vector.reduce.{operation}.v{VECTOR}{vector.type.element}"
    function = builder.module.globals.get(name) or ir.Function(
        builder.module, ir.FunctionType(element, [vector.type]), name
    )
    return builder.call(function, [vector])


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _split(typing: Any, slices: Any, source: Any, units: Any, factor: Any, into: Any) -> Any:
    """The float32 at an address, so many units of 32 of them, times a factor as whole numbers of `slices` bytes to an
    address; their sum. As `_lay_out_whole`, of vectors."""
    count = slices.literal_value

    def code(context: Any, builder: ir.IRBuilder, signature: Any, given: Sequence[Value]) -> Value:
        whole, long = ir.IntType(32), ir.IntType(64)
        words, floats = (ir.VectorType(kind, VECTOR) for kind in (whole, ir.FloatType()))
        sums = words if count == 1 else ir.VectorType(long, VECTOR)  # of single bytes no group is long enough
        quads = ir.VectorType(ir.IntType(8), VECTOR)
        places = [four + one for four in range(0, VECTOR, 4) for one in ORDER]

        def all_of(kind: ir.VectorType, value: float) -> Value:
            return ir.Constant(kind, [value] * VECTOR)

        def pointer(address: Value, offset: int, kind: ir.Type) -> Value:
            return builder.inttoptr(builder.add(address, ir.Constant(long, offset)), kind.as_pointer())

        first = builder.insert_element(ir.Constant(floats, ir.Undefined), given[3], ir.Constant(whole, 0))
        factors = builder.shuffle_vector(first, first, all_of(words, 0))
        totals = cgutils.alloca_once_value(builder, all_of(sums, 0))
        with cgutils.for_range(builder, given[2]) as loop:
            at = builder.add(given[1], builder.mul(loop.index, ir.Constant(long, 4 * FULL_UNIT)))
            to = builder.add(given[4], builder.mul(loop.index, ir.Constant(long, FULL_UNIT * count)))
            for part in range(0, FULL_UNIT, VECTOR):
                loaded = builder.load(pointer(at, 4 * part, floats))
                loaded.align = 4
                moved = builder.fadd(builder.fmul(loaded, factors), all_of(floats, TO_WHOLE))
                value = builder.sub(builder.bitcast(moved, words), all_of(words, TO_WHOLE_BITS))
                added = value if sums is words else builder.sext(value, sums)
                builder.store(builder.add(builder.load(totals), added), totals)
                if count > 1:
                    digits = all_of(words, DIGITS)
                    value = builder.xor(builder.add(value, digits), digits)
                for slice_ in range(count):
                    byte = builder.trunc(builder.lshr(value, all_of(words, 8 * (count - 1 - slice_))), quads)
                    stored = builder.shuffle_vector(byte, byte, ir.Constant(words, places))
                    builder.store(stored, pointer(to, slice_ * FULL_UNIT + part, quads)).align = 1
        return builder.sext(_reduced(builder, "add", builder.load(totals)), long)

    return types.int64(slices, types.int64, types.int64, types.float32, types.int64), code


@intrinsic  # type: ignore[untyped-decorator]
def _largest(typing: Any, source: Any, vectors: Any) -> Any:
    """The bits of the largest size among the float32 at an address, so many vectors of them."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, given: Sequence[Value]) -> Value:
        whole, long = ir.IntType(32), ir.IntType(64)
        words = ir.VectorType(whole, VECTOR)
        most = cgutils.alloca_once_value(builder, ir.Constant(words, [0] * VECTOR))
        with cgutils.for_range(builder, given[1]) as loop:
            at = builder.add(given[0], builder.mul(loop.index, ir.Constant(long, 4 * VECTOR)))
            loaded = builder.load(builder.inttoptr(at, words.as_pointer()))
            loaded.align = 4
            size, held = builder.and_(loaded, ir.Constant(words, [SIZE_BITS] * VECTOR)), builder.load(most)
            builder.store(builder.select(builder.icmp_unsigned(">", size, held), size, held), most)
        return _reduced(builder, "umax", builder.load(most))

    return types.uint32(types.int64, types.int64), code


@_compile  # type: ignore[untyped-decorator]
def _scale_of(given, slices):  # type: ignore[no-untyped-def]
    """What some float32 are multiplied with to become whole numbers of so many bytes, and the inverse.

    What is not finite makes the scale so. In one byte, a group whose largest is below 2**-120 counts as zeros; in
    three, the scale is not below 2**-126.
    """
    vectors = given.shape[0] // VECTOR
    top = _largest(address_of(given), vectors)
    for k in range(vectors * VECTOR, given.shape[0]):
        top = max(top, bits_of(given[k]) & np.uint32(SIZE_BITS))
    if top >= np.uint32(0x7F800000):
        return np.float32(0), np.float32(np.nan)
    if slices > 1:
        exponent = np.uint32(max(top >> np.uint32(23), np.uint32(22)))  # with 127 more
        return float_of((np.uint32(275) - exponent) << np.uint32(23)), float_of(
            (exponent - np.uint32(21)) << np.uint32(23)
        )
    largest = float_of(top)
    if largest < np.float32(2.0**-120):
        return np.float32(0), np.float32(0)
    return np.float32(127) / largest, largest / np.float32(127)


@_compile  # type: ignore[untyped-decorator]
def _lay_out_whole(source, into, slices, how, sums, size, row):  # type: ignore[no-untyped-def]
    """As `_lay_out`, in so many bytes; sums: [G, 2, size], the scale and the sum times it."""
    at, unit = 0, how[UNIT]
    for group in range(how[GROUPS]):
        last = group == how[GROUPS] - 1
        first, count = group * how[GROUP], how[LAST] if last else how[GROUP]
        filled = (how[LAST_UNITS] if last else how[UNITS]) * unit
        given, own = source[first : first + count], into[at : at + filled * slices // 4]
        factor, scale = _scale_of(given, slices)
        total, done = np.int64(0), 0
        if unit == FULL_UNIT:
            units = count // FULL_UNIT
            done = units * FULL_UNIT
            if slices == 1:
                total = _split(1, address_of(given), units, factor, address_of(own))
            else:
                total = _split(3, address_of(given), units, factor, address_of(own))
        for k in range(done, count):
            value = _whole(given[k] * factor)
            total += value
            digits = np.uint32(value) if slices == 1 else np.uint32((value + DIGITS) ^ DIGITS)
            begin, place = k // unit * unit * slices // 4 + (k % unit >> 2), np.uint32(8 * (2 * (k & 1) + (k >> 1 & 1)))
            for slice_ in range(slices):
                digit = digits >> np.uint32(8 * (slices - 1 - slice_)) & np.uint32(255)
                own[begin + slice_ * (unit // 4)] |= digit << place
        sums[2 * group * size + row] = scale
        sums[(2 * group + 1) * size + row] = scale * np.float32(total)
        at += filled * slices // 4


@_compile  # type: ignore[untyped-decorator]
def lay_out_tile(stage, tile, which, source, layout, sums):  # type: ignore[no-untyped-def]
    """All rows of a tile for one of its matrices, side by side: [words of a row, size], or, as AMX's tiles read them,
    [words of a row / 16, size, 16]."""
    table, tiles, order, starts, per_row, layouts = stage[:6]
    how = table[tiles[tile, EXPERT], which]
    size, first, count = tiles[tile, SIZE], tiles[tile, FIRST], tiles[tile, COUNT]
    kind = layouts[how[SLOT], tiles[tile, PLACE]]
    words = how[FILLED] // 2 * (kind & WORDS) // 2
    begin = starts[tile, which, 0]
    into, own = layout[begin : begin + words * size], sums[starts[tile, which, 1] :]
    if kind > WORDS:
        for row in range(count):
            lay_out_units(source[order[first + row] // per_row if per_row else first + row], into, how, own, size, row)
        return
    rows = into if size == 1 else zero_uint32s(words * count)
    for row in range(count):
        given = source[order[first + row] // per_row if per_row else first + row]
        laid_out = rows[row * words : row * words + words]
        if is_whole(kind):
            _lay_out_whole(given, laid_out, kind, how, own, size, row)
        else:
            _lay_out(given, laid_out, kind == 2, how, own, size, row)
    if size > 1:
        for word in range(words):
            side = into[word * size : word * size + count]
            for row in range(count):
                side[row] = rows[row * words + word]
