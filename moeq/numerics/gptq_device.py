"""GPTQ's loop over columns in torch operations, for GPUs: all rows of all experts of a batch at once.

Inside of a block the Triton kernel of device_sweep.py takes over where it runs.

Letters: E experts, K inputs, g inputs of one group, B bit widths, N output rows, R = B*N, G groups.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from moeq.numerics.factor import feedback
from moeq.numerics.group_grids import stacked, static_grids
from moeq.numerics.sweep import BLOCK
from moeq_kernels.grids import Symmetry, encode, fit_clipped_grid, fit_grid, inverse_scale, max_codes

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
    work = _Rows(columns, factor, bits, residual, codes)
    if order is None:
        grids = work.by_group(group, symmetric, importance)
    else:
        grids = work.in_order(order, group, symmetric, importance)
    return codes.unflatten(-1, (len(bits), rows)).permute(0, 2, 3, 1).contiguous(), *grids


@dataclass(frozen=True)
class _Rows:
    """Columns [E, K, N] with their factor [E, K, K], whose residual and codes [E, K, R] are filled.

    Both ways of rounding give scale and zero [E, B, N, G].
    """

    columns: Tensor
    factor: Tensor
    bits: Sequence[int]
    residual: Tensor
    codes: Tensor

    def in_order(
        self, order: Tensor, group: int, symmetric: Symmetry, importance: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Round the columns in an order [E, K], on the grids of the untouched weights."""
        static = stacked(static_grids(self.columns, self.bits, group, symmetric, importance))
        work = replace(self, columns=self.columns.gather(1, order.unsqueeze(2).expand_as(self.columns)))
        scale, zero = (part.permute(0, 3, 1, 2).flatten(2) for part in static)  # [E, G, R]
        for start in range(0, order.shape[1], BLOCK):
            stop = min(start + BLOCK, order.shape[1])
            index = (order[:, start:stop] // group).unsqueeze(2).expand(-1, -1, self.residual.shape[2])
            given = feedback(self.factor, self.residual, 0, start, stop)
            work._sweep(start, stop, given, scale.gather(1, index), zero.gather(1, index))
        return static

    def by_group(self, group: int, symmetric: Symmetry, importance: Tensor | None) -> tuple[Tensor, Tensor]:
        """Round the columns as they lie, on grids that are taken when their group comes."""
        inputs, rows = self.columns.shape[1:]
        grids = []
        for start in range(0, inputs, group):
            stop = min(start + group, inputs)
            moved = self.columns[:, start:stop].repeat(1, 1, len(self.bits))  # [E, g, R]
            given = feedback(self.factor, self.residual, 0, start, stop)
            if start:
                moved = torch.baddbmm(moved, unit_inverse(self.factor[:, start:stop, start:stop].mT), given)
            moved = moved.unflatten(-1, (len(self.bits), rows))
            if importance is None:
                scale, zero = fit_grid(moved, self.bits, symmetric)
            else:
                scale, zero = fit_clipped_grid(moved, importance[:, start:stop], self.bits, symmetric)
            grids.append((scale, zero))
            self._sweep(start, stop, given, scale.flatten(1).unsqueeze(1), zero.flatten(1).unsqueeze(1))
        return stacked(grids)

    def _sweep(self, first: int, last: int, given: Tensor, scale: Tensor, zero: Tensor) -> None:
        """Round the columns from first to last in order, in blocks and sub-blocks.

        given: [E, g, R] from the columns before; scale and zero: [E, 1, R], or [E, g, R] where columns have their own.
        """
        original = self.columns[:, first:last].repeat(1, 1, len(self.bits))
        factor, residual, codes = (
            self.factor[:, first:last, first:last],
            self.residual[:, first:last],
            self.codes[:, first:last],
        )
        top = max_codes(self.bits, scale).expand(-1, self.columns.shape[2]).reshape(-1)
        inverse = inverse_scale(scale)
        for start in range(0, last - first, BLOCK):
            stop = min(start + BLOCK, last - first)
            target = original[:, start:stop] + given[:, start:stop]
            if start:
                target.baddbmm_(factor[:, :start, start:stop].mT, residual[:, :start])
            here, block = slice(start, stop), factor[:, start:stop, start:stop]
            if has_kernel(target):
                from moeq.numerics import device_sweep  # imports Triton, which is large and not for every machine

                own = here if scale.shape[1] > 1 else slice(None)
                device_sweep.round_block(
                    target,
                    original[:, here],
                    block,
                    scale[:, own],
                    zero[:, own],
                    top,
                    residual[:, here],
                    codes[:, here],
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


def unit_inverse(lower: Tensor) -> Tensor:
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
