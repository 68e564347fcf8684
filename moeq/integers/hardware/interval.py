"""Interval arithmetic of whole numbers: what a register can hold at most, and the bits that it needs for that."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """All whole numbers from low to high."""

    low: int
    high: int

    def __post_init__(self) -> None:
        assert self.low <= self.high, f"{self.low} to {self.high} holds nothing"

    @property
    def signed(self) -> bool:
        """Whether it takes a sign."""
        return self.low < 0

    @property
    def magnitude(self) -> int:
        """The largest absolute value."""
        return max(-self.low, self.high)

    @property
    def bits(self) -> int:
        """The least width that holds every value: two's complement where there are negative ones."""
        if not self.signed:
            return max(1, self.high.bit_length())
        return 1 + max((-self.low - 1).bit_length(), max(self.high, 0).bit_length())

    @property
    def operand_bits(self) -> int:
        """The width at the port of a signed multiplier: an unsigned value takes a zero in front."""
        return self.bits if self.signed else self.bits + 1

    def __add__(self, other: Interval) -> Interval:
        return Interval(self.low + other.low, self.high + other.high)

    def __sub__(self, other: Interval) -> Interval:
        return Interval(self.low - other.high, self.high - other.low)

    def __mul__(self, other: Interval) -> Interval:
        ends = [a * b for a in (self.low, self.high) for b in (other.low, other.high)]
        return Interval(min(ends), max(ends))

    def __or__(self, other: Interval) -> Interval:
        """The least interval that holds both."""
        return Interval(min(self.low, other.low), max(self.high, other.high))

    def times(self, count: int) -> Interval:
        """Sums of `count` values of it."""
        return Interval(self.low * count, self.high * count)

    def shifted(self, bits: int) -> Interval:
        """round_shift of INTEGER.md by so many bits: half up."""
        half = (1 << bits) >> 1
        return Interval((self.low + half) >> bits, (self.high + half) >> bits)

    def within(self, other: Interval) -> bool:
        """Whether the other holds all of it."""
        return other.low <= self.low and self.high <= other.high


def signed(bits: int) -> Interval:
    """What a two's complement register of so many bits holds."""
    return Interval(-(1 << (bits - 1)), (1 << (bits - 1)) - 1)


def unsigned(bits: int) -> Interval:
    """What an unsigned register of so many bits holds."""
    return Interval(0, (1 << bits) - 1)


def symmetric(magnitude: int) -> Interval:
    """From -magnitude to magnitude."""
    return Interval(-magnitude, magnitude)
