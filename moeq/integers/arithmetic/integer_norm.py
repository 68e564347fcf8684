"""LayerNorm in integers: exact sums, an integer root, one reciprocal a row, codes of the normalized row.

Of a row x of D whole numbers, S = sum x and V = D * sum x**2 - S**2 = D**2 times its variance, exactly;
(x - mean)/sqrt(variance + eps) = (D*x - S)/sqrt(V + E), with E = D**2 * eps in the row's own scale, is made by

  shift V + E left by an even number `up`, so that it has 51 or 52 bits;  root = isqrt;  reciprocal = 2**50 // root
  y = (D*x - S) * reciprocal >> (32 - up/2), half up: 18 fractional bits
  code = (y*gain + bias) >> gain_bits + 18, half up, saturated

where gain and bias are gamma/s~ and beta/s~ with `gain_bits` and gain_bits + 18 fractional bits.

Letters: D channels, w bits of the row's numbers. gamma, beta and s~ are paper 004's (3.1): a folded norm's parameters
(equation 11) and the one scale of its output. The paper leaves the norm itself to its accelerator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeq.errors import QuantizationError
from moeq.integers.arithmetic.fixed_point import isqrt, saturated, shift_half_up
from moeq_kernels.widths import EXACT_BITS

RECIPROCAL_BITS = 50
UNIT_BITS = 18  # fractional bits of the normalized row
GAIN_BITS = 16  # magnitude bits of the largest gain


def widest_row(channels: int) -> int:
    """The widest two's complement w for which V < 2**51, at most 20 bits: D**2 * 2**(2w - 2) < 2**51."""
    free = EXACT_BITS - 1 - (channels * channels - 1).bit_length()
    return min(20, free // 2 + 1)


def gain_and_bias(weight: Tensor, bias: Tensor, scale: float, *, where: str) -> tuple[Tensor, Tensor, int]:
    """gamma/scale and beta/scale as int64 [D], and the fractional bits of the first (the second has 18 more).

    weight, bias: gamma and beta, real numbers [D]; scale: s~ of the output's codes. The largest gain takes 16 bits.
    Raises QuantizationError where all are zero, or a bias would not fit beside it.
    """
    gains, offsets = weight.double() / scale, bias.double() / scale
    largest = float(gains.abs().max())
    if not 0 < largest < float("inf"):
        raise QuantizationError("all weights of the norm are zero, or not finite", where=where, do="check the model")
    gain_bits = max(0, min(30, GAIN_BITS - int(torch.frexp(torch.tensor(largest)).exponent)))
    offset = (offsets * 2.0 ** (gain_bits + UNIT_BITS)).round()
    if float(offset.abs().max()) >= 2.0 ** (EXACT_BITS - 2) or largest * 2**gain_bits >= 2.0**24:
        raise QuantizationError("gain and bias of the norm lie too far apart", where=where, do="check the ranges")
    return (gains * 2.0**gain_bits).round().to(torch.int64), offset.to(torch.int64), gain_bits


def normalized_rows(rows: Tensor, epsilon: int) -> Tensor:
    """(x - mean)/sqrt(variance + eps) with 18 fractional bits; rows: int64 [..., D]; epsilon: E, whole, at least 1."""
    channels = rows.shape[-1]
    total = rows.sum(-1, keepdim=True)
    spread = channels * (rows * rows).sum(-1, keepdim=True) - total * total + epsilon
    # exponent n: 2**(n-1) <= spread < 2**n, exact because spread is under 2**52
    exponent = torch.frexp(spread.double()).exponent.to(torch.int64)
    up = torch.bitwise_and(EXACT_BITS - exponent, ~1)
    root = isqrt(torch.bitwise_left_shift(spread, up))
    reciprocal = torch.div(torch.tensor(1 << RECIPROCAL_BITS), root, rounding_mode="floor")
    return shift_half_up(
        (channels * rows - total) * reciprocal, RECIPROCAL_BITS - UNIT_BITS - torch.bitwise_right_shift(up, 1)
    )


def norm_codes(rows: Tensor, gain: Tensor, bias: Tensor, gain_bits: int, epsilon: int, bits: int) -> Tensor:
    """The codes of a LayerNorm's output, int64 [..., D] of `bits` bits.

    rows: int64 [..., D] of at most widest_row(D) bits; gain, bias, gain_bits: of `gain_and_bias`; epsilon: as
    `normalized_rows` takes it.
    """
    return saturated(shift_half_up(normalized_rows(rows, epsilon) * gain + bias, gain_bits + UNIT_BITS), bits)
