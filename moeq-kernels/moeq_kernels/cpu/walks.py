"""Trellis codes as a plug-in of the kernels: a lane's states cut out of its bits, values looked up by state.

A block of 16 rows is the rows of tiles (see `moeq_kernels.trellis`), a unit of 32 inputs two of them side by side. A
lane's 16*k bits of a tile, then those of the next tile, lie in k words as they are stored, lowest bit first. Taken in
chunks of 16 bits, the states of steps that end in one chunk lie in it and the one before; what is before a tile's first
chunk is the last one of the row above, of the tile's last row above its first: the lane before, the last before the
first. So two chunks in a word give all states that end in the second, up to 16 bits each.

With AVX-512's permutations of bytes (VBMI) the states of four inputs are cut out of each lane at once and 2**8 to
2**10 values looked up in registers of 64 of them; with AVX2 values are found as `lookups` tells; else, and for more
states, they are gathered from a table. Codes of 8 bits are their values. All stand for numbers 0 to 255, that is values
with 128 added: a zero point of 128 and a scale of 1/32 of the stored one make them affine codes of one group.

Letters: k bits of a step, L of a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from llvmlite.ir import Value
from numpy.typing import NDArray

from moeq_kernels import trellis
from moeq_kernels.cpu import lookups
from moeq_kernels.cpu.forms import AVX2_LANES, host_features, is_zen
from moeq_kernels.cpu.lanes import Lanes
from moeq_kernels.trellis_tables import table as trained_table
from moeq_kernels.widths import STATE_BITS, TRELLIS_BITS

CHUNK = 16  # bits
ORDER = 0, 2, 1, 3  # inputs of the bytes of a quad
MIDDLE = 128  # is added to values
LOOKED_UP = 10  # L up to which tables lie in registers
REGISTER = 6  # bits of the place of a byte in one


def table(bits: int, state_bits: int) -> NDArray[np.uint8]:
    """Values with 128 added by state, [2**L]."""
    found: NDArray[np.uint8] = (trellis.integer_values(bits, state_bits).to(torch.int16) + MIDDLE).numpy()
    return found.astype(np.uint8)


@dataclass(frozen=True)
class Walk:
    """Codes of k bits with 2**L states; L counts for nothing where k is 8."""

    bits: int
    state_bits: int
    affine: bool = True
    largest: int = 255

    @property
    def name(self) -> str:
        return f"trellis{self.bits}.{self.state_bits}"

    @property
    def planes(self) -> tuple[int, ...]:
        return (self.bits,)

    @property
    def walked(self) -> bool:
        """Whether values hang on what is before their own bits."""
        return self.bits in trellis.WALKED

    @property
    def effort(self) -> float:
        """1.4 of 2**8 states and 3.7 of 2**10 at one row, 1.6 and 2.6 at four."""
        return (1.5 if self.state_bits == STATE_BITS[0] else 3.0) if self.walked else 1.0

    def values(self, pairs: bool) -> tuple[float, float]:
        return 0.0, 1.0

    def quad(self, lanes: Lanes, words: Sequence[Sequence[Value]], at: int) -> Value:
        if not self.walked:
            mask = [4 * lane + one for lane in range(lanes.count) for one in ORDER]
            return lanes.with_flipped_signs(lanes.moved_bytes(words[0][at], mask))
        if self.in_registers(lanes.count):
            return self._looked_up(lanes, words, at)
        if self.shuffled(lanes.count):
            return self._shuffled(lanes, words, *divmod(4 * at, trellis.TILE), ORDER)
        taken = None
        for place, one in enumerate(ORDER):
            part = lanes.shifted(self.number(lanes, words, 4 * at + one), -8 * place)
            taken = part if taken is None else lanes.either(taken, part)
        return taken

    def number(self, lanes: Lanes, words: Sequence[Sequence[Value]], which: int) -> Value:
        """The value of one input with 128 added, a word a lane."""
        if self.walked and lanes.count == AVX2_LANES:
            return self._with_avx2(lanes, words, *divmod(which, trellis.TILE))
        if self.walked and not self.in_registers(lanes.count):
            return self._gathered(lanes, words, which)
        at, place = which // 4, ORDER.index(which % 4)
        return lanes.masked(lanes.shifted(self.quad(lanes, words, at), 8 * place), 255)

    def single(self, lanes: Lanes, words: Sequence[Sequence[Value]], at: int, half: int) -> Value:
        return lanes.to_floats(self.number(lanes, words, 2 * at + half))

    def pair(self, lanes: Lanes, words: Sequence[Sequence[Value]], at: int) -> Value:
        """bf16 holds them all: the upper halves of float32."""
        first, second = (lanes.as_words(self.single(lanes, words, at, half)) for half in (0, 1))
        return lanes.either(lanes.shifted(first, 16), second)

    def in_registers(self, lanes: int) -> bool:
        """Whether vectors of so many lanes look values up in registers."""
        return self.state_bits <= LOOKED_UP and lanes == 16 and host_features().get("avx512vbmi", False)

    def as_bytes(self, lanes: int) -> bool:
        """Whether vectors of so many lanes have the values of four inputs at once, a byte each."""
        return not self.walked or self.in_registers(lanes)

    @property
    def in_pairs(self) -> bool:
        """Whether tables in registers are looked up two at a time: on a Zen that is as fast as one, Intel's CPUs take
        twice as long."""
        return self.state_bits == 8 or is_zen()

    def _chunks(self, lanes: Lanes, words: Sequence[Sequence[Value]], tile: int, chunk: int) -> Value:
        """A chunk of a lane's bits of a tile and, below it, the one before."""
        own, last = tile * self.bits + chunk, tile * self.bits + self.bits - 1
        before, where = (words[1], last) if not chunk else (words[0], own - 1)
        if chunk and own % 2:
            return words[0][own // 2]
        word = before[where // 2]
        low = lanes.shifted(word, CHUNK) if where % 2 else lanes.masked(word, 0xFFFF)
        word = words[0][own // 2]
        high = lanes.masked(word, 0xFFFF0000) if own % 2 else lanes.shifted(word, -CHUNK)
        return lanes.either(low, high)

    def shuffled(self, lanes: int) -> bool:
        """Whether vectors of so many lanes look values up by shuffles."""
        return self.walked and self.state_bits == lookups.SHUFFLED and lanes == AVX2_LANES

    @property
    def trained(self) -> bool:
        """Whether values are a table's, not computed."""
        return self.walked and trained_table(self.bits, self.state_bits) is not None

    def place(self, lanes: Lanes, words: Sequence[Sequence[Value]], tile: int, step: int, steps: int = 1) -> Value:
        """The state of a step of a tile, with those of as many steps altogether, the last of which it is: as
        `lookups.several` is read."""
        count, end = self.state_bits + (steps - 1) * self.bits, (step + 1) * self.bits
        chunk = (end - 1) // CHUNK
        lowest = end - count - CHUNK * (chunk - 1)
        assert lowest >= 0
        return lanes.masked(lanes.shifted(self._chunks(lanes, words, tile, chunk), lowest), (1 << count) - 1)

    def _with_avx2(self, lanes: Lanes, words: Sequence[Sequence[Value]], tile: int, step: int) -> Value:
        if self.shuffled(lanes.count):
            four = next(four for four in lookups.GROUPS[self.bits] if step in four)
            found = lanes.once((words[0][0], tile, four), lambda: self._shuffled(lanes, words, tile, 0, four))
            return lanes.masked(lanes.shifted(found, 8 * four.index(step)), 255)
        if not self.trained:
            return lookups.computed(lanes, self.place(lanes, words, tile, step))

        def pair() -> Value:
            given = lookups.several(table(self.bits, self.state_bits), self.bits, self.state_bits, 2)
            address = lookups.address_of(lanes, f"moeq_{self.name}_pairs", given)
            return lookups.loaded(lanes, address, self.place(lanes, words, tile, step | 1, 2))

        both = lanes.once((words[0][0], tile, step // 2), pair)
        return lanes.masked(lanes.shifted(both, 8 * (step % 2)), 255)

    def _shuffled(
        self, lanes: Lanes, words: Sequence[Sequence[Value]], tile: int, first: int, four: Sequence[int]
    ) -> Value:
        """Four values a lane, of the steps that lie so far behind the first one; all of them end in one chunk."""
        ends = [(first + one + 1) * self.bits for one in four]
        chunk = (max(ends) - 1) // CHUNK
        lowest = [end - self.state_bits - CHUNK * (chunk - 1) for end in ends]
        assert min(lowest) >= 0
        states = lanes.shifted_bytes(self._chunks(lanes, words, tile, chunk), lowest)
        return lookups.shuffled(lanes, table(self.bits, self.state_bits), states)

    def _gathered(self, lanes: Lanes, words: Sequence[Sequence[Value]], which: int) -> Value:
        state = self.place(lanes, words, *divmod(which, trellis.TILE))
        address = lookups.address_of(lanes, f"moeq_{self.name}", table(self.bits, self.state_bits))
        return lanes.masked(lanes.gathered(address, state), 255)

    def _looked_up(self, lanes: Lanes, words: Sequence[Sequence[Value]], at: int) -> Value:
        """Four values a lane: the low bits of states tell a byte's place in a register, the others which of them."""
        tile, quad = divmod(at, trellis.TILE // 4)
        chunk = (4 * self.bits * (quad + 1) - 1) // CHUNK
        given = self._chunks(lanes, words, tile, chunk)
        lowest = [self.bits * (4 * quad + one + 1) - self.state_bits - CHUNK * (chunk - 1) for one in ORDER]
        assert min(lowest) >= 0
        low = lanes.cut_bytes(given, lowest)
        values = table(self.bits, self.state_bits).reshape(-1, 1 << REGISTER)
        tops = [lanes.top_bits(low)]  # of every byte, bit 7 of its state, then those above
        if self.state_bits > 8:
            high = lanes.cut_bytes(given, [place + self.state_bits - 8 for place in lowest])
            tops += [lanes.top_bits(lanes.doubled_bytes(high))] if self.state_bits > 9 else []
            tops += [lanes.top_bits(high)]
        if self.in_pairs:
            found = [lanes.from_two(values[n], values[n + 1], low) for n in range(0, len(values), 2)]
        else:
            found = self._of_four(lanes, values, low, tops.pop(0))
        for top in tops:
            found = [lanes.chosen(top, odd, even) for even, odd in zip(found[::2], found[1::2], strict=True)]
        (result,) = found
        return lanes.builder.bitcast(result, lanes.word_type)

    @staticmethod
    def _of_four(lanes: Lanes, values: NDArray[np.uint8], low: Value, seventh: Value) -> list[Value]:
        """What the low 8 bits of states find in four registers at a time: one look-up each, merged by masks."""
        builder, sixth = lanes.builder, lanes.top_bits(lanes.doubled_bytes(low))
        masks = (
            builder.and_(sixth, builder.not_(seventh)),
            builder.and_(seventh, builder.not_(sixth)),
            builder.and_(sixth, seventh),
        )
        found = []
        for first in range(0, len(values), 4):
            result = lanes.from_one(values[first], low)
            for more, mask in enumerate(masks):
                result = lanes.chosen(mask, lanes.from_one(values[first + 1 + more], low), result)
            found.append(result)
        return found


WALKS = [
    *(Walk(bits, state_bits) for bits in TRELLIS_BITS if bits in trellis.WALKED for state_bits in STATE_BITS),
    Walk(8, STATE_BITS[0]),
]


def name_of(bits: int, state_bits: int) -> str:
    """Of the codes of k bits with 2**L states."""
    return Walk(bits, state_bits if bits in trellis.WALKED else STATE_BITS[0]).name
