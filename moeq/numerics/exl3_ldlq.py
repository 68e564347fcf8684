"""EXL3's codes of weights from their Hessian: the walks of trellis_ldlq.py in the space between the transforms.

A weight's rows are brought to one root mean square, rows and inputs are given moeq's signs; what is between the
Hadamard transforms is then about normal, whatever the weight was. The loss of a residual there is that of
trellis_ldlq.py with the Hessian transformed alike, rows counting the same. At the end every row's scale is fitted to
the weight itself.

On a CPU the walks over 2^16 states are for small models, and tests: two cores of Zen 3, others working on them, took a
second for 11,000 to 13,000 weights at 2 to 4 bits, for 6,000 at 1 bit and for 2,000 at 8.

Letters: E weights of a batch, N output rows, K inputs, R and C tiles along them, k bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moeq.numerics.factor import Factor, factorize
from moeq.numerics.trellis_ldlq import Code, Walked, added_to, fitted_scale, in_pieces
from moeq_kernels.exl3 import BLOCK, STEP_ORDER, check_sides, packed, signs, state_values, transformed
from moeq_kernels.grids import LEAST_SCALE, SCALE_DTYPE, storable
from moeq_kernels.packed import PackedWeight
from moeq_kernels.trellis import TILE
from moeq_kernels.widths import Encoding

# of the values, over that of the weights: what loses least on normal tiles
SPREAD = {1: 1.0, 2: 1.0, 3: 0.94, 4: 0.9, 5: 0.88, 6: 0.8, 7: 0.78, 8: 0.75}


def factorize_turned(hessian: Tensor, damping: float) -> Factor:
    """The factor of Hessians [E, K, K] as they are between the transforms; ValueError unless K is a multiple of 128."""
    check_sides(BLOCK, hessian.shape[-1])
    own = signs(hessian.shape[-1]).to(hessian)
    turned = transformed(transformed(hessian * own * own.unsqueeze(-1)).mT).mT / BLOCK
    return factorize(turned, damping)


def quantize(
    weight: Tensor, factor: Factor, hessian: Tensor, bits: Sequence[int], codebook: str = "mul1"
) -> list[PackedWeight]:
    """The codes of weights [E, N, K] at several widths of 1 to 8 bits, a stack [E] each, on the weights' device.

    factor: of `factorize_turned`; hessian: [E, K, K], means of x x^T over tokens, float32, to which scales are fitted.
    Rows and inputs are multiples of 128; ValueError otherwise, and for a codebook that there is not.
    """
    experts, rows, inputs = weight.shape
    check_sides(rows, inputs)
    values = state_values(codebook).to(weight.device)
    own, other = signs(inputs).to(weight.device), signs(rows).to(weight.device)
    scale = weight.float().square().mean(-1).sqrt().clamp_min(LEAST_SCALE)  # [E, N]
    between = weight.float() / (scale * other).unsqueeze(-1) * own  # signs are their own inverses
    between = transformed(transformed(between).mT).mT / BLOCK
    spread = float(values.square().mean().sqrt())
    units = [torch.full((experts, rows), 1 / (SPREAD[k] * spread), device=weight.device) for k in bits]
    code = Code(values=dict.fromkeys(bits, values), order=STEP_ORDER.to(weight.device))
    steps = {k: torch.empty(experts, rows // TILE, inputs // TILE, TILE * TILE, dtype=torch.uint8) for k in bits}

    def piece(which: slice, part: slice) -> None:
        made = Walked(between[which, part], factor.unit_upper[which], factor.pivots[which], code,
                      [unit[which, part] for unit in units])  # fmt: skip
        for k, codes in zip(bits, made.codes, strict=True):
            steps[k][which, part.start // TILE : part.stop // TILE] = codes.cpu()

    in_pieces(between, len(bits), piece)
    seen = hessian, added_to(hessian, factor)
    return [
        _fitted(steps.pop(k), scale * unit, k, codebook, weight, *seen) for k, unit in zip(bits, units, strict=True)
    ]


def _fitted(
    steps: Tensor, scale: Tensor, bits: int, codebook: str, weight: Tensor, hessian: Tensor, added: Tensor
) -> PackedWeight:
    """Steps [E, R, C, 256] as they are stored, with the scale of every row that loses least; scale: about that;
    hessian, added: as of `fitted_scale`."""
    codes = packed(steps, bits).transpose(-3, -2).contiguous().view(torch.uint8).flatten(-2).to(weight.device)
    parts = {"codes": codes, "scales": storable(scale).to(SCALE_DTYPE).unsqueeze(-1)}
    made = PackedWeight.of(parts, bits, weight.shape[-1], Encoding.exl3(codebook))
    fitted = [
        fitted_scale(exact[None].float(), one.dequantize()[None], one.scales.mT, seen[None].float(), more[None])
        for exact, seen, more, one in zip(weight, hessian, added, _each(made), strict=True)
    ]
    return replace(made, scales=torch.cat(fitted).unsqueeze(-1))


def _each(stack: PackedWeight) -> list[PackedWeight]:
    """The weights of a stack [E]."""
    return [stack.map(lambda part: part[index]) for index in range(len(stack.codes))]  # noqa: B023
