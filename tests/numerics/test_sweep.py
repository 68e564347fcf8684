"""The compiled column loop bit for bit: whatever the vectors and panels of a CPU, a row is computed in one order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numba.core.registry import cpu_target
from torch import Tensor

from moeq.numerics import sweep
from moeq.numerics.compiled_grids import grids_between
from moeq.numerics.slab import ALIGNMENT, large_empty, transposed
from moeq_kernels.grids import SHRINKS, Symmetry, grid_between, inverse_scale

FUSES = "+fma" in cpu_target.target_context.codegen().magic_tuple()[2].split(",")
INPUTS, START = 60, 20
Lines = list[np.ndarray]


def given(block: int, rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Columns [1, K, N], feedback [1, b, 2 N] and factor [1, K, K] for the columns from START on."""
    generator = torch.Generator().manual_seed(block * rows)
    columns = torch.randn(1, INPUTS, rows, generator=generator, dtype=dtype)
    feedback = 0.3 * torch.randn(1, block, 2 * rows, generator=generator, dtype=dtype)
    factor = 0.2 * torch.randn(1, INPUTS, INPUTS, generator=generator, dtype=dtype)
    return columns, feedback, factor


def fused(one: np.ndarray, other: np.ndarray, more: np.ndarray) -> np.ndarray:
    """one * other + more in float32, with one rounding where the CPU has it so (in float64 the product is exact)."""
    exact = one.astype(np.float64) * other.astype(np.float64)
    return (exact + more if FUSES else exact.astype(np.float32) + more).astype(np.float32)


def solved(lines: Lines, factor: np.ndarray, solve: Callable[[int, np.ndarray], np.ndarray]) -> Lines:
    """What every column gives, column by column: earlier steps of four as one sum, then the own step's one by one."""
    gifts: Lines = []
    for k, line in enumerate(lines):
        whole = k - k % 4
        for i in range(0, whole, 4):
            weights = factor[i : i + 4, k]
            total = weights[1] * gifts[i + 1]
            for index in (0, 2, 3):
                total = fused(weights[index], gifts[i + index], total)
            line = line + total
        for i in range(whole, k):
            line = fused(factor[i, k], gifts[i], line)
        gifts.append(solve(k, line))
    return gifts


@pytest.mark.parametrize("rows", [5, 40])
@pytest.mark.parametrize("block", [3, 8, 22])
def test_columns_are_rounded_in_the_stated_order_bit_for_bit(block: int, rows: int) -> None:
    columns, feedback, factor = given(block, rows)
    top = torch.tensor([3.0, 15.0]).repeat_interleave(rows)
    scale = torch.rand(1, 2, 2 * rows, generator=torch.Generator().manual_seed(1)) + 0.1
    zero = (top / 2).round().expand(1, 2, -1).contiguous()
    group_of = (torch.arange(INPUTS) % 2)[None]
    residual, codes = torch.zeros(1, INPUTS, 2 * rows), torch.zeros(1, 2, rows, INPUTS, dtype=torch.uint8)
    grids = (scale, inverse_scale(scale), zero)
    sweep.round_block(columns, feedback, factor, START, grids, top, group_of, residual, codes, (0, 0))

    source = columns[0, START : START + block].repeat(1, 2).numpy()
    made: Lines = []

    def rounded(k: int, line: np.ndarray) -> np.ndarray:
        steps, inverses, zeros = (part[0, group_of[0, START + k]].numpy() for part in grids)
        made.append(np.clip(np.rint(fused(line, inverses, zeros)), 0, top.numpy()))
        return fused(-(made[-1] - zeros), steps, source[k])

    own = factor[0, START : START + block, START : START + block].numpy()
    left = solved(list(source + feedback[0].numpy()), own, rounded)
    assert np.array_equal(residual[0, START : START + block].numpy(), np.stack(left))
    assert np.array_equal(codes[0].permute(2, 0, 1).flatten(1)[START : START + block].numpy(), np.stack(made))
    assert not residual[0, START + block :].any()
    assert not codes[..., START + block :].any()


@pytest.mark.parametrize("rows", [5, 40])
@pytest.mark.parametrize("block", [3, 8, 22])
def test_extents_are_solved_in_the_stated_order_bit_for_bit(block: int, rows: int) -> None:
    columns, feedback, factor = given(block, rows)
    low, high, size, kept = sweep.extent(columns, feedback, factor, START, keep=True)
    own = factor[0, START : START + block, START : START + block].numpy()
    source = columns[0, START : START + block].repeat(1, 2).numpy()
    moved = source - np.stack(solved(list(feedback[0].numpy()), own, lambda _, line: -line))
    assert np.array_equal(kept[0].numpy(), moved)
    assert np.array_equal(low[0].numpy(), moved.min(0).clip(max=0))
    assert np.array_equal(high[0].numpy(), moved.max(0).clip(min=0))
    np.testing.assert_allclose(size[0].numpy(), np.abs(moved).mean(0), rtol=1e-6)
    assert sweep.extent(columns, feedback, factor, START)[3].numel() == 0


def test_what_is_not_contiguous_is_refused() -> None:
    columns, feedback, factor = given(8, 40)
    with pytest.raises(ValueError, match="contiguous"):
        sweep.extent(columns, feedback[:, :, :1].expand(-1, -1, 80), factor, START)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("symmetric", [False, True, "narrow", "full"])
def test_compiled_grids_are_those_of_torch_bit_for_bit(symmetric: Symmetry, dtype: torch.dtype) -> None:
    """Ranges from below float16's least number to above its largest, none on one side, none at all."""
    generator = torch.Generator().manual_seed(3)
    bits = (1, 2, 3, 4, 8)
    size = torch.logspace(-9, 7, 150, dtype=dtype).repeat(2, len(bits), 1)
    low, high = (size * torch.rand(size.shape, generator=generator, dtype=dtype) for _ in range(2))
    low[..., ::7], high[..., ::5], size[..., ::35] = 0, 0, 0
    found = grids_between(-low, high, size, bits, symmetric, SHRINKS)
    for index, shrink in enumerate(SHRINKS):
        scale, zero = grid_between(-low * shrink, high * shrink, size, bits, symmetric)
        for mine, its in zip(found, (scale, inverse_scale(scale), zero), strict=True):
            assert mine[index].contiguous().numpy().tobytes() == its.contiguous().numpy().tobytes()


def test_large_tensors_are_aligned_and_transposed_ones_contiguous() -> None:
    large = large_empty((3, 700, 1025), torch.float32)
    assert large.shape == (3, 700, 1025)
    assert large.dtype == torch.float32
    assert large.data_ptr() % ALIGNMENT == 0
    assert large.is_contiguous()
    part = large.normal_(generator=torch.Generator().manual_seed(0))[1:, :90, 5:300]
    assert transposed(part).is_contiguous()
    assert torch.equal(transposed(part), part.transpose(1, 2))
