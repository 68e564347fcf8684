"""Blocks of 16 rows in plain loops, for CPUs without the vectors that the other forms need, and as their oracle.

A unit's codes become values once, one lane after the other, which are then multiplied with all rows of activations.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moeq_kernels.cpu.codes import CODES, LANES, field, slot_of
from moeq_kernels.cpu.kept_code import internal
from moeq_kernels.cpu.memory import bits_of, byte_at, float_at, float_of, put_float, put_short, short_at, word_at
from moeq_kernels.cpu.walks import Walk
from moeq_kernels.cpu.walks import table as values_by_state

_compile = internal()
_field = _compile(field)


@_compile  # type: ignore[untyped-decorator]
def _half(bits):  # type: ignore[no-untyped-def]
    """The float32 of a finite float16."""
    short = np.uint32(bits)
    size = float_of((short & np.uint32(0x7FFF)) << np.uint32(13)) * np.float32(2.0**112)
    return -size if short & np.uint32(0x8000) else size


@_compile  # type: ignore[untyped-decorator]
def _bf16(value):  # type: ignore[no-untyped-def]
    bits = bits_of(value)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16((rounded >> np.uint32(16)) & np.uint32(0xFFFF))


@_compile  # type: ignore[untyped-decorator]
def _codes(at, planes, slot, unit, codes):  # type: ignore[no-untyped-def]
    """The codes of one unit, [unit, 16] uint32."""
    codes[:] = 0
    for plane in planes:
        mask = np.uint32((1 << plane) - 1)
        for k in range(unit):
            word, low = _field(plane, slot, k >> 1)
            shift = np.uint32(low + 16 * (k & 1))
            for lane in range(LANES):
                part = (word_at(at + (word * LANES + lane) * 4) >> shift) & mask
                codes[k, lane] = codes[k, lane] << np.uint32(plane) | part
        at += unit * plane // 32 * LANES * 4


@_compile  # type: ignore[untyped-decorator]
def _chunk(at, lane, chunk):  # type: ignore[no-untyped-def]
    """16 bits of a lane's words."""
    return word_at(at + (chunk // 2 * LANES + lane) * 4) >> np.uint32(16 * (chunk % 2)) & np.uint32(0xFFFF)


@_compile  # type: ignore[untyped-decorator]
def _walked(at, bits, state_bits, table, unit, codes):  # type: ignore[no-untyped-def]
    """As `_codes`, of trellis codes: values with 128 added, see `walks`."""
    mask = np.uint32((1 << state_bits) - 1)
    for k in range(unit):
        tile, step = divmod(k, 16)
        first, end = tile * bits, (step + 1) * bits
        chunk = (end - 1) // 16
        shift = np.uint32(end - state_bits - 16 * (chunk - 1))
        for lane in range(LANES):
            above, last = (lane, chunk) if chunk else ((lane - 1) % LANES, bits)
            before = _chunk(at, above, first + last - 1)
            both = before | _chunk(at, lane, first + chunk) << np.uint32(16)
            codes[k, lane] = table[both >> shift & mask]


@_compile  # type: ignore[untyped-decorator]
def _values(at, planes, slot, unit, dense, walk, table, scale, zero, codes, values):  # type: ignore[no-untyped-def]
    """The values of one unit, [unit, 16] float32; dense: 0 for codes of a grid, else as in DENSE; walk: bits of a state
    of trellis codes with their table, or 0."""
    if walk:
        _walked(at, planes[0], walk, table, unit, codes)
    else:
        _codes(at, planes, slot, unit, codes)
    for k in range(unit):
        for lane in range(LANES):
            code = codes[k, lane]
            if dense == 0:
                values[k, lane] = (np.float32(code) - zero[lane]) * scale[lane]
            elif dense == 16:
                values[k, lane] = float_of(code << np.uint32(16))
            elif dense == 17:
                values[k, lane] = _half(code)
            else:
                values[k, lane] = float_of(code)


@_compile  # type: ignore[untyped-decorator]
def _grid(scales, zeros, scale_step, zero_step, zero_start, scale, zero):  # type: ignore[no-untyped-def]
    for lane in range(LANES):
        scale[lane] = _half(short_at(scales + 2 * lane)) * scale_step
        zero[lane] = np.float32(byte_at(zeros + lane)) * zero_step + zero_start


DENSE = {"bfloat16": 16, "float16": 17, "float32": 32}


def blocks(codes: str, unit: int, rows: int, dtype: str) -> Callable[..., None]:
    """The code of a spec; arguments of what it gives: as `emit.ARGUMENTS`."""
    kind, dense, short = CODES[codes], DENSE.get(codes, 0), dtype == "bfloat16"
    planes, slot = kind.planes, slot_of(sum(kind.planes))
    unit_bytes = unit * sum(planes) // 32 * LANES * 4
    walk = kind.state_bits if isinstance(kind, Walk) else 0
    table = values_by_state(kind.bits, walk) if isinstance(kind, Walk) else np.zeros(1, np.uint8)

    def multiply(  # type: ignore[no-untyped-def]
        codes, scales, zeros, zero_stride, blocks, stride, following, groups, units, last_units,
        group_inputs, activations, sums, out, out_stride, scale_step, zero_step, zero_start,
    ):  # fmt: skip
        numbers, values = np.empty((unit, LANES), np.uint32), np.empty((unit, LANES), np.float32)
        scale, zero = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
        totals = np.empty((rows, LANES), np.float32)
        for block in range(blocks):
            at, given, own = codes + block * stride, activations, zeros + (block * stride if zero_stride else 0)
            totals[:] = 0
            for group in range(groups):
                if dense == 0:
                    _grid(scales + block * stride + 2 * LANES * group, own + zero_stride * group, scale_step, zero_step,
                          zero_start, scale, zero)  # fmt: skip
                for _ in range(last_units if group == groups - 1 else units):
                    _values(at, planes, slot, unit, dense, walk, table, scale, zero, numbers, values)
                    for row in range(rows):
                        for k in range(unit):
                            activation = float_at(given + (k * rows + row) * 4)
                            for lane in range(LANES):
                                totals[row, lane] += activation * values[k, lane]
                    at += unit_bytes
                    given += unit * rows * 4
            for row in range(rows):
                for lane in range(LANES):
                    put_float(out + row * out_stride + (block * LANES + lane) * 4, totals[row, lane])

    def unpack(  # type: ignore[no-untyped-def]
        codes, scales, zeros, zero_stride, blocks, stride, following, groups, units, last_units,
        group_inputs, activations, sums, out, out_stride, scale_step, zero_step, zero_start,
    ):  # fmt: skip
        numbers, values = np.empty((unit, LANES), np.uint32), np.empty((unit, LANES), np.float32)
        scale, zero = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
        for block in range(blocks):
            at, own = codes + block * stride, zeros + (block * stride if zero_stride else 0)
            for group in range(groups):
                if dense == 0:
                    _grid(scales + block * stride + 2 * LANES * group, own + zero_stride * group, scale_step, zero_step,
                          zero_start, scale, zero)  # fmt: skip
                to = out + group * group_inputs * out_stride + block * LANES * (2 if short else 4)
                for _ in range(last_units if group == groups - 1 else units):
                    _values(at, planes, slot, unit, dense, walk, table, scale, zero, numbers, values)
                    for k in range(unit):
                        for lane in range(LANES):
                            if short:
                                put_short(to + 2 * lane, _bf16(values[k, lane]))
                            else:
                                put_float(to + 4 * lane, values[k, lane])
                        to += out_stride
                    at += unit_bytes

    return multiply if rows else unpack
