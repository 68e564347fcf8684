"""Trellis codes of all experts of a batch at several widths from one factor: error feedback over tiles (LDLQ).

The left-looking form of gptq.py, 16 columns at a time. For the unit upper M and pivots d of the Hessian, the loss of a
residual e is the sum over columns j of d_j^2 (e_j + sum_{i<j} e_i M_ij)^2. What the columns before a block give to it,
g, its own residual makes up for where M_b^T e_b = -g, M_b the block's own part of M: so the walk goes to the weights
moved by the solution of this system (QTIP, arXiv 2406.11235, 3.4; LDLQ of arXiv 2307.13304, by blocks). An error in a
column counts with the diagonal of M_b diag(d_b^2) M_b^T.

Letters: E experts, N output rows, K inputs, B widths, b columns of a block (16), R and C tiles along rows and inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeq.numerics import trellis, trellis_device
from moeq.numerics.factor import Factor, feedback
from moeq.numerics.gptq_device import unit_inverse
from moeq_kernels.grids import SCALE_DTYPE
from moeq_kernels.threads import side_by_side
from moeq_kernels.trellis import TILE, UNIT, WALKED, TrellisWeight, pack, packed_shapes, tiles_along, values
from moeq_kernels.trellis_tables import NORMAL, table

SPAN = 256  # columns whose feedback from all columns before them is one matrix product
ROWS_AT_ONCE = 256  # that a thread works on together: 16 tiles side by side
RESIDUAL_BYTES = 256 << 20  # of the experts that a GPU works on at once
SHRINK = {1: 0.9, 2: 0.96, 3: 0.98, 4: 0.98}  # spread of the values that were not trained, over that of the weights
LEAST_SCALE, LARGEST_SCALE = 2.0**-24, 65504.0
LARGEST = 127  # value of a step of 8 bits, in units of 1/32


@dataclass(frozen=True, kw_only=True)
class Code:
    """What a tile's walk stands for. values: of each state [2**L] in units of the rows' scales, by width; None: steps
    of this width are their values. order: [256], which weight of the tile, row after row, each step is; None: that one.
    """

    values: Mapping[int, Tensor | None]
    order: Tensor | None = None

    @classmethod
    def own(cls, bits: Sequence[int], state_bits: int) -> Code:
        """moeq's, as moeq_kernels/trellis.py has it."""
        return cls(values={k: values(k, state_bits) if k in WALKED else None for k in bits})


def quantize(
    weight: Tensor, factor: Factor, hessian: Tensor, bits: Sequence[int], state_bits: int
) -> list[TrellisWeight]:
    """Quantize a batch of weights [E, N, K] at several widths, 1 to 4 or 8 bits, with 2**L states: a stack [E] each.

    factor: of hessian [E, K, K], float32, damped as `factor.factorize` did; hessian: what the rows' scales are fitted
    to, undamped. Rows are independent of each other but for those of a tile.
    """
    found = [_empty(weight, k, state_bits) for k in bits]
    code, added = Code.own(bits, state_bits), added_to(hessian, factor)

    def piece(which: slice, part: slice) -> None:
        some, tiles = weight[which, part], slice(part.start // TILE, tiles_along(min(part.stop, weight.shape[1])))
        scales = [_storable(first_scale(some, k, state_bits)) for k in bits]
        batch = Walked(some, factor.unit_upper[which], factor.pivots[which], code, scales)
        for width, (into, k) in enumerate(zip(found, bits, strict=True)):
            fitted = fitted_scale(batch.weight, batch.rounded(width), scales[width], hessian[which], added[which])
            into.codes[which, tiles], into.scales[which, part] = pack(batch.codes[width], k), fitted

    in_pieces(weight, len(bits), piece)
    return found


def in_pieces(weight: Tensor, widths: int, piece: Callable[[slice, slice], None]) -> None:
    """Work on weights [E, N, K] piece by piece, slices of experts and of rows, whole tiles: side by side on a CPU, as
    much as memory allows at once on a GPU."""
    experts, rows, inputs = weight.shape
    on_cpu = weight.device.type == "cpu"
    step = ROWS_AT_ONCE if on_cpu else rows
    some = max(1, ROWS_AT_ONCE // rows if on_cpu else RESIDUAL_BYTES // (4 * widths * rows * inputs))
    pieces = [
        (slice(first, first + some), slice(start, start + step))
        for first in range(0, experts, some)
        for start in range(0, rows, step)
    ]
    if on_cpu:
        side_by_side(lambda at: piece(*at), pieces)
    else:
        for at in pieces:
            piece(*at)


def _empty(weight: Tensor, bits: int, state_bits: int) -> TrellisWeight:
    """The stored form of weights [E, N, K], its contents undefined."""
    experts, rows, inputs = weight.shape
    parts = {
        name: torch.empty(experts, *shape, dtype=dtype, device=weight.device)
        for name, (shape, dtype) in packed_shapes(rows, inputs, bits).items()
    }
    return TrellisWeight(**parts, bits=bits, state_bits=state_bits, inputs=inputs)


def first_scale(weight: Tensor, bits: int, state_bits: int) -> Tensor:
    """Scales [..., N] that fit rows [..., N, K] best if their weights are normal, from their root mean square.

    Where steps are their values: with which none is beyond the largest.
    """
    if bits not in WALKED:
        return weight.float().abs().amax(-1) / (LARGEST * UNIT)
    normal = NORMAL * UNIT
    if table(bits, state_bits) is None:
        normal = float(values(bits, state_bits).square().mean().sqrt()) / SHRINK[bits]
    return weight.float().square().mean(-1).sqrt() / normal


def by_launches(device: torch.device) -> bool:
    """Whether every operation is a launch, so that of all blocks at once is prepared what can be."""
    return device.type != "cpu"


class Walked:
    """Some experts' weights [E, N, K] as walks of a code at several widths, their errors made up for.

    codes: bits of the steps, uint8 [E, R, C, 256], by width. Residuals are input-major, [E, K, B*N].
    """

    def __init__(self, weight: Tensor, upper: Tensor, pivots: Tensor, code: Code, scales: Sequence[Tensor]) -> None:
        """upper, pivots: the factor of the Hessians; scales: [E, N] of every width of the code."""
        self.weight = weight.to(upper.dtype)
        self._columns = self.weight.mT.contiguous()
        self._upper, self._pivots, self._bits, self._order = upper, pivots, list(code.values), code.order
        experts, inputs, rows = self._columns.shape
        self._residual = torch.empty(experts, inputs, len(scales) * rows, dtype=upper.dtype, device=upper.device)
        self._scales = torch.stack(list(scales), 1).unsqueeze(1).to(upper.dtype)  # [E, 1, B, N]
        self._values = [None if one is None else one.to(upper.device) for one in code.values.values()]
        along = tiles_along(rows), tiles_along(inputs), TILE * TILE
        self.codes = [torch.empty(experts, *along, dtype=torch.uint8, device=upper.device) for _ in scales]
        self._blocks = self._solved(*self._diagonal()) if by_launches(upper.device) else None
        self._run()

    def rounded(self, width: int) -> Tensor:
        """What the codes of the width of this index stand for, [E, N, K]."""
        rows = self.weight.shape[1]
        return self.weight - self._residual[:, :, width * rows : (width + 1) * rows].mT

    def _run(self) -> None:
        inputs = self._columns.shape[1]
        for far in range(0, inputs, SPAN):
            end = min(far + SPAN, inputs)
            given = feedback(self._upper, self._residual, 0, far, end)
            for start in range(far, end, TILE):
                stop = min(start + TILE, end)
                part = given[:, start - far : stop - far]
                if start > far:
                    part = torch.baddbmm(part, self._upper[:, far:start, start:stop].mT, self._residual[:, far:start])
                self._block(start, stop, part)

    def _diagonal(self) -> tuple[Tensor, Tensor]:
        """The whole blocks on the diagonal of the factor, [E, C, b, b], and their pivots, [E, C, b]."""
        experts, inputs, _ = self._upper.shape
        count = inputs // TILE
        apart, down, right = self._upper.stride()
        own = self._upper.as_strided((experts, count, TILE, TILE), (apart, TILE * (down + right), down, right))
        return own, self._pivots[:, : count * TILE].unflatten(1, (count, TILE))

    def _solved(self, own: Tensor, pivots: Tensor) -> tuple[Tensor, Tensor]:
        """Of blocks [.., b, b] the inverses of M_b^T, and how much errors count: [.., 256], as a walk takes them."""
        lower = own.mT.flatten(0, -3)
        inverse = unit_inverse(lower).view(own.shape)
        return inverse, self._counts(own, pivots)

    def _counts(self, own: Tensor, pivots: Tensor) -> Tensor:
        """How much errors in a block count, relative to each other: [.., b, b] and [.., b] as [.., 256]."""
        counts = (own * pivots.unsqueeze(-2).to(own.dtype) * own).sum(-1)
        counts = counts / counts.mean(-1, keepdim=True)
        counts = torch.nn.functional.pad(counts, (0, TILE - counts.shape[-1]))
        counts = counts.repeat(*[1] * (counts.dim() - 1), TILE)
        return counts if self._order is None else counts[..., self._order]

    def _block(self, start: int, stop: int, given: Tensor) -> None:
        """Round the columns from start to stop; given [E, b, B*N]: what those before give to them."""
        place = start // TILE
        if self._blocks is not None and stop - start == TILE:
            inverse, counts = (part[:, place] for part in self._blocks)
            moved = torch.bmm(inverse, given)
        else:
            own = self._upper[:, start:stop, start:stop]
            moved = torch.linalg.solve_triangular(own.mT, given, upper=False, unitriangular=True)
            counts = self._counts(own, self._pivots[:, start:stop])
        columns = self._columns[:, start:stop].unsqueeze(2)
        target = (columns + moved.unflatten(2, (len(self._bits), -1))) / self._scales
        values = self._walks(target.permute(2, 0, 3, 1), counts, place).permute(1, 3, 0, 2) * self._scales
        into = self._residual[:, start:stop].unflatten(2, (len(self._bits), -1))
        torch.sub(columns, values, out=into)

    def _walks(self, target: Tensor, counts: Tensor, column: int) -> Tensor:
        """Values [B, E, N, b] nearest to a target [B, E, N, b] in units of the scales; keeps the codes of the tiles.

        counts: how much errors count, [E, 256].
        """
        _, experts, rows, size = target.shape
        edges = (0, TILE - size, 0, -rows % TILE)
        whole = torch.nn.functional.pad(target, edges) if any(edges) else target
        tiles = whole.reshape(len(self._bits), -1, TILE * TILE)
        if self._order is not None:
            tiles = tiles[..., self._order]
        form = trellis if target.device.type == "cpu" else trellis_device
        found: list[Tensor] = []
        for own, bits, value, codes in zip(tiles, self._bits, self._values, self.codes, strict=True):
            made, nearest = _rounded(own) if value is None else form.walks(own, value, bits, counts)
            codes[:, :, column] = made.view(experts, -1, TILE * TILE)
            found.append(nearest if self._order is None else nearest[:, self._order.argsort()])
        near: Tensor = torch.stack(found).view(len(found), experts, -1, TILE)[:, :, :rows, :size]
        return near


def _rounded(target: Tensor) -> tuple[Tensor, Tensor]:
    """Steps uint8 and values float32 nearest to a target where steps are their values."""
    nearest = (target.float() / UNIT).round().clamp(-LARGEST - 1, LARGEST)
    return nearest.to(torch.int8).view(torch.uint8), nearest * UNIT


def _storable(scale: Tensor) -> Tensor:
    """Scales as they are stored, float16; none is 0 or infinite."""
    return scale.clamp(LEAST_SCALE, LARGEST_SCALE).to(SCALE_DTYPE)


def added_to(hessian: Tensor, factor: Factor) -> Tensor:
    """What its factor added to the diagonal of every Hessian [E, K, K], [E]."""
    return factor.damping.to(hessian) * hessian.diagonal(dim1=-2, dim2=-1).mean(-1)


def fitted_scale(weight: Tensor, rounded: Tensor, scale: Tensor, hessian: Tensor, added: Tensor) -> Tensor:
    """Scales float16 [E, N] with which rounded weights [E, N, K], made with scale [E, N], have the least loss.

    Least squares by the Hessian [E, K, K], row by row: scale * (q H w) / (q H q). Unchanged where that is not positive,
    and where, with `added` [E] on the Hessian's diagonal as when codes were chosen, it loses more by as much as the
    errors of the weights alone came to: there it is of too few tokens to tell a row's scale.
    """
    seen = rounded @ hessian
    wanted, own = (seen * weight).sum(-1), (seen * rounded).sum(-1)
    ratio, added = wanted / own, added.unsqueeze(-1)
    damped, pulled = own + added * rounded.square().sum(-1), wanted + added * (rounded * weight).sum(-1)
    more = (ratio.square() - 1) * damped - 2 * (ratio - 1) * pulled
    told = more <= added * (rounded - weight).square().sum(-1)
    return _storable(scale.float() * torch.where((ratio > 0) & told, ratio, 1.0).float())
