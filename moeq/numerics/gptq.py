"""GPTQ over all experts of a layer at once and all bit widths from one factor (left-looking form).

For H = U U^T with U upper triangular, the loss of a residual e = w - q is the sum over columns j of
U_jj^2 (e_j + sum_{i<j} e_i M_ij)^2 with M = U / diag(U): so column j is rounded after adding the feedback
sum_{i<j} e_i M_ij of the columns before it. This gives the codes of the classic form (Frantar et al., arXiv 2210.17323,
Algorithm 1, which needs the Cholesky factor of the inverse) from one Cholesky and no inverse, and the feedback of a
whole block is one matrix product, shared by every bit width and every row that sees the same input (gate and up).

Group scales are taken when the loop arrives at the group, from the weights as the feedback of all earlier columns
would move them: the solution of the unit-triangular system in the group's own block of M.

The columns' loop: gptq_cpu.py, and gptq_device.py for GPUs.

Letters: E experts, K inputs (columns of the weight), B bit widths, N output rows, G groups; inside of the loops weights
are input-major [E, K, N].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeq.numerics import gptq_cpu, gptq_device
from moeq.numerics.group_grids import stacked, static_grids
from moeq_kernels.grids import Symmetry, encode, inverse_scale, max_codes
from moeq_kernels.widths import resolved_group_size


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """Codes and grids of one weight at several widths: codes uint8 [E, B, N, K], scale and zero [E, B, N, G].

    Scales are those that are stored, rounded to float16, in the dtype that was worked in (see grids.py).
    """

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
    for plain rounding to the min-max grid (RTN) in float32. order [E, K]: columns in the order in which they are
    rounded, see `factor.act_order`; the factor is then that of the Hessian in this order, and groups (of the columns as
    they lie) have the grids of the untouched weights. importance: None for min-max grids; [E, K], columns as they lie,
    for the grid of every group (clipped, of SHRINKS times the range) with the least error of rounding so weighted,
    see `grids.fit_clipped_grid`. Returns `Quantized`, columns as they lie; rows are independent of each other.

    Frantar et al., arXiv 2210.17323, Algorithm 1 in the form above; the order of columns (act-order) is that of GPTQ's
    code, and so is the idea of the search for a range.
    """
    group = resolved_group_size(weight.shape[2], group_size)
    if factor is None:
        codes, scale, zero = _round_to_nearest(weight, bits, group, symmetric, importance)
    else:
        importance = None if importance is None else importance.to(factor.dtype)
        loop = gptq_cpu if weight.device.type == "cpu" else gptq_device
        codes, scale, zero = loop.codes_and_grids(weight, factor, bits, group, symmetric, order, importance)
        if order is not None:
            codes = codes.gather(-1, order.argsort(-1)[:, None, None, :].expand_as(codes))
    return Quantized(codes=codes, scale=scale, zero=zero, bits=tuple(bits), group_size=group_size)


def _round_to_nearest(
    weight: Tensor, bits: Sequence[int], group: int, symmetric: Symmetry, importance: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Rounding (RTN), group by group: codes [E, B, N, K], scale and zero [E, B, N, G]."""
    columns = weight.float().transpose(1, 2).contiguous()
    experts, inputs, rows = columns.shape
    counts = None if importance is None else importance.float()
    grids = static_grids(columns, bits, group, symmetric, counts)
    top = max_codes(bits, columns).expand(len(bits), rows)
    codes = torch.empty(experts, len(bits), rows, inputs, dtype=torch.uint8, device=columns.device)
    for index, (scale, zero) in enumerate(grids):
        here = slice(index * group, (index + 1) * group)
        part = columns[:, here].unsqueeze(2).expand(-1, -1, len(bits), -1)
        nearest = encode(part, inverse_scale(scale).unsqueeze(1), zero.unsqueeze(1), top)
        codes[..., here] = nearest.to(torch.uint8).permute(0, 2, 3, 1)
    return codes, *stacked(grids)
