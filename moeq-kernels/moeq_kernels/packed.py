"""A packed weight: codes, scales and zero points as they are stored, and their way back to values.

codes uint8 [..., N, ceil(K*b/8)]; scales float16 [..., N, G]; zeros uint8 [..., N, ceil(G*b/8)], absent for 1 bit (0.5)
and for symmetric grids (2**(b-1)). A nested weight of 2, 3 or 4 bits has the scales and zeros of its 4-bit grid at
every width, see `grids.nested_grid`.

Letters: E experts, N output rows, K inputs, G groups of inputs, b bits, B bytes of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moeq_kernels import grids
from moeq_kernels.packing import BLOCK_VALUES, pack, packed_row_bytes, unpack
from moeq_kernels.widths import NESTED_BITS, PARTS, SUPPORTED_BITS, group_count, resolved_group_size

if TYPE_CHECKING:
    from moeq.numerics.gptq import Quantized


def has_zeros(bits: int, symmetric: bool) -> bool:
    """Whether zero points are stored."""
    return bits > 1 and not symmetric


def grid_bits(bits: int, nested: bool) -> int:
    """The width of the grid that a weight of `bits` bits is stored with: that of the widest where it is nested."""
    return NESTED_BITS[-1] if nested and bits in NESTED_BITS else bits


def _middle(bits: int, nested: bool) -> float:
    """The zero point of codes whose zero points are not stored."""
    return grids.SIGN_ZERO if bits == 1 else 2.0 ** (grid_bits(bits, nested) - 1)


def packed_bytes(rows: int, inputs: int, bits: int, group_size: int, symmetric: bool, nested: bool = False) -> int:
    """Bytes of one packed weight [rows, inputs]: codes, scales and zero points."""
    shapes = packed_shapes(rows, inputs, bits, group_size, symmetric, nested)
    return sum(prod(shape) * dtype.itemsize for shape, dtype in shapes.values())


def packed_shapes(
    rows: int, inputs: int, bits: int, group_size: int, symmetric: bool, nested: bool = False
) -> dict[str, tuple[tuple[int, int], torch.dtype]]:
    """Shape and dtype of each stored part of one packed weight."""
    groups = group_count(inputs, group_size)
    shapes = {
        "codes": ((rows, packed_row_bytes(inputs, bits)), torch.uint8),
        "scales": ((rows, groups), grids.SCALE_DTYPE),
    }
    if has_zeros(bits, symmetric):
        shapes["zeros"] = ((rows, packed_row_bytes(groups, grid_bits(bits, nested))), torch.uint8)
    return shapes


class NotStorable(ValueError):
    """A quantizer's result that no packed weight stands for exactly; `index`: the first of its weights that is so."""

    def __init__(self, what: str, index: int) -> None:
        super().__init__(what)
        self.index = index


def _refuse(wrong: Tensor, what: str) -> None:
    """NotStorable where anything is wrong, [E, ...] bool."""
    if bool(wrong.any()):
        raise NotStorable(what, int(wrong.flatten(1).any(1).nonzero()[0]))


def _packed_codes(what: str, codes: Tensor, bits: int) -> Tensor:
    """Codes (or zero points) [E, ..., K], of any type, as they are stored; NotStorable but for 0 to 2**b - 1."""
    if codes.is_floating_point():
        _refuse(codes != codes.round(), f"{what} that are no whole numbers")
        _refuse((codes < 0) | (codes >= 2**bits), f"{what} beyond 0 to {2**bits - 1}")
        codes = codes.to(torch.uint8)
    try:
        return pack(codes, bits)
    except ValueError:
        _refuse((codes < 0) | (codes >= 2**bits), f"{what} beyond 0 to {2**bits - 1}")
        raise


def _stored_scales(scale: Tensor) -> Tensor:
    """Scales [E, ...] as they are stored; NotStorable where that would change one."""
    _refuse(~torch.isfinite(scale), "scales that are not finite")
    half = scale.to(grids.SCALE_DTYPE)
    _refuse(half.to(scale.dtype) != scale, "scales that float16 does not hold")
    return half


@dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """One weight, or a stack of weights of the same width, in its stored form.

    nested: whether its codes are the leading bits of 4-bit ones; no weight of another width than 2, 3 or 4 is.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group_size: int
    inputs: int
    symmetric: bool
    nested: bool = False

    @classmethod
    def of(cls, quantized: Quantized, bits: int, symmetric: bool, nested: bool = False) -> PackedWeight:
        """Pack one width of a `Quantized` batch: parts are [E, N, ...]; it stands for exactly the batch's values.

        nested: the widths 2, 3 and 4 of the batch are what `nested.quantize` made. Raises NotStorable for what would
        have to be rounded: codes or zero points off the grid, scales that are not finite or have too many digits.
        """
        index, nested = quantized.bits.index(bits), nested and bits in NESTED_BITS
        codes, scale, zero = (part[:, index] for part in (quantized.codes, quantized.scale, quantized.zero))
        if nested:
            scale, zero = grids.grid_of_nested(scale, zero, bits)
        scales, stored = _stored_scales(scale), None
        if has_zeros(bits, symmetric):
            stored = _packed_codes("zero points", zero, grid_bits(bits, nested))
        else:
            middle = _middle(bits, nested)
            _refuse(zero != middle, f"zero points other than {middle:g}")
        return cls(
            codes=_packed_codes("codes", codes, bits),
            scales=scales,
            zeros=stored,
            bits=bits,
            group_size=quantized.group_size,
            inputs=codes.shape[-1],
            symmetric=symmetric,
            nested=nested,
        )

    def parts(self) -> dict[str, Tensor]:
        """The stored tensors by name: codes [..., N, B], scales [..., N, G] and, where there are some, zeros."""
        every: Mapping[str, Tensor | None] = {"codes": self.codes, "scales": self.scales, "zeros": self.zeros}
        return {name: tensor for name, tensor in every.items() if tensor is not None}

    def map(self, change: Callable[[Tensor], Tensor]) -> PackedWeight:
        """The weight with every part [..., N, B] changed in its first axes or moved: another place, or fewer rows."""
        zeros = None if self.zeros is None else change(self.zeros)
        return replace(self, codes=change(self.codes), scales=change(self.scales), zeros=zeros)

    def check(self) -> None:
        """ValueError unless bits and group size can be and the parts have the types and shapes that they imply."""
        if self.bits not in SUPPORTED_BITS or self.inputs < 1 or self.group_size == 0 or self.group_size < -1:
            what = f"{self.inputs} inputs of {self.bits} bits in groups of {self.group_size}"
            raise ValueError(f"no packed weight has {what}")
        if self.codes.dim() < 2:
            raise ValueError(f"codes are {list(self.codes.shape)}, not rows of codes")
        *before, rows, _ = self.codes.shape
        wanted = {
            part: ([*before, *shape], dtype)
            for part, (shape, dtype) in packed_shapes(
                rows, self.inputs, self.bits, self.group_size, self.symmetric, self.nested
            ).items()
        }
        given = {part: (list(tensor.shape), tensor.dtype) for part, tensor in self.parts().items()}
        if wanted != given:
            part = next(name for name in PARTS if wanted.get(name) != given.get(name))
            raise ValueError(f"{part} of a packed weight are {given.get(part)}, not {wanted.get(part)}")

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.parts().values())

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values [..., N, K]: (code - zero) * scale in float32, then rounded to `dtype`; ValueError as `check`."""
        self.check()
        rows, count = self.map(lambda part: part.flatten(0, -2)), prod(self.codes.shape[:-1])
        values = torch.empty((count, self.inputs), dtype=dtype, device=self.codes.device)
        step = max(1, BLOCK_VALUES // self.inputs) if values.device.type == "cpu" else max(1, count)
        for start in range(0, count, step):
            some = rows.map(lambda part: part[start : start + step])  # noqa: B023
            codes = unpack(some.codes, self.bits, self.inputs)
            values[start : start + step] = grids.decode(codes, *some._grid(), self.group_size)
        return values.view(*self.codes.shape[:-1], self.inputs)

    def leading(self, bits: int) -> PackedWeight:
        """The nested weight of fewer bits that this one holds."""
        codes = unpack(self.codes, self.bits, self.inputs) >> (self.bits - bits)
        return replace(self, codes=pack(codes, bits), bits=bits)

    def unpacked(self) -> Quantized:
        """A stack [E, N, ...] as codes uint8 [E, 1, N, K] with scales and zero points [E, 1, N, G].

        ValueError as `check`.
        """
        from moeq.numerics.gptq import Quantized  # which loads a compiler

        self.check()
        scale, zero = self._grid()
        zero = zero.float() if isinstance(zero, Tensor) else torch.full_like(scale, zero, dtype=torch.float32)
        return Quantized(
            codes=unpack(self.codes, self.bits, self.inputs).unsqueeze(1),
            scale=scale.float().unsqueeze(1),
            zero=zero.unsqueeze(1),
            bits=(self.bits,),
            group_size=self.group_size,
        )

    def _grid(self) -> tuple[Tensor, Tensor | float]:
        """Scale and zero point of the codes as they are."""
        zero: Tensor | float = _middle(self.bits, self.nested)
        if self.zeros is not None:
            zero = unpack(self.zeros, grid_bits(self.bits, self.nested), self.scales.shape[-1])
        if not self.nested:
            return self.scales, zero
        scale = self.scales.float()
        middle = zero.float() if isinstance(zero, Tensor) else torch.full_like(scale, zero)
        return grids.nested_grid(scale, middle, self.bits)


def joined(parts: Sequence[PackedWeight], axis: int = 0) -> PackedWeight:
    """Weights of the same grid one after the other: stacks along their first axis, or rows of one along the next."""
    if len(parts) == 1:
        return parts[0]
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return replace(
        parts[0],
        codes=torch.cat([part.codes for part in parts], axis),
        scales=torch.cat([part.scales for part in parts], axis),
        zeros=torch.cat(zeros, axis) if zeros else None,
    )


def symmetric_bits(weight: PackedWeight) -> int:
    """The least width of a symmetric grid that holds exactly the values of a weight that is not nested."""
    if weight.bits == 1:
        return 2  # -s and +s are -1 and 1 of the codes -2 to 1
    return weight.bits if weight.zeros is None else weight.bits + 1


def widened(weight: PackedWeight, bits: int) -> PackedWeight:
    """The same values on a symmetric grid of `bits` bits; ValueError below `symmetric_bits` and for nested weights.

    Codes are shifted so that the zero point lies in the middle; a sign grid becomes the codes one below and above it,
    with half the scale, which float16 holds exactly but for scales below 2**-13.
    """
    if weight.nested or not symmetric_bits(weight) <= bits <= SUPPORTED_BITS[-1]:
        raise ValueError(f"no symmetric grid of {bits} bits holds {weight.bits} bits{' nested' * weight.nested}")
    codes = unpack(weight.codes, weight.bits, weight.inputs).to(torch.int16)
    scales = weight.scales
    if weight.bits == 1:
        signed = 2 * codes - 1
        scales = weight.scales / 2
        if not torch.equal(scales * 2, weight.scales):
            raise ValueError("a scale is too small to be halved")
    elif weight.zeros is None:
        signed = codes - 2 ** (weight.bits - 1)
    else:
        zeros = unpack(weight.zeros, weight.bits, scales.shape[-1]).to(torch.int16)
        repeat = resolved_group_size(weight.inputs, weight.group_size)
        signed = codes - zeros.repeat_interleave(repeat, -1)[..., : weight.inputs]
    moved = (signed + 2 ** (bits - 1)).to(torch.uint8)
    return replace(weight, codes=pack(moved, bits), scales=scales, zeros=None, bits=bits, symmetric=True)
