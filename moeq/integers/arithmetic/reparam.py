"""Norm reparameterization (paper 004, section 3.1): per-channel activation quantizers folded into the weights around.

What a norm gives to linears is quantized per channel, with scales s and integer zero points z; a static integer matrix
product wants one symmetric scale for the whole tensor. With s~ = mean(s), r1 = s/s~ and r2 = z - 2**(b-1), the norm
gives X' = (X + s*r2)/r1 and every linear W' = diag(r1) W, b' = b - W^T (s*r2): the same function, and the symmetric
codes of X' by s~ are the per-channel codes of X minus 2**(b-1). Equation 10 prints r1 inverted; with that, codes do not
agree. Without zero points (r2 = 0, where a bias cannot be carried) the symmetric per-channel codes of X stay as they
are.

All arithmetic is in float64; results are float64 and rounded once, by whoever stores them.

Letters: D channels of a norm's output, E experts, N outputs of a linear, T samples, b bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeq.errors import NotFiniteError, QuantizationError

_QUANTILE_ELEMENTS = 1 << 24  # the most that torch.quantile takes


@dataclass(frozen=True, kw_only=True)
class ChannelQuantizer:
    """Per-channel quantizer: x has the code round(x/scale + zero), clipped to 2**bits values.

    scale [D]; zero [D], whole numbers, all zero when symmetric. Codes lie in [0, 2**bits - 1], symmetric ones in
    [-2**(bits-1), 2**(bits-1) - 1].
    """

    scale: Tensor
    zero: Tensor
    bits: int
    symmetric: bool

    def codes(self, values: Tensor) -> Tensor:
        """The codes of values [..., D], whole numbers in float64."""
        lowest = -(2 ** (self.bits - 1)) if self.symmetric else 0
        codes = (values.double() / self.scale + self.zero).round()
        return codes.clamp(lowest, lowest + 2**self.bits - 1)

    def values(self, codes: Tensor) -> Tensor:
        """What codes [..., D] stand for, float64."""
        return (codes.double() - self.zero) * self.scale


@dataclass(frozen=True, kw_only=True)
class Fold:
    """What a norm's output is multiplied and shifted by: X' = (X + shift)/r1, quantized by the one scale s~.

    r1, r2, shift = s*r2: [D] in float64; scale: s~.
    """

    r1: Tensor
    r2: Tensor
    shift: Tensor
    scale: float
    bits: int

    @property
    def shifts(self) -> bool:
        """Whether consumers need a bias."""
        return bool((self.r2 != 0).any())


def channel_range(samples: Tensor, percentile: float | None = None) -> tuple[Tensor, Tensor]:
    """Least and largest value of every channel over samples [T, D], float64 [D].

    percentile (above 50, up to 100): the values that this share of the samples does not exceed, on either side.
    """
    if percentile is None:
        return samples.amin(0).double(), samples.amax(0).double()
    ends = torch.tensor([1 - percentile / 100, percentile / 100], dtype=torch.float64, device=samples.device)
    width = max(1, _QUANTILE_ELEMENTS // len(samples))
    low, high = torch.cat([torch.quantile(part.double(), ends, 0) for part in samples.split(width, 1)], 1)
    return low, high


def asymmetric_quantizer(low: Tensor, high: Tensor, bits: int, *, where: str | None = None) -> ChannelQuantizer:
    """Scale (high - low)/(2**bits - 1) and zero point round(-low/scale) of every channel (equation 6).

    low, high: [D]. The range need not hold the value 0, so a zero point may lie outside of the codes. Raises
    QuantizationError naming the channel (of `where`) when one is constant, NotFiniteError when one is not finite.
    """
    low, high = low.double(), high.double()
    scale = (high - low) / (2**bits - 1)
    _check(low, high, scale, where)
    return ChannelQuantizer(scale=scale, zero=(-low / scale).round(), bits=bits, symmetric=False)


def symmetric_quantizer(low: Tensor, high: Tensor, bits: int, *, where: str | None = None) -> ChannelQuantizer:
    """Scale max(|low|, |high|)/(2**(bits-1) - 1) of every channel, zero points 0 (equation 7); errors as above.

    low, high: [D]. Only a channel that is always 0 has no scale.
    """
    low, high = low.double(), high.double()
    scale = torch.maximum(low.abs(), high.abs()) / (2 ** (bits - 1) - 1)
    _check(low, high, scale, where)
    return ChannelQuantizer(scale=scale, zero=torch.zeros_like(scale), bits=bits, symmetric=True)


def _check(low: Tensor, high: Tensor, scale: Tensor, where: str | None) -> None:
    finite = torch.isfinite(low) & torch.isfinite(high) & torch.isfinite(scale)
    if not bool(finite.all()):
        raise NotFiniteError(
            f"channel {int((~finite).nonzero()[0])} of the norm's output is not finite",
            where=where,
            do="use dtype: float32, or check the checkpoint's weights",
        )
    dead = scale < torch.finfo(torch.float32).tiny
    if bool(dead.any()):
        first, count = int(dead.nonzero()[0]), int(dead.sum())
        value = float(low[first]) + 0.0  # never -0
        others = f" ({count} such channels)" if count > 1 else ""
        raise QuantizationError(
            f"channel {first} of the norm's output is always {value:g} in calibration, it has no scale{others}",
            where=where,
            do="calibrate on more samples; when its weight is 0, leave this norm out of reparam.norms",
        )


def fold_of(quantizer: ChannelQuantizer) -> Fold:
    """r1, r2 (equation 10, r1 inverted) and s~: after the fold the quantizer's codes are symmetric ones of s~."""
    scale = quantizer.scale.mean()
    middle = 0 if quantizer.symmetric else 2 ** (quantizer.bits - 1)
    r2 = quantizer.zero - middle
    shift = quantizer.scale * r2
    return Fold(r1=quantizer.scale / scale, r2=r2, shift=shift, scale=float(scale), bits=quantizer.bits)


def symmetric_codes(values: Tensor, scale: Tensor | float, bits: int) -> Tensor:
    """round(values/scale) clipped to [-2**(bits-1), 2**(bits-1) - 1], whole numbers in float64 (equation 7).

    scale: a number, or a tensor that broadcasts to the values.
    """
    half = 2 ** (bits - 1)
    return (values.double() / scale).round().clamp(-half, half - 1)


def folded_norm(
    weight: Tensor, bias: Tensor | None, fold: Fold, *, plus_one: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Weight and bias [D] of the folded norm (equation 11), float64.

    plus_one: the norm multiplies by 1 + weight. A norm without a bias keeps none: its fold must not shift.
    """
    assert bias is not None or not fold.shifts
    gain = weight.double() + 1 if plus_one else weight.double()
    folded = gain / fold.r1
    return folded - 1 if plus_one else folded, None if bias is None else (bias.double() + fold.shift) / fold.r1


def folded_linear(weight: Tensor, bias: Tensor | None, fold: Fold, *, axis: int = -1) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a linear that is fed by the folded norm (equations 14 to 16), float64.

    weight: any shape whose `axis` holds the D inputs ([N, D], or stacks [E, N, D]; axis -2 of [E, D, N]); bias: the
    shape without that axis, None for none. The new bias is made of the old weight; None when there was none and the
    fold does not shift.
    """
    rows = weight.double().movedim(axis, -1)
    folded = (rows * fold.r1).movedim(-1, axis)
    if not fold.shifts:
        return folded, None if bias is None else bias.double()
    taken = rows @ fold.shift
    return folded, -taken if bias is None else bias.double() - taken
