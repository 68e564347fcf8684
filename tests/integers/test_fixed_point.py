"""Fixed-point arithmetic against Python's own integers and fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from moeq.errors import QuantizationError
from moeq.integers.arithmetic.fixed_point import (
    check_fits,
    dyadic,
    isqrt,
    power,
    power_factor,
    power_table,
    saturated,
    scaled,
    shift_half_up,
)
from moeq.integers.arithmetic.integer_norm import gain_and_bias, norm_codes, normalized_rows, widest_row


@given(st.integers(-(2**51), 2**51), st.integers(0, 62))
@settings(max_examples=examples(60), deadline=None)
def test_a_shift_rounds_half_up(value: int, shift: int) -> None:
    found = int(shift_half_up(torch.tensor(value), shift))
    assert found == math.floor(Fraction(value, 2**shift) + Fraction(1, 2))


@given(st.floats(2.0**-40, 2.0**15), st.integers(-(2**31), 2**31 - 1))
@settings(max_examples=examples(60), deadline=None)
def test_a_dyadic_factor_is_near_and_its_product_is_rounded_once(factor: float, value: int) -> None:
    found = dyadic(factor)
    multiplier, shift = int(found.multiplier), int(found.shift)
    assert 2**15 <= multiplier < 2**16
    assert abs(Fraction(multiplier, 2**shift) / Fraction(factor) - 1) <= Fraction(1, 2**16)
    exact = math.floor(Fraction(value * multiplier, 2**shift) + Fraction(1, 2))
    assert int(scaled(torch.tensor(value), found)) == exact
    as_float = torch.floor(torch.tensor(value).double() * multiplier * 2.0**-shift + 0.5)
    assert int(as_float) == exact


def test_factors_that_no_multiplier_can_stand_for_are_refused() -> None:
    for factor in (0.0, -1.0, float("nan"), float("inf"), 2.0**17):
        with pytest.raises(QuantizationError):
            dyadic(factor)
    assert int(dyadic(2.0**-60).multiplier) == 4


@given(st.integers(0, 2**52))
@settings(max_examples=examples(60), deadline=None)
def test_roots_are_exact(value: int) -> None:
    assert int(isqrt(torch.tensor(value))) == math.isqrt(value)


def test_roots_are_exact_around_squares() -> None:
    roots = torch.tensor([2**26 - 1, 2**26 - 2, 2**25 + 1, 94906265 // 2, 3])
    assert isqrt(roots * roots - 1).tolist() == (roots - 1).tolist()
    assert isqrt(roots * roots).tolist() == roots.tolist()


@given(st.integers(0, 8000))
@settings(max_examples=examples(60), deadline=None)
def test_powers_come_from_one_table(steps: int) -> None:
    found = int(power(torch.tensor(steps), power_table()))
    entry = round(2**15 * 2 ** -((steps % 256) / 256))
    assert found == entry >> (steps // 256)
    assert abs(found / 2**15 - 2 ** (-steps / 256)) < 2.0**-14
    assert power_factor(1.0) == pytest.approx(256 / math.log(2))


def test_saturation_and_widths() -> None:
    assert saturated(torch.tensor([-200, -128, 127, 200]), 8).tolist() == [-128, -128, 127, 127]
    check_fits(2**31 - 1, 32, what="a sum", where="here")
    with pytest.raises(QuantizationError, match=r"here: a sum can reach 2,147,483,648, 32 bits hold 2,147,483,647"):
        check_fits(2**31, 32, what="a sum", where="here")


def norm_by_python(row: list[int], gain: list[int], bias: list[int], gain_bits: int, epsilon: int) -> list[int]:
    """The formulas of the module's docstring in Python's integers, 8 bits."""
    count, total = len(row), sum(row)
    spread = count * sum(x * x for x in row) - total * total + epsilon
    up = (52 - spread.bit_length()) // 2 * 2
    reciprocal = 2**50 // math.isqrt(spread << up)
    shift = 32 - up // 2
    found = []
    for x, g, b in zip(row, gain, bias, strict=True):
        y = ((count * x - total) * reciprocal + (1 << shift >> 1)) >> shift
        found.append(max(-128, min(127, (y * g + b + (1 << gain_bits + 17)) >> (gain_bits + 18))))
    return found


ROWS = st.lists(st.integers(-(2**19), 2**19 - 1), min_size=2, max_size=80)


@given(ROWS, st.integers(0, 10**6), st.integers(1, 10**9))
@settings(max_examples=examples(60), deadline=None)
def test_integer_layer_norm_is_the_documented_one_and_near_the_real_one(
    row: list[int], seed: int, epsilon: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(len(row), generator=generator).double() + 1.5
    offset = torch.randn(len(row), generator=generator).double()
    gain, bias, gain_bits = gain_and_bias(weight, offset, 0.02, where="norm")
    rows = torch.tensor([row])
    found = norm_codes(rows, gain, bias, gain_bits, epsilon, 8)[0]
    assert found.tolist() == norm_by_python(row, gain.tolist(), bias.tolist(), gain_bits, epsilon)
    x = rows[0].double()
    real = (x - x.mean()) / (x.var(unbiased=False) + epsilon / len(row) ** 2).sqrt()
    assert float((normalized_rows(rows, epsilon)[0] / 2**18 - real).abs().max()) < 2.0**-18 + 1e-6 * len(row)
    wanted = ((real * weight + offset) / 0.02).clamp(-128, 127)
    assert float((found - wanted).abs().max()) < 0.52


@pytest.mark.parametrize("channels", [2, 48, 64, 192, 384, 768, 1024, 4096])
def test_no_row_leaves_float64(channels: int) -> None:
    width = widest_row(channels)
    worst = 2 ** (width - 1)
    assert channels**2 * worst**2 <= 2**51
    assert 2 * channels * worst * 2**25 <= 2**52
    if width < 20:
        assert channels**2 * (2 * worst) ** 2 > 2**49


def test_an_extreme_row_is_exact() -> None:
    row = [2**19 - 1, -(2**19)] * 32
    gain, bias, gain_bits = gain_and_bias(torch.ones(64), torch.zeros(64), 1 / 100, where="norm")
    found = norm_codes(torch.tensor([row]), gain, bias, gain_bits, 1, 8)[0].tolist()
    assert found == norm_by_python(row, gain.tolist(), bias.tolist(), gain_bits, 1) == [100, -100] * 32
    assert norm_codes(torch.zeros(1, 64, dtype=torch.int64), gain, bias, gain_bits, 1, 8).abs().sum() == 0


def test_a_norm_without_weights_is_refused() -> None:
    with pytest.raises(QuantizationError, match=r"blocks\.0\.norm1: all weights"):
        gain_and_bias(torch.zeros(4), torch.ones(4), 0.1, where="blocks.0.norm1")
    with pytest.raises(QuantizationError, match="too far apart"):
        gain_and_bias(torch.full((4,), 1e-6), torch.full((4,), 1e9), 0.1, where="norm")
