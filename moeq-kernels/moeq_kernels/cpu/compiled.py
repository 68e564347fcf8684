"""Compiled blocks by what they are compiled for, kept on disk; and how compiled code calls them.

A block is compiled when it is first used, in one or two seconds, for the CPU of this machine, and kept: `kept_code`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from llvmlite import ir
from llvmlite.ir import Value
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from moeq_kernels.cpu import byte_pairs, panels, plain, row_walks, tiles
from moeq_kernels.cpu.emit import ARGUMENTS, FLOATS, Spec, emit
from moeq_kernels.cpu.forms import FORMS
from moeq_kernels.cpu.kept_code import callback, compiler

_KINDS = [types.float32 if name in FLOATS else types.int64 for name in ARGUMENTS]
_SIGNATURE = types.void(*_KINDS)
_blocks: dict[Spec, Any] = {}
_entries: list[Any] = []  # which keep their code
_lock = threading.Lock()


def _emitting(spec: Spec) -> Callable[[ir.IRBuilder, Spec, Sequence[Value]], None]:
    """What makes the code of a spec."""
    form = FORMS[spec.form]
    if row_walks.takes(spec):
        return row_walks.emit
    if form.tiles:
        return tiles.emit
    if form.byte_pairs:
        return byte_pairs.emit
    return panels.emit if 0 < form.panels <= spec.rows else emit


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _block(typing: Any, text: Any, arguments: Any) -> Any:
    """The code of a spec's text, in place; arguments: a tuple as ARGUMENTS."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, given: Sequence[Value]) -> Value:
        spec = Spec.of(text.literal_value)
        _emitting(spec)(builder, spec, cgutils.unpack_tuple(builder, given[1]))
        return context.get_dummy_value()

    return types.void(text, arguments), code


@intrinsic  # type: ignore[untyped-decorator]
def call_block(typing: Any, address: Any, arguments: Any) -> Any:
    """Call the compiled block at an address; arguments: a tuple as ARGUMENTS."""
    native = ir.FunctionType(
        ir.VoidType(), [ir.FloatType() if name in FLOATS else ir.IntType(64) for name in ARGUMENTS]
    )

    def code(context: Any, builder: ir.IRBuilder, signature: Any, given: Sequence[Value]) -> Value:
        block = builder.inttoptr(given[0], native.as_pointer())
        wanted = zip(cgutils.unpack_tuple(builder, given[1]), signature.args[1], _KINDS, strict=True)
        builder.call(block, [context.cast(builder, value, kind, to) for value, kind, to in wanted])
        return context.get_dummy_value()

    return types.void(address, arguments), code


@intrinsic  # type: ignore[untyped-decorator]
def call_work(typing: Any, address: Any, numbers: Any) -> Any:
    """Call what `entry` gave, at an address, with the address of its numbers."""
    whole = ir.IntType(64)

    def code(context: Any, builder: ir.IRBuilder, signature: Any, given: Sequence[Value]) -> Value:
        builder.call(builder.inttoptr(given[0], ir.FunctionType(ir.VoidType(), [whole]).as_pointer()), [given[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


@intrinsic  # type: ignore[untyped-decorator]
def call_parallel(typing: Any, address: Any, work: Any, numbers: Any, threads: Any) -> Any:
    """Call `GOMP_parallel` at an address: work, of `entry`, with the address of its numbers, in so many threads."""
    whole, count = ir.IntType(64), ir.IntType(32)
    native = ir.FunctionType(ir.VoidType(), [whole, whole, count, count])

    def code(context: Any, builder: ir.IRBuilder, signature: Any, given: Sequence[Value]) -> Value:
        function = builder.inttoptr(given[0], native.as_pointer())
        builder.call(function, [given[1], given[2], builder.trunc(given[3], count), ir.Constant(count, 0)])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), code


@cache
def entry(work: Callable[[int], None]) -> int:
    """Where the compiled code of work lies, a function of the address of its numbers; for `threads.together`."""
    compiled = callback(types.void(types.int64), work)
    _entries.append(compiled)
    address: int = compiled.address
    return address


@cache
def call(work: Callable[..., int]) -> Callable[..., int]:
    """Work of whole numbers, addresses or counts, that gives one, compiled; to be called from Python at the least cost:
    what numba makes for Python, without its choice by types, takes a fifth of what a call by ctypes takes.

    Python's lock is not held while it runs."""
    compiled = compiler()(work)
    compiled.compile(types.int64(*[types.int64] * len(inspect.signature(work).parameters)))
    _entries.append(compiled)
    (made,) = compiled.overloads.values()
    function: Callable[..., int] = made.entry_point
    return function


def _vectors(text: str) -> Callable[..., None]:
    def block(  # type: ignore[no-untyped-def]
        codes, scales, zeros, zero_stride, blocks, stride, following, groups, units, last_units,
        group_inputs, activations, sums, out, out_stride, scale_step, zero_step, zero_start,
    ):  # fmt: skip
        given = (
            codes, scales, zeros, zero_stride, blocks, stride, following, groups, units, last_units,
            group_inputs, activations, sums, out, out_stride, scale_step, zero_step, zero_start,
        )  # fmt: skip
        _block(text, given)

    return block


def address(spec: Spec) -> int:
    """Where the compiled block of a spec lies; it is compiled, or read from the disk, when it is first asked for."""
    with _lock:
        if spec not in _blocks:
            plainly = FORMS[spec.form].lanes == 1
            block = plain.blocks(spec.codes, spec.unit, spec.rows, spec.dtype) if plainly else _vectors(spec.text())
            _blocks[spec] = callback(_SIGNATURE, block)
        found: int = _blocks[spec].address
        return found
