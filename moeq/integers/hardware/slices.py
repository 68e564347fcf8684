"""Multiplier slices and block RAMs of an FPGA that arithmetic and memories of given widths take.

A slice (DSP48E2 of AMD's UltraScale+, UG579) multiplies 27 by 18 bits, signed. Wider operands are cut into digits of
26 and 17 bits, the lower ones unsigned. Several narrow products share one slice where they share an operand: packed
beside each other at a distance of one whole product, so that each can be taken out exactly (a product that is negative
borrows from the next, which logic gives back). Adders, shifts, comparisons and registers lie in logic, which is not
counted; nor is a product with a constant of at most three signed digits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from moeq.integers.hardware.interval import Interval

LARGE, SMALL = 27, 18  # bits of a slice's operands
BLOCK_SHAPES = ((36, 512), (18, 1024), (9, 2048), (4, 4096), (2, 8192), (1, 16384))  # width, depth of 18 Kibit (UG573)
LOGIC_DEPTH = 64  # words: memories of no more lie in logic (a 64-word RAM is a lookup table a bit)
FEW_DIGITS = 3


def slices(a: Interval, b: Interval) -> int:
    """Slices of one product of two registers a cycle."""
    wide, narrow = a.operand_bits, b.operand_bits
    ways = ((wide, narrow), (narrow, wide))
    return min(-(-max(1, x - 1) // (LARGE - 1)) * -(-max(1, y - 1) // (SMALL - 1)) for x, y in ways)


def digits(constant: int) -> int:
    """Nonzero digits of a constant in signed digits: shifts that are added or subtracted."""
    return (3 * constant ^ constant).bit_count()


def constant_slices(a: Interval, constant: int) -> int:
    """Slices of a product with a constant; none where a few shifts do it."""
    return 0 if digits(constant) <= FEW_DIGITS else slices(a, Interval(0, constant))


@dataclass(frozen=True)
class Packing:
    """`lefts` operands of one kind times `rights` of the other in one slice, products `distance` bits apart."""

    lefts: int
    rights: int
    distance: int

    @property
    def products(self) -> int:
        """Products of a slice a cycle."""
        return self.lefts * self.rights


def _beside(one: Interval, count: int, distance: int) -> Interval:
    total = one
    for place in range(1, count):
        total = total + Interval(one.low << place * distance, one.high << place * distance)
    return total


@cache
def packings(left: Interval, right: Interval) -> tuple[Packing, ...]:
    """Every way to pack products of operands: left * right of one at least; none where one product takes more slices.

    Product p + lefts * q stands `distance` bits times its number up; packed operands must fit their ports.
    """
    distance = (left * right).bits
    found = []
    for lefts in range(1, LARGE // max(1, min(left.bits, distance)) + 1):
        for rights in range(1, LARGE // max(1, min(right.bits, distance)) + 1):
            a = _beside(left, lefts, distance).operand_bits
            b = _beside(right, rights, lefts * distance).operand_bits
            if max(a, b) <= LARGE and min(a, b) <= SMALL:
                found.append(Packing(lefts, rights, distance))
    return tuple(found)


def array_slices(left: Interval, right: Interval, lefts: int, rights: int) -> tuple[int, Packing | None]:
    """Slices of all products of `lefts` operands with `rights` others a cycle, and how they are packed.

    None: one product takes several slices.
    """
    ways = packings(left, right)
    if not ways:
        return lefts * rights * slices(left, right), None
    taken = [(-(-lefts // way.lefts) * -(-rights // way.rights), way.products, way) for way in ways]
    count, _, way = min(taken, key=lambda each: each[:2])
    return count, way


def block_rams(width: int, depth: int, *, small_too: bool = False) -> float:
    """Block RAMs of 36 Kibit, in halves, of a memory that gives one word of `width` bits a cycle.

    small_too: also where so few words would lie in logic.
    """
    if depth <= LOGIC_DEPTH and not small_too:
        return 0.0
    return min(-(-width // wide) * -(-depth // deep) for wide, deep in BLOCK_SHAPES) / 2
