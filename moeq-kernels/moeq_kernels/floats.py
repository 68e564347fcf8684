"""Codes that are floating-point numbers: NVFP4 and MXFP4 at 4 bits, FP8 at 8.

A code of 4 bits is e2m1: a sign, two bits of exponent, one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and these below 0
(OCP Microscaling Formats, version 1.0). NVFP4: 16 inputs of a row share a scale, e4m3, and a whole matrix one number
that scales are counted in, `unit` float32 [1, 1]: value = code * (scale * unit), each product rounded once. MXFP4:
32 inputs share a scale, e8m0 (b stands for 2**(b - 127)). A code of 8 bits is e4m3 (OCP 8-bit Floating Point, version
1.0: 448 is the largest, no infinity), its scale a float16 a row. moeq makes units and scales of rows that are powers of
two: values are then exact in bfloat16, whatever order a runtime multiplies in.

codes uint8 [..., N, ceil(K*b/8)]; scales uint8 [..., N, G] at 4 bits, float16 [..., N, 1] at 8.

Letters: N output rows, K inputs, G groups of inputs, b bits.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from moeq_kernels.packing import packed_row_bytes, unpack
from moeq_kernels.widths import FLOAT_BITS, FLOAT_GROUPS, group_count

HALVES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1 without its sign
FP4_MOST, FP8_MOST = 6.0, 448.0
FP8_NAN, E8M0_NAN = 0x7F, 0xFF  # e4m3 without its sign; e8m0
E8M0_BIAS = 127
E4M3 = torch.float8_e4m3fn


@cache
def fp4_values() -> Tensor:
    """The value of each code of 4 bits, float32 [16]."""
    positive = torch.tensor(HALVES)
    return torch.cat([positive, -positive])


@cache
def fp8_values() -> Tensor:
    """The value of each byte as e4m3, float32 [256]; two of them are no numbers."""
    return torch.arange(256, dtype=torch.uint8).view(E4M3).float()


@cache
def power_values() -> Tensor:
    """The value of each byte as e8m0, float32 [256]; the last one is no number."""
    found = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - E8M0_BIAS).float()
    found[E8M0_NAN] = torch.nan
    return found


def packed_shapes(rows: int, inputs: int, bits: int, codebook: str) -> dict[str, tuple[tuple[int, int], torch.dtype]]:
    """Shape and dtype of each stored part of one weight; ValueError for a width that there is not."""
    if bits not in FLOAT_BITS or codebook not in FLOAT_GROUPS:
        raise ValueError(f"{codebook or 'floating point'} has no codes of {bits} bits")
    codes = {"codes": ((rows, packed_row_bytes(inputs, bits)), torch.uint8)}
    if bits == FLOAT_BITS[-1]:
        return {**codes, "scales": ((rows, 1), torch.float16)}
    found = {**codes, "scales": ((rows, group_count(inputs, FLOAT_GROUPS[codebook])), torch.uint8)}
    return {**found, "unit": ((1, 1), torch.float32)} if codebook == "nvfp4" else found


def scale_values(scales: Tensor, codebook: str, unit: Tensor | None) -> Tensor:
    """What stored scales [..., N, G] stand for, float32."""
    if scales.dtype != torch.uint8:
        return scales.float()
    if unit is None:
        return power_values().to(scales.device)[scales.long()]
    return fp8_values().to(scales.device)[scales.long()] * unit.float()


def dequantize(
    codes: Tensor, scales: Tensor, unit: Tensor | None, bits: int, inputs: int, codebook: str,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """Values [..., N, K], computed in float32, in a dtype."""
    value = (fp4_values() if bits == FLOAT_BITS[0] else fp8_values()).to(codes.device)
    found = value[unpack(codes, bits, inputs).long()]
    scale = scale_values(scales, codebook, unit)
    if scale.shape[-1] > 1:
        scale = scale.repeat_interleave(FLOAT_GROUPS[codebook], -1)[..., :inputs]
    return (found * scale).to(dtype)


def are_numbers(codes: Tensor, scales: Tensor, unit: Tensor | None, bits: int) -> bool:
    """Whether all that is stored stands for finite numbers."""
    if bits == FLOAT_BITS[-1]:
        return bool(((codes & FP8_NAN) != FP8_NAN).all() & torch.isfinite(scales).all())
    if unit is None:
        return bool((scales != E8M0_NAN).all())
    return bool(((scales & FP8_NAN) != FP8_NAN).all() & torch.isfinite(unit).all())
