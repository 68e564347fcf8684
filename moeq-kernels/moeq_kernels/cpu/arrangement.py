"""How one matrix lies in the flat buffer of a layer, and the way there and back.

A matrix [N, K] is blocks of 16 rows, one after the other; a lane is a row. A block holds its codes in units of 32
inputs (fewer where groups are no multiple of 32), see `codes`, then the scales, float16 [G, 16], then the zero points,
uint8 [G, 16], where there are some. Every group begins with a new unit; what is missing of the last unit of a group
and of the last block is zeros. All zero points of a grid without stored ones are 16 bytes that matrices share.

Letters: N rows, K inputs, G groups, g inputs of a full group, U inputs of a unit, P planes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from moeq_kernels import grids, trellis
from moeq_kernels.cpu.codes import CODES, LANES, UNIT, field, least_unit, slot_of
from moeq_kernels.cpu.kept_code import compiler, internal
from moeq_kernels.cpu.walks import MIDDLE, name_of
from moeq_kernels.description import Matrix
from moeq_kernels.packed import PackedWeight
from moeq_kernels.packing import pack, packed_row_bytes, unpack
from moeq_kernels.widths import NESTED_BITS, Encoding, group_count, resolved_group_size

ALIGNED = 64  # bytes, of every block
DENSE = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_compile, _field = compiler(), internal()(field)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What can be known of an arranged matrix without its values; sizes in bytes are of one block. It is asked for at
    every change of an expert's version, so that what follows from the fields is worked out once."""

    codes: str
    rows: int
    inputs: int
    group_size: int
    symmetric: bool = True
    nested: bool = False
    state_bits: int = 0

    @classmethod
    def of(cls, matrix: Matrix) -> Shape:
        """ValueError for what cannot be arranged."""
        if isinstance(matrix, Tensor):
            if matrix.dim() != 2 or matrix.dtype not in DENSE or not matrix.numel():
                raise ValueError(f"a dense matrix of {matrix.dtype} {list(matrix.shape)}")
            rows, inputs = matrix.shape
            return cls(codes=DENSE[matrix.dtype], rows=rows, inputs=inputs, group_size=-1)
        matrix.check()
        if matrix.codes.dim() != 2 or not matrix.codes.numel():
            raise ValueError(f"packed codes {list(matrix.codes.shape)}")
        return cls(
            codes=name_of(matrix.bits, matrix.state_bits) if matrix.state_bits else str(matrix.bits),
            rows=matrix.scales.shape[0],
            inputs=matrix.inputs,
            group_size=matrix.group_size,
            symmetric=matrix.symmetric,
            nested=matrix.nested,
            state_bits=matrix.state_bits,
        )

    @cached_property
    def planes(self) -> tuple[int, ...]:
        return CODES[self.codes].planes

    @cached_property
    def blocks(self) -> int:
        return -(-self.rows // LANES)

    @cached_property
    def groups(self) -> int:
        return group_count(self.inputs, self.group_size)

    @cached_property
    def group_inputs(self) -> int:
        return resolved_group_size(self.inputs, self.group_size)

    @cached_property
    def last_inputs(self) -> int:
        return self.inputs - (self.groups - 1) * self.group_inputs

    @cached_property
    def unit(self) -> int:
        """Inputs that are filled up to a whole number of them in every group."""
        if self.state_bits:
            return UNIT
        whole = self.group_inputs if self.groups > 1 else self.inputs
        return UNIT if whole % UNIT == 0 else least_unit(self.planes)

    @cached_property
    def units(self) -> tuple[int, int]:
        """Units of a full group and of the last one."""
        return -(-self.group_inputs // self.unit), -(-self.last_inputs // self.unit)

    @cached_property
    def layout(self) -> tuple[int, ...]:
        """What rows of activations are laid out by: inputs of groups, and the units that whole numbers lie in."""
        return self.groups, self.group_inputs, self.last_inputs, self.unit

    @cached_property
    def words(self) -> int:
        """Words of 32 bits of a lane."""
        full, last = self.units
        return ((self.groups - 1) * full + last) * self.unit * sum(self.planes) // 32

    @cached_property
    def filled_inputs(self) -> int:
        """Inputs with what fills up the last unit of every group."""
        full, last = self.units
        return ((self.groups - 1) * full + last) * self.unit

    @cached_property
    def scales_at(self) -> int:
        return self.words * LANES * 4

    @cached_property
    def zeros_at(self) -> int:
        return self.scales_at + (2 * LANES * self.groups if CODES[self.codes].affine else 0)

    @cached_property
    def has_zeros(self) -> bool:
        return CODES[self.codes].affine and Encoding.of(self).has_zeros(sum(self.planes))

    @cached_property
    def stride(self) -> int:
        """Bytes from one block to the next."""
        return -(-(self.zeros_at + LANES * self.groups * self.has_zeros) // ALIGNED) * ALIGNED

    @cached_property
    def nbytes(self) -> int:
        return self.blocks * self.stride

    def grid(self) -> tuple[float, float, float]:
        """scale_step, zero_step and zero_start: value = (code - (zero_step * zero + zero_start)) * scale_step * scale
        with what is stored; a zero that is not stored counts as 0."""
        if not CODES[self.codes].affine:
            return 1.0, 1.0, 0.0
        if self.state_bits:
            return trellis.UNIT, 1.0, float(MIDDLE)
        bits = int(self.codes)
        inside = 2.0 ** (NESTED_BITS[-1] - bits) if self.nested else 1.0
        start = -(inside - 1) / 2 / inside
        if not self.has_zeros:
            middle = grids.SIGN_ZERO if bits == 1 else 2.0 ** (Encoding.of(self).grid_bits(bits) - 1)
            start += middle / inside
        return inside, 1 / inside, start


@_compile  # type: ignore[untyped-decorator]
def _to_words(codes, bits, planes, slot, inputs, group, unit, words, stride):  # type: ignore[no-untyped-def]
    """Bit streams [N, B] into words [blocks * stride] of uint32, which are 0 before; group: inputs of a full one."""
    per_unit, most = unit * bits // 32, (bits + 14) // 8
    number = len(planes)
    word, shift = np.empty((number, unit), np.int64), np.empty((number, unit), np.uint32)
    left, mask = np.empty(number, np.uint32), np.empty(number, np.uint32)
    above, base = bits, 0
    for which, plane in enumerate(planes):  # where the bits of each of a unit's codes go
        above -= plane
        left[which], mask[which] = above, (1 << plane) - 1
        for offset in range(unit):
            of_plane, low = _field(plane, slot, offset >> 1)
            word[which, offset], shift[which, offset] = base + of_plane * 16, low + 16 * (offset & 1)
        base += unit * plane // 32 * 16
    for row in range(codes.shape[0]):
        stream = codes[row]
        at = row // 16 * stride + row % 16
        for first in range(0, inputs, group):
            last = min(first + group, inputs)
            for begin in range(first, last, unit):
                for offset in range(min(unit, last - begin)):
                    bit = (begin + offset) * bits
                    byte = bit >> 3
                    code = np.uint32(0)
                    for more in range(min(most, stream.shape[0] - byte)):
                        code |= np.uint32(stream[byte + more]) << np.uint32(8 * more)
                    code >>= np.uint32(bit & 7)
                    for which in range(number):
                        value = (code >> left[which]) & mask[which]
                        words[at + word[which, offset]] |= value << shift[which, offset]
                at += per_unit * 16


@_compile  # type: ignore[untyped-decorator]
def _from_words(words, bits, planes, slot, inputs, group, unit, codes, stride):  # type: ignore[no-untyped-def]
    """The inverse: codes [N, B] are zeros before."""
    per_unit = unit * bits // 32
    for row in range(codes.shape[0]):
        stream = codes[row]
        lane = row % 16
        at = row // 16 * stride
        for first in range(0, inputs, group):
            last = min(first + group, inputs)
            for begin in range(first, last, unit):
                for offset in range(min(unit, last - begin)):
                    code, left, base = np.uint32(0), bits, at
                    for plane in planes:
                        left -= plane
                        word, low = _field(plane, slot, offset >> 1)
                        value = words[base + word * 16 + lane] >> np.uint32(low + 16 * (offset & 1))
                        code |= (value & np.uint32((1 << plane) - 1)) << np.uint32(left)
                        base += unit * plane // 32 * 16
                    bit = (begin + offset) * bits
                    moved = np.uint64(code) << np.uint64(bit & 7)
                    byte = bit >> 3
                    while moved:
                        stream[byte] |= np.uint8(moved & np.uint64(255))
                        moved >>= np.uint64(8)
                        byte += 1
                at += per_unit * 16


def _streams(matrix: Tensor) -> tuple[Tensor, int]:
    """A dense matrix as rows of bytes with the bits of one value; a float32 has its two halves swapped by `planes`."""
    return matrix.contiguous().view(torch.uint8), 8 * matrix.element_size()


def _put_tiles(codes: Tensor, shape: Shape, into: Tensor) -> None:
    """Tiles [R, C*32*k] into blocks [R, stride]: chunks of 16 bits of a row, of two tiles, as words of its lane."""
    bits, along = sum(shape.planes), trellis.tiles_along(shape.inputs)
    tiles = codes.contiguous().view(torch.int16).view(shape.blocks, along, LANES, bits)
    whole = torch.nn.functional.pad(tiles, (0, 0, 0, 0, 0, along % 2)).view(shape.blocks, -1, 2, LANES, bits)
    chunks = whole.transpose(2, 3).reshape(shape.blocks, -1, LANES, bits, 2).transpose(2, 3)
    into[:, : shape.scales_at] = chunks.contiguous().view(torch.uint8).view(shape.blocks, -1)


def _tiles_of(blocks: Tensor, shape: Shape) -> Tensor:
    """The inverse."""
    bits, along = sum(shape.planes), trellis.tiles_along(shape.inputs)
    words = blocks[:, : shape.scales_at].contiguous().view(torch.int16).view(shape.blocks, -1, bits, LANES, 2)
    chunks = words.transpose(2, 3).reshape(shape.blocks, -1, LANES, 2, bits).transpose(2, 3)
    tiles = chunks.reshape(shape.blocks, -1, LANES, bits)[:, :along]
    return tiles.contiguous().view(torch.uint8).view(shape.blocks, -1)


def arrange(matrix: Matrix, shape: Shape, into: Tensor) -> None:
    """Write a matrix into the bytes `into` [shape.nbytes], uint8 zeros that begin on a word."""
    if isinstance(matrix, PackedWeight) and shape.state_bits:
        blocks = into.view(shape.blocks, shape.stride)
        _put_tiles(matrix.codes, shape, blocks)
        scales = _by_block(matrix.scales, shape).view(torch.uint8).view(shape.blocks, -1)
        blocks[:, shape.scales_at : shape.zeros_at] = scales
        return
    codes, bits = (matrix.codes, matrix.bits) if isinstance(matrix, PackedWeight) else _streams(matrix)
    words = into.numpy().view(np.uint32)
    _to_words(codes.contiguous().numpy(), bits, *_how(shape), words, shape.stride // 4)
    if isinstance(matrix, PackedWeight):
        blocks = into.view(shape.blocks, shape.stride)
        scales = _by_block(matrix.scales, shape).view(torch.uint8)
        blocks[:, shape.scales_at : shape.zeros_at] = scales.view(shape.blocks, -1)
        if matrix.zeros is not None:
            width = matrix.encoding.grid_bits(matrix.bits)
            zeros = _by_block(unpack(matrix.zeros, width, shape.groups), shape)
            blocks[:, shape.zeros_at : shape.zeros_at + LANES * shape.groups] = zeros.view(shape.blocks, -1)


def undo(shape: Shape, held: Tensor) -> Matrix:
    """The matrix that was arranged, from its bytes [shape.nbytes]."""
    if shape.state_bits:
        blocks = held.view(shape.blocks, shape.stride)
        scales = blocks[:, shape.scales_at : shape.zeros_at].contiguous().view(grids.SCALE_DTYPE)
        parts = {"codes": _tiles_of(blocks, shape), "scales": _by_row(scales, shape)}
        return PackedWeight.of(parts, sum(shape.planes), shape.inputs, Encoding.of(shape))
    packed = CODES[shape.codes].affine
    bits = sum(shape.planes)
    codes = torch.zeros(shape.rows, packed_row_bytes(shape.inputs, bits) if packed else shape.inputs * bits // 8,
                        dtype=torch.uint8)  # fmt: skip
    _from_words(held.numpy().view(np.uint32), bits, *_how(shape), codes.numpy(), shape.stride // 4)
    if not packed:
        dtype = next(dtype for dtype, name in DENSE.items() if name == shape.codes)
        return codes.view(dtype)
    blocks = held.view(shape.blocks, shape.stride)
    scales = blocks[:, shape.scales_at : shape.zeros_at].contiguous().view(grids.SCALE_DTYPE)
    zeros = None
    if shape.has_zeros:
        stored = _by_row(blocks[:, shape.zeros_at : shape.zeros_at + LANES * shape.groups], shape)
        zeros = pack(stored, Encoding.of(shape).grid_bits(bits))
    return PackedWeight(
        codes=codes,
        scales=_by_row(scales, shape),
        zeros=zeros,
        bits=bits,
        group_size=shape.group_size,
        inputs=shape.inputs,
        symmetric=shape.symmetric,
        nested=shape.nested,
    )


def _how(shape: Shape) -> tuple[tuple[int, ...], int, int, int, int]:
    """Planes, bits of a slot, inputs, inputs of a full group and of a unit."""
    return shape.planes, slot_of(sum(shape.planes)), shape.inputs, shape.group_inputs, shape.unit


def _by_block(values: Tensor, shape: Shape) -> Tensor:
    """[N, G] as [blocks, G, 16], filled up with zeros."""
    whole = values.new_zeros(shape.blocks * LANES, shape.groups)
    whole[: shape.rows] = values
    return whole.view(shape.blocks, LANES, shape.groups).transpose(1, 2).contiguous()


def _by_row(values: Tensor, shape: Shape) -> Tensor:
    """The inverse: [blocks, G * 16] as [N, G]."""
    rows = values.reshape(shape.blocks, shape.groups, LANES).transpose(1, 2).reshape(-1, shape.groups)
    return rows[: shape.rows].contiguous()
