"""A packed weight: codes, scales and zero points as they are stored, and their way back to values.

codes uint8 [..., N, ceil(K*b/8)]; scales float16 [..., N, G]; zeros uint8 [..., N, ceil(G*b/8)], absent for 1 bit (0.5)
and for symmetric grids (2**(b-1)). Of trellis codes, and of EXL3's, codes [..., ceil(N/16), ceil(K/16)*32*b], scales
[..., N, 1], see trellis.py and exl3.py. A nested weight of 2, 3 or 4 bits has the scales and zeros of its 4-bit grid at
every width, see `grids.nested_grid`. Of i-quants see iq.py. Of codes that are floating-point numbers see floats.py; of
these NVFP4 has a `unit` float32 [..., 1, 1], what its scales are counted in. Of 0 bits, a matrix of a dropped expert,
nothing is stored, and all values are zero.

Letters: E experts, N output rows, K inputs, G groups of inputs, b bits, B bytes of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from moeq_kernels import exl3, floats, grids, iq, trellis
from moeq_kernels.packing import BLOCK_VALUES, pack, packed_row_bytes, unpack
from moeq_kernels.widths import DROPPED, EXL3_SIDE, PARTS, SUPPORTED_BITS, Encoding, group_count, resolved_group_size


def middle_of(bits: int, encoding: Encoding) -> float:
    """The zero point of codes whose zero points are not stored."""
    return grids.SIGN_ZERO if bits == 1 else 2.0 ** (encoding.grid_bits(bits) - 1)


def packed_bytes(rows: int, inputs: int, bits: int, encoding: Encoding) -> int:
    """Bytes of one packed weight [rows, inputs]: codes, scales and zero points."""
    shapes = packed_shapes(rows, inputs, bits, encoding)
    return sum(prod(shape) * dtype.itemsize for shape, dtype in shapes.values())


def packed_shapes(
    rows: int, inputs: int, bits: int, encoding: Encoding
) -> dict[str, tuple[tuple[int, int], torch.dtype]]:
    """Shape and dtype of each stored part of one packed weight."""
    if bits == DROPPED:
        return {}
    if encoding.state_bits:
        codes, dtype = trellis.packed_shapes(rows, inputs, bits)["codes"]
        return {"codes": (codes, dtype), "scales": ((rows, 1), grids.SCALE_DTYPE)}
    if encoding.floats:
        return floats.packed_shapes(rows, inputs, bits, encoding.codebook)
    if encoding.codes == "iq":
        return iq.packed_shapes(rows, inputs, bits, encoding.codebook)
    groups = group_count(inputs, encoding.group_size)
    shapes = {
        "codes": ((rows, packed_row_bytes(inputs, bits)), torch.uint8),
        "scales": ((rows, groups), grids.SCALE_DTYPE),
    }
    if encoding.has_zeros(bits):
        shapes["zeros"] = ((rows, packed_row_bytes(groups, encoding.grid_bits(bits))), torch.uint8)
    return shapes


@dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """One weight, or a stack of weights of the same width, in its stored form.

    nested: whether its codes are the leading bits of 4-bit ones; no weight of another width than 2, 3 or 4 is;
    state_bits: of trellis codes, 0 for grids; codebook: of EXL3's and of floating-point numbers, empty for others.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group_size: int
    inputs: int
    symmetric: bool
    nested: bool = False
    state_bits: int = 0
    codebook: str = ""
    unit: Tensor | None = None

    @classmethod
    def of(cls, parts: Mapping[str, Tensor], bits: int, inputs: int, encoding: Encoding) -> PackedWeight:
        """A weight of its stored tensors by name, see `parts`; KeyError where it has no codes or scales."""
        own = vars(encoding.at(bits))
        codes, scales, zeros, unit = parts["codes"], parts["scales"], parts.get("zeros"), parts.get("unit")
        return cls(codes=codes, scales=scales, zeros=zeros, unit=unit, bits=bits, inputs=inputs, **own)

    @classmethod
    def dropped(cls, rows: int, inputs: int, encoding: Encoding) -> PackedWeight:
        """A matrix [rows, inputs] of a dropped expert: no part of it is stored, all of its values are zero."""
        nothing = torch.empty(rows, 0, dtype=torch.uint8)
        own = vars(encoding.at(DROPPED))
        return cls(codes=nothing, scales=nothing.half(), zeros=None, bits=DROPPED, inputs=inputs, **own)

    @property
    def encoding(self) -> Encoding:
        """How its codes stand for values."""
        return Encoding.of(self)

    @property
    def whole(self) -> int:
        """How many rows, and inputs, hang together in tiles; 1 where codes lie row by row or there are none."""
        if not self.state_bits or self.bits == DROPPED:
            return 1
        return EXL3_SIDE if self.codebook else trellis.TILE

    @property
    def row_count(self) -> int:
        """N of a weight [..., N, K]."""
        return int((self.scales if self.whole > 1 else self.codes).shape[-2])

    def parts(self) -> dict[str, Tensor]:
        """The stored tensors by name: codes [..., N, B], scales [..., N, G] and, where there are such, zeros, unit."""
        if self.bits == DROPPED:
            return {}
        every: Mapping[str, Tensor | None] = {name: getattr(self, name) for name in PARTS}
        return {name: tensor for name, tensor in every.items() if tensor is not None}

    def map(self, change: Callable[[Tensor], Tensor]) -> PackedWeight:
        """The weight with every part [..., N, B] changed in its first axes or moved: another place, fewer weights."""
        zeros, unit = (None if part is None else change(part) for part in (self.zeros, self.unit))
        return replace(self, codes=change(self.codes), scales=change(self.scales), zeros=zeros, unit=unit)

    def rows(self, which: Tensor | slice) -> PackedWeight:
        """Some rows of a weight [N, K] whose codes lie row by row."""
        zeros = None if self.zeros is None else self.zeros[which].contiguous()
        return replace(self, codes=self.codes[which].contiguous(), scales=self.scales[which].contiguous(), zeros=zeros)

    def are_numbers(self) -> bool:
        """Whether what is stored stands for finite numbers."""
        if self.encoding.floats and self.bits != DROPPED:
            return floats.are_numbers(self.codes, self.scales, self.unit, self.bits)
        return bool(torch.isfinite(self.scales).all())

    def check(self, scale_dtype: torch.dtype = grids.SCALE_DTYPE) -> None:
        """ValueError unless bits and group size can be and the parts have the types and shapes that they imply.

        scale_dtype: what the scales of a grid are kept in.
        """
        if self.bits == DROPPED:
            if self.codes.dim() < 2 or self.codes.shape[-1]:
                raise ValueError(f"codes are {list(self.codes.shape)}, of a matrix that has none")
            return
        if self.bits not in SUPPORTED_BITS or self.inputs < 1 or self.group_size == 0 or self.group_size < -1:
            what = f"{self.inputs} inputs of {self.bits} bits in groups of {self.group_size}"
            raise ValueError(f"no packed weight has {what}")
        if self.codes.dim() < 2:
            raise ValueError(f"codes are {list(self.codes.shape)}, not rows of codes")
        if self.encoding.codes == "exl3":
            exl3.word_values(self.codebook)  # or there is no such code
            exl3.check_sides(self.scales.shape[-2] if self.scales.dim() > 1 else 0, self.inputs)
        elif self.state_bits:
            trellis.integer_values(self.bits, self.state_bits)
        *before, rows, _ = self.scales.shape if self.whole > 1 and self.scales.dim() > 1 else self.codes.shape
        wanted = {
            part: ([*before, *shape], dtype)
            for part, (shape, dtype) in packed_shapes(rows, self.inputs, self.bits, self.encoding).items()
        }
        if self.encoding.codes == "grid":
            wanted["scales"] = (wanted["scales"][0], scale_dtype)
        given = {part: (list(tensor.shape), tensor.dtype) for part, tensor in self.parts().items()}
        if wanted != given:
            part = next(name for name in PARTS if wanted.get(name) != given.get(name))
            raise ValueError(f"{part} of a packed weight are {given.get(part)}, not {wanted.get(part)}")

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.parts().values())

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values [..., N, K] in float32, of a grid (code - zero) * scale, rounded to `dtype`; ValueError as `check`.

        The scales of a grid may be of any floating-point type: other tools keep some that float16 does not hold.
        """
        self.check(self.scales.dtype if self.scales.is_floating_point() else grids.SCALE_DTYPE)
        if self.bits == DROPPED:
            return torch.zeros(*self.codes.shape[:-1], self.inputs, dtype=dtype, device=self.codes.device)
        if self.encoding.floats:
            stored = self.codes, self.scales, self.unit
            return floats.dequantize(*stored, self.bits, self.inputs, self.codebook, dtype)
        if self.encoding.codes == "iq":
            return iq.dequantize(self.codes, self.scales, self.bits, self.codebook, dtype)
        if self.codebook:
            return exl3.dequantize(self.codes, self.scales.squeeze(-1), self.bits, self.inputs, self.codebook, dtype)
        if self.state_bits:
            return trellis.dequantize(
                self.codes, self.scales.squeeze(-1), self.bits, self.state_bits, self.inputs, dtype
            )
        rows, count = self.map(lambda part: part.flatten(0, -2)), prod(self.codes.shape[:-1])
        values = torch.empty((count, self.inputs), dtype=dtype, device=self.codes.device)
        step = max(1, BLOCK_VALUES // self.inputs) if values.device.type == "cpu" else max(1, count)
        for start in range(0, count, step):
            some = rows.map(lambda part: part[start : start + step])  # noqa: B023
            codes = unpack(some.codes, self.bits, self.inputs)
            values[start : start + step] = grids.decode(codes, *some.grid(), self.group_size)
        return values.view(*self.codes.shape[:-1], self.inputs)

    def leading(self, bits: int) -> PackedWeight:
        """The nested weight of fewer bits that this one holds."""
        assert self.nested
        codes = unpack(self.codes, self.bits, self.inputs) >> (self.bits - bits)
        return replace(self, codes=pack(codes, bits), bits=bits)

    def grid(self) -> tuple[Tensor, Tensor | float]:
        """Scale and zero point of the codes as they are; ValueError for codes that have no grid."""
        _refuse_no_grid(self)
        zero: Tensor | float = middle_of(self.bits, self.encoding)
        if self.zeros is not None:
            zero = unpack(self.zeros, self.encoding.grid_bits(self.bits), self.scales.shape[-1])
        if not self.nested:
            return self.scales, zero
        scale = self.scales.float()
        middle = zero.float() if isinstance(zero, Tensor) else torch.full_like(scale, zero)
        return grids.nested_grid(scale, middle, self.bits)


def _refuse_no_grid(weight: PackedWeight) -> None:
    """ValueError for what only codes of a grid have."""
    if weight.encoding.codes != "grid":
        raise ValueError(f"{'trellis' if weight.state_bits else weight.codebook} codes stand for no grid")


def joined(parts: Sequence[PackedWeight], axis: int = 0) -> PackedWeight:
    """Weights of the same grid one after the other: stacks along their first axis, or rows of one along the next, which
    have no unit."""
    if len(parts) == 1:
        return parts[0]
    units = [part.unit for part in parts if part.unit is not None]
    assert not (units and axis), "rows of several matrices have no common unit"
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return replace(
        parts[0],
        codes=torch.cat([part.codes for part in parts], axis),
        scales=torch.cat([part.scales for part in parts], axis),
        zeros=torch.cat(zeros, axis) if zeros else None,
        unit=torch.cat(units, axis) if units else None,
    )


def row_range(weight: PackedWeight, first: int, count: int) -> PackedWeight:
    """The weight [count, K] of some of the rows [N, K] in order; ValueError unless they are whole tiles of trellis
    codes."""
    rows = slice(first, first + count)
    if weight.whole == 1:
        return weight.rows(rows)
    lines = _whole_tiles(weight, "rows", first, count, weight.row_count)
    return replace(weight, codes=weight.codes[lines].contiguous(), scales=weight.scales[rows].contiguous())


def _whole_tiles(weight: PackedWeight, what: str, first: int, count: int, length: int) -> slice:
    """The tiles of some rows or inputs of so many; ValueError unless they are whole."""
    last, whole = first + count, weight.whole
    if first % whole or (last % whole and last != length) or not 0 <= first < last <= length:
        raise ValueError(f"{what} {first} to {last - 1} are no whole tiles of {whole}")
    return slice(first // trellis.TILE, trellis.tiles_along(last))


def some_inputs(weight: PackedWeight, first: int, count: int) -> PackedWeight:
    """The weight [N, count] of some of the inputs [N, K]; ValueError unless they are whole groups of the grid, or all
    lie in one, or whole tiles of trellis codes, or blocks of i-quants."""
    if weight.bits == DROPPED:
        return replace(weight, inputs=count)
    if weight.whole > 1:
        tiles = _whole_tiles(weight, "inputs", first, count, weight.inputs)
        each = trellis.STEPS // 8 * weight.bits
        return replace(
            weight, codes=weight.codes[..., tiles.start * each : tiles.stop * each].contiguous(), inputs=count
        )
    size = resolved_group_size(weight.inputs, weight.group_size)
    last = first + count
    whole = not first % size and (not last % size or last == weight.inputs)
    blocks = weight.encoding.codes == "iq"
    within = whole or (first // size == (last - 1) // size and not blocks)
    if not within or not 0 <= first < last <= weight.inputs:
        raise ValueError(f"inputs {first} to {last - 1} are no whole groups of {size}")
    groups = slice(first // size, -(-last // size))
    if blocks:
        codes = weight.codes.unflatten(-1, (weight.scales.shape[-1], -1))[..., groups, :].flatten(-2).contiguous()
        return replace(weight, codes=codes, scales=weight.scales[..., groups].contiguous(), inputs=count)
    zeros = weight.zeros
    if zeros is not None:
        bits = weight.encoding.grid_bits(weight.bits)
        zeros = pack(unpack(zeros, bits, weight.scales.shape[-1])[..., groups], bits)
    return replace(
        weight,
        codes=pack(unpack(weight.codes, weight.bits, weight.inputs)[..., first:last], weight.bits),
        scales=weight.scales[..., groups].contiguous(),
        zeros=zeros,
        inputs=count,
    )


def symmetric_bits(weight: PackedWeight) -> int:
    """The least width of a symmetric grid that holds exactly the values of a weight that is not nested; ValueError for
    other codes."""
    _refuse_no_grid(weight)
    if weight.bits in (DROPPED, 1):
        return 2  # nothing is 0, -s and +s are -1 and 1, of the codes -2 to 1
    return weight.bits if weight.zeros is None else weight.bits + 1


def widened(weight: PackedWeight, bits: int) -> PackedWeight:
    """The same values on a symmetric grid of `bits` bits; ValueError below `symmetric_bits` and for nested weights.

    Codes are shifted so that the zero point lies in the middle; a sign grid becomes the codes one below and above it,
    with half the scale, which float16 holds exactly but for scales below 2**-13; what is dropped becomes zeros.
    """
    if weight.nested or not symmetric_bits(weight) <= bits <= SUPPORTED_BITS[-1]:
        raise ValueError(f"no symmetric grid of {bits} bits holds {weight.bits} bits{' nested' * weight.nested}")
    if weight.bits == DROPPED:
        return _zeros(weight, bits)
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


def _zeros(dropped: PackedWeight, bits: int) -> PackedWeight:
    """What stands for a dropped matrix in a symmetric grid."""
    *before, _ = dropped.codes.shape
    codes = torch.full((*before, dropped.inputs), 2 ** (bits - 1), dtype=torch.uint8)
    scales = torch.ones(*before, group_count(dropped.inputs, dropped.group_size), dtype=grids.SCALE_DTYPE)
    return replace(dropped, codes=pack(codes, bits), scales=scales, bits=bits, symmetric=True)
