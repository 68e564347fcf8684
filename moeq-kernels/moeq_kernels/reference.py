"""The plain way, with which every kernel is compared: an expert is unpacked when it is used, and multiplied.

All bytes of a layer lie in one buffer, in the order and the bits of the checkpoint.

Letters as in `description`; n experts that are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import linear

from moeq_kernels.description import DOWN, LayerOfExperts, Matrix
from moeq_kernels.packed import PackedWeight
from moeq_kernels.trellis import TILE

ALIGNED = 64  # bytes
Expert = Callable[[int, Tensor, Tensor], Tensor]  # expert, its rows [T, H], which tokens they are [T] -> [T, H]


def routed_sum(experts: Iterable[int], hidden: Tensor, index: Tensor, weights: Tensor, output: Expert) -> Tensor:
    """Sum over each token's experts of weight times output [T, H], of some experts [n] alone, one after the other."""
    result = torch.zeros_like(hidden)
    for expert in experts:
        token, place = torch.where(index == expert)
        rows = output(expert, hidden[token], token)
        result.index_add_(0, token, (rows * weights[token, place, None]).to(result.dtype))
    return result


def values(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """A matrix [N, K] in a dtype."""
    return matrix.to(dtype) if isinstance(matrix, Tensor) else matrix.dequantize(dtype)


def some_rows(matrix: Matrix, rows: Tensor) -> Matrix:
    """Some rows [n] of a matrix; those of trellis codes, which lie in tiles, as float32 values."""
    if isinstance(matrix, PackedWeight) and matrix.whole > 1:
        size = matrix.whole
        used, place = torch.unique(rows // size, return_inverse=True)
        every = (used[:, None] * size + torch.arange(size, device=rows.device)).flatten()
        scales = matrix.scales[every.clamp(max=len(matrix.scales) - 1)]
        found = replace(matrix, codes=matrix.codes[every[::TILE] // TILE], scales=scales).dequantize()
        return found[place * size + rows % size]
    return matrix[rows] if isinstance(matrix, Tensor) else matrix.rows(rows)


def expert_output(layer: LayerOfExperts, expert: int, rows: Tensor) -> Tensor:
    """Output [T, H] of one expert for rows [T, H]."""
    matrices, biases = layer.matrices[expert], layer.biases[expert] if layer.biases else {}

    def product(projection: str, given: Tensor) -> Tensor:
        bias = biases.get(projection)
        return linear(given, values(matrices[projection], given.dtype), None if bias is None else bias.to(given.dtype))

    inner = layer.gate({name: product(name, rows) for name in matrices if name != DOWN})
    output = product(DOWN, inner)
    return output if layer.finish is None else layer.finish(output)


class _Flat:
    """One buffer for many tensors, each of which begins on a whole number of 64 bytes."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        size = sum(_aligned(tensor) for tensor in tensors)
        self.buffer = torch.zeros(size, dtype=torch.uint8, device=tensors[0].device)
        self._next = 0

    def take_in(self, tensor: Tensor) -> Tensor:
        """A copy in the buffer."""
        start = self._next
        self._next += _aligned(tensor)
        part = self.buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return part.copy_(tensor)

    def take_in_matrix(self, matrix: Matrix) -> Matrix:
        """A matrix whose parts are in the buffer."""
        return self.take_in(matrix) if isinstance(matrix, Tensor) else matrix.map(self.take_in)


def _aligned(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNED) * ALIGNED


def _tensors(matrix: Matrix) -> list[Tensor]:
    return [matrix] if isinstance(matrix, Tensor) else list(matrix.parts().values())


class ReferenceLayer:
    """A layer as it is stored."""

    def __init__(self, layer: LayerOfExperts) -> None:
        tensors = [tensor for of in layer.matrices for matrix in of.values() for tensor in _tensors(matrix)]
        self._flat = _Flat([*tensors, *(bias for of in layer.biases for bias in of.values())])
        self._layer = replace(
            layer,
            matrices=[{name: self._flat.take_in_matrix(one) for name, one in of.items()} for of in layer.matrices],
            biases=[{name: self._flat.take_in(bias) for name, bias in of.items()} for of in layer.biases],
        )

    @property
    def nbytes(self) -> int:
        return self._flat.buffer.nbytes

    def matrix(self, expert: int, projection: str) -> Matrix:
        return self._layer.matrices[expert][projection]

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        used = [expert for expert in torch.unique(index).tolist() if 0 <= expert < len(self._layer.matrices)]
        return routed_sum(used, hidden, index, weights, self._output)

    def _output(self, expert: int, rows: Tensor, _: Tensor) -> Tensor:
        return expert_output(self._layer, expert, rows)


class ReferenceLinear:
    """A matrix as it is stored."""

    def __init__(self, matrix: Matrix, bias: Tensor | None) -> None:
        self._matrix, self._bias = matrix, bias

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in _tensors(self._matrix)) + (
            0 if self._bias is None else self._bias.nbytes
        )

    def matrix(self) -> Matrix:
        return self._matrix

    def some(self, rows: Tensor) -> Matrix:
        return some_rows(self._matrix, rows)

    def __call__(self, rows: Tensor) -> Tensor:
        bias = None if self._bias is None else self._bias.to(rows.dtype)
        return linear(rows, values(self._matrix, rows.dtype), bias)


class ReferenceKernel:
    """Computes every layer, on any device and in any dtype."""

    name = "reference"

    def refusal(self, layer: LayerOfExperts) -> str | None:
        return None

    def layer(self, layer: LayerOfExperts) -> ReferenceLayer:
        return ReferenceLayer(layer)

    def linear(self, matrix: Matrix, bias: Tensor | None = None) -> ReferenceLinear:
        return ReferenceLinear(matrix, bias)
