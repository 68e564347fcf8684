"""GPTQ's loop over columns in torch operations, for GPUs: all rows of all experts of a batch at once.

Inside of a block the Triton kernel of device_sweep.py takes over where it runs.

Letters: E experts, K inputs, g inputs of one group, B bit widths, N output rows, R = B*N, G groups.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from moeq.numerics.factor import feedback
from moeq.numerics.grids import Symmetry, encode, fit_clipped_grid, fit_grid, inverse_scale, max_codes
from moeq.numerics.group_grids import stacked, static_grids
from moeq.numerics.sweep import BLOCK

SUB_BLOCK = 16  # columns updated by rank-1 steps inside a block


def codes_and_grids(
    weight: Tensor,
    factor: Tensor,
    bits: Sequence[int],
    group: int,
    symmetric: Symmetry,
    order: Tensor | None,
    importance: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `gptq_cpu.codes_and_grids`: codes uint8 [E, B, N, K], scale and zero [E, B, N, G]."""
    columns = weight.to(factor.dtype).transpose(1, 2).contiguous()
    experts, inputs, rows = columns.shape
    residual = columns.new_empty(experts, inputs, len(bits) * rows)
    codes = torch.empty_like(residual, dtype=torch.uint8)
    if order is None:
        grids = _by_group(columns, factor, bits, group, symmetric, importance, residual, codes)
    else:
        grids = stacked(static_grids(columns, bits, group, symmetric, importance))
        _in_order(columns, factor, bits, grids, order, group, residual, codes)
    return codes.unflatten(-1, (len(bits), rows)).permute(0, 2, 3, 1).contiguous(), *grids


def _by_group(
    columns: Tensor,
    factor: Tensor,
    bits: Sequence[int],
    group: int,
    symmetric: Symmetry,
    importance: Tensor | None,
    residual: Tensor,
    codes: Tensor,
) -> tuple[Tensor, Tensor]:
    """Round columns [E, K, N] group by group; fills residual and codes [E, K, R], returns scale and zero."""
    inputs, rows = columns.shape[1:]
    widths = len(bits)
    top = max_codes(bits, columns).expand(widths, rows).reshape(-1)
    grids = []
    for start in range(0, inputs, group):
        here = slice(start, min(start + group, inputs))
        own = factor[:, here, here]
        original = columns[:, here].repeat(1, 1, widths)  # [E, g, R]
        given = feedback(factor, residual, 0, start, here.stop)
        moved = torch.baddbmm(original, _unit_inverse(own.mT), given) if start else original
        moved = moved.unflatten(-1, (widths, rows))
        if importance is None:
            scale, zero = fit_grid(moved, bits, symmetric)
        else:
            scale, zero = fit_clipped_grid(moved, importance[:, here], bits, symmetric)
        grids.append((scale, zero))
        flat = (part.flatten(1).unsqueeze(1) for part in (scale, zero))
        _sweep_group(original, given, own, *flat, top, residual[:, here], codes[:, here])
    return stacked(grids)


def _in_order(
    columns: Tensor,
    factor: Tensor,
    bits: Sequence[int],
    static: tuple[Tensor, Tensor],
    order: Tensor,
    group: int,
    residual: Tensor,
    codes: Tensor,
) -> None:
    """Round columns [E, K, N] in an order, block by block, on grids that are given, [E, B, N, G]."""
    inputs, rows = columns.shape[1:]
    columns = columns.gather(1, order.unsqueeze(2).expand_as(columns))
    top = max_codes(bits, columns).expand(len(bits), rows).reshape(-1)
    of_group = [part.permute(0, 3, 1, 2).flatten(2) for part in static]  # [E, G, R]
    for start in range(0, inputs, BLOCK):
        here = slice(start, min(start + BLOCK, inputs))
        index = (order[:, here] // group).unsqueeze(2).expand(-1, -1, len(top))
        _sweep_group(
            columns[:, here].repeat(1, 1, len(bits)),
            feedback(factor, residual, 0, start, here.stop),
            factor[:, here, here],
            *(part.gather(1, index) for part in of_group),
            top,
            residual[:, here],
            codes[:, here],
        )


def _unit_inverse(lower: Tensor) -> Tensor:
    """Inverses of unit lower triangular matrices [E, g, g]: small; the wide right-hand sides are then one product."""
    identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device).expand_as(lower)
    inverse: Tensor = torch.linalg.solve_triangular(lower, identity, upper=False, unitriangular=True)
    return inverse


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def has_kernel(tensor: Tensor) -> bool:
    """Whether the Triton kernel runs where this tensor [...] lies: on a GPU, or anywhere in Triton's interpreter."""
    return (tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1") and _has_triton()


def _sweep_group(
    original: Tensor,
    given: Tensor,
    factor: Tensor,
    scale: Tensor,
    zero: Tensor,
    top: Tensor,
    residual: Tensor,
    codes: Tensor,
) -> None:
    """Round the columns of one group in order, in blocks and sub-blocks; fills residual and codes [E, g, R].

    original: [E, g, R]; given: [E, g, R] from before the group; factor: [E, g, g]; scale and zero: [E, 1, R], or
    [E, g, R] where columns have their own; top: [R].
    """
    inputs = original.shape[1]
    inverse = inverse_scale(scale)
    for start in range(0, inputs, BLOCK):
        stop = min(start + BLOCK, inputs)
        target = original[:, start:stop] + given[:, start:stop]
        if start:
            target.baddbmm_(factor[:, :start, start:stop].mT, residual[:, :start])
        block = factor[:, start:stop, start:stop]
        if has_kernel(target):
            from moeq.numerics import device_sweep  # imports Triton, which is large and not for every machine

            own = slice(start, stop) if scale.shape[1] > 1 else slice(None)
            device_sweep.round_block(
                target,
                original[:, start:stop],
                block,
                scale[:, own],
                zero[:, own],
                top,
                residual[:, start:stop],
                codes[:, start:stop],
            )
            continue
        for low in range(0, stop - start, SUB_BLOCK):
            high = min(low + SUB_BLOCK, stop - start)
            for column in range(low, high):
                at = min(start + column, scale.shape[1] - 1)
                code = encode(target[:, column], inverse[:, at], zero[:, at], top)
                codes[:, start + column].copy_(code)
                left = residual[:, start + column]
                torch.sub(original[:, start + column], code.sub_(zero[:, at]).mul_(scale[:, at]), out=left)
                if column + 1 < high:
                    ahead = block[:, column, column + 1 : high]
                    target[:, column + 1 : high].addcmul_(ahead.unsqueeze(-1), left.unsqueeze(1))
            if high < stop - start:
                target[:, high:].baddbmm_(block[:, low:high, high:].mT, residual[:, start + low : start + high])
