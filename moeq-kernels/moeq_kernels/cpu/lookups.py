"""Values of trellis codes by state with AVX2, which has no VBMI, and whose gathers take longer than as many loads.

    2**8 states       shuffles of 16 bytes by the low 4 bits of states, merged by the other 4
    trained, more     one load of the values of two steps side by side, by the bits of both their states
    computed          by the arithmetic that makes them, see `trellis.computed_values`

A table of several steps is read by the bits of all their states, of which two neighbours share all but k.

Letters: k bits of a step, L of a state, n steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llvmlite import ir
from llvmlite.ir import Value
from numpy.typing import NDArray

from moeq_kernels import trellis
from moeq_kernels.cpu.forms import AVX2_LANES
from moeq_kernels.cpu.lanes import I8, I16, I32, I64, Lanes

SHUFFLED = 8  # L of the tables that shuffles look up
NIBBLE = 4  # bits by which a shuffle finds a byte
GROUPS = {  # by k, which of a tile's inputs are looked up together: those whose states two shifts align, as bytes
    1: tuple((first, first + 8, first + 1, first + 9) for first in range(0, 8, 2)),
    2: tuple((first, first + 4, first + 1, first + 5) for first in (0, 2, 8, 10)),
    3: tuple((first, first + 2, first + 1, first + 3) for first in range(0, 16, 4)),
    4: tuple((first, first + 2, first + 1, first + 3) for first in range(0, 16, 4)),
}


def several(values: NDArray[np.uint8], bits: int, state_bits: int, steps: int) -> NDArray[np.uint8]:
    """Values of n steps one after the other by the bits of all their states, [2**(L + (n - 1) * k), n]; values: [2**L]
    of one."""
    places = np.arange(1 << state_bits + (steps - 1) * bits)
    found: NDArray[np.uint8] = np.stack(
        [values[places >> bits * step & (1 << state_bits) - 1] for step in range(steps)], 1
    )
    return found


def address_of(lanes: Lanes, name: str, table: NDArray[np.generic]) -> Value:
    """Where a table lies in the module, which has it once, with some bytes more to be read with the last ones."""
    module = lanes.builder.module
    found = module.globals.get(name)
    if found is None:
        given = bytearray(table.tobytes() + bytes(4))
        kind = ir.ArrayType(I8, len(given))
        found = ir.GlobalVariable(module, kind, name)
        found.initializer, found.linkage, found.global_constant = ir.Constant(kind, given), "internal", True
        found.align = 64
    return lanes.builder.ptrtoint(found, I64)


def shuffled(lanes: Lanes, values: NDArray[np.uint8], states: Value) -> Value:
    """Four values a lane by four states of 8 bits. One half of each pair of tables gives zeros where the other one is
    meant, by bit 4 of the state; the pairs are chosen from by bits 5 to 7."""
    builder, tables = lanes.builder, values.reshape(-1, 1 << NIBBLE)
    low, fifth = lanes.masked(states, 0x0F0F0F0F), lanes.masked(lanes.shifted(states, -3), 0x80808080)
    even = lanes.either(low, fifth)
    places = even, lanes.with_flipped_signs(even)
    tops = [lanes.top_bits(lanes.as_bytes(lanes.shifted(states, bit - 7))) for bit in (5, 6, 7)]

    def found(first: int, level: int) -> Value:
        if level < 0:
            pair = [lanes.from_sixteen(tables[first + half], places[half]) for half in (0, 1)]
            return builder.or_(*pair)
        return lanes.chosen(tops[level], found(first + (2 << level), level - 1), found(first, level - 1))

    return builder.bitcast(found(0, len(tops) - 1), lanes.word_type)


def computed(lanes: Lanes, states: Value) -> Value:
    """One value a lane by state."""
    hashed = lanes.times_plus(states, trellis.MULTIPLIER, trellis.ADDEND)
    return lanes.shifted(lanes.plus(lanes.sum_of_bytes(hashed), 2), 2)


def slots(builder: ir.IRBuilder, count: int) -> Value:
    """The address of room for so many vectors of places on the stack."""
    with builder.goto_entry_block():
        room = builder.alloca(ir.ArrayType(ir.VectorType(I32, AVX2_LANES), count))
        room.align = 64
    return builder.ptrtoint(room, I64)


def place_at(builder: ir.IRBuilder, slot: Value, offset: int) -> Value:
    """One of the places that were stored, as int64. LLVM would take it out of the vector, which takes two or three
    times as long as reading it: what is atomic is read."""
    at = builder.inttoptr(builder.add(slot, ir.Constant(I64, offset)), I32.as_pointer())
    return builder.zext(builder.load_atomic(at, "monotonic", 4), I64)


def entries(builder: ir.IRBuilder, table: Value, kind: ir.IntType, places: Sequence[Value]) -> Value:
    """Entries of a table, whole numbers of such a kind, side by side by place."""
    nbytes = kind.width // 8
    result = ir.Constant(ir.VectorType(kind, len(places)), ir.Undefined)
    for which, place in enumerate(places):
        at = builder.add(table, builder.mul(place, ir.Constant(I64, nbytes)))
        entry = builder.load(builder.inttoptr(at, kind.as_pointer()))
        entry.align = nbytes
        result = builder.insert_element(result, entry, ir.Constant(I32, which))
    return result


def loaded(lanes: Lanes, table: Value, places: Value) -> Value:
    """Two values a lane, in 16 bits of it, from a table of two steps."""
    slot = slots(lanes.builder, 1)
    lanes.store(places, slot, 0)
    of_lanes = [place_at(lanes.builder, slot, 4 * lane) for lane in range(AVX2_LANES)]
    return lanes.builder.zext(entries(lanes.builder, table, I16, of_lanes), lanes.word_type)
