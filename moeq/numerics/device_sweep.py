"""The column loop of GPTQ on a GPU, in Triton: one program holds the columns of a block for a few rows of one expert.

Imported only where Triton is installed; without it the same loop runs as torch operations, a dozen launches a column.

Letters: E experts, b columns of a block, R rows times widths.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeq_kernels.streams import launching_on

TILE = 32  # rows of a program
MAGIC = {torch.float32: 1.5 * 2.0**23, torch.float64: 1.5 * 2.0**52}  # adding and taking it away rounds half to even


@triton.jit  # type: ignore[untyped-decorator]
def _round_block(  # type: ignore[no-untyped-def]
    target,
    original,
    factor,
    scale,
    zero,
    top,
    residual,
    codes,
    inputs,
    lanes,
    target_step,
    original_step,
    factor_step,
    factor_row,
    grid_step,
    grid_row,
    residual_step,
    codes_step,
    magic: tl.constexpr,
    block: tl.constexpr,
    tile: tl.constexpr,
):
    expert = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * tile + tl.arange(0, tile)
    column = tl.arange(0, block)
    here = lane < lanes
    loaded = (column[:, None] < inputs) & here[None, :]
    wanted = tl.load(target + expert * target_step + column[:, None] * lanes + lane[None, :], mask=loaded, other=0.0)
    highest = tl.load(top + lane, mask=here, other=0.0)
    for index in range(inputs):
        value = tl.sum(tl.where(column[:, None] == index, wanted, 0.0), 0)
        at = expert * grid_step + index * grid_row + lane
        step = tl.load(scale + at, mask=here, other=0.0)
        offset = tl.load(zero + at, mask=here, other=0.0)
        inverse = tl.where(step > 0, 1.0 / tl.where(step > 0, step, 1.0), 0.0)
        code = (value * inverse + offset + magic) - magic
        code = tl.minimum(tl.maximum(code, 0.0), highest)
        exact = tl.load(original + expert * original_step + index * lanes + lane, mask=here, other=0.0)
        left = exact - (code - offset) * step
        tl.store(residual + expert * residual_step + index * lanes + lane, left, mask=here)
        tl.store(codes + expert * codes_step + index * lanes + lane, code.to(tl.uint8), mask=here)
        later = (column > index) & (column < inputs)
        weight = tl.load(factor + expert * factor_step + index * factor_row + column, mask=later, other=0.0)
        wanted += weight[:, None] * left[None, :]


def round_block(
    target: Tensor,
    original: Tensor,
    factor: Tensor,
    scale: Tensor,
    zero: Tensor,
    top: Tensor,
    residual: Tensor,
    codes: Tensor,
) -> None:
    """Round the columns of one block in order; fills residual and codes [E, b, R].

    target: [E, b, R] original weights with the feedback of all columns before the block; original: [E, b, R]; factor:
    [E, b, b], of which what lies above the diagonal is read; scale and zero: [E, 1, R], or [E, b, R] where columns have
    their own; top: [R] largest codes; codes: uint8, all others float32 or float64. Rows lie side by side (stride 1),
    else ValueError; experts may lie apart.
    """
    experts, inputs, lanes = target.shape
    for tensor in (target, original, scale, zero, residual, codes):
        if tensor.stride(2) != 1 or (tensor.shape[1] > 1 and tensor.stride(1) != lanes):
            raise ValueError("rows must lie side by side")
    if scale.stride() != zero.stride() or factor.stride(2) != 1:
        raise ValueError("scale and zero must lie alike, and rows of the factor whole")
    with launching_on(target.device):
        _round_block[experts, triton.cdiv(lanes, TILE)](
            target,
            original,
            factor,
            scale,
            zero,
            top,
            residual,
            codes,
            inputs,
            lanes,
            target.stride(0),
            original.stride(0),
            factor.stride(0),
            factor.stride(1),
            scale.stride(0),
            lanes if scale.shape[1] > 1 else 0,
            residual.stride(0),
            codes.stride(0),
            magic=MAGIC[target.dtype],
            block=triton.next_power_of_2(inputs),
            tile=TILE,
            num_warps=4,
        )
