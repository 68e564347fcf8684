"""The inner step of trellis.py as vector code: what reaches the next states of a trellis, 16 tiles side by side.

LLVM's own vectorizer keeps no minima over a loop in registers, so the code is written down for it here. A vector is one
state of 16 tiles; where the CPU has shorter ones, LLVM splits it.

numba keeps compiled code by the file of the function that was compiled: who changes this file touches trellis.py too.

Letters: L bits of a state, k bits of a step, p what two states in a row share, 2**(L-k) of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

LANES = 16  # tiles side by side
_FLOAT, _BYTE, _WORD, _PLACE = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
_BYTES = {_FLOAT: 4, _BYTE: 1}


def _vector(element: ir.Type) -> ir.VectorType:
    return ir.VectorType(element, LANES)


def _same(builder: ir.IRBuilder, value: Any) -> Any:
    """A value in all lanes of a vector."""
    kind = _vector(value.type)
    some = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_WORD, 0))
    return builder.shuffle_vector(some, ir.Constant(kind, ir.Undefined), ir.Constant(_vector(_WORD), [0] * LANES))


class _Step:
    """Writes the code of one step of k bits; before, after [2**(L-k), LANES], back uint8 of the same shape, values
    [2**L]: pointers to their first elements."""

    def __init__(self, builder: ir.IRBuilder, bits: int, before: Any, after: Any, back: Any, values: Any) -> None:
        self.builder = builder
        self.ways = 1 << bits
        self.before, self.after, self.back, self.values = before, after, back, values

    def place(self, pointer: Any, element: ir.Type, row: Any, count: int = LANES) -> Any:
        """Pointer to the line of a row, of `count` elements."""
        offset = self.builder.mul(row, ir.Constant(_PLACE, count * _BYTES[element]))
        whole = _vector(element) if count == LANES else element
        base = self.builder.bitcast(pointer, _BYTE.as_pointer())
        return self.builder.bitcast(self.builder.gep(base, [offset]), whole.as_pointer())

    def reach(self, wanted: Any, weight: Any, middle: Any, stride: Any, middles: Any) -> None:
        """The least cost of each next p that has `middle` as its low bits: of the states (c, middle, j), over all j.

        wanted, weight: vectors, both times the square root of what an error counts; stride: 2**(L-k) states; middles:
        2**(L-2k). The way taken is kept in the lowest bits of the cost, so that one minimum finds both.
        """
        code, low = self.builder, self.builder.mul(middle, ir.Constant(_PLACE, self.ways))
        costs = [
            code.load(self.place(self.before, _FLOAT, code.add(low, ir.Constant(_PLACE, way))), align=4)
            for way in range(self.ways)
        ]
        words = _vector(_WORD)
        clear = ir.Constant(words, [-self.ways & 0xFFFFFFFF] * LANES)
        for newest in range(self.ways):
            shift = ir.Constant(_PLACE, newest)
            first = code.add(low, code.mul(stride, shift))
            best = None
            for way in range(self.ways):
                state = code.add(first, ir.Constant(_PLACE, way))
                value = _same(code, code.load(self.place(self.values, _FLOAT, state, 1), align=4))
                rest = code.fsub(wanted, code.fmul(weight, value, flags=("contract",)), flags=("contract",))
                cost = code.fadd(costs[way], code.fmul(rest, rest, flags=("contract",)), flags=("contract",))
                marked = code.and_(code.bitcast(cost, words), clear)
                marked = code.or_(marked, ir.Constant(words, [way] * LANES))
                cost = code.bitcast(marked, _vector(_FLOAT))
                best = cost if best is None else code.select(code.fcmp_ordered("<", cost, best), cost, best)
            to = code.add(middle, code.mul(middles, shift))
            code.store(best, self.place(self.after, _FLOAT, to), align=4)
            taken = code.and_(code.bitcast(best, words), ir.Constant(words, [self.ways - 1] * LANES))
            code.store(code.trunc(taken, _vector(_BYTE)), self.place(self.back, _BYTE, to), align=1)


def _stepper(bits: int) -> Callable[..., Any]:
    """The intrinsic of one step of `bits` bits: before, after float32 [2**(L-k), LANES], back uint8 of the same shape,
    wanted, weight float32 [LANES], values float32 [2**L], all contiguous."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        arrays = [
            make_array(kind)(context, builder, value) for kind, value in zip(signature.args, arguments, strict=True)
        ]
        before, after, back, wanted, weight, values = [array.data for array in arrays]
        step = _Step(builder, bits, before, after, back, values)
        zero = ir.Constant(_PLACE, 0)
        want, count = (builder.load(step.place(line, _FLOAT, zero), align=4) for line in (wanted, weight))
        stride = cgutils.unpack_tuple(builder, arrays[0].shape, 2)[0]
        middles = builder.lshr(stride, ir.Constant(_PLACE, bits))
        with cgutils.for_range(builder, middles) as loop:
            step.reach(want, count, loop.index, stride, middles)
        return context.get_dummy_value()

    def typed(typing, before, after, back, wanted, weight, values):  # type: ignore[no-untyped-def]
        return types.void(before, after, back, wanted, weight, values), emit

    made: Callable[..., Any] = intrinsic(typed)
    return made


step1, step2, step3, step4 = (_stepper(bits) for bits in (1, 2, 3, 4))
