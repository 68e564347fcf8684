"""GPTQ's loop over columns on a CPU: matrix products between blocks, the compiled loop of sweep.py inside of them.

A few rows of a few experts at a time (rows are independent), so that what the blocks give to each other stays in the
cache.

Letters: E experts, K inputs, B bit widths, N output rows, R = B*N, G groups.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moeq.numerics import sweep
from moeq.numerics.factor import feedback
from moeq.numerics.grids import Symmetry, extent, inverse_scale, max_codes
from moeq.numerics.group_grids import group_grid, stacked, static_grids
from moeq.numerics.sweep import BLOCK
from moeq.numerics.threads import side_by_side

LANES_AT_ONCE = 2048  # rows times widths that a thread works on together
SPAN = 256  # columns whose feedback from all columns before them is one matrix product


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
    codes = torch.empty(experts, len(bits), rows, inputs, dtype=torch.uint8)
    scale, zero = factor.new_empty(2, experts, len(bits), rows, -(-inputs // group))
    chunks = max(1, round(rows * len(bits) / LANES_AT_ONCE))
    step = -(-rows // (chunks * sweep.LANES)) * sweep.LANES
    some = max(1, LANES_AT_ONCE // (len(bits) * rows))
    spaces = threading.local()

    def piece(at: tuple[int, int]) -> None:
        which, part = slice(at[0], at[0] + some), slice(at[1], at[1] + step)
        columns = weight[which, part].to(factor.dtype).transpose(1, 2).contiguous()
        size = columns.numel() * len(bits)
        if not hasattr(spaces, "residual") or spaces.residual.numel() < size:
            spaces.residual = torch.empty(size, dtype=factor.dtype)
        residual = spaces.residual[:size].view(*columns.shape[:2], -1)
        counts = None if importance is None else importance[which]
        if order is None:
            grids = _some_rows(columns, factor[which], bits, group, symmetric, counts, residual, codes, at)
        else:
            grids = stacked(static_grids(columns, bits, group, symmetric, counts))
            _some_rows_in_order(columns, factor[which], bits, grids, order[which], group, residual, codes, at)
        scale[which, :, part], zero[which, :, part] = grids

    side_by_side(piece, [(first, start) for first in range(0, experts, some) for start in range(0, rows, step)])
    return codes, scale, zero


def _some_rows_in_order(
    columns: Tensor,
    factor: Tensor,
    bits: Sequence[int],
    static: tuple[Tensor, Tensor],
    order: Tensor,
    group: int,
    residual: Tensor,
    codes: Tensor,
    at: tuple[int, int],
) -> None:
    """As _some_rows with grids that are given, [E, B, N, G]; codes are in the order of rounding."""
    inputs, rows = columns.shape[1:]
    columns = columns.gather(1, order.unsqueeze(2).expand_as(columns)).contiguous()
    scale, zero = (part.permute(0, 3, 1, 2).flatten(2).contiguous() for part in static)
    top = max_codes(bits, scale).expand(len(bits), rows).reshape(-1)
    group_of = (order // group).contiguous()
    grids = (scale, inverse_scale(scale), zero)
    for begin, given in _blocks(None, factor, residual, 0, inputs):
        sweep.round_block(columns, given, factor, begin, grids, top, group_of, residual, codes, at)


def _some_rows(
    columns: Tensor,
    factor: Tensor,
    bits: Sequence[int],
    group: int,
    symmetric: Symmetry,
    importance: Tensor | None,
    residual: Tensor,
    codes: Tensor,
    at: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Some rows of some experts, columns [E, K, N], from expert and row `at` on: fills codes, returns the grids."""
    experts, inputs, rows = columns.shape
    widths = len(bits)
    first_group = torch.zeros(experts, inputs, dtype=torch.long)
    top = max_codes(bits, columns).expand(widths, rows).reshape(-1)
    grids = []
    span = max(group, SPAN // group * group)
    for far in range(0, inputs, span):
        from_far = feedback(factor, residual, 0, far, min(far + span, inputs))
        for start in range(far, min(far + span, inputs), group):
            stop = min(start + group, inputs)
            given = _with_near(from_far, factor, residual, far, start, stop)
            if start:
                *ends, moved = sweep.extent(columns, given, factor, start, keep=importance is not None)
                ends = [end.unflatten(1, (widths, rows)) for end in ends]
            else:
                moved = columns[:, :stop]
                ends = [end.unsqueeze(1).expand(-1, widths, -1) for end in extent(moved)]
            counts = None if importance is None else importance[:, start:stop]
            scale, zero = group_grid(moved, ends, bits, symmetric, counts)
            grids.append((scale, zero))
            scale, inverse, zero = (part.reshape(experts, 1, -1) for part in (scale, inverse_scale(scale), zero))
            own = (scale.contiguous(), inverse.contiguous(), zero.contiguous())
            for begin, nearer in _blocks(given, factor, residual, start, stop):
                sweep.round_block(columns, nearer, factor, begin, own, top, first_group, residual, codes, at)
    return stacked(grids)


def _blocks(
    given: Tensor | None, factor: Tensor, residual: Tensor, start: int, stop: int
) -> Iterator[tuple[int, Tensor]]:
    """First columns of the blocks from start to stop, each with what all columns before it give, [E, <= BLOCK, R].

    given: what those before `start` give to them (None: there are none); the residual of a block must be there when
    the next one is asked for.
    """
    for far in range(start, stop, SPAN):
        end = min(far + SPAN, stop)
        from_far = _with_near(given, factor, residual, start, far, end)
        for begin in range(far, end, BLOCK):
            yield begin, _with_near(from_far, factor, residual, far, begin, min(begin + BLOCK, end))


def _with_near(given: Tensor | None, factor: Tensor, residual: Tensor, first: int, start: int, stop: int) -> Tensor:
    """What all columns before `start` give to those from start to stop, [E, stop - start, R].

    given: what those before `first` give to the columns from `first` on, which is added to; None: there are none.
    """
    if given is None:
        return feedback(factor, residual, first, start, stop)
    part = given[:, start - first : stop - first]
    if first < start:
        part.baddbmm_(factor[:, first:start, start:stop].mT, residual[:, first:start])
    return part.contiguous()
