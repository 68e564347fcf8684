"""The plain way: what a layer computes in float64, from one buffer that holds every stored bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from packed_layers import layer_of, matrix_of, reference, routed

from moeq_kernels.description import Matrix
from moeq_kernels.packed import PackedWeight
from moeq_kernels.reference import ReferenceKernel

MIXED = (2, {"gate_proj": 1, "up_proj": 3, "down_proj": 16}, 4, 8, 16)


def parts(matrix: Matrix) -> list[torch.Tensor]:
    return list(matrix.parts().values()) if isinstance(matrix, PackedWeight) else [matrix]


def same(one: Matrix, other: Matrix) -> bool:
    return type(one) is type(other) and all(
        mine.dtype == its.dtype and torch.equal(mine, its) for mine, its in zip(parts(one), parts(other), strict=True)
    )


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_a_layer_is_held_once_and_computes_what_it_says(biased: bool, nested: bool) -> None:
    layer = layer_of(MIXED, 40, 24, 16, biased=biased, nested=nested)
    prepared = ReferenceKernel().layer(layer)
    hidden, index, weights = routed(7, len(MIXED), 3, 40, torch.float32)
    wanted = reference(layer, hidden, index, weights)
    assert (prepared(hidden, index, weights) - wanted).abs().max() <= 1e-6 * wanted.abs().max()
    stored = 0
    for expert, matrices in enumerate(layer.matrices):
        assert all(same(prepared.matrix(expert, name), matrix) for name, matrix in matrices.items())
        stored += sum(part.nbytes for matrix in matrices.values() for part in parts(matrix))
        stored += sum(bias.nbytes for bias in layer.biases[expert].values())
    tensors = sum(len(parts(matrix)) for matrices in layer.matrices for matrix in matrices.values())
    assert stored <= prepared.nbytes <= stored + 64 * (tensors + biased * 3 * len(MIXED))


def test_a_number_below_zero_is_no_expert() -> None:
    """As the CPU's kernel has it, and not one counted from the end."""
    layer = layer_of(MIXED, 40, 24, 16)
    hidden, index, weights = routed(7, len(MIXED), 3, 40, torch.float32)
    index[0, 1], index[3, 0] = -1, -2
    wanted = reference(layer, hidden, index.clamp(min=0), weights * (index >= 0))
    found = ReferenceKernel().layer(layer)(hidden, index, weights)
    assert (found - wanted).abs().max() <= 1e-6 * wanted.abs().max()


def test_a_layer_finishes_rows_before_they_are_weighted() -> None:
    layer = replace(layer_of((4, 2), 40, 24, 16), finish=lambda rows: rows.tanh())
    given = routed(5, 2, 2, 40, torch.float32)
    wanted = reference(layer, *given).float()
    torch.testing.assert_close(ReferenceKernel().layer(layer)(*given), wanted, rtol=1e-5, atol=1e-5)


def test_no_rows_and_no_experts_are_zeros() -> None:
    prepared = ReferenceKernel().layer(layer_of((4, 2), 40, 24, 16))
    empty = prepared(*routed(0, 2, 2, 40, torch.bfloat16))
    assert (tuple(empty.shape), empty.dtype) == ((0, 40), torch.bfloat16)
    beyond = prepared(torch.ones(3, 40), torch.full((3, 2), 2), torch.ones(3, 2))
    assert torch.equal(beyond, torch.zeros(3, 40))


@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16])
def test_some_rows_are_those_of_the_matrix(bits: int) -> None:
    matrix = matrix_of(37, 40, bits, 16)
    prepared = ReferenceKernel().linear(matrix)
    which = torch.tensor([36, 0, 5, 5, 17])
    whole, some = (one if isinstance(one, torch.Tensor) else one.dequantize() for one in (matrix, prepared.some(which)))
    assert torch.equal(some, whole[which])
    assert same(prepared.matrix(), matrix)
