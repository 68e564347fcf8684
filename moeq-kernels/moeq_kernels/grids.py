"""Affine quantization grids, one scale and zero point a group of inputs and output row.

A code c stands for the value (c - zero) * scale, c in [0, 2**bits - 1] (Jacob et al., arXiv 1712.05877, equation 1).
Scales are rounded to float16 before any code is computed, so that what was measured is what is stored. Widths of 2 bits
and more: integer zero points, zero always on the grid. 1 bit is a sign grid: the two values are -s and +s with s fitted
to the mean magnitude, which in the same formula is zero = 0.5 and scale = 2*s (codes {0, 1}); nothing is stored for the
zero point.

Letters: E experts, K inputs, G groups, g inputs of one group, B bit widths, N output rows (input-major: inputs before
rows).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from moeq_kernels.widths import NESTED_BITS, resolved_group_size

Symmetry = bool | Literal["narrow", "full"]
SIGN_ZERO = 0.5
SCALE_DTYPE = torch.float16
LEAST_SCALE = 2.0**-24  # above 0 in float16
COARSE_SCALE = 2.0**-17  # below which float16 keeps fewer than 8 binary digits
SHRINKS = tuple(1 - step / 32 for step in range(21))  # of the min-max range that clipping tries, the whole first


def max_codes(bits: Sequence[int], like: Tensor) -> Tensor:
    """Largest code 2**b - 1 of each width as [B, 1], in the dtype and on the device of a tensor of any shape."""
    return torch.tensor([[2.0**b - 1] for b in bits], dtype=like.dtype, device=like.device)


def storable(scale: Tensor) -> Tensor:
    """Scales [...] rounded to the stored float16 precision, in the dtype that they had; never up to infinity, nor down
    to 0, which would make weights of any size 0."""
    half = scale.clamp(max=torch.finfo(SCALE_DTYPE).max).to(SCALE_DTYPE).to(scale.dtype)
    return torch.where((half == 0) & (scale > 0), LEAST_SCALE, half)


def beyond_float16(scales: Tensor) -> list[str]:
    """How stored scales [..., N, G] of one weight lack in range: `scale_underflow` where even the largest has fewer
    than 8 binary digits, `scale_overflow` where one is cut off at the largest number."""
    most = float(scales.max()) if scales.numel() else 0.0
    lacks = {
        "scale_underflow": 0 < most < COARSE_SCALE,
        "scale_overflow": most >= torch.finfo(SCALE_DTYPE).max,
    }
    return [name for name, so in lacks.items() if so]


def extent(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Least (at most 0), largest (at least 0) and mean absolute weight of one group [E, g, ...], each [E, ...]."""
    return weight.amin(1).clamp(max=0), weight.amax(1).clamp(min=0), weight.abs().mean(1)


def fit_grid(weight: Tensor, bits: Sequence[int], symmetric: Symmetry = False) -> tuple[Tensor, Tensor]:
    """Fit min-max grids to one group of inputs, for all bit widths at once.

    weight: [E, g, B, N] (the B copies may differ: each width carries its own feedback). Returns scale and zero
    [E, B, N] in weight's dtype. `symmetric` pins the zero point to the middle, 2**(b-1); 1 bit is always a sign grid.
    A group of zeros gets scale 0, which stands for the value 0. The sign grid of 1 bit with the mean magnitude is that
    of XNOR-Net (Rastegari et al., arXiv 1603.05279, equation 6).
    """
    return grid_between(*extent(weight), bits, symmetric)


def grid_between(
    low: Tensor, high: Tensor, size: Tensor, bits: Sequence[int], symmetric: Symmetry
) -> tuple[Tensor, Tensor]:
    """Scale and zero [E, B, N] from a group's `extent`: low, high and size [E, B, N].

    symmetric: the largest magnitude m lies 2**(b-1) - 1/2 codes from the zero point, half a code beyond the last one
    above it; `narrow`: 2**(b-1) - 1, scale = m/127 at 8 bits and m/7 at 4, the lowest code unused; `full`: 2**(b-1),
    scale = m/128 and m/8, a positive m is clamped.
    """
    top = max_codes(bits, low)
    if symmetric:
        codes = top - 1 if symmetric == "narrow" else top + 1 if symmetric == "full" else top
        scale = storable(torch.maximum(high, -low) * 2 / codes)
        zero = ((top + 1) / 2).expand_as(scale).clone()
    else:
        scale = storable((high - low) / top)
        zero = torch.where(scale > 0, (-low / scale.clamp(min=1e-12)).round(), 0.0)
        zero = torch.minimum(zero.clamp(min=0), top)
    for index, width in enumerate(bits):
        if width == 1:
            scale[:, index] = storable(2 * size[:, index])
            zero[:, index] = SIGN_ZERO
    return scale, zero


def shrunk_grids(
    low: Tensor, high: Tensor, size: Tensor, bits: Sequence[int], symmetric: Symmetry
) -> Iterator[tuple[Tensor, Tensor]]:
    """The grids that clipping chooses from, [E, B, N] each: `grid_between` of the range times each of SHRINKS; at 1
    bit all are equal."""
    for shrink in SHRINKS:
        yield grid_between(low * shrink, high * shrink, size, bits, symmetric)


def fit_clipped_grid(
    weight: Tensor, importance: Tensor, bits: Sequence[int], symmetric: Symmetry = False
) -> tuple[Tensor, Tensor]:
    """As `fit_grid`, with the range of the least error of rounding among the shrunk ones.

    weight: [E, g, B, N]; importance: [E, g], what an input's error counts. The error is the sum of cubes: GPTQ's own
    search takes the power 2.4 where squares clip too much, and 3 measures better still. Of equals the widest range is
    taken, so that the error is never above that of the min-max grid.
    """
    top, counts = max_codes(bits, weight), importance[:, :, None, None]
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for scale, zero in shrunk_grids(*extent(weight), bits, symmetric):
        codes = encode(weight, inverse_scale(scale).unsqueeze(1), zero.unsqueeze(1), top)
        rest = codes.sub_(zero.unsqueeze(1)).mul_(scale.unsqueeze(1)).sub_(weight).abs_()
        error = rest.pow_(3).mul_(counts).sum(1)
        if best is None:
            best = error, scale, zero
            continue
        better = error < best[0]
        best = tuple(torch.where(better, new, old) for new, old in zip((error, scale, zero), best, strict=True))  # type: ignore[assignment]
    assert best is not None
    return best[1], best[2]


def nested_grid(scale: Tensor, zero: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scale and zero [...] of the leading `bits` bits of codes whose grid (of 4 bits) has this scale and zero [...]."""
    inside = 2 ** (NESTED_BITS[-1] - bits)
    return scale * inside, (zero - (inside - 1) / 2) / inside


def grid_of_nested(scale: Tensor, zero: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The inverse of `nested_grid`: scale and zero [...] of the 4-bit grid."""
    inside = 2 ** (NESTED_BITS[-1] - bits)
    return scale / inside, zero * inside + (inside - 1) / 2


def inverse_scale(scale: Tensor) -> Tensor:
    """1/scale [...], with 0 where the scale is 0 (every weight of such a group then gets the code of the value 0)."""
    return torch.where(scale > 0, 1 / scale.clamp(min=1e-12), torch.zeros_like(scale))


def encode(weight: Tensor, inverse: Tensor, zero: Tensor, top: Tensor) -> Tensor:
    """Nearest code [...], as a float: clamp(round(w/scale + zero), 0, top); `inverse` is `inverse_scale(scale)`.

    All arguments broadcast together; halves are rounded to even.
    """
    codes = torch.addcmul(zero, weight, inverse).round_().clamp_(min=0)
    return torch.minimum(codes, top, out=codes)


def decode(codes: Tensor, scale: Tensor, zero: Tensor | float, group_size: int) -> Tensor:
    """Values of stored codes, output-major.

    codes: [..., N, K] integers; scale: [..., N, G]; zero: [..., N, G] or a constant; G = group_count(K, group_size).
    Returns float32 [..., N, K] = (codes - zero) * scale of the group that input k belongs to.
    """
    length = codes.shape[-1]
    repeat = resolved_group_size(length, group_size)
    scale = scale.to(torch.float32)
    if length % repeat == 0:
        grouped: Tensor = codes.to(torch.float32).unflatten(-1, (-1, repeat))
        offset = zero.to(torch.float32).unsqueeze(-1) if isinstance(zero, Tensor) else zero
        return ((grouped - offset) * scale.unsqueeze(-1)).flatten(-2)
    spread = scale.repeat_interleave(repeat, -1)[..., :length]
    if isinstance(zero, Tensor):
        zero = zero.to(torch.float32).repeat_interleave(repeat, -1)[..., :length]
    return (codes.to(torch.float32) - zero) * spread
