"""i-quants of all experts of a batch at several widths from one factor: error feedback over eights (LDLQ).

As trellis_ldlq.py, eight columns at a time. For the unit upper M and pivots d^2 of the Hessian, the loss of a residual
e is the sum over columns j of d_j^2 (e_j + sum_{i<j} e_i M_ij)^2. What the columns before an eight give to it, g, its
own residual makes up for where M_b^T e_b = -g, M_b the eight's own part of M: so entries are chosen for the weights
moved by the solution of this system, and an error there counts with A = M_b diag(d_b^2) M_b^T (QTIP, arXiv 2406.11235,
3.4; LDLQ of arXiv 2307.13304, by blocks).

A block's float16 is fixed when the sweep arrives at it, from the scale that each of its runs would take alone; the
runs' own steps are searched with what has come to them by then. At the end the float16 of all blocks of a row are
fitted to the loss together. 8 bits are GPTQ's, in groups of 32.

On a CPU, wherever the weights are.

Letters: E experts, N output rows, K inputs, B blocks of 256 of a row, b eights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeq.numerics import gptq, iq_search
from moeq.numerics.factor import Factor, feedback
from moeq.numerics.iq_blocks import KINDS, blocks
from moeq.numerics.trellis_ldlq import added_to
from moeq.numerics.vectors import LANES
from moeq_kernels.iq_types import BLOCK, BLOCKS, type_of
from moeq_kernels.packed import PackedWeight
from moeq_kernels.widths import Encoding

NEAR = 2  # steps on each side of the nearest that are tried
ROOM = 1 / 0.85  # between the largest scale of a block and its last step, for what feedback makes larger
WHOLE = 8  # bits of whole numbers
LEAST_SCALE, LARGEST_SCALE = 2.0**-24, 65504.0


def quantize(weight: Tensor, factor: Factor, hessian: Tensor, bits: Sequence[int], codebook: str) -> list[PackedWeight]:
    """Quantize a batch of weights [E, N, K] at several widths of a set of i-quants: a stack [E] each, where they were.

    factor: of hessian [E, K, K], float32, damped as `factor.factorize` did; hessian: what the blocks' float16 are
    fitted to, undamped. ValueError unless K is a multiple of 256.
    """
    if weight.shape[-1] % BLOCK:
        raise ValueError(f"{weight.shape[-1]} inputs are no multiple of {BLOCK}")
    columns = weight.float().mT.contiguous().cpu()
    upper, pivots = factor.unit_upper.float().contiguous().cpu(), _near_one(factor.pivots.float().cpu())
    parts = (*eights(upper, pivots), pivots)
    made = []
    for width in bits:
        name = type_of(width, codebook)
        if width == WHOLE:
            codes, scales = _whole_numbers(columns, upper, BLOCKS[name][0])
        else:
            codes, scales = _Columns(columns, upper, parts, name).made(hessian, added_to(hessian, factor))
        stored = {"codes": codes.to(weight.device), "scales": scales.to(weight.device)}
        made.append(PackedWeight.of(stored, width, weight.shape[-1], Encoding.iq(codebook)))
    return made


def _whole_numbers(columns: Tensor, upper: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Codes uint8 [E, N, K] and scales [E, N, K / size] of Q8_0."""
    found = gptq.quantize(columns.mT, upper, bits=[WHOLE], group_size=size, symmetric=True)
    return found.codes[:, 0] ^ 128, found.scale[:, 0].half()


class _Columns:
    """Weights as one type's codes, column after column; residuals are input-major, [E, K, N], of rows up to a multiple
    of LANES, the last of which are 0."""

    def __init__(self, columns: Tensor, upper: Tensor, parts: tuple[Tensor, Tensor, Tensor], name: str) -> None:
        """parts: of `eights`, and pivots."""
        self._upper, self._parts, self._name, self._rows = upper, parts, name, columns.shape[2]
        self._columns = torch.nn.functional.pad(columns, (0, -columns.shape[2] % LANES))
        self._residual = torch.empty_like(self._columns)

    def made(self, hessian: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """Codes uint8 [E, N, B*L] and scales float16 [E, N, B]; hessian [E, K, K], added [E]: as of `fitted_scales`."""
        codes, scales = zip(*map(self._block, range(0, self._columns.shape[1], BLOCK)), strict=True)
        stored = torch.stack(scales, -1)
        for expert, (own, more) in enumerate(zip(hessian.float().cpu(), added.tolist(), strict=True)):
            weight, left = self._columns[expert, :, : self._rows].mT, self._residual[expert, :, : self._rows].mT
            stored[expert] = fitted_scales(weight, weight - left, stored[expert], own, more)
        return torch.cat(codes, -1), stored

    def _block(self, start: int) -> tuple[Tensor, Tensor]:
        """Codes [E, N, L] and scales [E, N] of the columns from `start` on."""
        given = feedback(self._upper, self._residual, 0, start, start + BLOCK)
        inverse, metric, pivots = self._parts
        own = slice(start // 8, (start + BLOCK) // 8)
        parts = inverse[:, own].contiguous(), metric[:, own].contiguous(), pivots
        ideal = iq_search.fitted(self._name, self._columns, given, start, *parts[:2])
        largest = ideal.gather(1, ideal.abs().argmax(1, keepdim=True)).squeeze(1)
        stored = _storable(largest * ROOM / iq_search.last_factor(KINDS[self._name]))
        entries, signs, steps = iq_search.swept(
            self._name, self._columns, given, self._upper, start, parts, stored.float(), ideal, self._residual, NEAR
        )
        flat = [part[:, : self._rows].flatten(0, 1) for part in (entries, signs, steps)]
        return blocks(self._name, *flat).unflatten(0, (-1, self._rows)), stored[:, : self._rows]


def eights(upper: Tensor, pivots: Tensor) -> tuple[Tensor, Tensor]:
    """Of the eights of all columns, float32 [E, K/8, 8, 8] each, the inverse of M_b^T and A; upper [E, K, K], pivots
    [E, K]. Expert by expert, so that each is what it is alone."""
    experts, inputs, _ = upper.shape
    inverse, metric = (torch.empty(experts, inputs // 8, 8, 8) for _ in range(2))
    unit = torch.eye(8, dtype=torch.float64)
    for expert in range(experts):
        own = torch.stack([upper[expert, at : at + 8, at : at + 8] for at in range(0, inputs, 8)]).double()
        inverse[expert] = torch.linalg.solve_triangular(own.mT, unit, upper=False, unitriangular=True)
        metric[expert] = own * pivots[expert].view(-1, 1, 8).double() @ own.mT
    return inverse, metric


def fitted_scales(weight: Tensor, rounded: Tensor, scales: Tensor, hessian: Tensor, added: float) -> Tensor:
    """Scales float16 [N, B] with which rounded weights [N, K], made with scales [N, B], have the least loss by the
    Hessian [K, K]: least squares over all blocks of a row at once. As they were where that has no solution; `added`: as
    of `trellis_ldlq.fitted_scale`."""
    blocks = scales.shape[1]
    parts, exact = rounded.unflatten(1, (blocks, -1)), weight.unflatten(1, (blocks, -1))
    size = parts.shape[-1]
    seen = torch.stack([parts[:, at] @ hessian[at * size : (at + 1) * size] for at in range(blocks)], 1)
    between = (seen.unflatten(2, (blocks, -1)) * parts.unsqueeze(1)).sum(-1).double()
    wanted = (seen * weight.unsqueeze(1)).sum(-1).double()
    lower, failed = torch.linalg.cholesky_ex(between)
    ratio = torch.cholesky_solve(wanted.unsqueeze(-1), lower).squeeze(-1)
    right = (failed == 0).unsqueeze(-1) & torch.isfinite(ratio) & (ratio > 0)
    ratio = torch.where(right, ratio, 1.0)
    damped = between + torch.diag_embed(added * parts.square().sum(-1).double())
    pulled = (damped @ (ratio + 1).unsqueeze(-1)).squeeze(-1) - 2 * (wanted + added * (parts * exact).sum(-1))
    told = ((ratio - 1) * pulled).sum(-1) <= added * (rounded - weight).square().sum(-1)
    return _storable(scales.float() * torch.where(told.unsqueeze(-1), ratio, 1.0).float())


def _near_one(pivots: Tensor) -> Tensor:
    """Pivots [E, K] in another unit, a power of two of every expert's own: squares of costs then neither vanish nor
    overflow, whatever the activations' size."""
    power = pivots.mean(-1, keepdim=True).log2().round().nan_to_num(0.0).clamp(-126, 126)
    return pivots * (-power).exp2()


def _storable(scale: Tensor) -> Tensor:
    """Scales as they are stored, float16; none is infinite, and none 0 but those that were."""
    return (scale.sign() * scale.abs().clamp(LEAST_SCALE, LARGEST_SCALE)).half()
