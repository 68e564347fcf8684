"""The form of AMX's tiles: what only its own layout of activations and values can get wrong."""

from __future__ import annotations

import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as some
from packed_layers import layer_of, matrix_of, reference, routed, values
from torch import Tensor

from moeq_kernels import measured
from moeq_kernels.cpu.forms import FORMS, forms, tiles_allowed
from moeq_kernels.cpu.kernel import CpuKernel
from moeq_kernels.cpu.layer import PackedLinear
from moeq_kernels.description import DOWN, Matrix

AMX, VECTORS = FORMS["amx"], FORMS["avx512_vnni"]
BF16 = torch.bfloat16
needs_tiles = pytest.mark.skipif(not AMX.runs_here(), reason="this CPU, or its system, has no AMX tiles of bf16")


def rows_of(count: int, inputs: int, seed: int = 0) -> Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(seed)).to(BF16)


def check(matrix: Matrix, count: int, bias: Tensor | None = None) -> None:
    """Exact but for the last rounding."""
    rows = rows_of(count, matrix.shape[1] if isinstance(matrix, Tensor) else matrix.inputs)
    wanted = rows.double() @ values(matrix).T + (0 if bias is None else bias.double())
    result = CpuKernel("amx", measured.NEVER).linear(matrix, bias)(rows).double()
    assert ((result - wanted).abs() <= wanted.abs() * 2.0**-8 + 1e-6 * wanted.abs().max() + 1e-30).all()


@needs_tiles
@pytest.mark.parametrize("bits", [*range(1, 9), 16])
@pytest.mark.parametrize("nested", [False, True])
def test_every_kind_of_codes(bits: int, nested: bool) -> None:
    matrix = matrix_of(48, 192, bits, 64, symmetric=bits == 5, nested=nested)
    for count in (4, 33):
        check(matrix, count)


@needs_tiles
@settings(max_examples=examples(80), deadline=None)
@given(
    rows=some.integers(1, 100),
    units=some.integers(1, 9),
    group_units=some.sampled_from([-1, 1, 2, 3, 4]),
    bits=some.sampled_from([3, 4, 8, 16]),
    symmetric=some.booleans(),
    biased=some.booleans(),
    count=some.integers(1, 70),
)
def test_any_number_of_blocks_groups_and_rows(
    rows: int, units: int, group_units: int, bits: int, symmetric: bool, biased: bool, count: int
) -> None:
    """Odd numbers of blocks and of units; groups of one unit; the last group shorter."""
    group_size = group_units if group_units < 0 else 32 * group_units
    bias = torch.linspace(-1, 1, rows) if biased else None
    check(matrix_of(rows, 32 * units, bits, group_size, symmetric=symmetric), count, bias)


@needs_tiles
@pytest.mark.parametrize(("bits", "inputs", "group_size"), [(3, 112, 48), (1, 100, 24), (3, 37, 32), (1, 5, -1)])
def test_groups_that_are_filled_up_to_units(bits: int, inputs: int, group_size: int) -> None:
    """Words of a plane of one bit hold 32 inputs, so that these groups have whole units."""
    check(matrix_of(48, inputs, bits, group_size), 17)


@needs_tiles
@pytest.mark.parametrize(("matrix", "dtype"), [
    (matrix_of(40, 96, 4, 24), BF16), (matrix_of(40, 50, 2, 16), BF16),
    (matrix_of(40, 96, 16, dtype=torch.float16), BF16), (matrix_of(40, 96, 4), torch.float32),
], ids=["groups of 24", "groups of 16", "float16 values", "float32 rows"])  # fmt: skip
def test_what_tiles_do_not_fit_is_multiplied_by_vectors(matrix: Matrix, dtype: torch.dtype) -> None:
    rows = rows_of(20, 96 if isinstance(matrix, Tensor) else matrix.inputs).to(dtype)
    found, wanted = (CpuKernel(form, measured.NEVER).linear(matrix)(rows) for form in ("amx", "avx512_bf16"))
    assert torch.equal(found, wanted)


@needs_tiles
def test_few_rows_are_those_of_vectors() -> None:
    matrix, rows = matrix_of(40, 96, 4), rows_of(AMX.tiles - 1, 96)
    found, wanted = (CpuKernel(form).linear(matrix) for form in ("amx", "avx512_bf16"))
    assert isinstance(found, PackedLinear)
    assert torch.equal(found(rows[:1]), wanted(rows[:1]))
    assert torch.equal(found(rows[:2]), wanted(rows[:2]))


@needs_tiles
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("tokens", [5, 60, 300])
def test_a_mixed_layer(tokens: int, activation: str | None) -> None:
    """Experts with one row, and with more than a tile has; at once, and with the activation outside of the pass."""
    widths = [4, 3, {"gate_proj": 2, "up_proj": 8, DOWN: 16}, 1, 16]
    layer = layer_of(widths, 96, 64, biased=True, activation=activation)
    given_rows = routed(tokens, len(widths), 2, 96, BF16)
    given_rows[1][: tokens // 2, 0] = 3
    result = CpuKernel("amx", measured.NEVER).layer(layer)(*given_rows)
    wanted = reference(layer, *given_rows)
    assert (result.double() - wanted).abs().max() <= 2.0**-7 * wanted.abs().max()


@needs_tiles
def test_products_of_torch_and_of_tiles_by_turns() -> None:
    """Both configure the tiles of the same thread."""
    matrix, rows, dense = matrix_of(64, 128, 4), rows_of(40, 128), rows_of(64, 128, 1)
    linear = CpuKernel("amx", measured.NEVER).linear(matrix)
    first = linear(rows), torch.nn.functional.linear(rows, dense)
    for _ in range(3):
        again = linear(rows), torch.nn.functional.linear(rows, dense)
        assert all(map(torch.equal, first, again))


def test_without_permission_there_are_no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeq_kernels.cpu.forms.tiles_allowed", lambda: False)
    assert "amx" not in forms()
    monkeypatch.setattr("sys.platform", "darwin")
    tiles_allowed.cache_clear()
    assert not tiles_allowed()
    tiles_allowed.cache_clear()


@needs_tiles
def test_groups_too_long_for_int32_are_summed_as_floats() -> None:
    """Few rows would be multiplied as whole numbers."""
    most = (2**31 - 1) // (128 * 255)
    assert CpuKernel("amx").linear(matrix_of(1, most + 1, 8, -1)).form == FORMS["avx512"]
    assert CpuKernel("amx").linear(matrix_of(1, most, 8, -1)).form == AMX


def test_the_form_of_fewer_rows_has_the_same_vectors() -> None:
    assert AMX.vectors is VECTORS
    assert AMX.of_rows(AMX.tiles) is AMX
    assert AMX.of_rows(AMX.tiles - 1) is AMX.of_rows(0) is VECTORS
    assert AMX.taking(True, False) is VECTORS
    assert AMX.taking(False, True) is FORMS["avx512"]
    assert VECTORS.vectors is VECTORS


@needs_tiles
def test_experts_are_multiplied_by_tiles_where_a_matrix_alone_is_unpacked() -> None:
    """What is named stays as it is."""
    layer = layer_of([4, 2], 64, 32)
    (first, _) = layer.matrices
    alone = CpuKernel("amx").linear(first["up_proj"]).prefill
    assert CpuKernel("amx").layer(layer).prefill == 4 * alone
    assert CpuKernel("amx", 7).layer(layer).prefill == CpuKernel("amx", 7).linear(first["up_proj"]).prefill == 7
    assert CpuKernel("avx512_bf16").layer(layer).prefill == CpuKernel("avx512_bf16").linear(first["up_proj"]).prefill
