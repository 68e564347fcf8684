"""Random packed matrices and what they are in float64."""

from __future__ import annotations

import torch

from moeq_kernels.packed import PackedWeight
from moeq_kernels.packing import pack
from moeq_kernels.widths import Encoding, group_count

Matrix = PackedWeight | torch.Tensor


class Maker:
    """Random matrices, always the same ones."""

    def __init__(self, seed: int, device: str = "cpu") -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device

    def codes(self, bits: int, *shape: int) -> torch.Tensor:
        return pack(torch.randint(0, 2**bits, shape, generator=self.generator, dtype=torch.uint8), bits)

    def rows(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype).to(self.device)

    def packed(
        self, rows: int, inputs: int, bits: int, group: int, symmetric: bool = False, nested: bool = False
    ) -> PackedWeight:
        encoding = Encoding(group_size=group, symmetric=symmetric, nested=nested)
        groups, grid = group_count(inputs, group), encoding.grid_bits(bits)
        scales = (0.01 + 0.1 * torch.rand(rows, groups, generator=self.generator)).half()
        made = PackedWeight(
            codes=self.codes(bits, rows, inputs),
            scales=scales,
            zeros=self.codes(grid, rows, groups) if encoding.has_zeros(bits) else None,
            bits=bits,
            group_size=group,
            inputs=inputs,
            symmetric=symmetric,
            nested=nested,
        )
        return made.map(lambda part: part.to(self.device))


def exact(matrix: Matrix) -> torch.Tensor:
    """Its values in float64."""
    return matrix.double() if isinstance(matrix, torch.Tensor) else matrix.dequantize().double()


def same(one: Matrix, other: Matrix) -> bool:
    """Whether both are equal bit for bit."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    first, second = one.parts(), other.parts()
    settings = [(each.bits, each.group_size, each.inputs, each.symmetric, each.nested) for each in (one, other)]
    return settings[0] == settings[1] and {*first} == {*second} and all(torch.equal(first[k], second[k]) for k in first)
