"""The walks of benchmarks/further_widths.py: moeq's own where all steps are alike, closed where kinds take turns."""

import further_widths
import pytest
import torch

from moeq.numerics import trellis
from moeq_kernels.trellis import values


@pytest.mark.full
@pytest.mark.parametrize("bits", [1, 3])
def test_steps_alike_are_the_walks_of_moeq(bits: int) -> None:
    tiles = torch.randn(3, 256, generator=torch.Generator().manual_seed(bits))
    value = values(bits, 8)
    found = further_widths.nearest(tiles, [bits] * 256, {bits: value})
    own = trellis.walks(tiles, value, bits)[1]
    losses = [(tiles - near).square().sum(1) for near in (found, own)]
    assert torch.allclose(*losses, rtol=1e-4)


def test_half_steps_lie_between_their_neighbours() -> None:
    tiles = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    tables = {bits: values(bits, 8) for bits in (1, 2)}
    errors = [
        float((tiles - further_widths.nearest(tiles, steps, tables)).square().mean())
        for steps in ([1] * 256, [1, 2] * 128, [2] * 256)
    ]
    assert errors[0] > errors[1] > errors[2]
