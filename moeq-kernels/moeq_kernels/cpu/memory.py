"""Numbers at addresses and their bits, for compiled code."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from llvmlite.ir import Value
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from moeq_kernels.cpu.emit import LINE_BYTES
from moeq_kernels.cpu.lanes import I64, Lanes

HUGE_PAGE = 1 << 21  # bytes
MUCH_BYTES = 1 << 21  # of an array, from which on it is asked for in huge pages
IN_HUGE_PAGES: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # of madvise; only Linux has it


def _at_once(operation: str) -> Any:
    """A change of the int64 at an address by a number, at once for all threads, that gives what it was before."""

    @intrinsic  # type: ignore[untyped-decorator]
    def change(typing: Any, address: Any, number: Any) -> Any:
        def code(context: Any, builder: ir.IRBuilder, signature: Any, given: Sequence[Value]) -> Value:
            place = builder.inttoptr(given[0], ir.IntType(64).as_pointer())
            return builder.atomic_rmw(operation, place, context.cast(builder, given[1], number, types.int64), "seq_cst")

        return types.int64(address, number), code

    return change


add_at, swap_at = _at_once("add"), _at_once("xchg")


@intrinsic  # type: ignore[untyped-decorator]
def look_at(typing: Any, address: Any) -> Any:
    """The int64 at an address as another thread last put it there, and what that thread wrote before."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, given: Sequence[Value]) -> Value:
        return builder.load_atomic(builder.inttoptr(given[0], ir.IntType(64).as_pointer()), "acquire", 8)

    return types.int64(types.int64), code


@intrinsic  # type: ignore[untyped-decorator]
def put_at(typing: Any, address: Any, number: Any) -> Any:
    """Put an int64 at an address for other threads to see, after all that was written before."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, given: Sequence[Value]) -> Value:
        builder.store_atomic(given[1], builder.inttoptr(given[0], ir.IntType(64).as_pointer()), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


def _sizes(context: Any, builder: ir.IRBuilder, kind: Any, given: Value) -> list[Value]:
    """Lengths of an array: of a tuple of them, or one."""
    several = isinstance(kind, types.BaseTuple)
    kinds, lengths = (list(kind), cgutils.unpack_tuple(builder, given)) if several else ([kind], [given])
    return [context.cast(builder, length, its, types.intp) for length, its in zip(lengths, kinds, strict=True)]


def _array_type(kind: Any, shape: Any) -> Any:
    return types.Array(kind, len(shape) if isinstance(shape, types.BaseTuple) else 1, "C")


def _filled(context: Any, builder: ir.IRBuilder, kind: Any, data: Value, sizes: Sequence[Value], owner: Any) -> Value:
    """An array of a type at an address, row by row; owner: of its memory, None where it is another's."""
    array, strides = context.make_array(kind)(context, builder), [ir.Constant(I64, kind.dtype.bitwidth // 8)]
    for size in reversed(sizes[1:]):
        strides.append(builder.mul(strides[-1], size))
    native = context.get_data_type(kind.dtype).as_pointer()
    place = builder.inttoptr(data, native) if data.type == I64 else builder.bitcast(data, native)
    populate_array(array, data=place, shape=sizes, strides=strides[::-1], itemsize=strides[0], meminfo=owner)
    return array._getvalue()


def _array(kind: Any) -> Any:
    """The numbers of a type that lie at an address, as an array: of a shape, or so many of them; numba's `carray` is
    compiled again for every type of shape."""

    @intrinsic  # type: ignore[untyped-decorator]
    def numbers(typing: Any, address: Any, shape: Any) -> Any:
        made = _array_type(kind, shape)

        def code(context: Any, builder: ir.IRBuilder, signature: Any, given: Sequence[Value]) -> Value:
            return _filled(context, builder, made, given[0], _sizes(context, builder, shape, given[1]), None)

        return made(types.int64, shape), code

    return numbers


def _allocated(context: Any, builder: ir.IRBuilder, nbytes: Value) -> tuple[Value, Value]:
    """The owner of new memory and where it lies, from a cache line on. Much of it comes in huge pages, where the system
    has them: a long prompt's rows are new memory at every call, and every page that is new takes a fault."""
    whole = ir.IntType(32)
    much = builder.icmp_unsigned(">=", nbytes, ir.Constant(I64, MUCH_BYTES))
    align = builder.select(much, ir.Constant(whole, HUGE_PAGE), ir.Constant(whole, LINE_BYTES))
    owner = context.nrt.meminfo_alloc_aligned(builder, nbytes, align)
    data = context.nrt.meminfo_data(builder, owner)
    if IN_HUGE_PAGES is not None:
        with builder.if_then(much, likely=False):
            kind = ir.FunctionType(whole, [data.type, I64, whole])
            advise = cgutils.get_or_insert_function(builder.module, kind, "madvise")
            builder.call(advise, [data, nbytes, ir.Constant(whole, IN_HUGE_PAGES)])
    return owner, data


def _space(kind: Any, *, clear: bool) -> Any:
    """A new array of a type from a cache line on, of a shape or so many numbers, 0 or whatever was there; numba's
    `np.empty` is compiled again wherever it is called."""

    @intrinsic  # type: ignore[untyped-decorator]
    def numbers(typing: Any, shape: Any) -> Any:
        made = _array_type(kind, shape)

        def code(context: Any, builder: ir.IRBuilder, signature: Any, given: Sequence[Value]) -> Value:
            sizes, nbytes = _sizes(context, builder, shape, given[0]), ir.Constant(I64, kind.bitwidth // 8)
            for size in sizes:
                nbytes = builder.mul(nbytes, size)
            owner, data = _allocated(context, builder, nbytes)
            if clear:
                cgutils.memset(builder, data, nbytes, 0)
            return _filled(context, builder, made, data, sizes, owner)

        return made(shape), code

    return numbers


@intrinsic  # type: ignore[untyped-decorator]
def address_of(typing: Any, array: Any) -> Any:
    """Where the first number of an array lies, an int64."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, given: Sequence[Value]) -> Value:
        return builder.ptrtoint(context.make_array(array)(context, builder, given[0]).data, ir.IntType(64))

    return types.int64(array), code


def asking(level: int) -> Any:
    """Have the cache line of an address come into a level of the cache; one where nothing lies does no harm."""

    @intrinsic  # type: ignore[untyped-decorator]
    def ask(typing: Any, address: Any) -> Any:
        def code(context: Any, builder: ir.IRBuilder, signature: Any, given: Sequence[Value]) -> Value:
            Lanes(builder, 1).prefetch(given[0], 0, level)
            return context.get_dummy_value()

        return types.void(types.int64), code

    return ask


ask_for = asking(1)


@intrinsic  # type: ignore[untyped-decorator]
def bits_of(typing: Any, number: Any) -> Any:
    """The 32 bits of a float32, as a whole number."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, given: Sequence[Value]) -> Value:
        return builder.bitcast(given[0], ir.IntType(32))

    return types.uint32(types.float32), code


@intrinsic  # type: ignore[untyped-decorator]
def float_of(typing: Any, bits: Any) -> Any:
    """The float32 of 32 bits."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, given: Sequence[Value]) -> Value:
        return builder.bitcast(given[0], ir.FloatType())

    return types.float32(types.uint32), code


def _load(native: ir.Type, kind: Any, align: int) -> Any:
    """A number of a type at an address."""

    @intrinsic  # type: ignore[untyped-decorator]
    def load(typing: Any, address: Any) -> Any:
        def code(context: Any, builder: ir.IRBuilder, signature: Any, given: Sequence[Value]) -> Value:
            loaded = builder.load(builder.inttoptr(given[0], native.as_pointer()))
            loaded.align = align
            return loaded

        return kind(types.int64), code

    return load


def _save(native: ir.Type, kind: Any, align: int) -> Any:
    """Put a number of a type at an address."""

    @intrinsic  # type: ignore[untyped-decorator]
    def save(typing: Any, address: Any, number: Any) -> Any:
        def code(context: Any, builder: ir.IRBuilder, signature: Any, given: Sequence[Value]) -> Value:
            builder.store(given[1], builder.inttoptr(given[0], native.as_pointer())).align = align
            return context.get_dummy_value()

        return types.void(types.int64, kind), code

    return save


byte_at = _load(ir.IntType(8), types.uint8, 1)
short_at = _load(ir.IntType(16), types.uint16, 2)
word_at = _load(ir.IntType(32), types.uint32, 4)
float_at = _load(ir.FloatType(), types.float32, 4)
put_short = _save(ir.IntType(16), types.uint16, 2)
put_float = _save(ir.FloatType(), types.float32, 4)

int64s, uint16s = _array(types.int64), _array(types.uint16)
uint32s, float32s = _array(types.uint32), _array(types.float32)
new_int64s, new_float32s = _space(types.int64, clear=False), _space(types.float32, clear=False)
zero_int64s, zero_float32s, zero_uint32s = (
    _space(kind, clear=True) for kind in (types.int64, types.float32, types.uint32)
)
