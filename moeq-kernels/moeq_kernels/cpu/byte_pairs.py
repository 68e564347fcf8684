"""Dot products of bytes where the CPU sums two of them in 16 bits, not four in 32: AVX2 without AVX-VNNI.

Sums of 16 bits are added up as such for as long as no codes and activations can fill them, then widened: eight products
of 4 bits, which a unit has. Codes of 8 bits, which two products would fill, are multiplied as two of 4.
"""

from __future__ import annotations

from llvmlite.ir import Value

from moeq_kernels.cpu.lanes import Lanes

MOST = (1 << 15) - 1  # of an int16
MOST_ACTIVATION = 128  # of a byte of activations, with its sign
HALF = 4  # bits
LOW_HALVES = 0x0F0F0F0F


def most_products(largest: int) -> int:
    """How many sums of two products of codes, at most `largest`, an int16 holds: 0 if not even one."""
    return MOST // (2 * MOST_ACTIVATION * largest)


def parts_of(lanes: Lanes, codes: Value, largest: int) -> list[tuple[Value, int]]:
    """Four codes a lane as what two products of do not fill 16 bits, and what each is to be multiplied with."""
    if most_products(largest):
        return [(codes, 1)]
    return [(lanes.masked(codes, LOW_HALVES), 1), (lanes.masked(lanes.shifted(codes, HALF), LOW_HALVES), 1 << HALF)]


class Sums16:
    """The products of one unit of a block, part and row with one byte of activations; `total` is in int32."""

    def __init__(self, lanes: Lanes, largest: int, total: Value) -> None:
        self.lanes, self.total = lanes, total
        self.most = most_products(largest) or most_products((1 << HALF) - 1)
        self._sums: dict[int, Value] = {}
        self._held: dict[int, int] = {}

    def add(self, codes: Value, factor: int, activations: Value) -> None:
        """The products of codes and activations, times a factor."""
        products = self.lanes.dot_bytes(codes, activations)
        if factor in self._sums:
            products = self.lanes.builder.add(self._sums[factor], products)
        self._sums[factor] = products
        self._held[factor] = self._held.get(factor, 0) + 1
        if self._held[factor] == self.most:
            self._widen(factor)

    def _widen(self, factor: int) -> None:
        self.total = self.lanes.dot_shorts(self.total, self._sums.pop(factor), factor)
        del self._held[factor]

    def end(self) -> Value:
        """The total with what has not been widened yet."""
        for factor in tuple(self._sums):
            self._widen(factor)
        return self.total
