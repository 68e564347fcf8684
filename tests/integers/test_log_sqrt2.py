"""Log-sqrt2 attention: shifts against the real formula, the printed floor refuted, widths proven."""

from __future__ import annotations

import math

import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moeq.errors import QuantizationError
from moeq.integers.arithmetic.fixed_point import dyadic
from moeq.integers.arithmetic.log_sqrt2 import (
    STEPS,
    Logarithm,
    joined,
    normalized,
    numerator_codes,
    quantized,
    shift_and_parity,
    shifted_sums,
    widths,
)

SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 40), st.integers(1, 6), st.integers(0, 10**6))
KINDS = st.sampled_from(["log-sqrt2", "log2"])


def made(shape: tuple[int, int, int, int], bits: int) -> tuple[Tensor, Tensor]:
    """Codes [Q, K] with a 0 in every row, as the largest score has, and 8-bit values [K, d]."""
    queries, keys, size, seed = shape
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (queries, keys), generator=generator)
    codes[:, seed % keys] = 0
    return codes, torch.randint(-128, 128, (keys, size), generator=generator)


def real_product(codes: Tensor, values: Tensor, kind: Logarithm) -> Tensor:
    return torch.exp2(-codes.double() / STEPS[kind]) @ values.double()


def by_shifts(shift: Tensor, odd: Tensor, values: Tensor, left: int) -> Tensor:
    even_sum, odd_sum = shifted_sums(shift, odd, values, left)
    return (even_sum.double() + math.sqrt(2) * odd_sum.double()) / 2**left


@given(SHAPES, KINDS)
@settings(max_examples=examples(60), deadline=None)
def test_shifts_equal_the_real_product_with_the_ceiling(shape: tuple[int, int, int, int], kind: Logarithm) -> None:
    codes, values = made(shape, 4)
    held = widths(4, kind, shape[1], 8, where="attention")
    assert held.dropped_from is None
    found = by_shifts(*shift_and_parity(codes, kind), values, held.left)
    torch.testing.assert_close(found, real_product(codes, values, kind), rtol=1e-12, atol=1e-9)


@given(SHAPES)
@settings(max_examples=examples(60), deadline=None)
def test_the_floor_of_equation_21_is_wrong_wherever_a_code_is_odd(shape: tuple[int, int, int, int]) -> None:
    codes, values = made(shape, 4)
    values = values.abs() + 1
    odd = codes % 2 == 1
    found = by_shifts(codes // 2, odd, values, 8)
    wanted = real_product(codes, values, "log-sqrt2")
    assert (found > wanted * (1 + 1e-9)).any(-1).tolist() == odd.any(-1).tolist()


@given(SHAPES)
@settings(max_examples=examples(60), deadline=None)
def test_sums_are_those_of_literal_shifts(shape: tuple[int, int, int, int]) -> None:
    codes, values = made(shape, 4)
    even, odd = [[[0] * shape[2] for _ in range(shape[0])] for _ in range(2)]
    for q in range(shape[0]):
        for k in range(shape[1]):
            for d in range(shape[2]):
                code = int(codes[q, k])
                (odd if code % 2 else even)[q][d] += (int(values[k, d]) << 8) >> ((code + 1) // 2)
    found = shifted_sums(*shift_and_parity(codes, "log-sqrt2"), values, 8)
    assert [part.tolist() for part in found] == [even, odd]


@given(SHAPES, KINDS, st.sampled_from([3, 4, 5, 8]), st.floats(0.01, 4.0))
@settings(max_examples=examples(60), deadline=None)
def test_the_whole_product_is_within_a_code_of_the_real_one(
    shape: tuple[int, int, int, int], kind: Logarithm, bits: int, ratio: float
) -> None:
    codes, values = made(shape, bits)
    held = widths(bits, kind, shape[1], 8, where="attention")
    split = shift_and_parity(codes, kind)
    sums = shifted_sums(*split, values, held.left)
    total = joined(*shifted_sums(*split, torch.ones_like(values[:, :1]), held.left))
    found, _ = normalized(joined(*sums), total, held.left, dyadic(ratio), held)
    weights = torch.exp2(-codes.double() / STEPS[kind])
    if held.dropped_from is not None:
        weights = torch.where(codes >= held.dropped_from, 0.0, weights)
    wanted = weights @ values.double() / weights.sum(-1, keepdim=True) * ratio
    assert float((found - wanted).abs().max()) < 0.5 + 0.01 * ratio
    assert max(int(part.abs().max()) for part in sums) < 2**31


@given(SHAPES)
@settings(max_examples=examples(60), deadline=None)
def test_masked_pairs_count_nothing_at_all(shape: tuple[int, int, int, int]) -> None:
    codes, values = made(shape, 4)
    kept = torch.rand(codes.shape, generator=torch.Generator().manual_seed(shape[3])) < 0.5
    split = shift_and_parity(codes, "log-sqrt2")
    for row in range(shape[0]):
        mine = kept[row]
        found = shifted_sums(*(part[row : row + 1] for part in split), values, 8, kept[row : row + 1])
        alone = shifted_sums(*(part[row : row + 1, mine] for part in split), values[mine], 8)
        assert [part.tolist() for part in found] == [part.tolist() for part in alone]


@given(st.floats(1e-5, 1e-2), st.integers(0, 2**21), KINDS)
@settings(max_examples=examples(60), deadline=None)
def test_codes_need_no_exponential(scale: float, difference: int, kind: Logarithm) -> None:
    factor = dyadic(STEPS[kind] * scale / math.log(2))
    found = int(numerator_codes(torch.tensor([difference]), factor, 4))
    exact = STEPS[kind] * scale * difference / math.log(2)
    if abs(exact % 1 - 0.5) > 1e-3 or exact > 16:
        numerator = torch.tensor([max(math.exp(-difference * scale), 1e-300)], dtype=torch.float64)
        assert found == int(quantized(numerator, 4, kind))


def test_codes_of_known_numerators() -> None:
    values = torch.tensor([1.0, 2**-0.25, 2**-0.24, 0.5, 0.25, 2**-7.5, 1e-9], dtype=torch.float64)
    assert quantized(values, 4, "log-sqrt2").tolist() == [0, 1, 0, 2, 4, 15, 15]
    assert quantized(values, 4, "log2").tolist() == [0, 0, 0, 1, 2, 8, 15]


@pytest.mark.parametrize("kind", ["log-sqrt2", "log2"])
@pytest.mark.parametrize("bits", [2, 4, 6, 8])
@pytest.mark.parametrize("keys", [1, 17, 197, 577, 2048])
def test_the_largest_sum_fits_and_one_more_bit_would_not(kind: Logarithm, bits: int, keys: int) -> None:
    held = widths(bits, kind, keys, 8, where="attention")
    worst = torch.full((keys, 1), -128)
    codes = torch.zeros(1, keys, dtype=torch.int64)
    even, _ = shifted_sums(*shift_and_parity(codes, kind), worst, held.left)
    assert abs(int(even)) <= 2**31 - 1
    assert keys * 128 * 2**held.left * 2**held.reciprocal_bits <= 2**52
    if held.dropped_from is not None:
        assert 2 * abs(int(even)) > 2**31 - 1
        dropped = torch.tensor([[0, held.dropped_from]])
        one, two = shifted_sums(*shift_and_parity(dropped, kind), torch.tensor([[1], [1]]), held.left)
        assert (int(one), int(two)) == (2**held.left, 0)


def test_what_32_bits_cannot_hold_is_refused() -> None:
    with pytest.raises(QuantizationError, match=r"blocks\.1\.attention: log2 attention of 4 bits over 5000 keys"):
        widths(4, "log2", 5000, 8, where="blocks.1.attention")
    assert widths(4, "log-sqrt2", 65535, 8, where="x").left == 8
    with pytest.raises(QuantizationError, match="32-bit sums"):
        widths(4, "log-sqrt2", 65536, 8, where="x")
