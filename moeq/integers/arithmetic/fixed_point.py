"""Integer arithmetic as a chip does it: dyadic multipliers, one named rounding, saturation, roots, a table of 2**-x.

A real factor is a multiplier of 16 bits and a right shift: x*factor is (x*multiplier + 2**(shift-1)) >> shift. That is
rounding half up, floor(v + 1/2), the only rounding used here ("half_up"). Every product of these functions stays under
2**52, so that float64 arithmetic of the same formula gives the same whole numbers; callers prove the widths of what
they pass. All integer tensors are int64, of any shape that broadcasts, and stand for registers of the widths named.
Paper 004 takes such arithmetic as given (4.3 names reciprocals and shifts); moeq/INTEGER.md defines it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moeq.errors import QuantizationError
from moeq_kernels.widths import MAX_SHIFT, MULTIPLIER_BITS

ACCUMULATOR_BITS = 32
OCTAVE_STEPS = 256  # entries of the table of 2**-x
UNIT_BITS = 15  # 1.0 in that table and in routing weights is 2**15


@dataclass(frozen=True, kw_only=True)
class Dyadic:
    """factor ~ multiplier / 2**shift; int64 tensors of one shape, multiplier in [2**15, 2**16) or 0."""

    multiplier: Tensor
    shift: Tensor


def dyadic(factor: Tensor | float, *, where: str | None = None) -> Dyadic:
    """The nearest multipliers of positive real factors of any shape (relative error at most 2**-16).

    Factors under 2**-46 lose digits, since shifts end at 62. Raises QuantizationError, naming `where`, for one that is
    not finite, not positive, or of 2**16 and more.
    """
    factors = torch.as_tensor(factor, dtype=torch.float64)
    if not bool((torch.isfinite(factors) & (factors > 0)).all()):
        raise QuantizationError("a scale is zero or not finite", where=where, do="check the calibration images")
    _, exponent = torch.frexp(factors)
    shift = (MULTIPLIER_BITS - exponent).clamp(max=MAX_SHIFT)
    multiplier = torch.ldexp(factors, shift).round()
    over = multiplier >= 2**MULTIPLIER_BITS
    multiplier, shift = torch.where(over, multiplier / 2, multiplier), torch.where(over, shift - 1, shift)
    if bool((shift < 0).any()):
        worst = f"{float(factors.max()):.3g}"
        raise QuantizationError(f"a factor of {worst} has no 16-bit multiplier", where=where, do="check the ranges")
    return Dyadic(multiplier=multiplier.to(torch.int64), shift=shift.to(torch.int64))


def shift_half_up(values: Tensor, shift: Tensor | int) -> Tensor:
    """floor(values / 2**shift + 1/2), elementwise, of int64 values; shift: 0 to 62, a number or what broadcasts."""
    by = torch.as_tensor(shift, dtype=torch.int64)
    half = torch.where(by > 0, torch.bitwise_left_shift(torch.ones_like(by), (by - 1).clamp(min=0)), 0)
    return torch.bitwise_right_shift(values + half, by)


def scaled(values: Tensor, factor: Dyadic) -> Tensor:
    """int64 values (under 2**36 in magnitude) times the factor, elementwise, rounded half up."""
    return shift_half_up(values * factor.multiplier, factor.shift)


def saturated(values: Tensor, bits: int) -> Tensor:
    """Values, int64 or whole numbers in float64, clipped, elementwise, to what `bits` bits hold signed."""
    return values.clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def bits_of(magnitude: int) -> int:
    """The least n with magnitude <= 2**n."""
    return max(0, magnitude - 1).bit_length()


def check_fits(magnitude: int, bits: int, *, what: str, where: str) -> None:
    """QuantizationError unless a signed register of `bits` bits holds +-magnitude."""
    if magnitude > 2 ** (bits - 1) - 1:
        raise QuantizationError(
            f"{what} can reach {magnitude:,}, {bits} bits hold {2 ** (bits - 1) - 1:,}",
            where=where,
            do="use fewer bits for weights or activations",
        )


def isqrt(values: Tensor) -> Tensor:
    """floor(sqrt(values)), elementwise and exact, of int64 values from 0 to 2**52."""
    root = values.double().sqrt().floor().to(torch.int64)
    root = torch.where(root * root > values, root - 1, root)
    return torch.where((root + 1) * (root + 1) <= values, root + 1, root)


def power_table() -> Tensor:
    """2**-(j/256) for j from 0 to 255 with 15 fractional bits, rounded to nearest, int64 [256]."""
    steps = torch.arange(OCTAVE_STEPS, dtype=torch.float64) / OCTAVE_STEPS
    table: Tensor = (torch.exp2(-steps) * 2**UNIT_BITS).round().to(torch.int64)
    return table


def power(steps: Tensor, table: Tensor) -> Tensor:
    """2**-(steps/256) with 15 fractional bits, bits below dropped; steps: int64, 0 and more; table: [256] as above."""
    whole = torch.bitwise_right_shift(steps, OCTAVE_STEPS.bit_length() - 1).clamp(max=MAX_SHIFT)
    entries: Tensor = table[torch.bitwise_and(steps, OCTAVE_STEPS - 1)]
    return torch.bitwise_right_shift(entries, whole)


def power_factor(scale: float) -> float:
    """By what a difference d of scores of this scale is multiplied so that exp(-d*scale) = 2**-(product/256).

    What a softmax takes: the numerators exp(x - max) of paper 004's section 3.2 become lookups in the table.
    """
    return OCTAVE_STEPS * scale / math.log(2)
