"""Matrices of all experts side by side in the flat buffer: the tables that compiled code reads, and unpacked products.

Letters: E experts, C matrices of a stage, N rows and K inputs of a matrix, n rows of an unpacked tile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeq_kernels.cpu import columns, compiled, pages, schedule
from moeq_kernels.cpu.arrangement import ALIGNED, Shape, arrange, undo
from moeq_kernels.cpu.byte_pairs import most_products
from moeq_kernels.cpu.codes import CODES, LANES, UNIT
from moeq_kernels.cpu.emit import Spec
from moeq_kernels.cpu.forms import Form
from moeq_kernels.cpu.threads import together
from moeq_kernels.cpu.walks import Walk
from moeq_kernels.description import LayerOfExperts, Matrix
from moeq_kernels.once import made_once
from moeq_kernels.reference import some_rows
from moeq_kernels.threads import side_by_side

FLOATS_ROWS = 4  # from which on codes of 8 bits are multiplied faster as float32 than as two of 4 bits
UNPACKED_BYTES = 1 << 20  # of values at a time where a matrix is unpacked
Integers = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Matrices:
    """Those of all experts for one stage, side by side: `shapes` [E][C], places of each in the buffer.

    biases: [n] float32 of all of them; where: [E][C] the first of each in it, -1 for none.
    """

    shapes: Sequence[Sequence[Shape]]
    offsets: Sequence[Sequence[int]]
    biases: Floats
    where: Sequence[Sequence[int]]
    held: Tensor

    @made_once
    def kinds(self) -> list[tuple[str, int]]:
        """Kinds of codes and units among them: what blocks are compiled for."""
        return sorted({(shape.codes, shape.unit) for row in self.shapes for shape in row})

    @made_once
    def table(self) -> Integers:
        """[E, C, COLUMNS] as `columns` names them."""
        each = zip(self.shapes, self.offsets, self.where, strict=True)
        return np.array([self._entries(*expert) for expert in each], np.int64)

    def _entries(self, shapes: Sequence[Shape], offsets: Sequence[int], biases: Sequence[int]) -> list[list[int]]:
        """The rows of an expert."""
        return [
            self._entry(*places, alike=n > 0 and places[0].layout == shapes[0].layout)
            for n, places in enumerate(zip(shapes, offsets, biases, strict=True))
        ]

    def _entry(self, shape: Shape, offset: int, bias: int, *, alike: bool) -> list[int]:
        full, last = shape.units
        values = {
            columns.BITS: sum(shape.planes), columns.OFFSET: offset, columns.STRIDE: shape.stride,
            columns.ROWS: shape.rows, columns.SLOT: self.kinds.index((shape.codes, shape.unit)),
            columns.SCALES_AT: shape.scales_at, columns.ZEROS_AT: shape.zeros_at,
            columns.ZERO_STRIDE: LANES * shape.has_zeros, columns.GROUPS: shape.groups,
            columns.GROUP: shape.group_inputs, columns.LAST: shape.last_inputs, columns.UNITS: full,
            columns.LAST_UNITS: last, columns.UNIT: shape.unit, columns.BIAS: bias,
            columns.FILLED: shape.filled_inputs, columns.ALIKE: alike,
            columns.WORK: max(shape.stride, int(shape.filled_inputs * LANES / 2 * CODES[shape.codes].effort)),
        }  # fmt: skip
        return [values[column] for column in range(columns.COLUMNS)]

    @made_once
    def grids(self) -> Floats:
        """[E, C, 3], see `Shape.grid`."""
        return np.array([[shape.grid() for shape in row] for row in self.shapes], np.float32)

    @made_once
    def pairs(self) -> bool:
        """Whether all can be multiplied as pairs of bf16."""
        return all(codes not in ("float16", "float32") for codes, _ in self.kinds)

    @made_once
    def units(self) -> bool:
        """Whether all groups are of whole units, as tiles multiply them."""
        return all(unit == UNIT for _, unit in self.kinds)

    @made_once
    def inputs(self) -> int:
        return self.shapes[0][0].inputs

    @made_once
    def work(self) -> int:
        """Of the only matrix, all its blocks, see `columns`."""
        return int(self.table[0, 0, columns.WORK]) * self.shapes[0][0].blocks

    @made_once
    def rows(self) -> int:
        return max(shape.rows for row in self.shapes for shape in row)

    def with_places(self, places: Mapping[int, tuple[Sequence[Shape], Sequence[int]]]) -> Matrices:
        """The same with some experts elsewhere in the buffer: their shapes and offsets [C]. All kinds of codes among
        them are known already; only the rows of these experts are made anew."""
        shapes, offsets = list(self.shapes), list(self.offsets)
        table, grids = self.table.copy(), self.grids.copy()
        for expert, (shape, offset) in places.items():
            shapes[expert], offsets[expert] = shape, offset
            table[expert] = self._entries(shape, offset, self.where[expert])
            grids[expert] = [one.grid() for one in shape]
        made = replace(self, shapes=shapes, offsets=offsets)
        same = {name: getattr(self, name) for name in ("kinds", "inputs", "rows", "_functions", "_layouts")}
        made.__dict__.update(same, table=table, grids=grids)
        return made

    def matrix(self, expert: int, which: int) -> Matrix:
        shape, offset = self.shapes[expert][which], self.offsets[expert][which]
        return undo(shape, self.held[offset : offset + shape.nbytes])

    def some(self, rows: Tensor) -> Matrix:
        """Some rows [n] of the only matrix; only the blocks that have one are read."""
        shape, offset = self.shapes[0][0], self.offsets[0][0]
        blocks = self.held[offset : offset + shape.nbytes].view(shape.blocks, shape.stride)
        used, place = torch.unique(rows // LANES, return_inverse=True)
        found = undo(replace(shape, rows=len(used) * LANES), blocks[used].flatten())
        return some_rows(found, place * LANES + rows % LANES)

    @made_once
    def _functions(self) -> dict[str, Integers]:
        return {}

    def functions(self, form: Form) -> Integers:
        """Addresses of compiled blocks, [kinds, sizes], 0 for those that `compile` was not asked for."""
        found = self._functions.get(form.name)
        if found is None:  # of two threads that make it one has its own taken
            found = self._functions.setdefault(form.name, np.zeros((len(self.kinds), len(form.rows)), np.int64))
        return found

    @made_once
    def _layouts(self) -> dict[str, Integers]:
        return {}

    def layouts(self, form: Form) -> Integers:
        """How activations are laid out for blocks of each kind and size, [kinds, sizes], see `Form.layout`."""
        found = self._layouts.get(form.name)
        if found is None:
            every = [[form_of(form, codes, rows).layout for rows in form.rows] for codes, _ in self.kinds]
            found = self._layouts.setdefault(form.name, np.array(every))
        return found

    def bound(self, form: Form) -> Integers:
        """The numbers of `schedule.bound`, of arrays that are kept here."""
        functions, layouts = self.functions(form), self.layouts(form)
        return np.array(
            [
                self.table.ctypes.data, *self.table.shape[:2], functions.ctypes.data, *functions.shape,
                layouts.ctypes.data, self.grids.ctypes.data, self.biases.ctypes.data, len(self.biases),
                self.held.data_ptr(), self.inputs, self.rows,
            ],
            np.int64,
        )  # fmt: skip

    def compile(self, form: Form, tiles: Integers) -> None:
        """Have the blocks that the tiles need."""
        slots = self.table[tiles[:, columns.EXPERT], :, columns.SLOT]
        places = np.broadcast_to(tiles[:, columns.PLACE, None], slots.shape)
        for slot, place in set(zip(slots.flatten().tolist(), places.flatten().tolist(), strict=True)):
            self.compile_one(form, slot, place)

    def compile_one(self, form: Form, slot: int, place: int) -> None:
        """Have the block for a kind and a size."""
        codes, unit = self.kinds[slot]
        rows = form.rows[place]
        spec = Spec(form=form_of(form, codes, rows).name, codes=codes, unit=unit, rows=rows)
        self.functions(form)[slot, place] = compiled.address(spec)

    def product(self, rows: Tensor, expert: int, which: int, form: Form) -> Tensor:
        """rows [T, K] times a matrix [N, K], with its bias, in the rows' dtype: it is unpacked in tiles, each
        multiplied by torch; float16 rows are multiplied as float32, and bf16 rows where `Form.unpacks_bf16` says so."""
        short = rows.dtype == torch.bfloat16 and form.unpacks_bf16
        shape, dtype = self.shapes[expert][which], torch.bfloat16 if short else torch.float32
        name = str(dtype).removeprefix("torch.")
        spec = Spec(form=form.unpacking.name, codes=shape.codes, unit=shape.unit, rows=0, dtype=name)
        function, how, grid = compiled.address(spec), self.table[expert, which], self.grids[expert, which]
        step = max(1, UNPACKED_BYTES // (shape.inputs * dtype.itemsize * LANES))
        space = torch.empty(shape.inputs + shape.unit, min(step, shape.blocks) * LANES, dtype=dtype)
        result, given = rows.new_empty(len(rows), shape.blocks * LANES), rows.to(dtype)
        for first in range(0, shape.blocks, step):
            last = min(first + step, shape.blocks)
            numbers = np.zeros(schedule.UNPACKING, np.int64)
            numbers[2 * schedule.LINE :] = (
                how.ctypes.data, grid.ctypes.data, self.held.data_ptr(), function, first, last, space.data_ptr(),
                space.shape[1] * space.itemsize, space.itemsize,
            )  # fmt: skip
            together(compiled.entry(schedule.unpack), numbers)
            count = (last - first) * LANES
            result[:, first * LANES : first * LANES + count] = given @ space[: shape.inputs, :count]
        result = result[:, : shape.rows]
        bias = self.where[expert][which]
        if bias >= 0:
            result = result + torch.from_numpy(self.biases[bias : bias + shape.rows]).to(rows.dtype)
        return result


def form_of(form: Form, codes: str, rows: int) -> Form:
    """The form for one kind of codes and so many rows. Multiplied with activations as they are: dense values, trellis
    codes where that is faster, and codes of which no two products fit into 16 bits, by many rows."""
    found, kind = form.of_rows(rows), CODES[codes]
    if isinstance(kind, Walk) and kind.as_bytes(found.lanes) and found.walks_in_bytes(rows):
        found = found.bytewise
    wide = found.byte_pairs and not found.int8 and rows >= FLOATS_ROWS and not most_products(kind.largest)
    as_they_are = wide or not kind.affine or (kind.walked and found.walks_in_floats(rows))
    return found.floats if found.slices and as_they_are else found


def flat(layer: LayerOfExperts, stages: Sequence[Sequence[str]]) -> tuple[Tensor, list[Matrices]]:
    """All matrices of a layer in one buffer, which begins with zeros, and for each stage, which are names of
    projections, its part. ValueError for what cannot be arranged."""
    names = [name for stage in stages for name in stage]
    shapes = [{name: Shape.of(matrices[name]) for name in names} for matrices in layer.matrices]
    sizes = [shape[name].nbytes for shape in shapes for name in names]
    ends = np.cumsum([ALIGNED, *sizes]).tolist()
    held = pages.zeros(ends[-1])
    offsets = [dict(zip(names, ends[n * len(names) :], strict=False)) for n in range(len(shapes))]

    def put(expert: int) -> None:
        for name in names:
            shape, first = shapes[expert][name], offsets[expert][name]
            arrange(layer.matrices[expert][name], shape, held[first : first + shape.nbytes])

    side_by_side(put, range(len(shapes)))
    made = []
    for stage in stages:
        biases, where = biases_of(layer.biases, stage, len(shapes))
        made.append(
            Matrices(
                shapes=[[shape[name] for name in stage] for shape in shapes],
                offsets=[[offset[name] for name in stage] for offset in offsets],
                biases=biases,
                where=where,
                held=held,
            )
        )
    return held, made


def biases_of(
    biases: Sequence[Mapping[str, Tensor]], stage: Sequence[str], experts: int
) -> tuple[Floats, list[list[int]]]:
    """All biases of a stage as float32, one after the other, and where each begins, -1 for none."""
    parts, where, at = [np.zeros(0, np.float32)], [[-1] * len(stage) for _ in range(experts)], 0
    for expert, of_expert in enumerate(biases):
        for which, name in enumerate(stage):
            if name in of_expert:
                parts.append(of_expert[name].detach().float().contiguous().numpy())
                where[expert][which] = at
                at += len(parts[-1])
    return np.concatenate(parts), where
