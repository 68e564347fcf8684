"""Short groups in k-quants: near the grid's own values, read alike by gguf, exact where the groups of a block agree."""

from __future__ import annotations

from dataclasses import replace

import peers
import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from made_sources import rounded

from moeq.numerics import ggml
from moeq.numerics.ggml_refit import AFFINE, SIGNED, multiples, refit
from moeq.numerics.ggml_types import HOLDS, NEAREST, RUNS, TYPES
from moeq.numerics.matrix_error import relative_error

FITTED = sorted(grid for grid, name in NEAREST.items() if name in {*AFFINE, *SIGNED} and grid != (8, True))
WEIGHTS = 0.02 * torch.randn(24, 512, generator=torch.Generator().manual_seed(3))
MOST = {(6, False): 1.3, (8, False): 1.2}  # of a grid's own error, where the type has no zero points
SHORT = 0.36  # of the others', in the shortest groups


def short_groups(grid: tuple[int, bool]) -> list[int]:
    return [size for size in (16, 32, 64, 128, 256) if size % RUNS[grid] == 0]


@pytest.mark.parametrize("grid", FITTED)
def test_values_stay_near_the_grids_own(grid: tuple[int, bool]) -> None:
    bits, symmetric = grid
    for size in short_groups(grid):
        made = rounded(WEIGHTS, bits, size, symmetric)
        name, blocks = refit(made)
        assert name == NEAREST[grid]
        assert blocks.shape == (24, TYPES[name].row_bytes(512))
        error = relative_error(ggml.decode(name, blocks, 512), made.dequantize())
        own = relative_error(made.dequantize(), WEIGHTS)
        assert error < MOST.get(grid, SHORT if size < 64 else 0.12) * own, (size, error, own)


@pytest.mark.parametrize("grid", FITTED)
def test_gguf_reads_the_same_values(grid: tuple[int, bool]) -> None:
    gguf = peers.module("gguf")
    name, blocks = refit(rounded(WEIGHTS, grid[0], RUNS[grid], grid[1]))
    wanted = torch.from_numpy(gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[name]))
    assert torch.equal(ggml.decode(name, blocks, 512), wanted)


@pytest.mark.parametrize("grid", [grid for grid in FITTED if grid in HOLDS])
def test_groups_that_agree_are_held_exactly(grid: tuple[int, bool]) -> None:
    made = rounded(WEIGHTS, grid[0], 256, grid[1])
    name, blocks = refit(made)
    assert torch.equal(ggml.decode(name, blocks, 512), made.dequantize())


@pytest.mark.parametrize("grid", [(2, False), (3, True), (4, False), (6, True)])
def test_negative_scales_are_turned(grid: tuple[int, bool]) -> None:
    made = rounded(WEIGHTS, grid[0], 64, grid[1])
    signs = torch.where(torch.arange(made.scales.numel()) % 3 == 0, -1.0, 1.0).view_as(made.scales)
    turned = replace(made, scales=made.scales * signs.half())
    name, blocks = refit(turned)
    error = relative_error(ggml.decode(name, blocks, 512), turned.dequantize())
    upright = relative_error(ggml.decode(*refit(made), 512), made.dequantize())
    assert error < 1.6 * upright + 0.01


@pytest.mark.parametrize("grid", [(2, False), (4, False), (5, False)])
def test_groups_of_one_sign_are_held_like_others(grid: tuple[int, bool]) -> None:
    """Their zero points are 0, and what a block would best take off of them is negative, which it cannot be."""
    size = RUNS[grid]
    for place in (0, size, 3 * size):
        weights = WEIGHTS.clone()
        weights[:, place : place + size] = weights[:, place : place + size].abs() + 0.03
        made = rounded(weights, grid[0], size, grid[1])
        name, blocks = refit(made)
        error = relative_error(ggml.decode(name, blocks, 512), made.dequantize())
        assert error < SHORT * relative_error(made.dequantize(), weights)


def test_groups_of_zeros_stay_zeros() -> None:
    weights = WEIGHTS.clone()
    weights[:, :256] = 0
    weights[:, 256:288] = 0
    for grid in FITTED:
        made = rounded(weights, grid[0], 32, grid[1])
        silent = replace(made, scales=torch.where(made.scales.float().abs() < 1e-4, 0, made.scales).half())
        values = ggml.decode(*refit(silent), 512)
        assert bool(values.isfinite().all())
        assert not bool(values[:, :256].any()), grid


@given(st.lists(st.integers(1, 15), min_size=4, max_size=4), st.floats(0.001, 1))
@settings(max_examples=examples(60), deadline=None)
def test_multiples_that_there_are_get_found(whole: list[int], step: float) -> None:
    d = torch.tensor(step).half().float()
    wanted = (d * torch.tensor(whole, dtype=torch.float32)).view(1, 1, 4)
    found, multiple = multiples(wanted, torch.ones(()), 15)
    assert float((found * multiple - wanted).norm() / wanted.norm()) < 2e-3


@pytest.mark.parametrize(
    ("bits", "symmetric", "group", "why"),
    [
        (1, True, 128, "no type of ggml comes near 1 bits"),
        (7, False, 128, "no type of ggml comes near 7 bits with zero points"),
        (4, False, 16, "512 inputs in groups of 16 are no multiples of the 256 and 32 of Q4_K"),
        (2, True, 40, "512 inputs in groups of 40 are no multiples of the 256 and 16 of Q2_K"),
    ],
)
def test_what_has_no_type_is_refused(bits: int, symmetric: bool, group: int, why: str) -> None:
    made = rounded(WEIGHTS, min(bits, 4), 128, symmetric)
    with pytest.raises(ValueError, match=why):
        refit(replace(made, bits=bits, group_size=group))
