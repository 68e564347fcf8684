"""Quantized softmax numerators and their product with values by shifts (paper 004, sections 3.2 and 4.3).

The numerator A = exp(x - max) lies in (0, 1], so its quantizer has the scale 1:

  log-sqrt2: A_q = clip(round(-2 log2 A), 0, 2**b - 1), A^ = 2**(-A_q/2) = 2**(-ceil(A_q/2)) * (sqrt2 if A_q is odd)
  log2:      A_q = clip(round(-log2 A), 0, 2**b - 1),   A^ = 2**(-A_q)

In integers A_q is one multiplication of max - x, without an exponential. Equation 21 prints floor(A_q/2), which
doubles the odd weights; the shift is the ceiling. The parity belongs to a query and a key, so that sqrt2 fits into no
scale of V: even and odd codes are summed apart, and each output takes one multiplication by sqrt2. V is first shifted
left by `left` bits; a shift of up to `left` then loses nothing. Codes whose shift is longer count as 0, as do masked
ones; at 4 bits of log-sqrt2 none is. Calibration may let more codes count as 0 (dropped_codes.py).

Letters: Q queries, K keys, d values a head, b bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moeq.errors import QuantizationError
from moeq.integers.arithmetic.fixed_point import ACCUMULATOR_BITS, Dyadic, bits_of, scaled, shift_half_up
from moeq_kernels.widths import EXACT_BITS

Logarithm = Literal["log-sqrt2", "log2"]
STEPS: dict[str, int] = {"log-sqrt2": 2, "log2": 1}  # codes an octave
ROOT_BITS = 15
ROOT = 46341  # sqrt2 with 15 fractional bits
LEFT = 16  # fractional bits of the sums where there is room, since sqrt2 is rounded to them
LEAST_LEFT = 12  # weights under 2**-12 may be dropped where the accumulator has no room, larger ones not
MOST_RECIPROCAL_BITS = 24


@dataclass(frozen=True, kw_only=True)
class Widths:
    """left: how far values are shifted up; dropped_from: the first code with no room, None when there is room for all.

    reciprocal_bits: fractional bits of the denominator's reciprocal, such that no product reaches 2**52.
    """

    left: int
    dropped_from: int | None
    reciprocal_bits: int


def widths(bits: int, kind: Logarithm, keys: int, value_bits: int, *, where: str) -> Widths:
    """The widths at which even and odd sums over `keys` values cannot leave 32 bits.

    The largest sum is keys * 2**(value_bits-1) * 2**left, of even and odd codes together. Raises QuantizationError
    when 32 bits do not even hold weights of 2**-12.
    """
    longest = -(-(2**bits - 1) // STEPS[kind])
    room = ((2 ** (ACCUMULATOR_BITS - 1) - 1) // (keys * 2 ** (value_bits - 1))).bit_length() - 1
    if room < min(longest, LEAST_LEFT):
        raise QuantizationError(
            f"{kind} attention of {bits} bits over {keys} keys of {value_bits}-bit values does not fit into "
            f"{ACCUMULATOR_BITS}-bit sums",
            where=where,
            do="use fewer bits for activations or attention",
        )
    left = min(max(longest, LEFT), room)
    largest = keys * 2 ** (value_bits - 1 + left)
    return Widths(
        left=left,
        dropped_from=None if left >= longest else left * STEPS[kind] + 1,
        reciprocal_bits=min(MOST_RECIPROCAL_BITS, EXACT_BITS - 1 - bits_of(largest)),
    )


def numerator_codes(differences: Tensor, factor: Dyadic, bits: int) -> Tensor:
    """A_q (equation 18) of max - x, both int64 [..., Q, K]; factor: scale of the scores, codes an octave over ln 2."""
    return scaled(differences, factor).clamp(max=2**bits - 1)


def quantized(numerators: Tensor, bits: int, kind: Logarithm) -> Tensor:
    """A_q, int64, of real numerators in (0, 1] of any shape, as equation 18 has it, halves up."""
    return torch.floor(-STEPS[kind] * torch.log2(numerators.double()) + 0.5).clamp(0, 2**bits - 1).to(torch.int64)


def shift_and_parity(codes: Tensor, kind: Logarithm) -> tuple[Tensor, Tensor]:
    """ceil(A_q/2) and the parity of equation 19, both in the shape of the codes; for log2 A_q itself and False."""
    if kind == "log2":
        return codes, torch.zeros_like(codes, dtype=torch.bool)
    return torch.bitwise_right_shift(codes + 1, 1), torch.bitwise_and(codes, 1).bool()


def shifted_sums(
    shift: Tensor, odd: Tensor, values: Tensor, left: int, kept: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sums over keys of (values << left) >> shift (equation 21), of even and odd codes apart: two int64 [..., Q, d].

    shift, odd: [..., Q, K]; values: [..., K, d]; kept: [..., Q, K], False for masked pairs and codes that are dropped,
    which count as 0, as do shifts beyond `left`. A shift is written as the product with a power of two.
    """
    counted = shift <= left if kept is None else (shift <= left) & kept
    weight = torch.where(counted, torch.bitwise_left_shift(torch.ones_like(shift), (left - shift).clamp(min=0)), 0)
    return torch.where(odd, 0, weight) @ values, torch.where(odd, weight, 0) @ values


def joined(even: Tensor, odd: Tensor) -> Tensor:
    """even + sqrt2*odd (s' of equation 20), int64 [..., Q, d], by one multiplication of each, rounded half up."""
    return even + shift_half_up(odd * ROOT, ROOT_BITS)


def normalized(
    numerator: Tensor, denominator: Tensor, unit_bits: int, factor: Dyadic, held: Widths
) -> tuple[Tensor, Tensor]:
    """numerator/denominator times a factor (s_v over the output's scale), rounded half up: int64 [..., Q, d].

    numerator: as `joined` gives it, with held.left fractional bits; denominator: int64 [..., Q, 1] with `unit_bits`
    fractional bits, at least 1.0. As section 4.3 has it, the reciprocal is multiplied by the scales once a query; the
    second result is that product, [..., Q, 1]. Of the factor's shift 16 bits stay for the end.
    """
    reciprocal = torch.div(torch.tensor(1 << (unit_bits + held.reciprocal_bits)), denominator, rounding_mode="floor")
    row = shift_half_up(reciprocal * factor.multiplier, 16)
    return shift_half_up(numerator * row, held.left + held.reciprocal_bits + factor.shift - 16), row
