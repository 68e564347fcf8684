"""Scales at the ends of float16: nothing becomes 0 or infinite, and what lacks range is named."""

from __future__ import annotations

import pytest
import torch

from moeq.numerics import gptq, nested
from moeq_kernels.grids import LEAST_SCALE, beyond_float16
from moeq_kernels.packed import PackedWeight

BITS = [1, 2, 3, 4, 8]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("leading", [False, True])
@pytest.mark.parametrize("size", [1e-7, 1e-6, 1e5])
def test_no_weights_become_0_or_infinite(size: float, leading: bool, clip: bool, symmetric: bool) -> None:
    weight = size * torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(0))
    importance = torch.ones(2, 64) if clip else None
    if leading:
        made = nested.quantize(weight, None, group_size=32, symmetric=symmetric, importance=importance)
    else:
        made = gptq.quantize(weight, None, bits=BITS, group_size=32, symmetric=symmetric, importance=importance)
    for bits in made.bits:
        packed = PackedWeight.of(made, bits, symmetric, leading)
        assert torch.isfinite(packed.scales).all()
        assert (packed.scales >= LEAST_SCALE).all()
        values = packed.dequantize()
        assert all(row.any() for row in values.flatten(0, 1)), bits
        error = float((values - weight).norm() / weight.norm())
        if size == 1e-6:  # in steps of 6e-8
            assert error < {1: 0.7, 2: 0.8, 3: 0.5, 4: 0.3, 8: 0.05}[bits], bits


def test_groups_of_zeros_keep_a_scale_of_0() -> None:
    weight = torch.zeros(1, 2, 32)
    weight[0, 1, 0] = 1e-30
    made = gptq.quantize(weight, None, bits=BITS, group_size=16)
    for bits in BITS:
        packed = PackedWeight.of(made, bits, False)
        assert packed.scales[0].float().tolist() == [[0, 0], [LEAST_SCALE, 0]]
        if bits > 1:
            assert not packed.dequantize().any()


@pytest.mark.parametrize(
    ("scales", "found"),
    [
        ([0.0, 0.0], []),
        ([1e-6, 0.01], []),
        ([1e-6, 7e-6], ["scale_underflow"]),
        ([1.0, 65504.0], ["scale_overflow"]),
        ([], []),
    ],
)
def test_what_lacks_range_is_named(scales: list[float], found: list[str]) -> None:
    assert beyond_float16(torch.tensor(scales, dtype=torch.float16)) == found
