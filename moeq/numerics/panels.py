"""The inner step of sweep.py as vector code: a panel of columns of a strip of rows, all of it in registers.

A strip is a few vectors of rows side by side. What the earlier columns of the block give to a panel's columns is added
up in registers, then the panel's columns are solved in order. LLVM's own vectorizer keeps no sums in registers over two
loops, so the code is written down for it here, for vectors as wide as the CPU's. Every row is computed by the same
operations in the same order whatever the width of a vector and a panel: in steps of four columns, each
line + (w1 g1 + w2 g2 + w3 g3 + w4 g4), products fused with sums where the CPU can; inside of four, column by column.

numba keeps compiled code by the file of the function that was compiled: who changes this file touches sweep.py too.

Letters: b columns of a block, S rows of a strip.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

STEP = 4  # columns whose gifts are summed before they are added


def _shape() -> tuple[int, int]:
    """Bytes of a vector and columns of a panel on the CPU that numba compiles for."""
    features = set(cpu_target.target_context.codegen().magic_tuple()[2].split(","))
    if "+avx512f" in features:
        return 64, 8  # 32 registers
    if "+avx" in features:
        return 32, 4  # 16 registers
    return 16, 8


VECTOR_BYTES, PANEL = _shape()
VECTORS = 2  # of rows in a strip
FETCHED = 16  # lines that are fetched before they are copied


Vector = list[Any]  # VECTORS values of LLVM side by side


@dataclass
class _Lines:
    """A two-dimensional array, or a one-dimensional one as one line, whose last dimension is contiguous."""

    data: Any
    stride: Any
    element: ir.Type

    def at(self, builder: ir.IRBuilder, kind: ir.Type, row: Any, column: Any) -> Any:
        """Pointer to a value of a kind that begins with an element; row and column int64."""
        offset = builder.add(builder.mul(row, self.stride), builder.mul(column, _int(self.element_bytes)))
        return builder.bitcast(builder.gep(self.data, [offset]), kind.as_pointer())

    @property
    def element_bytes(self) -> int:
        return {"float": 4, "double": 8, "i8": 1, "i64": 8}[str(self.element)]


def _int(value: int) -> ir.Constant:
    return ir.Constant(ir.IntType(64), value)


class _Code:
    """Writes operations on vectors of one strip; with `count`, only its first lanes are read and written in arrays that
    go on beyond the strip."""

    def __init__(self, builder: ir.IRBuilder, element: ir.Type, count: Any = None) -> None:
        self.builder = builder
        self.element = element
        self.width = VECTOR_BYTES // (4 if isinstance(element, ir.FloatType) else 8)
        self.vector = ir.VectorType(element, self.width)
        self.masks = None if count is None else [self._mask(count, index) for index in range(VECTORS)]

    def _mask(self, count: Any, index: int) -> Any:
        numbers = [index * self.width + lane for lane in range(self.width)]
        lanes = ir.Constant(ir.VectorType(ir.IntType(64), self.width), numbers)
        return self.builder.icmp_signed("<", lanes, self.spread(count))

    def _call(self, name: str, result: ir.Type, *arguments: Any) -> Any:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(function, arguments)

    def _suffix(self) -> str:
        return f"v{self.width}f{8 * VECTOR_BYTES // self.width}"

    def spread(self, value: Any) -> Any:
        """A value in all lanes of a vector."""
        kind = ir.VectorType(value.type, self.width)
        some = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), self.width), [0] * self.width)
        return self.builder.shuffle_vector(some, ir.Constant(kind, ir.Undefined), zeros)

    def one(self, lines: _Lines, row: Any, column: Any) -> Any:
        """One element of an array."""
        return self.builder.load(lines.at(self.builder, lines.element, row, column), align=lines.element_bytes)

    def weight(self, lines: _Lines, row: Any, column: Any) -> Any:
        return self.spread(self.one(lines, row, column))

    def load(self, lines: _Lines, row: Any, inside: bool = False) -> Vector:
        """The strip's part of a line; inside: of the strip's own arrays, which have all its lanes."""
        found = []
        for index in range(VECTORS):
            place = lines.at(self.builder, self.vector, row, _int(index * self.width))
            if self.masks is None or inside:
                found.append(self.builder.load(place, align=lines.element_bytes))
            else:
                name = f"llvm.masked.load.{self._suffix()}.p0"
                align, rest = ir.Constant(ir.IntType(32), lines.element_bytes), ir.Constant(self.vector, None)
                found.append(self._call(name, self.vector, place, align, self.masks[index], rest))
        return found

    def store(self, values: Vector, lines: _Lines, row: Any, inside: bool = False) -> None:
        for index, value in enumerate(values):
            place = lines.at(self.builder, self.vector, row, _int(index * self.width))
            if self.masks is None or inside:
                self.builder.store(value, place, align=lines.element_bytes)
            else:
                name, align = f"llvm.masked.store.{self._suffix()}.p0", ir.Constant(ir.IntType(32), lines.element_bytes)
                self._call(name, ir.VoidType(), value, place, align, self.masks[index])

    def ahead(self, lines: _Lines, row: Any, strips: int = 1) -> None:
        """Fetch a line's part of the next strip, or of as many strips further as said."""
        lanes = VECTORS * self.width
        for lane in range(0, lanes, 64 // lines.element_bytes):
            self.fetch(lines.at(self.builder, ir.IntType(8), row, _int(strips * lanes + lane)))

    def fetch(self, place: Any, hints: Sequence[int] = (0, 3, 1)) -> None:
        """Fetch a line of the cache; hints as LLVM has them: to read or write, how near, data."""
        self._call("llvm.prefetch.p0", ir.VoidType(), place, *(ir.Constant(ir.IntType(32), hint) for hint in hints))

    def each(self, operation: Callable[..., Any], *vectors: Vector) -> Vector:
        return [operation(*values) for values in zip(*vectors, strict=True)]

    def fused(self, one: Vector, other: Vector, more: Vector) -> Vector:
        """one * other + more, with one rounding where the CPU can."""
        name = f"llvm.fmuladd.{self._suffix()}"
        return [self._call(name, self.vector, *values) for values in zip(one, other, more, strict=True)]

    def add(self, one: Vector, other: Vector) -> Vector:
        return self.each(self.builder.fadd, one, other)

    def subtract(self, one: Vector, other: Vector) -> Vector:
        return self.each(self.builder.fsub, one, other)

    def negative(self, one: Vector) -> Vector:
        return self.each(self.builder.fneg, one)

    def least(self, one: Vector, other: Vector) -> Vector:
        """The other where it is less, else the one."""
        return self._chosen("<", one, other)

    def largest(self, one: Vector, other: Vector) -> Vector:
        return self._chosen(">", one, other)

    def _chosen(self, relation: str, one: Vector, other: Vector) -> Vector:
        build = self.builder
        return [build.select(build.fcmp_ordered(relation, b, a), b, a) for a, b in zip(one, other, strict=True)]

    def magnitude(self, one: Vector) -> Vector:
        return [self._call(f"llvm.fabs.{self._suffix()}", self.vector, value) for value in one]

    def given(self, weights: Sequence[Any], gifts: Sequence[Vector]) -> Vector:
        """w1 g1 + w2 g2 + w3 g3 + w4 g4, as it is rounded everywhere."""
        spread = [[weight] * VECTORS for weight in weights]
        total = self.each(self.builder.fmul, spread[1], gifts[1])
        for index in (0, 2, 3):
            total = self.fused(spread[index], gifts[index], total)
        return total


def _solve(
    code: _Code,
    columns: int,
    first: Any,
    weights: _Lines,
    left: _Lines,
    load: Callable[[Any], Vector],
    column: Callable[[Any, Vector], Vector],
) -> None:
    """A panel of `columns` columns (a multiple of STEP, or 1) from `first` on.

    load: what a column begins with; column: solves one column, given all that it gets, and gives what it gives, which
    is kept in left [b, S]; weights [b, b]: what column i gives to column k, at (i, k).
    """
    build = code.builder
    rows = [build.add(first, _int(index)) for index in range(columns)]
    sums = [[cgutils.alloca_once_value(build, value) for value in load(row)] for row in rows]

    def read(place: Sequence[Any]) -> Vector:
        return [build.load(value) for value in place]

    def write(values: Vector, place: Sequence[Any]) -> None:
        for value, into in zip(values, place, strict=True):
            build.store(value, into)

    with cgutils.for_range(build, build.sdiv(first, _int(STEP))) as loop:
        place = build.mul(loop.index, _int(STEP))
        from_where = [build.add(place, _int(index)) for index in range(STEP)]
        gifts = [code.load(left, row, inside=True) for row in from_where]
        for row, into in zip(rows, sums, strict=True):
            own = [code.weight(weights, which, row) for which in from_where]
            write(code.add(read(into), code.given(own, gifts)), into)
    if columns == 1:
        with cgutils.for_range(build, build.srem(first, _int(STEP))) as loop:
            which = build.add(build.sub(first, build.srem(first, _int(STEP))), loop.index)
            own = [code.weight(weights, which, first)] * VECTORS
            write(code.fused(own, code.load(left, which, inside=True), read(sums[0])), sums[0])
    values = [read(into) for into in sums]
    gifts = []
    for index, row in enumerate(rows):
        gifts.append(column(row, values[index]))
        code.store(gifts[-1], left, row, inside=True)
        end = min(index - index % STEP + STEP, columns)
        for later in range(index + 1, end):
            own = [code.weight(weights, row, rows[later])] * VECTORS
            values[later] = code.fused(own, gifts[index], values[later])
        if index + 1 == end:
            for later in range(end, columns):
                own = [code.weight(weights, rows[which], rows[later]) for which in range(end - STEP, end)]
                values[later] = code.add(values[later], code.given(own, gifts[-STEP:]))


def _panels(builder: ir.IRBuilder, element: ir.Type, count: Any, length: Any, panel: Callable[..., None]) -> None:
    """panel(code, columns, first) for a strip's whole panels, then for the columns left over one by one."""

    def both(code: _Code) -> None:
        whole = builder.mul(builder.sdiv(length, _int(PANEL)), _int(PANEL))
        with cgutils.for_range_slice(builder, _int(0), whole, _int(PANEL), inc=True) as (first, _):
            panel(code, PANEL, first)
        with cgutils.for_range_slice(builder, whole, length, _int(1), inc=True) as (first, _):
            panel(code, 1, first)

    lanes = VECTORS * _Code(builder, element).width
    with builder.if_else(builder.icmp_signed("==", count, _int(lanes))) as (full, partial):
        with full:
            both(_Code(builder, element))
        with partial:
            both(_Code(builder, element, count))


def _opened(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> list[Any]:
    """Arrays as _Lines, numbers as they are."""
    opened: list[Any] = []
    for kind, value in zip(signature.args, values, strict=True):
        if isinstance(kind, types.Array):
            array = make_array(kind)(context, builder, value)
            stride = cgutils.unpack_tuple(builder, array.strides, kind.ndim)[0]
            element = ir.IntType(8) if kind.dtype == types.uint8 else context.get_data_type(kind.dtype)
            opened.append(_Lines(builder.bitcast(array.data, cgutils.voidptr_t), stride, element))
        else:
            opened.append(value)
    return opened


@intrinsic  # type: ignore[untyped-decorator]
def round_strip(  # type: ignore[no-untyped-def]
    typing, source, given, weights, left, steps, inverses, zeros, groups, top, residual, codes, magic, length, count
):
    """Round the columns of a strip in order.

    source, given [b, count]: weights and what earlier blocks give to them; weights [b, b] as of `_solve`; left [b, S]
    and residual [b, count] are filled with what rounding leaves, codes [S, b] uint8; steps, inverses, zeros [G, count];
    groups [b] int64; top [count]; length: b.
    """

    def emit(context, builder, signature, values):  # type: ignore[no-untyped-def]
        source, given, weights, left, steps, inverses, zeros, groups, top, residual, codes, magic, length, count = (
            _opened(context, builder, signature, values)
        )
        element = source.element

        def panel(code: _Code, columns: int, first: Any) -> None:
            lowest = [code.spread(builder.fsub(magic, magic))] * VECTORS
            magics = [code.spread(magic)] * VECTORS
            highest = code.load(top, _int(0))
            made: list[Vector] = []

            def begin(row: Any) -> Vector:
                code.ahead(source, row)
                code.ahead(given, row)
                code.ahead(residual, row)
                return code.add(code.load(source, row), code.load(given, row))

            def column(row: Any, wanted: Vector) -> Vector:
                group = code.one(groups, _int(0), row)
                zero = code.load(zeros, group)
                rounded = code.fused(wanted, code.load(inverses, group), zero)
                rounded = code.subtract(code.add(rounded, magics), magics)
                rounded = code.least(code.largest(rounded, lowest), highest)
                made.append(rounded)
                off = code.negative(code.subtract(rounded, zero))
                rest = code.fused(off, code.load(steps, group), code.load(source, row))
                code.store(rest, residual, row)
                return rest

            _solve(code, columns, first, weights, left, begin, column)
            _write_codes(code, made, codes, first)

        _panels(builder, element, count, length, panel)
        return context.get_dummy_value()

    arguments = source, given, weights, left, steps, inverses, zeros, groups, top, residual, codes, magic, length, count
    return types.void(*arguments), emit


def _write_codes(code: _Code, made: Sequence[Vector], codes: _Lines, first: Any) -> None:
    """Codes of a panel's columns, floats, into [S, b] from column `first` on; STEP bytes at once where there are as
    many (little-endian)."""
    build = code.builder
    words = ir.VectorType(ir.IntType(32), code.width)
    some = min(STEP, len(made))
    for begin in range(0, len(made), some):
        for index in range(VECTORS):
            word = build.fptosi(made[begin][index], words)
            for place in range(1, some):
                shift = ir.Constant(words, [8 * place] * code.width)
                word = build.or_(word, build.shl(build.fptosi(made[begin + place][index], words), shift))
            if some == 1:
                word = build.trunc(word, ir.VectorType(ir.IntType(8), code.width))
            for lane in range(code.width):
                value = build.extract_element(word, ir.Constant(ir.IntType(32), lane))
                column = build.add(first, _int(begin))
                build.store(value, codes.at(build, value.type, _int(index * code.width + lane), column), align=1)


@intrinsic  # type: ignore[untyped-decorator]
def extent_strip(typing, source, given, weights, left, low, high, size, keep, keeps, length, count):  # type: ignore[no-untyped-def]
    """Least, largest and sum of absolute weights [count] of a group, each column moved by what the earlier ones owe,
    compared with what is there; if keeps, the weights themselves into keep [b, count].

    source, given [b, count]: weights and what earlier columns give to them; weights [b, b] as of `_solve`; left [b, S]
    is filled.
    """

    def emit(context, builder, signature, values):  # type: ignore[no-untyped-def]
        source, given, weights, left, low, high, size, keep, keeps, length, count = _opened(
            context, builder, signature, values
        )

        def panel(code: _Code, columns: int, first: Any) -> None:
            ends = [code.load(low, _int(0)), code.load(high, _int(0)), code.load(size, _int(0))]

            def begin(row: Any) -> Vector:
                code.ahead(source, row)
                code.ahead(given, row)
                return code.load(given, row)

            def column(row: Any, wanted: Vector) -> Vector:
                owed = code.negative(wanted)
                moved = code.subtract(code.load(source, row), owed)
                ends[0] = code.least(ends[0], moved)
                ends[1] = code.largest(ends[1], moved)
                ends[2] = code.add(ends[2], code.magnitude(moved))
                with builder.if_then(keeps):
                    code.store(moved, keep, row)
                return owed

            _solve(code, columns, first, weights, left, begin, column)
            for values, into in zip(ends, (low, high, size), strict=True):
                code.store(values, into, _int(0))

        _panels(builder, source.element, count, length, panel)
        return context.get_dummy_value()

    return types.void(source, given, weights, left, low, high, size, keep, keeps, length, count), emit


@intrinsic  # type: ignore[untyped-decorator]
def multiply_strip(typing, weights, gifts, into, columns, length, count):  # type: ignore[no-untyped-def]
    """Add to lines of a strip, into [columns, count], what `length` columns give to them, each line's sum in order.

    weights [panels * length, PANEL]: of PANEL lines after another; gifts [length, S].
    """

    def emit(context, builder, signature, values):  # type: ignore[no-untyped-def]
        weights, gifts, into, columns, length, count = _opened(context, builder, signature, values)

        def panel(code: _Code, some: int, first: Any) -> None:
            nothing = ir.Constant(code.vector, [0.0] * code.width)
            sums = [[cgutils.alloca_once_value(builder, nothing) for _ in range(VECTORS)] for _ in range(some)]
            for index in range(some):
                code.ahead(into, builder.add(first, _int(index)), strips=0)
            inside = builder.srem(first, _int(PANEL))
            begin = builder.mul(builder.sdiv(first, _int(PANEL)), length)
            with cgutils.for_range(builder, length) as loop:
                gift = code.load(gifts, loop.index, inside=True)
                place = builder.add(begin, loop.index)
                for index, total in enumerate(sums):
                    own = [code.weight(weights, place, builder.add(inside, _int(index)))] * VECTORS
                    added = code.fused(own, gift, [builder.load(value) for value in total])
                    for value, slot in zip(added, total, strict=True):
                        builder.store(value, slot)
            for index, total in enumerate(sums):
                row = builder.add(first, _int(index))
                code.store(code.add(code.load(into, row), [builder.load(value) for value in total]), into, row)

        _panels(builder, into.element, count, columns, panel)
        return context.get_dummy_value()

    return types.void(weights, gifts, into, columns, length, count), emit


@intrinsic  # type: ignore[untyped-decorator]
def pack_strip(typing, source, into, length, count):  # type: ignore[no-untyped-def]
    """A strip's part of lines that lie apart, source [length, count], into lines one after another [length, S]."""

    def emit(context, builder, signature, values):  # type: ignore[no-untyped-def]
        source, into, length, count = _opened(context, builder, signature, values)

        def line(code: _Code, some: int, row: Any) -> None:
            for index in range(some):
                code.ahead(source, builder.add(row, _int(FETCHED + index)), strips=0)
            for index in range(some):
                place = builder.add(row, _int(index))
                code.store(code.load(source, place), into, place, inside=True)

        _panels(builder, source.element, count, length, line)
        return context.get_dummy_value()

    return types.void(source, into, length, count), emit


@intrinsic  # type: ignore[untyped-decorator]
def fetch_strip(typing, into, length, count):  # type: ignore[no-untyped-def]
    """Fetch lines that lie apart, into [count, length] uint8, before they are written."""

    def emit(context, builder, signature, values):  # type: ignore[no-untyped-def]
        into, length, count = _opened(context, builder, signature, values)
        code = _Code(builder, ir.FloatType())
        each = cgutils.for_range_slice(builder, _int(0), length, _int(64), inc=True)
        with cgutils.for_range(builder, count) as row, each as (column, _):
            code.fetch(into.at(builder, ir.IntType(8), row.index, column), (1, 2, 1))
        return context.get_dummy_value()

    return types.void(into, length, count), emit
