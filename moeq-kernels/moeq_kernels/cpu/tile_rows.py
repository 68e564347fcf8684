"""Rows of activations as AMX's tiles read them, compiled: [units, rows, 32] in bf16, with their sums by group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.ir import Value
from numba import types
from numba.extending import intrinsic

from moeq_kernels.cpu.codes import UNIT
from moeq_kernels.cpu.columns import GROUP, GROUPS, LANES, LAST, LAST_UNITS, UNITS
from moeq_kernels.cpu.kept_code import internal
from moeq_kernels.cpu.lanes import Lanes
from moeq_kernels.cpu.memory import address_of, new_float32s

LINE = 2 * UNIT  # bytes of a unit of a row
_compile = internal()


def _rounded(lanes: Lanes, floats: Value) -> Value:
    """To bf16 as `Lanes.to_bf16`, but that what is no number stays so."""
    builder = lanes.builder
    odd = ir.Constant(ir.VectorType(ir.IntType(16), lanes.count), [0x7FC0] * lanes.count)
    return builder.select(builder.fcmp_unordered("uno", floats, floats), odd, lanes.to_bf16(floats, False))


@intrinsic  # type: ignore[untyped-decorator]
def _put_unit(typing: Any, source: Any, to: Any, sums: Any) -> Any:
    """32 float32 at an address to another one, rounded to bf16, and what they are then added to 16 float32 at sums."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, given: Sequence[Value]) -> Value:
        lanes = Lanes(builder, LANES)
        total = lanes.as_floats(lanes.words(given[2], 0))
        for half in range(UNIT // LANES):
            short = _rounded(lanes, lanes.as_floats(lanes.words(given[0], half * LANES * 4)))
            lanes.store(short, given[1], half * LANES * 2)
            kept = lanes.shifted(builder.zext(short, lanes.word_type), -16)
            total = builder.fadd(total, lanes.as_floats(kept))
        lanes.store(total, given[2], 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), code


@_compile  # type: ignore[untyped-decorator]
def lay_out_units(source, into, how, sums, size, row):  # type: ignore[no-untyped-def]
    """One row of activations [K] to its places among `size` rows in `into`, uint32, which is 0 where groups are filled
    up, and its sums by group to [G, size]."""
    at, step = address_of(into) + row * LINE, size * LINE
    part, rest = new_float32s(LANES), new_float32s(UNIT)
    for group in range(how[GROUPS]):
        last = group == how[GROUPS] - 1
        first, count = group * how[GROUP], how[LAST] if last else how[GROUP]
        begin, full = address_of(source) + 4 * first, count // UNIT
        part[:] = 0
        for unit in range(full):
            _put_unit(begin + 4 * UNIT * unit, at + unit * step, address_of(part))
        if full * UNIT < count:
            rest[:] = 0
            for place in range(count - full * UNIT):
                rest[place] = source[first + full * UNIT + place]
            _put_unit(address_of(rest), at + full * step, address_of(part))
        total = np.float32(0)
        for lane in range(LANES):
            total += part[lane]
        sums[group * size + row] = total
        at += step * (how[LAST_UNITS] if last else how[UNITS])
