"""A packed weight: codes, scales and zero points as they are stored, and their way back to values.

codes uint8 [..., N, ceil(K*b/8)]; scales float16 [..., N, G]; zeros uint8 [..., N, ceil(G*b/8)], absent for 1 bit (0.5)
and for symmetric grids (2**(b-1)). N output rows, K inputs, G groups of inputs, b bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moeq.numerics import grids
from moeq.numerics.gptq import Quantized
from moeq.numerics.packing import pack, packed_row_bytes, unpack

PARTS = ("codes", "scales", "zeros")
SCALE_BYTES = 2


def has_zeros(bits: int, symmetric: bool) -> bool:
    """Whether zero points are stored."""
    return bits > 1 and not symmetric


def packed_bytes(rows: int, inputs: int, bits: int, group_size: int, symmetric: bool) -> int:
    """Bytes of one packed weight [rows, inputs]: codes, scales and zero points."""
    groups = grids.group_count(inputs, group_size)
    zeros = packed_row_bytes(groups, bits) if has_zeros(bits, symmetric) else 0
    return rows * (packed_row_bytes(inputs, bits) + groups * SCALE_BYTES + zeros)


def packed_shapes(
    rows: int, inputs: int, bits: int, group_size: int, symmetric: bool
) -> dict[str, tuple[tuple[int, int], torch.dtype]]:
    """Shape and dtype of each stored part of one packed weight."""
    groups = grids.group_count(inputs, group_size)
    shapes = {
        "codes": ((rows, packed_row_bytes(inputs, bits)), torch.uint8),
        "scales": ((rows, groups), grids.SCALE_DTYPE),
    }
    if has_zeros(bits, symmetric):
        shapes["zeros"] = ((rows, packed_row_bytes(groups, bits)), torch.uint8)
    return shapes


@dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """One weight, or a stack of weights of the same width, in its stored form."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group_size: int
    inputs: int
    symmetric: bool

    @classmethod
    def of(cls, quantized: Quantized, bits: int, symmetric: bool) -> PackedWeight:
        """Pack one width of a `Quantized` batch: parts are [E, N, ...]."""
        index = quantized.bits.index(bits)
        zero = quantized.zero[:, index].round().to(torch.uint8) if has_zeros(bits, symmetric) else None
        return cls(
            codes=pack(quantized.codes[:, index], bits),
            scales=quantized.scale[:, index].to(grids.SCALE_DTYPE),
            zeros=None if zero is None else pack(zero, bits),
            bits=bits,
            group_size=quantized.group_size,
            inputs=quantized.codes.shape[-1],
            symmetric=symmetric,
        )

    def parts(self) -> dict[str, Tensor]:
        """The stored tensors by name."""
        found: Mapping[str, Tensor | None] = {"codes": self.codes, "scales": self.scales, "zeros": self.zeros}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def map(self, change: Callable[[Tensor], Tensor]) -> PackedWeight:
        """The weight with every part changed: another place, or fewer rows."""
        zeros = None if self.zeros is None else change(self.zeros)
        return replace(self, codes=change(self.codes), scales=change(self.scales), zeros=zeros)

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.parts().values())

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values [..., N, K]: (code - zero) * scale in float32, then rounded to `dtype`."""
        codes = unpack(self.codes, self.bits, self.inputs)
        return grids.decode(codes, self.scales, self._zero(), self.group_size).to(dtype)

    def unpacked(self) -> Quantized:
        """A stack [E, N, ...] as codes uint8 [E, 1, N, K] with scales and zero points [E, 1, N, G]."""
        zero = self._zero()
        zero = zero.float() if isinstance(zero, Tensor) else torch.full_like(self.scales, zero, dtype=torch.float32)
        return Quantized(
            codes=unpack(self.codes, self.bits, self.inputs).unsqueeze(1),
            scale=self.scales.float().unsqueeze(1),
            zero=zero.unsqueeze(1),
            bits=(self.bits,),
            group_size=self.group_size,
        )

    def _zero(self) -> Tensor | float:
        if self.zeros is not None:
            return unpack(self.zeros, self.bits, self.scales.shape[-1])
        return grids.SIGN_ZERO if self.bits == 1 else 2.0 ** (self.bits - 1)
