"""Forms that multiply bf16 activations as whole numbers of three bytes: as exact as sums of float32, at any size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as some
from packed_layers import layer_of, matrix_of, routed, values
from torch import Tensor

from moeq_kernels.cpu.forms import FORMS, forms
from moeq_kernels.cpu.kernel import CpuKernel
from moeq_kernels.packed import PackedWeight
from moeq_kernels.packing import pack
from moeq_kernels.widths import resolved_group_size

STEP = 2.0**-22  # by which an activation is moved, as a share of the largest of its row and group
SMALLEST = 2.0**-14  # what is not moved, as such a share
FLOAT = 2.0**-20  # of what is added up in float32
BF16 = torch.bfloat16
WHOLE = [name for name in forms() if FORMS[name].slices == 3]

pytestmark = pytest.mark.skipif(not WHOLE, reason="this CPU has no dot products of bytes")


@pytest.fixture(params=WHOLE)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def spread(count: int, inputs: int, seed: int, octaves: float) -> Tensor:
    """Rows whose sizes go over so many powers of two."""
    random = torch.Generator().manual_seed(seed)
    sizes = 2.0 ** (octaves * (torch.rand(count, inputs, generator=random) - 0.5))
    return (torch.randn(count, inputs, generator=random) * sizes).to(BF16)


def check(matrix: PackedWeight, rows: Tensor, form: str) -> None:
    exact, groups = rows.double(), resolved_group_size(matrix.inputs, matrix.group_size)
    wanted = exact @ values(matrix).T
    largest = torch.cat([part.abs().amax(1, keepdim=True).expand_as(part) for part in exact.split(groups, 1)], 1)
    moved = torch.where(exact.abs() < SMALLEST * largest, STEP * largest, 0.0)
    scales = matrix.scales.double().abs().repeat_interleave(groups, 1)[:, : matrix.inputs] * 2.0 ** (matrix.bits + 1)
    allowed = moved @ scales.T + FLOAT * (exact.abs() @ scales.T) + wanted.abs() * 2.0**-8 + 1e-37
    found = CpuKernel(form).linear(matrix)(rows)
    assert found.dtype == BF16
    assert ((found.double() - wanted).abs() <= allowed).all()


@settings(max_examples=examples(25), deadline=None)
@given(
    rows=some.integers(1, 80),
    inputs=some.integers(1, 140),
    bits=some.integers(1, 8),
    group_size=some.sampled_from([-1, 24, 32, 64]),
    symmetric=some.booleans(),
    nested=some.booleans(),
    count=some.sampled_from([1, 2, 3, 4, 7, 9]),
    octaves=some.sampled_from([0.0, 6.0, 30.0, 200.0]),
    seed=some.integers(0, 9),
)
def test_any_shape_and_size_is_within_the_bound(
    rows: int, inputs: int, bits: int, group_size: int, symmetric: bool, nested: bool, count: int, octaves: float,
    seed: int,
) -> None:  # fmt: skip
    matrix = matrix_of(rows, inputs, bits, group_size, symmetric=symmetric, nested=nested, seed=seed)
    check(matrix, spread(count, inputs, seed, octaves), WHOLE[0])


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_several_blocks_side_by_side(form: str, bits: int) -> None:
    """Seven of them: four at once and three alone, or two at once and one alone."""
    matrix = matrix_of(7 * 16 - 3, 160, bits, 32)
    for count in (1, 2):
        check(matrix, spread(count, 160, bits, 4.0), form)


def test_a_row_does_not_depend_on_the_others(form: str) -> None:
    """Sums of whole numbers are exact: one row of many is what it is alone."""
    linear, rows = CpuKernel(form).linear(matrix_of(70, 256, 4, 64)), spread(7, 256, 0, 4.0)
    together = linear(rows)
    assert all(torch.equal(linear(rows[place : place + 1])[0], together[place]) for place in range(7))


@pytest.mark.cases(8)
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_largest_codes_and_bytes_fit_into_every_sum(form: str, bits: int, count: int) -> None:
    """All codes are as large as they get but that of the input whose activation makes the bytes of all others -128."""
    matrix, codes = matrix_of(20, 64, bits, 64), torch.full((20, 64), (1 << bits) - 1)
    codes[:, 5] = 0
    zeros = None if matrix.zeros is None else torch.zeros_like(matrix.zeros)
    rows = torch.tensor([2.0**-14, 2.0**-6, -(2.0**-14), -(2.0**-6)], dtype=BF16)[:count, None].repeat(1, 64)
    rows[:, 5] = 1.0
    check(replace(matrix, codes=pack(codes, bits), zeros=zeros), rows, form)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(form: str, odd: float) -> None:
    rows = torch.ones(3, 96, dtype=BF16)
    rows[1, 40] = odd
    found = CpuKernel(form).linear(matrix_of(20, 96, 4))(rows)
    assert not found[1].isfinite().any()
    assert found[[0, 2]].isfinite().all()


def test_rows_of_nothing_and_of_the_smallest_numbers(form: str) -> None:
    linear = CpuKernel(form).linear(matrix_of(20, 96, 4))
    assert not linear(torch.zeros(2, 96, dtype=BF16)).any()
    assert linear(torch.full((2, 96), 1e-40, dtype=BF16)).isfinite().all()


def test_other_activations_and_dense_matrices_are_multiplied_as_floats(form: str) -> None:
    matrix, rows = matrix_of(40, 96, 4), torch.randn(3, 96, generator=torch.Generator().manual_seed(0))
    floats = FORMS[form].floats.name
    assert torch.equal(CpuKernel(form).linear(matrix)(rows), CpuKernel(floats).linear(matrix)(rows))
    layer, given_rows = layer_of([16, 16], 96, 64), routed(3, 2, 1, 96, BF16)
    assert torch.equal(CpuKernel(form).layer(layer)(*given_rows), CpuKernel(floats).layer(layer)(*given_rows))


def test_groups_too_long_for_int32_are_summed_as_floats(form: str) -> None:
    most = (2**31 - 1) // (128 * 255)
    wide = matrix_of(1, most + 1, 8, -1)
    assert isinstance(wide, PackedWeight)
    wide = replace(wide, codes=torch.full_like(wide.codes, 255), zeros=torch.zeros_like(wide.zeros))  # type: ignore[arg-type]
    linear = CpuKernel(form).linear(wide)
    assert linear.form == FORMS[form].floats
    assert abs(linear(torch.ones(1, most + 1, dtype=BF16)).item() / values(wide).sum() - 1) < 2.0**-8
    assert CpuKernel(form).linear(matrix_of(1, most, 8, -1)).form == FORMS[form]
