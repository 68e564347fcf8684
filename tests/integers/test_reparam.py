"""The laws of norm reparameterization: codes agree, functions stay, and equation 10 as printed breaks both."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moeq.errors import NotFiniteError, QuantizationError
from moeq.integers.arithmetic.reparam import (
    ChannelQuantizer,
    Fold,
    asymmetric_quantizer,
    channel_range,
    fold_of,
    folded_linear,
    folded_norm,
    symmetric_codes,
    symmetric_quantizer,
)

QUANTIZERS = {"asymmetric": asymmetric_quantizer, "symmetric": symmetric_quantizer}


def folded_output(values: Tensor, fold: Fold) -> Tensor:
    """What the folded norm gives where the old one gave these values (equation 12)."""
    return (values + fold.shift) / fold.r1


def spread(seed: int, channels: int, samples: int = 64) -> Tensor:
    """Samples whose channels differ a thousandfold in width and lie off zero."""
    made = torch.Generator().manual_seed(seed)
    width = 10 ** (3 * torch.rand(channels, generator=made, dtype=torch.float64) - 2)
    middle = width * 2 * torch.randn(channels, generator=made, dtype=torch.float64)
    return torch.randn(samples, channels, generator=made, dtype=torch.float64) * width + middle


def off_ties(values: Tensor, quantizer: ChannelQuantizer) -> Tensor:
    """Where a value does not lie between two codes, so that its code does not hang on the last digit."""
    exact = values / quantizer.scale + quantizer.zero
    return (exact - exact.floor() - 0.5).abs() > 1e-6


@pytest.mark.parametrize("kind", QUANTIZERS)
@given(seed=st.integers(0, 2**31), channels=st.integers(1, 33), bits=st.sampled_from([4, 6, 8]))
@settings(max_examples=examples(40), deadline=None)
def test_codes_after_the_fold_are_the_channels_codes(kind: str, seed: int, channels: int, bits: int) -> None:
    values = spread(seed, channels)
    quantizer = QUANTIZERS[kind](*channel_range(values[:32]), bits)  # the other half is clipped
    fold = fold_of(quantizer)
    codes = symmetric_codes(folded_output(values, fold), fold.scale, bits)
    expected = quantizer.codes(values) - (2 ** (bits - 1) if kind == "asymmetric" else 0)
    assert torch.equal(torch.where(off_ties(values, quantizer), codes, expected), expected)
    assert fold.shifts == (kind == "asymmetric" and bool((quantizer.zero != 2 ** (bits - 1)).any()))


def test_the_factor_as_printed_gives_other_codes() -> None:
    values = spread(1, 16)
    fold = fold_of(asymmetric_quantizer(*channel_range(values), 8))
    printed = replace(fold, r1=1 / fold.r1)
    codes = symmetric_codes(folded_output(values, fold), fold.scale, 8)
    assert (symmetric_codes(folded_output(values, printed), fold.scale, 8) != codes).double().mean() > 0.5


@pytest.mark.parametrize(("kind", "error"), [("asymmetric", 0.02), ("symmetric", 0.05)])
def test_quantized_products_are_as_good_as_per_channel(kind: str, error: float) -> None:
    values, weight = spread(3, 48, 256), torch.randn(24, 48, dtype=torch.float64)
    fold = fold_of(QUANTIZERS[kind](*channel_range(values), 8))
    folded, bias = folded_linear(weight, torch.zeros(24), fold)
    quantized = symmetric_codes(folded_output(values, fold), fold.scale, 8) * fold.scale
    exact = values @ weight.T
    found = (quantized @ folded.T + bias - exact).norm() / exact.norm()
    step = values.abs().max() / 127
    plain = (symmetric_codes(values, step, 8) * step @ weight.T - exact).norm() / exact.norm()
    assert found < error
    assert found < plain


@given(seed=st.integers(0, 2**31), channels=st.integers(1, 20), kind=st.sampled_from(sorted(QUANTIZERS)))
@settings(max_examples=examples(30), deadline=None)
def test_norm_and_linear_compute_the_same(seed: int, channels: int, kind: str) -> None:
    made = torch.Generator().manual_seed(seed)
    normal = torch.randn(50, channels, generator=made, dtype=torch.float64)
    gain, beta = (torch.randn(channels, generator=made, dtype=torch.float64) for _ in range(2))
    values = normal * gain + beta
    fold = fold_of(QUANTIZERS[kind](*channel_range(values), 8))
    weight = torch.randn(3, 5, channels, generator=made, dtype=torch.float64)
    bias = torch.randn(3, 5, generator=made, dtype=torch.float64)
    new_gain, new_beta = folded_norm(gain, beta, fold)
    assert new_beta is not None
    for laid, axis in ((weight, -1), (weight.mT, -2)):
        folded, new_bias = folded_linear(laid, bias, fold, axis=axis)
        assert new_bias is not None
        upright = folded if axis == -1 else folded.mT
        found = torch.einsum("td,end->ten", normal * new_gain + new_beta, upright) + new_bias
        assert torch.allclose(found, torch.einsum("td,end->ten", values, weight) + bias, rtol=1e-9, atol=1e-9)
    assert torch.allclose(normal * new_gain + new_beta, folded_output(values, fold), rtol=1e-9, atol=1e-9)


def test_a_norm_of_one_plus_weight() -> None:
    fold = fold_of(symmetric_quantizer(-torch.tensor([1.0, 4.0]), torch.tensor([2.0, 3.0]), 8))
    weight = torch.tensor([0.5, -0.25])
    folded, bias = folded_norm(weight, None, fold, plus_one=True)
    assert bias is None
    assert torch.allclose((1 + folded) * fold.r1, (1 + weight).double())


def test_a_linear_gains_a_bias_only_where_the_fold_shifts() -> None:
    low, high = torch.tensor([-1.0, 0.5]), torch.tensor([2.0, 3.0])
    weight = torch.ones(3, 2)
    assert folded_linear(weight, None, fold_of(symmetric_quantizer(low, high, 8)))[1] is None
    fold = fold_of(asymmetric_quantizer(low, high, 8))
    gained = folded_linear(weight, None, fold)[1]
    assert gained is not None
    assert torch.allclose(gained, -fold.shift.sum().expand(3))


def test_percentiles_leave_outliers_out() -> None:
    values = torch.arange(1001.0).unsqueeze(1).repeat(1, 2)
    values[-1] = 1e9
    low, high = channel_range(values, 99.0)
    assert low.tolist() == pytest.approx([10, 10])
    assert high.tolist() == pytest.approx([990, 990])
    assert channel_range(values)[1].tolist() == [1e9, 1e9]


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_a_channel_without_a_scale_is_named(kind: str) -> None:
    low, high = torch.tensor([-1.0, 0.0, -2.0]), torch.tensor([1.0, 0.0, 2.0])
    with pytest.raises(QuantizationError, match=r"layers\.3\.norm: channel 1 .* always 0 .*leave this norm out"):
        QUANTIZERS[kind](low, high, 8, where="layers.3.norm")


def test_a_constant_channel_off_zero_has_no_asymmetric_scale() -> None:
    low, high = torch.tensor([3.0, 0.0]), torch.tensor([3.0, 1.0])
    with pytest.raises(QuantizationError, match=r"channel 0 .* always 3 "):
        asymmetric_quantizer(low, high, 8)
    assert symmetric_quantizer(low, high, 8).scale[0] > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", QUANTIZERS)
def test_a_channel_that_is_not_finite_is_named(kind: str, value: float) -> None:
    values = spread(5, 4)
    values[7, 2] = value
    with pytest.raises(NotFiniteError, match=r"blocks\.0\.norm: channel 2 .*not finite"):
        QUANTIZERS[kind](*channel_range(values), 8, where="blocks.0.norm")
