"""Replicas that share their codes: the 2- and 3-bit codes of a weight are the leading bits of its 4-bit code.

With scale s and zero z of the 4-bit grid, the replica of b bits has k = 2**(4-b) of its codes in one of its own, which
stands for their middle: value = (code*k + (k-1)/2 - z) * s, an affine grid of scale k*s and zero (z - (k-1)/2) / k.
Every width carries its own feedback; a code is chosen for all widths together: the least sum of COUNTS times the
squares of their distances, each in codes of its own.

Letters: E experts, K inputs, N output rows, B = 3 widths, R = B*N, g inputs of a group, G groups, C candidate ranges.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeq.numerics import compiled_grids, sweep
from moeq.numerics.factor import feedback
from moeq.numerics.gptq import Quantized
from moeq.numerics.gptq_cpu import LANES_AT_ONCE
from moeq.numerics.group_grids import stacked
from moeq.numerics.sweep import BLOCK
from moeq_kernels.grids import (
    SHRINKS,
    Symmetry,
    encode,
    grid_between,
    inverse_scale,
    max_codes,
    nested_grid,
)
from moeq_kernels.widths import NESTED_BITS, resolved_group_size

LANES_A_THREAD = 1024  # rows times widths, at least
WIDEST = NESTED_BITS[-1]
COUNTS = (2.0, 1.5, 1.0)  # by width


def quantize(
    weight: Tensor,
    factor: Tensor | None,
    *,
    group_size: int,
    symmetric: Symmetry = False,
    importance: Tensor | None = None,
) -> Quantized:
    """Codes and grids of 2, 3 and 4 bits of weights [E, N, K]: a `Quantized` whose scales and zeros [E, B, N, G] are
    those of `grids.nested_grid`; arguments as in `gptq.quantize`.

    factor None: rounding without feedback. The codes of a width do not depend on which widths are asked for, nor a row
    on the others.
    """
    experts, rows, inputs = weight.shape
    widths = len(NESTED_BITS)
    dtype = torch.float32 if factor is None else factor.dtype
    group = resolved_group_size(inputs, group_size)
    codes = torch.empty(experts, widths, rows, inputs, dtype=torch.uint8, device=weight.device)
    scale, zero = weight.new_empty(2, experts, widths, rows, -(-inputs // group), dtype=dtype)
    step, some = rows, experts
    if _on_cpu(weight):
        lanes = max(LANES_AT_ONCE, LANES_A_THREAD * torch.get_num_threads()) // widths
        step, some = max(1, lanes), max(1, lanes // rows)
    for first in range(0, experts, some):
        which = slice(first, first + some)
        counts = None if importance is None else importance[which].to(dtype)
        own = None if factor is None else factor[which].contiguous()
        for start in range(0, rows, step):
            part = slice(start, start + step)
            columns = weight[which, part].to(dtype).transpose(1, 2).contiguous()
            residual = columns.new_zeros(len(columns), inputs, widths * columns.shape[2])
            work = _Rows(columns, own, residual, codes, (first, start))
            scale[which, :, part], zero[which, :, part] = work.rounded(group, symmetric, counts)
    return Quantized(codes=codes, scale=scale, zero=zero, bits=NESTED_BITS, group_size=group_size)


def _on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


@dataclass(frozen=True)
class _Rows:
    """Some rows of some experts, columns [E, K, N] with their factor [E, K, K], whose residual [E, K, R] is filled, and
    the codes of all of them from expert and row `at` on."""

    columns: Tensor
    factor: Tensor | None
    residual: Tensor
    codes: Tensor
    at: tuple[int, int]

    def rounded(self, group: int, symmetric: Symmetry, importance: Tensor | None) -> tuple[Tensor, Tensor]:
        """Round all columns, group by group; scale and zero [E, B, N, G]."""
        inputs, rows = self.columns.shape[1:]
        grids = []
        for start in range(0, inputs, group):
            stop = min(start + group, inputs)
            counts = None if importance is None else importance[:, start:stop].contiguous()
            scale, zero = _grid(self._moved(start, stop), rows, counts, symmetric)
            grids.append((scale.unflatten(1, (-1, rows)), zero.unflatten(1, (-1, rows))))
            own = (scale.contiguous(), inverse_scale(scale).contiguous(), zero.contiguous())
            for begin in range(start, stop, BLOCK):
                self._round(begin, min(begin + BLOCK, stop), own)
        return stacked(grids)

    def _given(self, start: int, stop: int) -> Tensor:
        """What all earlier columns give to those from start to stop, [E, stop - start, R]."""
        if self.factor is None:
            return self.residual.new_zeros(len(self.residual), stop - start, self.residual.shape[2])
        return feedback(self.factor, self.residual, 0, start, stop)

    def _moved(self, start: int, stop: int) -> Tensor:
        """A group's weights at every width as the feedback of all earlier columns would move them, [E, g, R]."""
        given = self._given(start, stop)
        if self.factor is not None and start and _on_cpu(given):
            return sweep.extent(self.columns, given, self.factor, start, keep=True)[3]
        plain = self.columns[:, start:stop].repeat(1, 1, len(NESTED_BITS))
        if self.factor is None or start == 0:
            return plain
        own = self.factor[:, start:stop, start:stop].mT
        solved: Tensor = torch.linalg.solve_triangular(own, given, upper=False, unitriangular=True)
        return solved + plain

    def _round(self, start: int, stop: int, grids: tuple[Tensor, Tensor, Tensor]) -> None:
        """Round the columns from start to stop; grids: scale, its inverse and zero, [E, R]."""
        given, counts = self._given(start, stop), self.columns.new_tensor(COUNTS)
        if _on_cpu(given) and self.factor is not None:
            given = given.contiguous()
            sweep.round_nested(
                self.columns, given, self.factor, start, grids, counts, self.residual, self.codes, self.at
            )
            return
        expert, row = self.at
        experts, _, rows = self.columns.shape
        codes = self.codes[expert : expert + experts, :, row : row + rows]
        scale, inverse, zero = (part.unflatten(1, (-1, rows)) for part in grids)
        shifts = torch.arange(len(NESTED_BITS) - 1, -1, -1, device=given.device)
        table = torch.arange(2**WIDEST, device=given.device).unsqueeze(1) >> shifts  # [16, B]
        numbers = table.to(given.dtype)[:, None, :, None]
        target = given.unflatten(2, (-1, rows)) + self.columns[:, start:stop].unsqueeze(2)
        for column in range(stop - start):
            place = torch.addcmul(zero, target[:, column], inverse)
            cost = ((numbers - place).square_() * counts.view(-1, 1)).sum(2)  # [16, E, N]
            chosen = table[cost.argmin(0)].movedim(-1, 1)  # [E, B, N]
            left = self.columns[:, start + column].unsqueeze(1) - (chosen.to(given.dtype) - zero) * scale
            self.residual[:, start + column] = left.flatten(1)
            codes[..., start + column] = chosen.to(torch.uint8)
            if self.factor is not None:
                ahead = self.factor[:, start + column, start + column + 1 : stop]
                target[:, column + 1 :].addcmul_(ahead[:, :, None, None], left.unsqueeze(1))


def _grid(moved: Tensor, rows: int, importance: Tensor | None, symmetric: Symmetry) -> tuple[Tensor, Tensor]:
    """Scale and zero [E, R] of all widths, from the range of the widest's weights or the best part of it."""
    widest = moved[:, :, -rows:]
    low, high = widest.amin(1, keepdim=True).clamp(max=0), widest.amax(1, keepdim=True).clamp(min=0)
    candidates = []
    for shrink in SHRINKS if importance is not None else (1.0,):
        scale, zero = grid_between(low * shrink, high * shrink, high, [WIDEST], symmetric)
        grids = [nested_grid(scale[:, 0], zero[:, 0], bits) for bits in NESTED_BITS]
        candidates.append([torch.cat(parts, 1) for parts in zip(*grids, strict=True)])
    scale, zero = (torch.stack(parts) for parts in zip(*candidates, strict=True))  # [C, E, R]
    if importance is None:
        return scale[0], zero[0]
    errors = _errors(moved, importance, scale, zero).unflatten(-1, (len(NESTED_BITS), rows))  # [C, E, B, N]
    powers = [count / 2.0 ** (3 * (WIDEST - bits)) for count, bits in zip(COUNTS, NESTED_BITS, strict=True)]
    chosen = (errors * errors.new_tensor(powers).view(-1, 1)).sum(2).argmin(0)
    index = chosen.repeat(1, len(NESTED_BITS))[None]
    return scale.gather(0, index)[0], zero.gather(0, index)[0]


def _errors(moved: Tensor, importance: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Weighted sum of cubed errors of rounding moved [E, g, R] to the nearest codes of each grid, [C, E, R]."""
    top = max_codes(NESTED_BITS, scale).flatten()
    if _on_cpu(moved):
        return compiled_grids.grid_errors(moved, importance, scale, inverse_scale(scale), zero, top)
    highest = top.repeat_interleave(moved.shape[2] // len(NESTED_BITS))
    errors = []
    for step, middle in zip(scale.unsqueeze(2), zero.unsqueeze(2), strict=True):
        rest = (encode(moved, inverse_scale(step), middle, highest) - middle) * step - moved
        errors.append((rest.abs_().pow_(3) * importance.unsqueeze(2)).sum(1))
    return torch.stack(errors)
