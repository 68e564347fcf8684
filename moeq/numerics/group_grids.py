"""Grids of groups of inputs: of their whole range, or of the part of it whose grid rounds with the least error.

On a CPU the search over the shrunk ranges is compiled (compiled_grids.py); elsewhere it is `grids.fit_clipped_grid`.

Letters: E experts, K inputs, G groups, g inputs of one, B bit widths, N output rows, R = B*N, C candidate grids.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeq.numerics import compiled_grids
from moeq_kernels.grids import (
    SHRINKS,
    Symmetry,
    extent,
    fit_clipped_grid,
    grid_between,
    inverse_scale,
    max_codes,
)


def group_grid(
    weight: Tensor, ends: Sequence[Tensor], bits: Sequence[int], symmetric: Symmetry, importance: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Scale, its `inverse_scale` and zero [E, B, N] of one group, in the dtype of its weights.

    weight: [E, g, N], the same at all widths, or [E, g, R]; ends: its `grids.extent`, three of [E, B, N]; importance:
    [E, g] what an input's error counts in clipping, None for the whole range.
    """
    low, high, size = ends
    if importance is None and weight.device.type == "cpu":
        scale, inverse, zero = compiled_grids.grids_between(low, high, size, bits, symmetric)
        return scale[0], inverse[0], zero[0]
    if importance is None:
        scale, zero = grid_between(low, high, size, bits, symmetric)
        return scale, inverse_scale(scale), zero
    return _clipped(weight, ends, bits, symmetric, importance)


def static_grids(
    columns: Tensor, bits: Sequence[int], group: int, symmetric: Symmetry, importance: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    """Scale and zero [E, B, N] of every group of `group` of the untouched weights [E, K, N]; importance: [E, K]."""
    grids = []
    for start in range(0, columns.shape[1], group):
        here = slice(start, start + group)
        ends = [end.unsqueeze(1).expand(-1, len(bits), -1) for end in extent(columns[:, here])]
        counts = None if importance is None else importance[:, here]
        scale, _, zero = group_grid(columns[:, here], ends, bits, symmetric, counts)
        grids.append((scale, zero))
    return grids


def stacked(grids: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Scale and zero [E, B, N, G] of G groups' [E, B, N]."""
    return torch.stack([scale for scale, _ in grids], -1), torch.stack([zero for _, zero in grids], -1)


def _clipped(
    weight: Tensor, ends: Sequence[Tensor], bits: Sequence[int], symmetric: Symmetry, importance: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As `fit_clipped_grid`, with the inverse; arguments as of `group_grid`."""
    widths, rows = ends[0].shape[1:]
    if weight.device.type != "cpu":
        every = weight.unflatten(-1, (-1, rows)).expand(-1, -1, widths, -1)
        scale, zero = fit_clipped_grid(every, importance, bits, symmetric)
        return scale, inverse_scale(scale), zero
    low, high, size = ends
    grids = compiled_grids.grids_between(low, high, size, bits, symmetric, SHRINKS)
    scale, inverse, zero = (part.flatten(2) for part in grids)
    weight, importance, top = weight.contiguous(), importance.contiguous(), max_codes(bits, scale).flatten()
    best = compiled_grids.grid_errors(weight, importance, scale, inverse, zero, top).argmin(0)[None]
    return tuple(part.gather(0, best)[0].unflatten(1, (widths, rows)) for part in (scale, inverse, zero))  # type: ignore[return-value]
