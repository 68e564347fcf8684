"""Vectors of rows as values of compiled code: what is done to LANES rows at once, written once.

numba leaves it to LLVM which loops become vector code, and LLVM keeps no sums in registers over two loops. A value of
these functions is a vector of LANES float32 (`floats`), int32 (`words`) or truth values, one of a row each, whatever
the CPU's registers hold; every row is computed by the same operations in the same order as any other. Only compiled
code calls them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel.models import PrimitiveModel
from numba.extending import intrinsic, register_model

LANES = 8
_BYTES = 4
_I32 = ir.IntType(32)


class _Vector(types.Type):  # type: ignore[misc]
    """One of the three types; element: LLVM's."""

    def __init__(self, name: str, element: ir.Type) -> None:
        super().__init__(name=f"moeq.{name}{LANES}")
        self.llvm = ir.VectorType(element, LANES)


class _Model(PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: _Vector) -> None:
        super().__init__(manager, kind, kind.llvm)


register_model(_Vector)(_Model)
_FLOATS, _WORDS, _TRUTHS = _Vector("floats", ir.FloatType()), _Vector("words", _I32), _Vector("truths", ir.IntType(1))


def _spread(builder: ir.IRBuilder, scalar: Any) -> Any:
    undefined = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))


def _call(builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: Any) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _place(builder: ir.IRBuilder, address: Any, place: Any, kind: ir.Type) -> Any:
    """Pointer to what lies so many numbers of 32 bits after an address."""
    offset = builder.mul(place, ir.Constant(place.type, _BYTES))
    return builder.inttoptr(builder.add(address, offset), kind.as_pointer())


def _found(name: str, kind: Any, native: ir.Type, wider: bool = False) -> Any:
    """A function of an address and a place, in numbers of 32 bits from it on: what lies there."""

    def typed(typing: Any, address: Any, place: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            found = builder.load(_place(builder, values[0], values[1], native), align=_BYTES)
            return builder.sext(found, ir.IntType(64)) if wider else found

        return kind(types.int64, types.int64), code

    typed.__name__ = name
    return intrinsic(typed)


def _put(name: str, kind: Any, native: ir.Type) -> Any:
    """A function of an address, a place and a value, which it puts there."""

    def typed(typing: Any, address: Any, place: Any, value: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            builder.store(values[2], _place(builder, values[0], values[1], native), align=_BYTES)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, kind), code

    typed.__name__ = name
    return intrinsic(typed)


floats_at, put_floats = _found("floats_at", _FLOATS, _FLOATS.llvm), _put("put_floats", _FLOATS, _FLOATS.llvm)
words_at, put_words = _found("words_at", _WORDS, _WORDS.llvm), _put("put_words", _WORDS, _WORDS.llvm)
number_at, put_number = (
    _found("number_at", types.float32, ir.FloatType()),
    _put("put_number", types.float32, ir.FloatType()),
)
word_at, put_word = _found("word_at", types.int64, _I32, wider=True), _put("put_word", types.int32, _I32)


@intrinsic  # type: ignore[untyped-decorator]
def floats(typing: Any, scalar: Any) -> Any:
    """A number in every lane, or the numbers of words."""
    given = scalar if scalar in (_WORDS, types.float32) else types.float32

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.sitofp(values[0], _FLOATS.llvm) if given == _WORDS else _spread(builder, values[0])

    return _FLOATS(given), code


@intrinsic  # type: ignore[untyped-decorator]
def words(typing: Any, scalar: Any) -> Any:
    """A whole number in every lane."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _spread(builder, values[0])

    return _WORDS(types.int32), code


def _of_two(name: str, floating: str, whole: str | None = None) -> Any:
    """A function of two vectors of one type, lane by lane."""

    def typed(typing: Any, one: Any, other: Any) -> Any:
        method = floating if one == _FLOATS else whole
        assert method is not None, (name, one)
        assert one == other, (name, one, other)

        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return getattr(builder, method)(*values)

        return one(one, other), code

    typed.__name__ = name
    return intrinsic(typed)


add = _of_two("add", "fadd", "add")
sub = _of_two("sub", "fsub", "sub")
mul = _of_two("mul", "fmul", "mul")
ratio = _of_two("ratio", "fdiv")


@intrinsic  # type: ignore[untyped-decorator]
def fused(typing: Any, one: Any, other: Any, more: Any) -> Any:
    """one * other + more, with one rounding where the CPU can."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _call(builder, f"llvm.fmuladd.v{LANES}f32", _FLOATS.llvm, *values)

    return _FLOATS(_FLOATS, _FLOATS, _FLOATS), code


def _of_one(name: str, function: str) -> Any:
    """A function of LLVM of one vector of floats, lane by lane."""

    def typed(typing: Any, one: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return _call(builder, f"llvm.{function}.v{LANES}f32", _FLOATS.llvm, *values)

        return _FLOATS(_FLOATS), code

    typed.__name__ = name
    return intrinsic(typed)


size_of, root = _of_one("size_of", "fabs"), _of_one("root", "sqrt")


@intrinsic  # type: ignore[untyped-decorator]
def negated(typing: Any, one: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fneg(values[0])

    return _FLOATS(_FLOATS), code


def _compared(name: str, sign: str) -> Any:
    """A function of two vectors of one type: in which lanes a comparison holds."""

    def typed(typing: Any, one: Any, other: Any) -> Any:
        assert one == other, (name, one, other)

        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            compared = builder.fcmp_ordered if one == _FLOATS else builder.icmp_signed
            return compared(sign, *values)

        return _TRUTHS(one, other), code

    typed.__name__ = name
    return intrinsic(typed)


less, equal, unlike = _compared("less", "<"), _compared("equal", "=="), _compared("unlike", "!=")


def _of_truths(name: str, operation: Callable[[Any, Any, Any], Any]) -> Any:
    def typed(typing: Any, one: Any, other: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return operation(builder, *values)

        return _TRUTHS(_TRUTHS, _TRUTHS), code

    typed.__name__ = name
    return intrinsic(typed)


both = _of_truths("both", ir.IRBuilder.and_)
differ = _of_truths("differ", ir.IRBuilder.xor)


@intrinsic  # type: ignore[untyped-decorator]
def pick(typing: Any, truths: Any, ones: Any, others: Any) -> Any:
    """Of two vectors, by lane: where it holds, and where not."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.select(*values)

    return ones(_TRUTHS, ones, others), code


@intrinsic  # type: ignore[untyped-decorator]
def somewhere(typing: Any, truths: Any) -> Any:
    """Whether it holds in any lane."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        bits = builder.bitcast(values[0], ir.IntType(LANES))
        return builder.icmp_unsigned("!=", bits, ir.Constant(bits.type, 0))

    return types.boolean(_TRUTHS), code
