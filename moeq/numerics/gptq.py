"""GPTQ over all experts of a layer at once and all bit widths from one factor (left-looking form).

For H = U U^T with U upper triangular, the loss of a residual e = w - q is the sum over columns j of
U_jj^2 (e_j + sum_{i<j} e_i M_ij)^2 with M = U / diag(U): so column j is rounded after adding the feedback
sum_{i<j} e_i M_ij of the columns before it. This gives the codes of the classic form (Frantar et al. 2022, Algorithm 1,
which needs the Cholesky factor of the inverse) from one Cholesky and no inverse, and the feedback of a whole block is
one matrix product, shared by every bit width and every row that sees the same input (gate and up).

Group scales are taken when the loop arrives at the group, from the weights as the feedback of all earlier columns
would move them: the solution of the unit-triangular system in the group's own block of M.

Axes: E experts, K inputs (columns of the weight), B bit widths, N output rows; weights are input-major [E, K, N].
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moeq.numerics import sweep
from moeq.numerics.grids import (
    Symmetry,
    encode,
    fit_clipped_grid,
    fit_grid,
    grid_between,
    group_count,
    inverse_scale,
    max_codes,
    resolved_group_size,
    shrunk_grids,
)
from moeq.numerics.threads import side_by_side

LANES_AT_ONCE = 2048  # rows times widths that a CPU's thread works on together
BLOCK = 128  # columns that the inner loop rounds one by one
SPAN = 256  # columns whose feedback from all columns before them is one matrix product
SUB_BLOCK = 16  # columns updated by rank-1 steps inside a block


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """Codes and grids of one weight at several widths: codes uint8 [E, B, N, K], scale and zero [E, B, N, G]."""

    codes: Tensor
    scale: Tensor
    zero: Tensor
    bits: tuple[int, ...]
    group_size: int


def quantize(
    weight: Tensor,
    factor: Tensor | None,
    *,
    bits: Sequence[int],
    group_size: int,
    symmetric: Symmetry = False,
    order: Tensor | None = None,
    importance: Tensor | None = None,
) -> Quantized:
    """Quantize a batch of weights at several widths with one factor.

    weight: [E, N, K] floating point; factor: factor.Factor.unit_upper [E, K, K] in the dtype to work in, or None
    for plain rounding to the min-max grid (RTN). order [E, K]: columns in the order in which they are rounded, see
    `factor.act_order`; the factor is then that of the Hessian in this order, and groups (of the columns as they
    lie) have the grids of the untouched weights. importance: None for min-max grids; [E, K], columns as they lie,
    for the grid of every group (clipped, of SHRINKS times the range) with the least error of rounding so weighted,
    see `fit_clipped_grid`. Returns `Quantized`, columns as they lie; rows are independent of each other.
    """
    if factor is None:
        return _round_to_nearest(_input_major(weight, torch.float32), bits, group_size, symmetric, importance)
    group = resolved_group_size(weight.shape[2], group_size)
    if importance is not None:
        importance = importance.to(factor.dtype)
    work = _on_cpu if weight.device.type == "cpu" else _on_device
    codes, scale, zero = work(weight, factor, bits, group, symmetric, order, importance)
    return Quantized(codes=codes, scale=scale, zero=zero, bits=tuple(bits), group_size=group_size)


def _static_grids(
    columns: Tensor, bits: Sequence[int], group: int, symmetric: Symmetry, importance: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Grids of the untouched weights [E, K, N]: scale and zero [E, B, N, G]."""
    found = []
    for start in range(0, columns.shape[1], group):
        part = columns[:, start : start + group]
        low, high, size = (one.unsqueeze(1).repeat(1, len(bits), 1) for one in _extent(part))
        if importance is None:
            found.append(grid_between(low, high, size, bits, symmetric))
        else:
            counts = importance[:, start : start + group]
            found.append(_clipped(part.contiguous(), counts, (low, high, size), bits, symmetric))
    return torch.stack([scale for scale, _ in found], -1), torch.stack([zero for _, zero in found], -1)


def _extent(part: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Least (at most 0), largest (at least 0) and mean absolute weight, [E, N] each, of one group [E, g, N]."""
    return part.amin(1).clamp(max=0), part.amax(1).clamp(min=0), part.abs().mean(1)


def _clipped(
    weight: Tensor,
    importance: Tensor,
    extent: tuple[Tensor, Tensor, Tensor],
    bits: Sequence[int],
    symmetric: Symmetry,
) -> tuple[Tensor, Tensor]:
    """As `fit_clipped_grid`: scale and zero [E, B, N] of one group, on a CPU by the compiled search.

    weight: [E, g, N], the same at all widths, or [E, g, B*N]; importance: [E, g]; extent: [E, B, N] each.
    """
    low, high, size = extent
    widths, rows = low.shape[1:]
    if weight.device.type != "cpu":
        every = weight.unflatten(-1, (-1, rows)).expand(-1, -1, widths, -1)
        return fit_clipped_grid(every, importance, bits, symmetric)
    grids = list(shrunk_grids(low, high, size, bits, symmetric))
    scale, zero = (torch.stack(parts).flatten(2) for parts in zip(*grids, strict=True))  # [C, E, B*N]
    top = max_codes(bits, scale).flatten()
    chosen = sweep.grid_errors(weight, importance.contiguous(), scale, inverse_scale(scale), zero, top).argmin(0)[None]
    found = [one.gather(0, chosen)[0].unflatten(1, (widths, rows)) for one in (scale, zero)]
    return found[0], found[1]


def _input_major(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype).transpose(1, 2).contiguous()


def _on_cpu(
    weight: Tensor,
    factor: Tensor,
    bits: Sequence[int],
    group: int,
    symmetric: Symmetry,
    order: Tensor | None,
    importance: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [E, B, N, K], scale and zero [E, B, N, G]: products between blocks, the compiled column loop inside.

    A few rows at a time (rows are independent), so that what the blocks give to each other stays in the cache.
    """
    experts, rows, inputs = weight.shape
    factor = factor.contiguous()
    codes = torch.empty(experts, len(bits), rows, inputs, dtype=torch.uint8)
    groups = -(-inputs // group)
    scale, zero = (torch.empty(experts, len(bits), rows, groups, dtype=factor.dtype) for _ in range(2))
    chunks = max(1, round(rows * len(bits) / LANES_AT_ONCE))
    step = -(-rows // (chunks * sweep.LANES)) * sweep.LANES
    some = max(1, LANES_AT_ONCE // (len(bits) * rows))
    spaces = threading.local()

    def piece(at: tuple[int, int]) -> None:
        which, part = slice(at[0], at[0] + some), slice(at[1], at[1] + step)
        columns = _input_major(weight[which, part], factor.dtype)
        size = columns.numel() * len(bits)
        if not hasattr(spaces, "residual") or spaces.residual.numel() < size:
            spaces.residual = torch.empty(size, dtype=factor.dtype)
        residual = spaces.residual[:size].view(*columns.shape[:2], -1)
        counts = None if importance is None else importance[which]
        if order is None:
            grids = _some_rows(columns, factor[which], bits, group, symmetric, counts, residual, codes, at)
        else:
            grids = _static_grids(columns, bits, group, symmetric, counts)
            _some_rows_in_order(columns, factor[which], bits, grids, order[which], group, residual, codes, at)
        scale[which, :, part], zero[which, :, part] = grids

    side_by_side(piece, [(first, start) for first in range(0, experts, some) for start in range(0, rows, step)])
    return codes if order is None else _put_back(codes, order), scale, zero


def _put_back(codes: Tensor, order: Tensor) -> Tensor:
    """Codes [E, B, N, K] from the order of rounding to the order in which columns lie."""
    back = order.argsort(-1)
    return codes.gather(-1, back[:, None, None, :].expand_as(codes))


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
    scale, zero = (one.permute(0, 3, 1, 2).flatten(2).contiguous() for one in static)
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
    """_on_cpu for some rows of some experts, from expert and row `at` on: fills codes, returns scale and zero."""
    experts, inputs, rows = columns.shape
    widths = len(bits)
    first_group = torch.zeros(experts, inputs, dtype=torch.long)
    top = max_codes(bits, columns).expand(widths, rows).reshape(-1)
    scales, zeros = [], []
    span = max(group, SPAN // group * group)
    for far in range(0, inputs, span):
        from_far = _feedback(factor, residual, 0, far, min(far + span, inputs))
        for start in range(far, min(far + span, inputs), group):
            stop = min(start + group, inputs)
            feedback = _with_near(from_far, factor, residual, far, start, stop)
            if start:
                *extent, moved = sweep.extent(columns, feedback, factor, start, keep=importance is not None)
            else:
                extent, moved = [one.repeat(1, widths) for one in _extent(columns[:, :stop])], columns[:, :stop]
            low, high, size = (one.unflatten(1, (widths, rows)) for one in extent)
            if importance is None:
                scale, zero = grid_between(low, high, size, bits, symmetric)
            else:
                counts = importance[:, start:stop]
                scale, zero = _clipped(moved.contiguous(), counts, (low, high, size), bits, symmetric)
            scales.append(scale)
            zeros.append(zero)
            grids = tuple(one.reshape(experts, 1, -1).contiguous() for one in (scale, inverse_scale(scale), zero))
            for begin, given in _blocks(feedback, factor, residual, start, stop):
                sweep.round_block(columns, given, factor, begin, grids, top, first_group, residual, codes, at)  # type: ignore[arg-type]
    return torch.stack(scales, -1), torch.stack(zeros, -1)


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
        return _feedback(factor, residual, first, start, stop)
    part = given[:, start - first : stop - first]
    if first < start:
        part.baddbmm_(factor[:, first:start, start:stop].mT, residual[:, first:start])
    return part.contiguous()


def _feedback(factor: Tensor, residual: Tensor, first: int, start: int, stop: int) -> Tensor:
    """What the columns from first to start give to those from start to stop, [E, stop - start, R]."""
    if first == start:
        return residual.new_zeros(len(residual), stop - start, residual.shape[2])
    return torch.bmm(factor[:, first:start, start:stop].mT, residual[:, first:start])


def _on_device(
    weight: Tensor,
    factor: Tensor,
    bits: Sequence[int],
    group: int,
    symmetric: Symmetry,
    order: Tensor | None,
    importance: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As _on_cpu, in torch operations."""
    if order is not None:
        return _on_device_in_order(weight, factor, bits, group, symmetric, order, importance)
    columns = _input_major(weight, factor.dtype)
    experts, inputs, rows = columns.shape
    widths = len(bits)
    residual = torch.empty(experts, inputs, widths * rows, dtype=columns.dtype, device=columns.device)
    codes = torch.empty(experts, inputs, widths * rows, dtype=torch.uint8, device=columns.device)
    scales, zeros = [], []
    for start in range(0, inputs, group):
        stop = min(start + group, inputs)
        original = columns[:, start:stop].repeat(1, 1, widths)  # [E, g, B*N]
        if start:
            feedback = torch.bmm(factor[:, :start, start:stop].mT, residual[:, :start])
            moved = torch.baddbmm(original, _unit_inverse(factor[:, start:stop, start:stop].mT), feedback)
        else:
            feedback, moved = torch.zeros_like(original), original
        moved = moved.unflatten(-1, (widths, rows))
        if importance is None:
            scale, zero = fit_grid(moved, bits, symmetric)
        else:
            scale, zero = fit_clipped_grid(moved, importance[:, start:stop], bits, symmetric)
        scales.append(scale)
        zeros.append(zero)
        top = max_codes(bits, scale).expand(widths, rows).reshape(-1)
        _sweep_group(
            original,
            feedback,
            factor[:, start:stop, start:stop],
            scale.flatten(1).unsqueeze(1),
            zero.flatten(1).unsqueeze(1),
            top,
            residual[:, start:stop],
            codes[:, start:stop],
        )
    codes = codes.unflatten(-1, (widths, rows)).permute(0, 2, 3, 1).contiguous()
    return codes, torch.stack(scales, -1), torch.stack(zeros, -1)


def _on_device_in_order(
    weight: Tensor,
    factor: Tensor,
    bits: Sequence[int],
    group: int,
    symmetric: Symmetry,
    order: Tensor,
    importance: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As _on_device with static grids; every column brings its group's."""
    columns = _input_major(weight, factor.dtype)
    experts, inputs, rows = columns.shape
    widths = len(bits)
    scale, zero = _static_grids(columns, bits, group, symmetric, importance)
    columns = columns.gather(1, order.unsqueeze(2).expand_as(columns))
    residual = torch.empty(experts, inputs, widths * rows, dtype=columns.dtype, device=columns.device)
    codes = torch.empty(experts, inputs, widths * rows, dtype=torch.uint8, device=columns.device)
    top = max_codes(bits, scale).expand(widths, rows).reshape(-1)
    of_group = [one.permute(0, 3, 1, 2).flatten(2) for one in (scale, zero)]  # [E, G, R]
    for start in range(0, inputs, BLOCK):
        stop = min(start + BLOCK, inputs)
        index = (order[:, start:stop] // group).unsqueeze(2).expand(-1, -1, widths * rows)
        _sweep_group(
            columns[:, start:stop].repeat(1, 1, widths),
            _feedback(factor, residual, 0, start, stop),
            factor[:, start:stop, start:stop],
            of_group[0].gather(1, index),
            of_group[1].gather(1, index),
            top,
            residual[:, start:stop],
            codes[:, start:stop],
        )
    codes = codes.unflatten(-1, (widths, rows)).permute(0, 2, 3, 1).contiguous()
    return _put_back(codes, order), scale, zero


def _unit_inverse(lower: Tensor) -> Tensor:
    """Inverses of unit lower triangular matrices [E, g, g]: small; the wide right-hand sides are then one product."""
    identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device).expand_as(lower)
    inverse: Tensor = torch.linalg.solve_triangular(lower, identity, upper=False, unitriangular=True)
    return inverse


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _has_kernel(tensor: Tensor) -> bool:
    """Whether the Triton kernel runs where this tensor lies: on a GPU, or anywhere in Triton's interpreter."""
    return (tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1") and _has_triton()


def _device_sweep() -> Any:
    """The kernel's module; Triton is large and there is none for every machine."""
    return importlib.import_module("moeq.numerics.device_sweep")


def _sweep_group(
    original: Tensor,
    feedback: Tensor,
    factor: Tensor,
    scale: Tensor,
    zero: Tensor,
    top: Tensor,
    residual: Tensor,
    codes: Tensor,
) -> None:
    """Round the columns of one group in order, in blocks and sub-blocks; fills residual and codes [E, g, R].

    original: [E, g, R] (R = B*N rows); feedback: [E, g, R] from before the group; factor: [E, g, g]; scale and zero:
    [E, 1, R], or [E, g, R] where columns have their own.
    """
    inputs = original.shape[1]
    inverse = inverse_scale(scale)
    for start in range(0, inputs, BLOCK):
        stop = min(start + BLOCK, inputs)
        target = original[:, start:stop] + feedback[:, start:stop]
        if start:
            target.baddbmm_(factor[:, :start, start:stop].mT, residual[:, :start])
        block = factor[:, start:stop, start:stop]
        if _has_kernel(target):
            own = slice(start, stop) if scale.shape[1] > 1 else slice(None)
            _device_sweep().round_block(
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
                mine = min(start + column, scale.shape[1] - 1)
                code = encode(target[:, column], inverse[:, mine], zero[:, mine], top)
                codes[:, start + column].copy_(code)
                left = residual[:, start + column]
                torch.sub(original[:, start + column], code.sub_(zero[:, mine]).mul_(scale[:, mine]), out=left)
                if column + 1 < high:
                    ahead = block[:, column, column + 1 : high]
                    target[:, column + 1 : high].addcmul_(ahead.unsqueeze(-1), left.unsqueeze(1))
            if high < stop - start:
                target[:, high:].baddbmm_(block[:, low:high, high:].mT, residual[:, start + low : start + high])


def _round_to_nearest(
    columns: Tensor, bits: Sequence[int], group_size: int, symmetric: Symmetry, importance: Tensor | None
) -> Quantized:
    """Rounding (RTN) of columns [E, K, N], group by group."""
    experts, inputs, rows = columns.shape
    group = resolved_group_size(inputs, group_size)
    codes = torch.empty(experts, len(bits), rows, inputs, dtype=torch.uint8, device=columns.device)
    scales, zeros = [], []
    grids = None if importance is None else _static_grids(columns, bits, group, symmetric, importance.to(columns.dtype))
    for index in range(group_count(inputs, group_size)):
        here = slice(index * group, (index + 1) * group)
        part = columns[:, here].unsqueeze(2).expand(-1, -1, len(bits), -1)
        scale, zero = fit_grid(part, bits, symmetric) if grids is None else (one[..., index] for one in grids)
        top = max_codes(bits, scale).expand(len(bits), rows)
        found = encode(part, inverse_scale(scale).unsqueeze(1), zero.unsqueeze(1), top)
        codes[..., here] = found.to(torch.uint8).permute(0, 2, 3, 1)
        scales.append(scale)
        zeros.append(zero)
    return Quantized(
        codes=codes,
        scale=torch.stack(scales, -1),
        zero=torch.stack(zeros, -1),
        bits=tuple(bits),
        group_size=group_size,
    )
