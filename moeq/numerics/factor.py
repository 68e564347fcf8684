"""Factoring Hessians for GPTQ: H = U U^T, U upper triangular, for all experts of a batch.

Letters: E experts, K inputs, R rows times widths.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moeq.numerics import products
from moeq.numerics.slab import large_empty, transposed
from moeq.numerics.sweep import compiled
from moeq_kernels.threads import side_by_side

FACTOR_BLOCK = 256  # columns that are factored at once
TURNED_BLOCK = 128  # the same where products are as fast with few columns
LEAST_TURNED = 512  # inputs from which on a CPU makes the factor's transpose
MAX_DAMPING = 1.0


@dataclass(frozen=True, kw_only=True)
class Factor:
    """Unit upper triangular factor M of each expert's Hessian and what it took to get it.

    unit_upper: [E, K, K]; pivots: [E, K] U_jj^2, what the square of a column's error counts when later columns make up
    for the rest (the damping alone for inputs that were always zero); damping: [E] fraction of the mean diagonal that
    was added; float64: [E] bool, the float32 factorization failed; failed: [E] bool, no damping up to 1.0 made it
    positive definite (M is the identity there: plain rounding).
    """

    unit_upper: Tensor
    pivots: Tensor
    damping: Tensor
    float64: Tensor
    failed: Tensor

    def fallbacks(self, expert: int, damping: float) -> dict[str, bool]:
        """What the factorization of one expert came to, by the names in the loss table; damping: what was asked for."""
        failed = bool(self.failed[expert])
        raised = float(self.damping[expert]) > damping and not failed
        return {"rounded": failed, "raised_damping": raised, "float64": bool(self.float64[expert])}


def factorize(hessian: Tensor, damping: float = 0.01, *, of_many: bool = True) -> Factor:
    """Factor a batch of Hessians [E, K, K] (means of x x^T over tokens, float32 or float64), all at once.

    damping: fraction of the mean diagonal that is added to it (Frantar et al., arXiv 2210.17323, step 3 of GPTQ).
    Inputs that were always zero get a unit diagonal (they then neither give nor take feedback). Where the float32
    factorization fails it is repeated in float64, then with damping raised tenfold up to 1.0; nothing is raised.

    of_many: on a CPU every Hessian has one thread, so that its factor is the same in whatever batch; otherwise few of
    them have all threads one after the other.
    """
    experts, size = hessian.shape[0], hessian.shape[-1]
    work = large_empty(hessian.shape, hessian.dtype).copy_(hessian) if hessian.device.type == "cpu" else hessian.clone()
    diagonal = work.diagonal(dim1=-2, dim2=-1)
    mean = diagonal.mean(-1, keepdim=True)
    dead = diagonal <= 0
    diagonal.masked_fill_(dead, 1.0)
    diagonal.add_(damping * mean)
    damped = diagonal.clone()
    used = torch.full((experts,), damping, dtype=torch.float64)
    upper, pivots, info = _unit_factors(work, of_many)
    bad = (info != 0) | ~torch.isfinite(pivots).all(-1)
    float64 = torch.zeros(experts, dtype=torch.bool)
    failed = torch.zeros(experts, dtype=torch.bool)
    for expert in bad.nonzero().flatten().tolist():
        float64[expert] = True
        exact = hessian[expert].double().diagonal_scatter(damped[expert].double())
        fixed, amount = _retry(exact, mean[expert].double(), damping)
        used[expert] = amount
        if fixed is None:
            failed[expert] = True
            fixed = torch.eye(size, dtype=torch.float64, device=hessian.device)
        upper[expert] = fixed.to(upper.dtype)
        pivots[expert] = upper[expert].diagonal()
        upper[expert].div_(pivots[expert])
    unseen = torch.where(mean > 0, damping * mean, 1.0)  # what damping makes of them; 1 is only for Cholesky
    pivots = torch.where(dead, unseen, pivots.square_())
    return Factor(unit_upper=upper, pivots=pivots, damping=used, float64=float64, failed=failed)


def _unit_factors(work: Tensor, of_many: bool) -> tuple[Tensor, Tensor, Tensor]:
    """As `_upper_factor`, its columns divided by U_jj, these [E, K], and what is nonzero where there is none; on a CPU
    every Hessian by itself."""
    if work.device.type != "cpu":
        upper, info = _upper_factor(work)
        pivots = upper.diagonal(dim1=-2, dim2=-1).clone()
        return upper.div_(pivots.unsqueeze(-2)), pivots, info
    info, pivots = torch.zeros(len(work), dtype=torch.int32), work.new_empty(work.shape[:2])

    def piece(expert: int) -> None:
        one = work[expert : expert + 1]
        if work.shape[-1] >= LEAST_TURNED:
            info[expert] = _turned_factor(one, pivots[expert])
            return
        info[expert] = _upper_factor(one)[1][0]
        pivots[expert] = one[0].diagonal()
        one.div_(pivots[expert])

    side_by_side(piece, range(len(work)), one_each=of_many)
    return work, pivots, info


def _upper_factor(work: Tensor) -> tuple[Tensor, Tensor]:
    """U with work = U U^T, upper triangular, in place of `work` [E, K, K]; [E] nonzero where there is none.

    Block by block from the last one; all but the blocks on the diagonal is matrix products.
    """
    experts, size, _ = work.shape
    info = torch.zeros(experts, dtype=torch.int32, device=work.device)
    for stop in range(size, 0, -FACTOR_BLOCK):
        start = max(0, stop - FACTOR_BLOCK)
        column = work[:, :stop, start:stop]
        if stop < size:
            column.baddbmm_(work[:, :stop, stop:], work[:, start:stop, stop:].mT, alpha=-1)
        lower, wrong = torch.linalg.cholesky_ex(column[:, start:].flip(-2, -1))  # flipped back, it is upper triangular
        block = lower.flip(-2, -1)
        info = torch.maximum(info, wrong)
        column[:, start:] = block
        if start:
            above = column[:, :start]
            if work.device.type == "cpu":
                above = transposed(above).mT  # LAPACK's order; torch's own copy would take longer than the solution
            solved = torch.linalg.solve_triangular(block.mT, above, upper=False, left=False)
            column[:, :start] = transposed(solved.mT) if work.device.type == "cpu" else solved
    return work.triu_(), info


def _turned_factor(work: Tensor, pivots: Tensor) -> Tensor:
    """As `_unit_factors` of one Hessian [1, K, K] on a CPU, pivots [K] filled; made as U^T, whose lines the products
    and LAPACK take as they lie."""
    size, own = work.shape[-1], products.pays(work)
    lower, info = work[0], torch.zeros((), dtype=torch.int32)
    step = TURNED_BLOCK if own else FACTOR_BLOCK
    for stop in range(size, 0, -step):
        start = max(0, stop - step)
        lines = lower[start:stop]
        if stop < size and own:
            products.add_product(
                work, start, work, work, summed=(stop, size), columns=(start, stop), lanes=stop, negative=True
            )
        elif stop < size:
            lines[:, :stop].addmm_(lower[stop:, start:stop].T, lower[stop:, :stop], alpha=-1)
        found, wrong = torch.linalg.cholesky_ex(lines[:, start:stop].flip(0, 1))
        info = torch.maximum(info, wrong)
        block = found.T.flip(0, 1)
        lines[:, start:stop] = block
        if start and own:
            unit = torch.eye(len(block), dtype=torch.float64)
            inverse = torch.linalg.solve_triangular(block.double(), unit, upper=False)
            above = lines[:, :start].clone()
            lines[:, :start] = 0
            whole, each = (0, len(block)), inverse.to(work.dtype).contiguous()[None]
            products.add_product(work, start, each, above[None], summed=whole, columns=whole)
        elif start:
            lines[:, :start] = torch.linalg.solve_triangular(block, lines[:, :start].T, upper=False, left=False).T
    pivots.copy_(lower.diagonal())
    _turn(lower.numpy(), pivots.numpy())
    return info


@compiled  # type: ignore[untyped-decorator]
def _turn(matrix, pivots):  # type: ignore[no-untyped-def]
    """The lower triangle of [K, K], its lines divided by pivots [K], into the upper one, zeros into the lower one."""
    size, tile = matrix.shape[0], 32
    part = np.empty((tile, tile), matrix.dtype)  # lines a power of two of bytes apart push each other out of the cache
    for top in range(0, size, tile):
        rows = min(tile, size - top)
        divisors = pivots[top : top + rows]
        for left in range(0, top + 1, tile):
            columns = min(tile, size - left)
            for row in range(rows):
                line = matrix[top + row, left : left + columns]
                for column in range(columns):
                    part[row, column] = line[column]
                for column in range(columns if left < top else row):
                    line[column] = 0
            for column in range(columns):
                line = matrix[left + column, top : top + rows]
                for row in range(0 if left < top else column, rows):
                    line[row] = part[row, column] / divisors[row]


def _retry(work: Tensor, mean: Tensor, damping: float) -> tuple[Tensor | None, float]:
    """Factor one (already damped) Hessian in float64, raising the damping until it is positive definite."""
    total = damping
    mean = mean.clamp(min=torch.finfo(torch.float32).tiny)
    while True:
        lower, info = torch.linalg.cholesky_ex(work.flip(-2, -1))
        if int(info) == 0 and bool(torch.isfinite(lower.diagonal()).all()):
            return lower.flip(-2, -1), total
        raised = max(total * 10, 1e-3)
        if raised > MAX_DAMPING:
            return None, total
        work = work + torch.diag_embed(((raised - total) * mean).expand(work.shape[-1]))
        total = raised


def feedback(factor: Tensor, residual: Tensor, first: int, start: int, stop: int, into: Tensor | None = None) -> Tensor:
    """What the columns from first to start give to those from start to stop, [E, stop - start, R].

    factor: unit upper triangular [E, K, K]; residual: [E, K, R] of the same dtype, what rounding left of the columns;
    into: where to compute it, contiguous.
    """
    given = residual.new_empty(len(residual), stop - start, residual.shape[2]) if into is None else into
    if first == start:
        return given.zero_()
    if products.pays(factor):
        given.zero_()
        whole = factor.contiguous(), residual.contiguous()
        products.add_product(given, 0, *whole, summed=(first, start), columns=(start, stop))
        return given
    return torch.bmm(factor[:, first:start, start:stop].mT, residual[:, first:start], out=given)


def act_order(hessian: Tensor) -> tuple[Tensor, Tensor]:
    """Columns by falling activation energy, int64 [E, K], and the Hessian [E, K, K] in this order (desc_act of GPTQ).

    Columns that matter most are rounded first, when all others can still make up for them.
    """
    order = hessian.diagonal(dim1=-2, dim2=-1).argsort(dim=-1, descending=True, stable=True)
    rows = hessian.gather(1, order.unsqueeze(2).expand_as(hessian))
    return order, rows.gather(2, order.unsqueeze(1).expand_as(hessian))
