"""Products in vector code against those in float64, and that nothing beside a row or an expert changes its bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moeq.numerics import gptq, gptq_device, products
from moeq.numerics.factor import factorize


def given(experts: int, inputs: int, lanes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(experts, inputs, inputs, generator=generator, dtype=torch.float64)
    lines = torch.randn(experts, inputs, lanes, generator=generator, dtype=torch.float64)
    return weights.to(dtype), lines.to(dtype)


@pytest.mark.cases(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("experts", "lanes", "summed", "columns"),
    [
        (1, 1, (0, 1), (1, 2)),
        (1, 128, (0, 256), (256, 320)),
        (2, 300, (0, 259), (259, 272)),
        (3, 33, (5, 600), (600, 611)),
    ],
)
def test_products_equal_those_in_float64(
    experts: int, lanes: int, summed: tuple[int, int], columns: tuple[int, int], dtype: torch.dtype
) -> None:
    weights, lines = given(experts, columns[1], lanes, dtype)
    into = torch.ones(experts, columns[1] - columns[0] + 2, lanes, dtype=dtype)
    products.add_product(into, 1, weights, lines, summed=summed, columns=columns)
    here = slice(*summed)
    exact = weights[:, here, slice(*columns)].double().mT @ lines[:, here].double()
    bound = (summed[1] - summed[0]) * 20 * torch.finfo(dtype).eps
    torch.testing.assert_close(into[:, 1:-1].double() - 1, exact, atol=bound, rtol=0)
    assert bool((into[:, [0, -1]] == 1).all())


def test_products_are_subtracted_from_the_first_lanes_alone() -> None:
    weights, lines = given(1, 40, 100, torch.float64)
    into = torch.zeros(1, 8, 100, dtype=torch.float64)
    products.add_product(into, 0, weights, lines, summed=(0, 32), columns=(32, 40), lanes=50, negative=True)
    exact = weights[:, :32, 32:].mT @ lines[:, :32]
    torch.testing.assert_close(into[..., :50], -exact[..., :50])
    assert not into[..., 50:].any()


def problem(experts: int, rows: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(experts, 2 * inputs, inputs, generator=generator, dtype=torch.float64)
    hidden = hidden + 0.5 * hidden.roll(1, -1)
    weight = torch.randn(experts, rows, inputs, generator=generator, dtype=torch.float64)
    return weight.to(dtype), (hidden.mT @ hidden / inputs).to(dtype)


def test_gptq_is_the_same_by_either_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in another order: factors equal within rounding, codes in float64 all alike."""
    weight, hessian = problem(2, 40, 520, torch.float64)
    found: list[tuple[Any, gptq.Quantized]] = []
    for vectors in (True, False):
        monkeypatch.setattr(products, "faster_here", lambda vectors=vectors: vectors)
        factor = factorize(hessian)
        found.append((factor, gptq.quantize(weight, factor.unit_upper, bits=(2, 4), group_size=128)))
    (one, codes), (other, others) = found
    torch.testing.assert_close(one.unit_upper, other.unit_upper)
    torch.testing.assert_close(one.pivots, other.pivots)
    assert not one.unit_upper.tril(-1).any()
    assert torch.equal(codes.codes, others.codes)
    assert torch.equal(codes.scale, others.scale)


def test_a_row_is_rounded_alike_whatever_is_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "faster_here", lambda: True)
    weight, hessian = problem(2, 70, 530, torch.float32)
    factor = factorize(hessian).unit_upper
    whole = gptq.quantize(weight, factor, bits=(2, 3), group_size=128)
    alone = gptq.quantize(weight[1:, 37:38], factorize(hessian[1:]).unit_upper, bits=(3,), group_size=128)
    assert torch.equal(whole.codes[1:, 1:, 37:38], alone.codes)
    assert torch.equal(whole.scale[1:, 1:, 37:38], alone.scale)


@pytest.mark.cases(1)
@pytest.mark.parametrize("group", [64, 96, 320])
def test_long_sweeps_equal_those_in_torch(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans, their halves and quarters, whole and ragged, within groups and over several of them."""
    monkeypatch.setattr(products, "faster_here", lambda: False)
    weight, hessian = problem(2, 20, 1100, torch.float64)
    factor = factorize(hessian).unit_upper
    whole = gptq.quantize(weight, factor, bits=(2, 4), group_size=group)
    monkeypatch.setattr(gptq, "gptq_cpu", gptq_device)
    in_torch = gptq.quantize(weight, factor, bits=(2, 4), group_size=group)
    assert torch.equal(whole.codes, in_torch.codes)
    torch.testing.assert_close(whole.scale, in_torch.scale)


@pytest.mark.parametrize("vectors", [True, False])
def test_an_indefinite_hessian_is_found(vectors: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "faster_here", lambda: vectors)
    _, hessian = problem(2, 1, 520, torch.float32)
    hessian[1] *= -1
    factor = factorize(hessian)
    assert factor.failed.tolist() == [False, True]
    assert torch.equal(factor.unit_upper[1], torch.eye(520))
