"""Forms that round activations to int8: within the bound that is derived from the rounding, and no nearer by chance."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as some
from packed_layers import layer_of, matrix_of, routed, values
from torch import Tensor, nn

from moeq_kernels.cpu.forms import FORMS, forms
from moeq_kernels.cpu.kernel import CpuKernel
from moeq_kernels.description import DOWN, LayerOfExperts, Matrix
from moeq_kernels.packed import PackedWeight
from moeq_kernels.widths import resolved_group_size

STEP = 1 / 254  # half of the distance of two int8, as a share of the largest of a group
FLOAT = 2.0**-20  # of what is added up in float32
SLOPE = 1.1  # the steepest that silu is

pytestmark = pytest.mark.skipif(not forms(int8=True), reason="this CPU has no dot products of bytes")


@pytest.fixture(params=[name for name, form in FORMS.items() if form.int8])
def form(request: pytest.FixtureRequest) -> str:
    if request.param not in forms(int8=True):
        pytest.skip(f"this CPU has no {request.param}")
    return str(request.param)


def rounding(rows: Tensor, matrix: Matrix) -> Tensor:
    """How far each activation [T, K] may be moved, in float64."""
    if isinstance(matrix, Tensor):
        return torch.zeros_like(rows)
    parts = rows.abs().split(resolved_group_size(matrix.inputs, matrix.group_size), 1)
    return torch.cat([part.amax(1, keepdim=True).expand_as(part) * STEP for part in parts], 1)


def sizes(matrix: Matrix) -> Tensor:
    """What is added up in float32 [N, K]: of a packed weight, scale times code and zero point apart."""
    if isinstance(matrix, Tensor):
        return matrix.double().abs()
    groups = resolved_group_size(matrix.inputs, matrix.group_size)
    scales = matrix.scales.double().abs().repeat_interleave(groups, 1)[:, : matrix.inputs]
    return scales * 2.0 ** (matrix.bits + 1)


def bound(rows: Tensor, moved: Tensor, matrix: Matrix) -> Tensor:
    """How far each output [T, N] may be from that of float64; moved: how far rows may be from those given."""
    largest = rows.abs() + moved
    all_moved = moved + rounding(largest, matrix)
    return all_moved @ values(matrix).abs().T + FLOAT * (largest @ sizes(matrix).T)


def check_linear(matrix: Matrix, rows: Tensor, form: str) -> Tensor:
    """The errors of a product as shares of their bounds."""
    exact = rows.double()
    wanted, allowed = exact @ values(matrix).T, bound(exact, torch.zeros_like(exact), matrix)
    found = CpuKernel(form).linear(matrix)(rows)
    assert found.dtype == rows.dtype
    allowed = allowed + wanted.abs() * (2.0**-8 if rows.dtype == torch.bfloat16 else 2.0**-20) + 1e-30
    shares = (found.double() - wanted).abs() / allowed
    assert shares.max() <= 1
    return shares


@pytest.mark.cases(3)
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize(("group_size", "nested"), [(64, False), (128, True), (-1, False)])
def test_products_are_within_the_bound(form: str, bits: int, group_size: int, nested: bool) -> None:
    matrix = matrix_of(40, 256, bits, group_size, symmetric=bits == 5, nested=nested)
    for count in (1, 3, 16):
        rows = torch.randn(count, 256, generator=torch.Generator().manual_seed(bits))
        shares = check_linear(matrix, rows, form)
        assert shares.max() > 0.01, "activations are rounded"


@pytest.mark.full
@settings(max_examples=examples(60), deadline=None)
@given(
    rows=some.integers(1, 40),
    inputs=some.integers(1, 140),
    bits=some.integers(1, 8),
    group_size=some.sampled_from([-1, 1, 5, 8, 16, 24, 32, 64, 128]),
    symmetric=some.booleans(),
    nested=some.booleans(),
    count=some.integers(1, 20),
    outlier=some.sampled_from([0.0, 1.0, 1e3, 1e30]),
    dtype=some.sampled_from([torch.bfloat16, torch.float32]),
    seed=some.integers(0, 9),
)
def test_any_shape_is_within_the_bound(
    rows: int, inputs: int, bits: int, group_size: int, symmetric: bool, nested: bool, count: int, outlier: float,
    dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    """Of the form that is fastest here; one activation of every row is multiplied by `outlier`."""
    matrix = matrix_of(rows, inputs, bits, group_size, symmetric=symmetric, nested=nested, seed=seed)
    activations = torch.randn(count, inputs, generator=torch.Generator().manual_seed(seed))
    activations[:, seed % inputs] *= outlier
    check_linear(matrix, activations.to(dtype), forms(int8=True)[0])


def test_the_error_that_is_stated(form: str) -> None:
    """In words: 0.6 to 0.7 % for activations of a normal distribution and groups of 128."""
    matrix = matrix_of(256, 1024, 4, 128)
    rows = torch.randn(16, 1024, generator=torch.Generator().manual_seed(0))
    wanted = rows.double() @ values(matrix).T
    error = (CpuKernel(form).linear(matrix)(rows) - wanted).norm() / wanted.norm()
    assert 0.006 < error < 0.007


def test_whole_numbers_are_exact(form: str) -> None:
    """Activations that are int8 times a power of two lose nothing."""
    for bits in range(1, 9):
        matrix = matrix_of(33, 96, bits, 24)
        rows = torch.randint(-127, 128, (5, 96), generator=torch.Generator().manual_seed(bits)).float()
        rows[:, ::24] = 127.0
        wanted = rows.double() @ values(matrix).T / 4
        found = CpuKernel(form).linear(matrix)(rows / 4).double()
        assert ((found - wanted).abs() <= FLOAT * (rows.double().abs() @ sizes(matrix).T) / 4).all()


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_largest_codes_and_activations_fit_into_every_sum(form: str, bits: int) -> None:
    matrix = matrix_of(20, 128, bits, 128)
    assert isinstance(matrix, PackedWeight)
    zeros = None if matrix.zeros is None else torch.zeros_like(matrix.zeros)
    full = replace(matrix, codes=torch.full_like(matrix.codes, 255), zeros=zeros)
    for count in (1, 4):
        for value in (127.0, -127.0):
            check_linear(full, torch.full((count, 128), value), form)


def layer_bound(layer: LayerOfExperts, rows: Tensor, expert: int) -> tuple[Tensor, Tensor]:
    """One expert's output in float64 and how far from it one may be, both [T, H]."""
    matrices, none = layer.matrices[expert], torch.zeros_like(rows)
    gate, up = (rows @ values(matrices[name]).T for name in ("gate_proj", "up_proj"))
    gate_moved, up_moved = (bound(rows, none, matrices[name]) for name in ("gate_proj", "up_proj"))
    inner = nn.functional.silu(gate) * up
    moved = SLOPE * gate_moved * (up.abs() + up_moved) + nn.functional.silu(gate).abs() * up_moved + FLOAT * inner.abs()
    return inner @ values(matrices[DOWN]).T, bound(inner, moved, matrices[DOWN])


@pytest.mark.cases(5)
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_mixed_layer_is_within_the_bound(form: str, tokens: int, at_once: bool) -> None:
    """At once, or with the activation outside of the pass; the experts of 16 bits are exact."""
    widths = [4, 3, {"gate_proj": 2, "up_proj": 16, DOWN: 8}, {"gate_proj": 16, "up_proj": 4, DOWN: 16}, 1, 16]
    layer = layer_of(widths, 96, 64, activation="silu" if at_once else None)
    hidden, index, weights = routed(tokens, len(widths), 2, 96, torch.float32)
    wanted, allowed = torch.zeros(tokens, 96, dtype=torch.float64), torch.full((tokens, 96), 1e-30, dtype=torch.float64)
    for expert in range(len(widths)):
        of_tokens, places = (index == expert).nonzero(as_tuple=True)
        result, moved = layer_bound(layer, hidden[of_tokens].double(), expert)
        share = weights[of_tokens, places, None].double()
        wanted.index_add_(0, of_tokens, result * share)
        allowed.index_add_(0, of_tokens, moved * share + FLOAT * result.abs())
    found = CpuKernel(form).layer(layer)(hidden, index, weights)
    assert ((found.double() - wanted).abs() <= allowed).all()


def test_a_dense_layer_is_the_float_forms(form: str) -> None:
    layer, given = layer_of([16, 16], 96, 64), routed(7, 2, 1, 96, torch.float32)
    assert torch.equal(CpuKernel(form).layer(layer)(*given), CpuKernel(FORMS[form].floats.name).layer(layer)(*given))


def test_many_rows_are_multiplied_as_they_are(form: str) -> None:
    matrix, rows = matrix_of(40, 96, 4), torch.randn(8, 96, generator=torch.Generator().manual_seed(0))
    found = CpuKernel(form, prefill=8).linear(matrix)(rows)
    torch.testing.assert_close(found.double(), rows.double() @ values(matrix).T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(form: str, odd: float) -> None:
    rows = torch.ones(3, 96)
    rows[1, 40] = odd
    found = CpuKernel(form).linear(matrix_of(20, 96, 4))(rows)
    assert not found[1].isfinite().any()
    assert found[[0, 2]].isfinite().all()


def test_rows_of_nothing_give_nothing(form: str) -> None:
    linear = CpuKernel(form).linear(matrix_of(20, 96, 4))
    assert not linear(torch.zeros(2, 96)).any()
    assert not linear(torch.full((2, 96), 1e-40)).any()


def test_groups_too_long_for_int32_are_refused(form: str) -> None:
    most = (2**31 - 1) // (127 * 255)
    wide = matrix_of(1, most + 1, 8, -1)
    assert isinstance(wide, PackedWeight)
    kernel, fits = CpuKernel(form), matrix_of(1, most, 8, -1)
    assert isinstance(fits, PackedWeight)
    fits = replace(fits, codes=torch.full_like(fits.codes, 255), zeros=torch.zeros_like(fits.zeros))  # type: ignore[arg-type]
    wanted = values(fits).sum()
    assert abs(kernel.linear(fits)(torch.ones(1, most)).item() / wanted - 1) < 1e-5
    with pytest.raises(ValueError, match=f"groups of {most + 1} inputs of 8 bits, more than {form} can add up"):
        kernel.linear(wide)
    layer = layer_of([8], 32, 32)
    layer = replace(layer, matrices=[dict.fromkeys(layer.matrices[0], wide)])
    assert "more than" in str(kernel.refusal(layer))
    assert CpuKernel().linear(wide) is not None
