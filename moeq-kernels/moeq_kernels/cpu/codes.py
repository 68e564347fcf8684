"""How codes become values: the plug-in of the kernels. What is beside it (layout, schedule, reading) is shared.

A matrix lies in blocks of LANES rows; a lane is a row. Its codes come in words of 32 bits a lane, each half of a word
for one input of a pair. A word has slots of s bits, the power of two that holds a code; pairs with even numbers have
those from the low bits of each half on, the others those from its middle on, so that a byte mask takes four inputs:

    s = 4:   31..28 27..24 23..20 19..16   15..12 11..8 7..4 3..0
    input:     7      3      5      1        6     2     4    0

Codes of 3, 5, 6 or 7 bits are split into planes of 4, 2 and 1 bits, the high bits first, and as many words as fill the
slots of one word of a plane of p bits, s/p, share it: the first has the low p bits of every slot. So one shift for each
plane puts a whole word of codes together, see `Affine._joined`.

What a register of words becomes is a vector of `start + step * code`: an affine grid's codes are ORed into the mantissa
of 1.0 (start 1, step 2**-b), which takes two instructions; scale and zero point come in once a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from llvmlite.ir import Value

from moeq_kernels.cpu.lanes import Lanes
from moeq_kernels.cpu.walks import WALKS

LANES = 16  # rows of a block
UNIT = 32  # inputs that a compiled loop takes at once, where groups are whole multiples of it
BF16_MANTISSA, FLOAT_MANTISSA = 7, 23


class Codes(Protocol):
    """One kind of codes. `planes`: bits of each, the high ones first; `affine`: whether groups have scales; `largest`:
    of the numbers of `quad`; `walked`: whether words come with those of the lane before, as one plane more; `effort`:
    time of a row's product, of that with a grid's code, whatever that one's width (measured on a Zen 4); start and
    step: of the values that `pair` and `single` give, by whether they are pairs of bf16."""

    @property
    def name(self) -> str: ...
    @property
    def planes(self) -> tuple[int, ...]: ...
    @property
    def affine(self) -> bool: ...
    @property
    def largest(self) -> int: ...
    @property
    def walked(self) -> bool: ...
    @property
    def effort(self) -> float: ...

    def values(self, pairs: bool) -> tuple[float, float]:
        """start and step."""

    def pair(self, lanes: Lanes, words: Sequence[Sequence[Value]], at: int) -> Value:
        """Values of the inputs 2*at and 2*at + 1 as two bf16 a lane; words: of each plane those of the unit."""

    def single(self, lanes: Lanes, words: Sequence[Sequence[Value]], at: int, half: int) -> Value:
        """Values of the input 2*at + half as one float32 a lane."""

    def quad(self, lanes: Lanes, words: Sequence[Sequence[Value]], at: int) -> Value:
        """Codes of the inputs 4*at + (0, 2, 1, 3) as four bytes a lane, the first in the low ones."""


def slot_of(bits: int) -> int:
    """Bits of the slot of a code, or of each half of a float32."""
    return int(min(16, 1 << (bits - 1).bit_length()))


def field(plane: int, slot: int, at: int) -> tuple[int, int]:
    """Which word of a plane holds pair `at`, and its lowest bit within each half; compiled, too."""
    number, place = at // (16 // slot), at % (16 // slot)
    word, part = number // (slot // plane), number % (slot // plane)
    return word, (place // 2 + place % 2 * (8 // slot)) * slot + part * plane


@dataclass(frozen=True)
class Affine:
    """Codes of a grid of scales and zero points, 1 to 8 bits."""

    bits: int
    planes: tuple[int, ...]
    affine: bool = True
    walked: bool = False
    effort: float = 1.0

    @property
    def name(self) -> str:
        return str(self.bits)

    @property
    def largest(self) -> int:
        return (1 << self.bits) - 1

    def values(self, pairs: bool) -> tuple[float, float]:
        """Of 1.0 with the code in its mantissa; 8 bits do not fit into that of bf16, and are converted."""
        return (0.0, 1.0) if pairs and self.bits > BF16_MANTISSA else (1.0, 2.0**-self.bits)

    def pair(self, lanes: Lanes, words: Sequence[Sequence[Value]], at: int) -> Value:
        if self.bits > BF16_MANTISSA:
            return self._converted(lanes, words[0], at)
        joined, low = self._joined(lanes, words, at)
        top = BF16_MANTISSA - self.bits
        taken = lanes.masked(lanes.shifted(joined, low - top), 0x00010001 * (self.largest << top))
        return lanes.with_bits(taken, 0x3F803F80)

    def single(self, lanes: Lanes, words: Sequence[Sequence[Value]], at: int, half: int) -> Value:
        joined, low = self._joined(lanes, words, at)
        top = FLOAT_MANTISSA - self.bits
        taken = lanes.masked(lanes.shifted(joined, low + 16 * half - top), self.largest << top)
        return lanes.as_floats(lanes.with_bits(taken, 0x3F800000))

    def quad(self, lanes: Lanes, words: Sequence[Sequence[Value]], at: int) -> Value:
        joined, low = self._joined(lanes, words, 2 * at)
        return lanes.masked(lanes.shifted(joined, low), 0x01010101 * self.largest)

    def _joined(self, lanes: Lanes, words: Sequence[Sequence[Value]], at: int) -> tuple[Value, int]:
        """The word of codes of pair `at`, put together of its planes, and its lowest bit in each half; what else
        is in a slot may be anything. All pairs of a word have the same, which is computed once."""
        slot, top, first, joined = slot_of(self.bits), self.bits, 0, None
        for plane, of_plane in zip(self.planes, words, strict=True):
            word, low = field(plane, slot, at)
            part, top = low % slot, top - plane
            if joined is None:  # the codes begin where the first plane need not be moved, if they can
                first, joined = max(0, part - top), of_plane[word]
                joined = lanes.shifted(joined, part - top - first)
            else:
                mask = sum(((1 << (first + top + plane)) - 1) << place for place in range(0, 32, slot))
                joined = lanes.mixed(mask, lanes.shifted(of_plane[word], part - top - first), joined)
        return joined, low - part + first

    def _converted(self, lanes: Lanes, words: Sequence[Value], at: int) -> Value:
        """8 bits as whole numbers, which bf16 holds up to 256: the upper half of the float32."""
        word, low = field(self.bits, self.bits, at)
        first, second = (
            lanes.as_words(lanes.to_floats(lanes.masked(lanes.shifted(words[word], low + 16 * half), 255)))
            for half in (0, 1)
        )
        return lanes.either(lanes.shifted(first, 16), second)


@dataclass(frozen=True)
class Dense:
    """Values as the checkpoint has them, in 16 or 32 bits."""

    name: str
    planes: tuple[int, ...]
    affine: bool = False
    largest: int = 0
    walked: bool = False
    effort: float = 1.0

    def values(self, pairs: bool) -> tuple[float, float]:
        return 0.0, 1.0

    def pair(self, lanes: Lanes, words: Sequence[Sequence[Value]], at: int) -> Value:
        if self.name != "bfloat16":
            raise ValueError(f"{self.name} is no pair of bf16")
        return words[0][at]

    def single(self, lanes: Lanes, words: Sequence[Sequence[Value]], at: int, half: int) -> Value:
        if self.name == "float32":  # the first plane: upper halves, the second: lower ones
            upper, lower = (lanes.shifted(plane[at], 16 * half) for plane in words)
            return lanes.as_floats(lanes.either(lanes.shifted(upper, -16), lanes.masked(lower, 0xFFFF)))
        word = lanes.shifted(words[0][at], 16 * half)
        return lanes.of_halves(word) if self.name == "float16" else lanes.as_floats(lanes.shifted(word, -16))

    def quad(self, lanes: Lanes, words: Sequence[Sequence[Value]], at: int) -> Value:
        raise ValueError(f"{self.name} has no codes")


PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
_GRIDS: list[Codes] = [Affine(bits, planes) for bits, planes in PLANES.items()]
_DENSE: list[Codes] = [Dense("bfloat16", (16,)), Dense("float16", (16,)), Dense("float32", (16, 16))]
CODES = {codes.name: codes for codes in (*_GRIDS, *_DENSE, *WALKS)}


def least_unit(planes: Sequence[int]) -> int:
    """Inputs that fill whole words of every plane."""
    return 32 // min(planes)
