"""Floating-point codes: the nearest numbers, scales that lose least, feedback; and their packed form."""

from __future__ import annotations

import pytest
import torch
from packed_layers import any_codes

from moeq.numerics import float_sweep
from moeq.numerics.factor import Factor, factorize
from moeq_kernels import floats
from moeq_kernels.packed import PackedWeight, joined, packed_bytes, row_range, some_inputs
from moeq_kernels.reference import some_rows
from moeq_kernels.widths import FLOAT_GROUPS, Encoding

CODEBOOKS = tuple(FLOAT_GROUPS)


def weights(experts: int = 2, rows: int = 24, inputs: int = 300) -> torch.Tensor:
    return torch.randn(experts, rows, inputs, generator=torch.Generator().manual_seed(0)) * 0.03


def hessian(inputs: int = 300, experts: int = 2) -> torch.Tensor:
    rows = torch.randn(experts, 2 * inputs, inputs, generator=torch.Generator().manual_seed(1))
    rows = rows + 0.9 * rows.roll(1, -1)
    return rows.mT @ rows / rows.shape[1]


def plain(experts: int = 2, inputs: int = 300) -> Factor:
    """Without feedback."""
    return factorize(torch.eye(inputs).expand(experts, -1, -1).contiguous())


def loss(made: PackedWeight, seen: torch.Tensor) -> float:
    left = made.dequantize() - weights()
    return float((left @ seen * left).sum())


def test_the_nearest_numbers_of_4_bits() -> None:
    given = torch.cat([torch.linspace(-8, 8, 4097), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -2.5])])
    found = float_sweep.nearest_fp4(given)
    least = (floats.fp4_values() - given.clamp(-6, 6).unsqueeze(1)).abs().amin(1)
    assert torch.equal((found - given.clamp(-6, 6)).abs(), least)
    assert found[-9:].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.0, -2.0]
    assert torch.equal(floats.fp4_values()[float_sweep.fp4_codes(found).long()], found)


def test_bytes_are_the_numbers_that_torch_has() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(floats.fp8_values().nan_to_num(-1), every.view(torch.float8_e4m3fn).float().nan_to_num(-1))
    assert floats.power_values()[[1, 127, 254]].tolist() == [2.0**-126, 1.0, 2.0**127]


@pytest.mark.parametrize("codebook", CODEBOOKS)
@pytest.mark.parametrize("bits", [4, 8])
def test_feedback_loses_less_and_bits_are_counted(codebook: str, bits: int) -> None:
    seen = hessian()
    made = float_sweep.quantize(weights(), factorize(seen), bits, codebook)
    alone = float_sweep.quantize(weights(), plain(), bits, codebook)
    assert loss(made, seen) < 0.75 * loss(alone, seen)
    assert made.nbytes == 2 * packed_bytes(24, 300, bits, Encoding.floating(codebook))
    assert made.are_numbers()
    values = made.dequantize()
    assert torch.equal(values, values.bfloat16().float())
    relative = (values - weights()).norm() / weights().norm()
    assert relative < (0.25 if bits == 4 else 0.06)


def test_scales_lose_least_of_those_that_are_tried() -> None:
    """No scale of a group, of all numbers of 8 bits, loses much less than the one that was found."""
    group = weights(1, 16, 16).mT
    count = torch.rand(1, 16, generator=torch.Generator().manual_seed(2)) + 0.1
    unit = torch.full((1, 1, 1), 2.0**-12)

    def lost(stored: torch.Tensor) -> torch.Tensor:
        scale = floats.scale_values(stored.unsqueeze(-1), "nvfp4", unit).squeeze(-1).unsqueeze(1)
        left = float_sweep.nearest_fp4(group / scale) * scale - group
        return (left.square() * count.unsqueeze(-1)).sum(1)

    stored, _ = float_sweep.searched_scales(group, count, "nvfp4", unit)
    every = torch.stack([lost(torch.full_like(stored, byte)) for byte in range(1, 127)])
    assert (lost(stored) <= 1.1 * every.amin(0)).all()
    assert (lost(stored) < 0.95 * every[-1]).all()


@pytest.mark.parametrize("codebook", CODEBOOKS)
@pytest.mark.parametrize("bits", [4, 8])
def test_parts_of_a_weight_and_stacks(codebook: str, bits: int) -> None:
    own = Encoding.floating(codebook)
    stack = [any_codes(8, 96, bits, own, seed=seed) for seed in range(2)]
    one, exact = stack[0], stack[0].dequantize()
    assert torch.equal(row_range(one, 2, 3).dequantize(), exact[2:5])
    assert torch.equal(some_inputs(one, 32, 64).dequantize(), exact[:, 32:])
    found = some_rows(one, torch.tensor([5, 1]))
    assert isinstance(found, PackedWeight)
    assert torch.equal(found.dequantize(), exact[[5, 1]])
    whole = joined([each.map(lambda part: part.unsqueeze(0)) for each in stack])
    assert torch.equal(whole.dequantize(), torch.stack([each.dequantize() for each in stack]))
    with pytest.raises(ValueError, match="stand for no grid"):
        one.grid()


def test_zeros_and_large_weights_stay_numbers() -> None:
    given = weights(1, 4, 64)
    given[0, 0], given[0, 1, 3] = 0.0, 4e4
    for codebook in CODEBOOKS:
        for bits in (4, 8):
            made = float_sweep.quantize(given, plain(1, 64), bits, codebook)
            values = made.dequantize()
            assert (values[0, 0] == 0).all()
            assert abs(float(values[0, 1, 3]) / 4e4 - 1) < 0.2
