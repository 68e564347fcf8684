"""GPTQ's loop over columns on a CPU: matrix products between blocks, the compiled loop of sweep.py inside of them.

A few rows of a few experts at a time (rows are independent), so that what the blocks give to each other stays in the
cache.

Letters: E experts, K inputs, B bit widths, N output rows, R = B*N, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moeq.numerics import products, sweep
from moeq.numerics.factor import feedback
from moeq.numerics.group_grids import group_grid, stacked, static_grids
from moeq.numerics.slab import Spaces, large_empty, transposed
from moeq.numerics.sweep import BLOCK
from moeq_kernels.grids import Symmetry, extent, inverse_scale, max_codes
from moeq_kernels.threads import side_by_side

LANES_AT_ONCE = 2048  # rows times widths that a thread works on together
SPAN = 256  # columns whose feedback from all columns before them is one matrix product
LONG_SPAN = 512  # the same from products.LEAST_INPUTS inputs on


def codes_and_grids(
    weight: Tensor,
    factor: Tensor,
    bits: Sequence[int],
    group: int,
    symmetric: Symmetry,
    order: Tensor | None,
    importance: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 [E, B, N, K] in the order of rounding, scale and zero [E, B, N, G]; arguments as of `gptq.quantize`.

    weight: [E, N, K]; factor: [E, K, K]; group: inputs of one; order: [E, K]; importance: [E, K] in factor's dtype.
    """
    experts, rows, inputs = weight.shape
    factor = factor.contiguous()
    codes = large_empty((experts, len(bits), rows, inputs), torch.uint8)
    scale, zero = factor.new_empty(2, experts, len(bits), rows, -(-inputs // group))
    chunks = max(1, round(rows * len(bits) / LANES_AT_ONCE))
    step = -(-rows // (chunks * sweep.LANES)) * sweep.LANES
    some = max(1, LANES_AT_ONCE // (len(bits) * rows))
    spaces = Spaces()

    def piece(at: tuple[int, int]) -> None:
        which, part = slice(at[0], at[0] + some), slice(at[1], at[1] + step)
        own = weight[which, part].to(factor.dtype)
        columns = transposed(own, spaces.space("columns", own.mT.shape, own.dtype))
        residual = spaces.space("residual", (*columns.shape[:2], len(bits) * columns.shape[2]), own.dtype)
        counts = None if importance is None else importance[which]
        work = _Rows(columns, factor[which], bits, residual, codes, at, spaces)
        if order is None:
            grids = work.by_group(group, symmetric, counts)
        else:
            grids = work.in_order(order[which], group, symmetric, counts)
        scale[which, :, part], zero[which, :, part] = grids

    side_by_side(piece, [(first, start) for first in range(0, experts, some) for start in range(0, rows, step)])
    return codes, scale, zero


@dataclass(frozen=True)
class _Rows:
    """Some rows of some experts, columns [E, K, N] with their factor [E, K, K], whose residual [E, K, R] is filled, and
    the codes of all of them from expert and row `at` on.

    Both ways of rounding give scale and zero [E, B, N, G].
    """

    columns: Tensor
    factor: Tensor
    bits: Sequence[int]
    residual: Tensor
    codes: Tensor
    at: tuple[int, int]
    spaces: Spaces

    def in_order(
        self, order: Tensor, group: int, symmetric: Symmetry, importance: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Round the columns in an order [E, K], on the grids of the untouched weights."""
        static = stacked(static_grids(self.columns, self.bits, group, symmetric, importance))
        columns = self.columns.gather(1, order.unsqueeze(2).expand_as(self.columns)).contiguous()
        scale, zero = (part.permute(0, 3, 1, 2).flatten(2).contiguous() for part in static)
        grids = (scale, inverse_scale(scale), zero)
        replace(self, columns=columns)._round(None, 0, columns.shape[1], grids, (order // group).contiguous())
        return static

    def by_group(self, group: int, symmetric: Symmetry, importance: Tensor | None) -> tuple[Tensor, Tensor]:
        """Round the columns as they lie, on grids that are taken when their group comes."""
        experts, inputs, rows = self.columns.shape
        widths = len(self.bits)
        first_group = torch.zeros(experts, inputs, dtype=torch.long)
        grids = []
        span = max(group, self._span() // group * group)
        for far in range(0, inputs, span):
            stop = min(far + span, inputs)
            shape = (experts, stop - far, self.residual.shape[2])
            space = self.spaces.space("from far", shape, self.residual.dtype)
            from_far = feedback(self.factor, self.residual, 0, far, stop, space)
            for start in range(far, min(far + span, inputs), group):
                stop = min(start + group, inputs)
                given = self._given(from_far, far, start, stop, group)
                if start:
                    keep = importance is not None
                    *ends, moved = sweep.extent(self.columns, given, self.factor, start, keep=keep)
                    ends = [end.unflatten(1, (widths, rows)) for end in ends]
                else:
                    moved = self.columns[:, :stop]
                    ends = [end.unsqueeze(1).expand(-1, widths, -1) for end in extent(moved)]
                counts = None if importance is None else importance[:, start:stop]
                found = group_grid(moved, ends, self.bits, symmetric, counts)
                grids.append((found[0], found[2]))
                own = [part.reshape(experts, 1, -1).contiguous() for part in found]
                self._round(given, start, stop, own, first_group)
        return stacked(grids)

    def _round(self, given: Tensor | None, start: int, stop: int, grids: Sequence[Tensor], group_of: Tensor) -> None:
        """Round the columns from start to stop, block by block; arguments as of `sweep.round_block`.

        given: what the columns before `start` give to them, [E, stop - start, R]; None: there are none.
        """
        top = max_codes(self.bits, self.columns).flatten().repeat_interleave(self.columns.shape[2])
        span = self._span()
        for far in range(start, stop, span):
            end = min(far + span, stop)
            from_far = self._with_near(given, start, far, end)
            for begin in range(far, end, BLOCK):
                nearer = self._given(from_far, far, begin, min(begin + BLOCK, end), BLOCK)
                sweep.round_block(
                    self.columns, nearer, self.factor, begin, grids, top, group_of, self.residual, self.codes, self.at
                )

    def _span(self) -> int:
        return LONG_SPAN if self._long() else SPAN

    def _long(self) -> bool:
        return self.columns.shape[1] >= products.LEAST_INPUTS

    def _given(self, given: Tensor, far: int, start: int, stop: int, block: int) -> Tensor:
        """As `_with_near` of a span from `far` on, block after block.

        Products of torch's library are slow with few columns: halfway through a span, a quarter of it and so on, what
        the columns behind give goes to as many ahead at once.
        """
        if not self._long() or products.pays(self.factor):
            return self._with_near(given, far, start, stop)
        passed = (start - far) // block
        if passed:
            size = (passed & -passed) * block
            ahead = slice(start, min(start + size, far + given.shape[1]))
            part = given[:, ahead.start - far : ahead.stop - far]
            part.baddbmm_(self.factor[:, start - size : start, ahead].mT, self.residual[:, start - size : start])
        return given[:, start - far : stop - far].contiguous()

    def _with_near(self, given: Tensor | None, first: int, start: int, stop: int) -> Tensor:
        """What all columns before `start` give to those from start to stop, [E, stop - start, R].

        given: what those before `first` give to the columns from `first` on, which is added to; None: there are none.
        """
        if given is None:
            return feedback(self.factor, self.residual, first, start, stop)
        part = given[:, start - first : stop - first]
        if first < start and products.pays(self.factor):
            products.add_product(
                given, start - first, self.factor, self.residual, summed=(first, start), columns=(start, stop)
            )
        elif first < start:
            part.baddbmm_(self.factor[:, first:start, start:stop].mT, self.residual[:, first:start])
        return part.contiguous()
