"""All matrices of one layer in one flat buffer on the device, and the table that says where each of them lies.

The table has for each expert and projection a row of whole numbers (COLUMNS) and one of three numbers that make a
stored zero point z and scale s into those of the codes as they are: zero = z * GRID[1] + GRID[2], scale = s * GRID[0].
That is all that tells a plain grid, a nested one, a sign grid and a symmetric one apart: (code - zero) * scale.

Trellis codes have a kind instead of a width there (`strips`), and values of states that were trained instead of zero
points: int16 patterns of float16 and then of bfloat16, in the buffer once for each kind and number of states.

Letters: E experts, S projections, N rows, K inputs, G groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moeq_kernels.description import DOWN, Matrix
from moeq_kernels.gpu.strips import arrange, kind_of, strip_bytes, undo
from moeq_kernels.gpu.swizzle import FRAGMENT, code_bytes, rows_of, swizzle, unswizzle
from moeq_kernels.grids import SIGN_ZERO
from moeq_kernels.packed import PackedWeight
from moeq_kernels.packing import pack, packed_row_bytes, repacked, unpack
from moeq_kernels.reference import some_rows
from moeq_kernels.trellis import TILE, UNIT, WALKED, integer_values, tiles_along
from moeq_kernels.trellis_tables import table
from moeq_kernels.widths import resolved_group_size

ALIGNMENT = 16  # bytes: the widest load of a thread
MOST_NEAR = 10  # bits of a state: a table of 2 KB, or of 16 KB of pairs (`walks.in_pairs`)
COLUMNS = ("width", "codes", "scales", "zeros", "zero_bits", "group", "bias", "state_bits")
CODES_UNIT, SCALES_UNIT, ZEROS_UNIT, BIAS_UNIT, VALUES_UNIT = 4, 2, 4, 4, 2  # bytes; dense matrices: their elements


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one matrix lies, in bytes from the start; None: there is no such part. like: it without its tensors;
    values: of the states of trellis codes."""

    rows: int
    inputs: int
    codes: int
    scales: int | None = None
    zeros: int | None = None
    bias: int | None = None
    values: int | None = None
    like: PackedWeight | torch.dtype

    @property
    def width(self) -> int:
        """Bits, or the kind of trellis codes."""
        if self.walk is not None:
            return kind_of(self.walk[0])
        return self.like.bits if isinstance(self.like, PackedWeight) else 8 * self.like.itemsize

    @property
    def walk(self) -> tuple[int, int] | None:
        """Bits of a step and of a state of trellis codes; a step of 8 bits is its state."""
        if not isinstance(self.like, PackedWeight) or not self.like.state_bits:
            return None
        return self.like.bits, self.like.state_bits if self.like.bits in WALKED else self.like.bits

    @property
    def trained(self) -> bool:
        """Whether it has trellis codes whose values are in a table."""
        return self.walk is not None and table(*self.walk) is not None

    @property
    def code_bytes(self) -> int:
        """Of codes or elements."""
        if not isinstance(self.like, PackedWeight):
            return self.rows * self.inputs * self.like.itemsize
        if self.walk is not None:
            return tiles_along(self.rows) * strip_bytes(self.inputs, self.like.bits)
        return code_bytes(self.rows, self.inputs, self.like.bits)

    @property
    def group(self) -> int:
        like = self.like
        return resolved_group_size(self.inputs, like.group_size) if isinstance(like, PackedWeight) else self.inputs

    @property
    def zero_bits(self) -> int:
        """Of a zero point as it lies here: 2, 4 or 8, so that none crosses a byte; 0 where none is stored."""
        if self.zeros is None or not isinstance(self.like, PackedWeight):
            return 0
        return 1 << (self.like.encoding.grid_bits(self.like.bits) - 1).bit_length()

    @property
    def zero_row_bytes(self) -> int:
        """Of a group's zero points."""
        return -(-packed_row_bytes(self.rows, self.zero_bits) // ZEROS_UNIT) * ZEROS_UNIT if self.zero_bits else 0

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads: codes or elements, scales and zero points."""
        like = self.like
        groups = like.scales.shape[-1] if isinstance(like, PackedWeight) else 0
        return self.code_bytes + groups * (2 * self.rows + self.zero_row_bytes)

    def row(self) -> list[int]:
        """Its row of the table."""
        unit = CODES_UNIT if isinstance(self.like, PackedWeight) else self.like.itemsize
        return [
            self.width,
            self.codes // unit,
            (self.scales or 0) // SCALES_UNIT,
            (self.zeros or 0) // ZEROS_UNIT if self.walk is None else (self.values or 0) // VALUES_UNIT,
            self.zero_bits,
            self.group,
            -1 if self.bias is None else self.bias // BIAS_UNIT,
            0 if self.walk is None else self.walk[1],
        ]

    def grid(self) -> list[float]:
        """The factor of its scales, and the factor and shift of its zero points."""
        like = self.like
        if not isinstance(like, PackedWeight):
            return [1.0, 0.0, 0.0]
        if self.walk is not None:
            return [UNIT, 0.0, 0.0]
        if like.bits == 1:
            return [1.0, 0.0, SIGN_ZERO]
        width = like.encoding.grid_bits(like.bits)
        inside = 2 ** (width - like.bits)
        middle = 0.0 if self.zero_bits else 2.0 ** (width - 1)
        return [float(inside), 1.0 / inside if self.zero_bits else 0.0, (middle - (inside - 1) / 2) / inside]


class Stored:
    """Matrices [S] of each of E experts in one buffer. buffer: uint8; table: int64 [E, S, 8]; grids: float32 [E, S, 3].

    shapes: (N, K) of each projection, the same for all experts (else ValueError); dense: the dtype of matrices that are
    not packed, of which there may be one (else ValueError), None where all are packed; computed: whether the values of
    all trellis codes are computed from their states; values: else where those of (bits, state bits) begin, in bytes.
    """

    def __init__(self, matrices: Sequence[Sequence[Matrix]], biases: Sequence[Sequence[Tensor | None]]) -> None:
        self.shapes = shapes_of(matrices)
        kinds = {one.dtype for expert in matrices for one in expert if isinstance(one, Tensor)}
        if len(kinds) > 1:
            raise ValueError(f"dense matrices are of {len(kinds)} types")
        self.dense = next(iter(kinds), None)
        first = matrices[0][0]
        device = first.device if isinstance(first, Tensor) else first.codes.device
        self.places: list[list[Place]] = []
        size = 0
        for expert, added in zip(matrices, biases, strict=True):
            self.places.append([])
            for matrix, bias in zip(expert, added, strict=True):
                place, size = placed(matrix, bias, size)
                self.places[-1].append(place)
        size = self._place_values(size)
        self.buffer = torch.zeros(-(-size // 64) * 64, dtype=torch.uint8, device=device)
        for expert, added, places in zip(matrices, biases, self.places, strict=True):
            for matrix, bias, place in zip(expert, added, places, strict=True):
                put(self.buffer, matrix, bias, place)
        for (bits, state_bits), at in self.values.items():
            made = integer_values(bits, state_bits)
            write(self.buffer, at, torch.cat([made.half().view(torch.int16), made.bfloat16().view(torch.int16)]))
        self.table = torch.tensor([[one.row() for one in every] for every in self.places], device=device)
        self.grids = torch.tensor([[one.grid() for one in every] for every in self.places], device=device)

    def _place_values(self, size: int) -> int:
        """Find room for tables of values from `size` on, which all matrices have where one has; where they end."""
        every = [place for places in self.places for place in places]
        self.computed = not any(one.trained for one in every)
        walks = {one.walk for one in every if one.walk is not None and one.walk[0] in WALKED}
        self.values: dict[tuple[int, int], int] = {}
        for walk in () if self.computed else sorted(walks):
            self.values[walk] = size
            size += 2 * VALUES_UNIT << walk[1]
        self.places = [
            [one if one.walk is None else replace(one, values=self.values.get(one.walk)) for one in places]
            for places in self.places
        ]
        return size

    @property
    def nbytes(self) -> int:
        return sum(one.numel() * one.element_size() for one in (self.buffer, self.table, self.grids))

    def values_near(self, warps: int) -> int:
        """Where programs of so many warps find values of trellis codes: -1 where they are computed, the most bits of a
        state where tables of all walks are small enough to be brought into shared memory, else 0: in memory.

        One warp alone would pass values from thread to thread instead, many times a look-up.
        """
        if self.computed:
            return -1
        most = max(state_bits for _, state_bits in self.values)
        return most if warps > 1 and most <= MOST_NEAR else 0

    @property
    def kinds(self) -> Sequence[Sequence[Place]]:
        """Of the projections [S] of everything that may be in the table, what programs are compiled for."""
        return self.places

    def costs(self, slots: Sequence[int]) -> list[int]:
        """Bytes of a row of some projections of each expert [E]: what persistent programs divide work by."""
        return [cost_of([every[slot] for slot in slots]) for every in self.places]

    def widths(self, slots: Sequence[int]) -> int:
        """The widths of some projections as bits of a whole number: 1 << 4 where any matrix has 4 bits."""
        return sum({1 << every[slot].width for every in self.kinds for slot in slots})

    def step(self, slots: Sequence[int]) -> int:
        """Inputs that have one group wherever they begin: the most of 128, 64, 32 and 16 in all matrices of some slots.

        0 where groups are no multiples of 16, or rows none: then each weight gets its own scale (`codes.uneven`).
        """
        packed = [every[slot] for every in self.kinds for slot in slots if every[slot].scales is not None]
        groups = {one.group for one in packed if one.group < one.inputs}
        if any(one.rows % FRAGMENT for one in packed):
            return 0
        return next((step for step in (128, 64, 32, 16) if all(group % step == 0 for group in groups)), 0)

    def nested(self, slots: Sequence[int]) -> bool:
        """Whether any matrix of some slots has zero points with fractions."""
        likes = [every[slot].like for every in self.kinds for slot in slots]
        return any(isinstance(one, PackedWeight) and one.nested for one in likes)

    def copy(self) -> Stored:
        """The same in another place of the device's memory."""
        made = copy(self)
        made.buffer, made.table, made.grids = self.buffer.clone(), self.table.clone(), self.grids.clone()
        return made

    def view(self, dtype: torch.dtype) -> Tensor:
        """The buffer in another unit."""
        return self.buffer.view(dtype)

    def singles(self) -> Tensor:
        """Where biases lie, float32."""
        return self.view(torch.float32)

    def launches(self) -> list[tuple[int, ...]]:
        """Slots that one launch may compute: each alone, and the first two where they have one shape."""
        alone: list[tuple[int, ...]] = [(slot,) for slot in range(len(self.shapes))]
        return [*alone, (0, 1)] if len(self.shapes) > 1 and self.shapes[0] == self.shapes[1] else alone

    def matrix(self, expert: int, slot: int, index: Tensor | None = None) -> Matrix:
        """One matrix as it was given, bit for bit; index: some of its rows [n], in any order and with repetitions."""
        place = self.places[expert][slot]
        like, rows, inputs = place.like, place.rows, place.inputs
        if not isinstance(like, PackedWeight):
            dense = self._bytes(place.codes, rows * inputs * like.itemsize).view(like).view(rows, inputs)
            return dense.clone() if index is None else dense.index_select(0, index)
        assert place.scales is not None
        groups = like.scales.shape[-1]
        words = self._bytes(place.codes, place.code_bytes)
        scales = self._bytes(place.scales, 2 * groups * rows).view(like.scales.dtype).view(groups, rows).T
        if place.walk is not None:
            return _walked(like, words, scales, index)
        back = _grid_order(rows, words.device).argsort()
        scales, zeros = scales[back], None
        if place.zeros is not None:
            row = place.zero_row_bytes
            packed = self._bytes(place.zeros, groups * row).view(groups, row)
            zeros = unpack(packed[:, : packed_row_bytes(rows, place.zero_bits)], place.zero_bits, rows)
            zeros = zeros[:, back].T
        if index is not None:
            words = rows_of(words, rows, inputs, like.bits, index)
            scales, rows = scales.index_select(0, index), len(index)
            zeros = None if zeros is None else zeros.index_select(0, index)
        return replace(
            like,
            codes=repacked(unswizzle(words, rows, inputs, like.bits), like.bits),
            scales=scales.contiguous(),
            zeros=None if zeros is None else repacked(zeros.contiguous(), like.encoding.grid_bits(like.bits)),
        )

    def bias(self, expert: int, slot: int) -> Tensor | None:
        """What is added to the rows of one matrix, float32 [N]."""
        place = self.places[expert][slot]
        return None if place.bias is None else self._bytes(place.bias, 4 * place.rows).view(torch.float32)

    def _bytes(self, at: int, size: int) -> Tensor:
        return self.buffer[at : at + size]


def put(buffer: Tensor, matrix: Matrix, bias: Tensor | None, place: Place) -> None:
    """Write one matrix, its codes in the kernels' order, its scales and zero points [G, N] by group."""
    if isinstance(matrix, Tensor):
        write(buffer, place.codes, matrix)
    else:
        if place.walk is not None:
            write(buffer, place.codes, arrange(matrix.codes, matrix.bits))
        else:
            write(buffer, place.codes, swizzle(unpack(matrix.codes, matrix.bits, matrix.inputs), matrix.bits))
        assert place.scales is not None
        order = _grid_order(place.rows, matrix.scales.device)
        write(buffer, place.scales, matrix.scales.T if place.walk is not None else matrix.scales.T[:, order])
        if place.zeros is not None and matrix.zeros is not None:
            zeros = unpack(matrix.zeros, matrix.encoding.grid_bits(matrix.bits), matrix.scales.shape[-1])
            packed = pack(zeros.T[:, order].contiguous(), place.zero_bits)
            missing = place.zero_row_bytes - packed.shape[1]
            write(buffer, place.zeros, torch.nn.functional.pad(packed, (0, missing)) if missing else packed)
    if bias is not None and place.bias is not None:
        write(buffer, place.bias, bias.float())


def write(buffer: Tensor, at: int, tensor: Tensor) -> None:
    """The bytes of a tensor into those of a buffer, wherever each lies."""
    written = tensor.contiguous().flatten().view(torch.uint8)
    buffer[at : at + written.numel()] = written


def cost_of(places: Sequence[Place]) -> int:
    """Bytes of a row of some matrices of an expert, which have the same rows."""
    return max(1, sum(one.nbytes for one in places) // places[0].rows)


def in_order(matrices: Mapping[str, Matrix]) -> list[str]:
    """The names of an expert's projections, DOWN last."""
    return [*(name for name in matrices if name != DOWN), DOWN]


def shapes_of(matrices: Sequence[Sequence[Matrix]]) -> list[tuple[int, int]]:
    """(N, K) of each projection; ValueError where experts differ."""
    every = {tuple(shape_of(one) for one in expert) for expert in matrices}
    if len(every) != 1:
        raise ValueError("experts of a layer have other shapes than each other")
    return list(every.pop())


def shape_of(matrix: Matrix) -> tuple[int, int]:
    """(N, K) of one matrix."""
    if isinstance(matrix, Tensor):
        return matrix.shape[0], matrix.shape[1]
    return matrix.scales.shape[0], matrix.inputs


def _walked(like: PackedWeight, words: Tensor, scales: Tensor, index: Tensor | None) -> Matrix:
    """A matrix of trellis codes as it was given, or some of its rows; only the strips that have one are read."""
    if index is None:
        return replace(like, codes=undo(words, like.inputs, like.bits), scales=scales.contiguous())
    used, place = torch.unique(index // TILE, return_inverse=True)
    every = used[:, None] * TILE + torch.arange(TILE, device=index.device)
    found = scales.index_select(0, every.flatten().clamp(max=len(scales) - 1))
    some = replace(like, codes=undo(words, like.inputs, like.bits, used), scales=found)
    return some_rows(some, place * TILE + index % TILE)


def _grid_order(rows: int, device: torch.device) -> Tensor:
    """Rows in the order in which a group's scales and zero points lie: r and r + 8 of 16 beside each other where words
    do so."""
    order = torch.arange(rows, device=device)
    return order.view(-1, 2, FRAGMENT // 2).transpose(1, 2).flatten() if rows % FRAGMENT == 0 else order


def placed(matrix: Matrix, bias: Tensor | None, start: int) -> tuple[Place, int]:
    """The place of a matrix from `start` on, and where it ends."""
    rows, inputs = shape_of(matrix)
    at: dict[str, int] = {}
    sizes: dict[str, int] = {}
    like: PackedWeight | torch.dtype
    if isinstance(matrix, Tensor):
        like, sizes["codes"] = matrix.dtype, rows * inputs * matrix.element_size()
    else:
        matrix.check()
        like = matrix.map(lambda part: part.new_empty(part.shape, device="meta"))
        groups = matrix.scales.shape[-1]
        sizes |= {"codes": Place(rows=rows, inputs=inputs, codes=0, like=like).code_bytes, "scales": 2 * groups * rows}
        if matrix.zeros is not None:
            empty = Place(rows=rows, inputs=inputs, codes=0, zeros=0, like=like)
            sizes["zeros"] = groups * empty.zero_row_bytes
    if bias is not None:
        sizes["bias"] = 4 * rows
    for name, size in sizes.items():
        at[name] = start
        start += -(-size // ALIGNMENT) * ALIGNMENT
    return Place(rows=rows, inputs=inputs, like=like, **at), start
