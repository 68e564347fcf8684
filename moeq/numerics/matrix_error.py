"""How far a quantized matrix is from the weights that it was made of, and how far it may be.

Letters: N rows, K inputs, G groups of g inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from moeq.numerics.float_sweep import nearest_fp4, nearest_fp8
from moeq_kernels import grids
from moeq_kernels.floats import FP4_MOST, FP8_MOST
from moeq_kernels.packed import PackedWeight, row_range
from moeq_kernels.widths import FLOAT_BITS, Encoding, resolved_group_size

BLOCK = 1 << 20  # weights that are compared at once
DIGITS = 9  # of an error that is written down: sums in another order give the same
ROUNDING = 0.5 * 10.0 ** (1 - DIGITS)  # relative, of a number with so many digits
NEIGHBOURS = 2.0  # where every weight takes one of the two codes beside it at random, its mean square error is 1/3 of a
# step's square, that of the nearest code 1/12: twice the error; feedback and training stay below
UNRELATED = 1.0  # the error of a matrix of zeros: that of one that has nothing to do with the weights is 2**0.5 or more
MOST_OF_A_ROW = 1.2  # of a single row, halfway between the two


def row_blocks(*matrices: PackedWeight | Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of matrices [N, K], in float32: a block at a time, so that of a large one nothing is held twice.

    ValueError where their shapes differ.
    """
    shapes = [_shape(matrix) for matrix in matrices]
    if len(set(shapes)) > 1:
        raise ValueError(f"matrices of {shapes} have no rows in common")
    whole = max(matrix.whole if isinstance(matrix, PackedWeight) else 1 for matrix in matrices)
    rows, width = shapes[0][0], math.prod(shapes[0][1:])
    step = -(-max(1, BLOCK // max(1, width)) // whole) * whole
    for first in range(0, rows or 1, step):
        yield tuple(_values(matrix, first, min(step, rows - first)) for matrix in matrices)


def is_equal(one: PackedWeight | Tensor, other: PackedWeight | Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Whether matrices [N, K], or other tensors, have the same values, the other's rounded to a type."""
    if _shape(one) != _shape(other):
        return False
    pair = (each if isinstance(each, PackedWeight) else torch.atleast_1d(each) for each in (one, other))
    return all(torch.equal(found, wanted.to(dtype).float()) for found, wanted in row_blocks(*pair))


def relative_error(values: PackedWeight | Tensor, exact: PackedWeight | Tensor) -> float:
    """||values - exact|| / ||exact|| of matrices [N, K], or ||values|| of nothing, sums in float64; infinite where one
    is not finite."""
    blocks = [(_norm(part), _norm(found - part)) for found, part in row_blocks(values, exact)]
    wanted, error = (math.hypot(*norms) for norms in zip(*blocks, strict=True))
    error /= wanted or 1.0
    return error if math.isfinite(error) else math.inf


def recorded(error: float) -> float:
    """An error as it is written down."""
    return float(f"{error:.{DIGITS}g}")


def is_recorded(error: float, stated: float, weights: int) -> bool:
    """Whether an error of a matrix of so many weights is the one that was written down, but for float arithmetic.

    Differences in float32 are the same everywhere; a sum of n squares in float64 is off by at most n 2**-53 relative,
    in whatever order it is taken, twice over, for both norms and on both sides.
    """
    return abs(error - stated) <= stated * (ROUNDING + 4 * weights * 2.0**-53) or error == stated


def most_error(exact: Tensor, packed: PackedWeight) -> float:
    """What the relative error of a matrix [N, K] of this width and grid may be: NEIGHBOURS times that of rounding to
    nearest on the grid between the least and the largest weight of each group, and below UNRELATED."""
    if packed.encoding.floats:
        return min(UNRELATED, NEIGHBOURS * float_rounding_error(exact, packed.bits, packed.codebook))
    return min(UNRELATED, NEIGHBOURS * rounding_error(exact, packed.bits, packed.group_size, packed.symmetric))


def rounding_error(exact: Tensor, bits: int, group_size: int, symmetric: bool) -> float:
    """The relative error of rounding weights [N, K] to nearest."""
    length = exact.shape[1]
    size = resolved_group_size(length, group_size)
    squares = 0.0
    top = grids.max_codes([bits], exact.float())[0]
    for start in range(0, length, size):
        group = exact[:, start : start + size].float()
        low, high, mean = (part[None, None] for part in grids.extent(group))
        scale, zero = (part[0, 0, :, None] for part in grids.grid_between(low, high, mean, [bits], symmetric))
        codes = grids.encode(group, grids.inverse_scale(scale), zero, top)
        squares += _norm((codes - zero) * scale - group) ** 2
    return math.sqrt(squares) / (_norm(exact.float()) or 1.0)


def float_rounding_error(exact: Tensor, bits: int, codebook: str) -> float:
    """The relative error of rounding weights [N, K] to the nearest floating-point numbers, none clipped."""
    nearest, most = (nearest_fp4, FP4_MOST) if bits == FLOAT_BITS[0] else (nearest_fp8, FP8_MOST)
    size = Encoding.floating(codebook).at(bits).group_size
    squares = 0.0
    for group in exact.float().split(exact.shape[1] if size == -1 else size, 1):
        scale = group.abs().amax(1, keepdim=True).clamp(min=2.0**-100) / most
        if codebook == "mxfp4" and bits == FLOAT_BITS[0]:
            scale = torch.exp2(scale.log2().ceil())
        squares += _norm(nearest(group / scale) * scale - group) ** 2
    return math.sqrt(squares) / (_norm(exact.float()) or 1.0)


def unlike_rows(values: PackedWeight | Tensor, exact: Tensor) -> list[int]:
    """Numbers of the rows [N, K] that have less to do with the weights than a row of zeros."""
    unlike: list[Tensor] = []
    for found, part in row_blocks(values, exact):
        wanted, errors = (torch.linalg.vector_norm(of, dim=1, dtype=torch.float64) for of in (part, found - part))
        unlike.append((wanted > 0) & ~(errors <= MOST_OF_A_ROW * wanted))
    return torch.cat(unlike).nonzero()[:, 0].tolist()  # type: ignore[no-any-return]


def _shape(matrix: PackedWeight | Tensor) -> tuple[int, ...]:
    if isinstance(matrix, PackedWeight):
        return matrix.row_count, matrix.inputs
    return tuple(matrix.shape)


def _values(matrix: PackedWeight | Tensor, first: int, count: int) -> Tensor:
    if isinstance(matrix, PackedWeight):
        return row_range(matrix, first, count).dequantize()
    return matrix[first : first + count].float()


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))
