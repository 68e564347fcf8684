"""MoPEQ's Hessian trace: closed form, exact second derivatives, samples."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.functional import hessian

from moeq.numerics.traces import closed_form, hutchinson

SHAPES = [(1, 1), (2, 3), (5, 4), (1, 9)]


@pytest.mark.parametrize("shape", SHAPES)
def test_closed_form_is_the_trace_of_the_hessian(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = hessian(torch.linalg.matrix_norm, weight).reshape(weight.numel(), -1)  # type: ignore[no-untyped-call]
    assert closed_form(weight) == pytest.approx(float(exact.trace()), abs=1e-12)


@pytest.mark.cases(1)
@pytest.mark.parametrize("distribution", ["rademacher", "gaussian"])
def test_hutchinson_is_within_its_error(distribution: str) -> None:
    generator = torch.Generator().manual_seed(1)
    misses = 0
    for _ in range(20):
        weight = torch.randn(8, 6, generator=generator)
        found = hutchinson(weight, 200, distribution, generator)  # type: ignore[arg-type]
        assert found.error > 0
        misses += abs(found.mean - closed_form(weight)) > 3 * found.error
    assert misses <= 1
    assert found.error < 0.1 * found.mean


def test_zeros_have_no_hessian_and_one_sample_no_error() -> None:
    zeros = torch.zeros(3, 3)
    generator = torch.Generator().manual_seed(0)
    assert closed_form(zeros) == 0
    assert hutchinson(zeros, 4, "gaussian", generator).mean == 0
    assert hutchinson(torch.ones(2, 2), 1, "gaussian", generator).error == float("inf")
