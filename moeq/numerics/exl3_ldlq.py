"""EXL3's codes of weights from their Hessian: the walks of trellis_ldlq.py in the space between the transforms.

A weight's rows are brought to one root mean square and given random signs, and so are inputs (their signs alone); what
is between the Hadamard transforms is then about normal, whatever the weight was. The loss of a residual there is that
of trellis_ldlq.py with the Hessian transformed alike, rows counting the same. At the end every row's scale in svh is
fitted to the weight itself.

On a CPU the walks over 2^16 states are for small models, and tests: two cores of Zen 3, others working on them, took a
second for 11,000 to 13,000 weights at 2 to 4 bits, for 6,000 at 1 bit and for 2,000 at 8.

Letters: E weights of a batch, N output rows, K inputs, k bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeq.numerics.exl3 import BLOCK, STEP_ORDER, Exl3Weight, check_sides, packed, state_values, transformed
from moeq.numerics.factor import factorize
from moeq.numerics.trellis_ldlq import Code, Walked, fitted_scale, in_pieces
from moeq_kernels.grids import SCALE_DTYPE
from moeq_kernels.trellis import TILE

# of the values, over that of the weights: what loses least on normal tiles
SPREAD = {1: 1.0, 2: 1.0, 3: 0.94, 4: 0.9, 5: 0.88, 6: 0.8, 7: 0.78, 8: 0.75}


def quantize(
    weight: Tensor,
    hessian: Tensor,
    bits: Sequence[int],
    codebook: str = "mul1",
    *,
    generator: torch.Generator,
    damping: float = 0.01,
) -> list[list[Exl3Weight]]:
    """The codes of weights [E, N, K] at several widths of 1 to 8 bits, [E] of each, on the weights' device.

    hessian: [E, K, K], means of x x^T over tokens, float32; generator: of the signs, on the CPU. Rows and inputs are
    multiples of 128; ValueError otherwise, and for a codebook that there is not.
    """
    experts, rows, inputs = weight.shape
    check_sides(rows, inputs)
    values = state_values(codebook).to(weight.device)
    suh, signs = (_signs(size, generator, weight) for size in (inputs, rows))  # [K], [N]
    scale = weight.float().square().mean(-1).sqrt().clamp_min(torch.finfo(SCALE_DTYPE).tiny)  # [E, N]
    between = weight.float() / (scale * signs).unsqueeze(-1) * suh  # signs are their own inverses
    between = transformed(transformed(between).mT).mT / BLOCK
    spread = values.square().mean().sqrt()
    turned = transformed(transformed(hessian.float() * suh * suh.unsqueeze(-1)).mT).mT / BLOCK
    factor = factorize(turned, damping)
    steps = {k: torch.empty(experts, rows // TILE, inputs // TILE, TILE * TILE, dtype=torch.uint8) for k in bits}
    units = [torch.full((experts, rows), 1 / (SPREAD[k] * float(spread)), device=weight.device) for k in bits]
    code = Code(values=dict.fromkeys(bits, values), order=STEP_ORDER.to(weight.device))

    def piece(which: slice, part: slice) -> None:
        made = Walked(between[which, part], factor.unit_upper[which], factor.pivots[which], code,
                      [unit[which, part] for unit in units])  # fmt: skip
        for k, codes in zip(bits, made.codes, strict=True):
            steps[k][which, part.start // TILE : part.stop // TILE] = codes.cpu()

    in_pieces(between, len(bits), piece)
    found = []
    for k, unit in zip(bits, units, strict=True):
        trellis = packed(steps[k], k).to(weight.device)
        own = (scale * signs * unit).to(SCALE_DTYPE)
        made = [
            Exl3Weight(trellis=one, suh=suh.to(SCALE_DTYPE), svh=svh, codebook=codebook)
            for one, svh in zip(trellis, own, strict=True)
        ]
        found.append([_fitted(one, *given) for one, *given in zip(made, weight, hessian, strict=True)])
    return found


def _signs(size: int, generator: torch.Generator, like: Tensor) -> Tensor:
    """Random signs, float32 [size]."""
    return (torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1.0).to(like.device)


def _fitted(made: Exl3Weight, weight: Tensor, hessian: Tensor) -> Exl3Weight:
    """With the scale of every row that loses least."""
    sizes, signs = made.svh.abs().unsqueeze(0), made.svh.sign()
    fitted = fitted_scale(
        weight.float().unsqueeze(0), made.dequantize().unsqueeze(0), sizes, hessian.float().unsqueeze(0)
    )
    return Exl3Weight(trellis=made.trellis, suh=made.suh, svh=fitted[0] * signs, codebook=made.codebook)
