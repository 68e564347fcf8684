"""The experts of a layer, or one matrix, in one flat buffer, and their products with rows of activations.

Letters: T tokens, k experts a token, P = T*k rows, E experts, A experts with rows, C matrices of a stage, S tiles, H
hidden size, I intermediate size, N rows and K inputs of a matrix.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeq_kernels.cpu import columns, finish, routing, schedule, tiles
from moeq_kernels.cpu.codes import LANES
from moeq_kernels.cpu.compiled import call, entry
from moeq_kernels.cpu.forms import Form
from moeq_kernels.cpu.matrices import Integers, Matrices, flat
from moeq_kernels.cpu.threads import awake, together
from moeq_kernels.description import DOWN, LayerOfExperts, Matrix

ITEM_BYTES = 1 << 19  # of packed matrices that a thread claims at once, fewer where they are used for many rows
ITEMS = 4  # of a thread, at least, where there are many rows
BF16_BYTES = 2
AHEAD_BYTES = 1 << 13  # of packed matrices, asked for before they are needed: 4 KiB cost 5 %, none half the speed
WAKING_BYTES = 2 << 20  # of packed matrices, and as many again for four rows, below which no other thread is woken
DIVIDED_BYTES = 1 << 19  # the same for one matrix, below which even threads that are awake have no part: two of them
# ran at 1.0 to 1.7 times the speed of one from there on, at 0.7 to 1.0 times with half of it and less
GATED, ALONE = ("gate_proj", "up_proj"), ("up_proj",)


@cache
def _sizes(form: Form) -> Integers:
    return np.array(form.rows)


@dataclass(frozen=True)
class _Routed:
    """Rows sorted by expert: order [P], the first of every expert [E + 1], and tiles [S, 5] of the experts that are not
    unpacked, of which there are `experts`."""

    order: Integers
    starts: Integers
    tiles: Integers
    experts: int

    @classmethod
    def of(cls, index: Integers, experts: int, form: Form, whole: int) -> _Routed:
        order, starts = np.empty(index.size, np.int64), np.empty(experts + 1, np.int64)
        tiles = np.empty((index.size, 5), np.int64)
        count, tiled = routing.route(index, starts, _sizes(form), whole, order, tiles)
        return cls(order, starts, tiles[:count], tiled)

    @property
    def rows(self) -> float:
        """Of an expert that has some, at most, in the mean."""
        return len(self.order) / self.experts

    def whole(self, whole: int) -> list[int]:
        """Experts with that many rows and more, which have no tiles."""
        return [] if len(self.order) < whole else np.flatnonzero(np.diff(self.starts) >= whole).tolist()  # type: ignore[no-any-return]


class _Stage:
    """One stage of a call: its matrices times the rows of a source, see `schedule.describe`."""

    def __init__(self, matrices: Matrices, form: Form, routed: _Routed, *, by_block: bool) -> None:
        self.matrices, self.form, self.routed = matrices, form, routed
        self.functions = matrices.functions(form)
        self.starts, self.words, self.sums, self.items, self.nbytes, complete = schedule.plan(
            routed.tiles,
            matrices.table,
            self.functions,
            matrices.layouts(form),
            by_block,
            *self._item(by_block),
        )
        if not complete:
            matrices.compile(form, routed.tiles)

    def _item(self, by_block: bool) -> tuple[int, int, int]:
        """About how many bytes of matrices an item has, what its blocks are a multiple of, and at most how many.

        Tiles are as fast as bytes come, so that items need not be smaller for many rows; all blocks of an item share
        the activations, and every thread has some items."""
        rows, form = self.routed.rows, self.form
        if not form.tiles or rows < form.tiles:
            multiple = schedule.MOST_TOGETHER if form.vectors.slices else 1
            return int(ITEM_BYTES / max(1.0, rows / 4)), multiple, schedule.MOST_BLOCKS
        given = len(self.routed.order) * self.matrices.inputs * BF16_BYTES if by_block else 0
        blocks = self.matrices.rows // LANES * (1 if by_block else self.routed.experts)
        threads = torch.get_num_threads()
        most = blocks // (ITEMS * threads) if threads > 1 else schedule.MOST_BLOCKS
        return max(ITEM_BYTES, given), tiles.SIDE, min(max(tiles.SIDE, most), schedule.MOST_BLOCKS)

    def arguments(self, source: Tensor, per_row: int, end: int, weights: Tensor, per_token: int, out: Tensor) -> Any:
        """Those of `schedule.describe`; source: [R, K] float32."""
        routed, held = self.routed, self.matrices.held
        layouts = self.matrices.layouts(self.form)
        where = held.data_ptr(), AHEAD_BYTES
        how = self.matrices.table, routed.tiles, routed.order, self.starts, per_row, layouts, *where
        counters = np.zeros(4 * schedule.LINE, np.int64)
        layout, sums = np.zeros(self.words, np.uint32), np.zeros(self.sums, np.float32)
        return (
            how, counters, source.numpy(), layout, sums, self.items, self.functions, self.matrices.grids, end,
            weights.numpy(), per_token, out.numpy(), self.matrices.biases,
        )  # fmt: skip


def _threads(nbytes: int, rows: float) -> int | None:
    """1 for what is done before another thread is awake, else None for all."""
    return 1 if nbytes * (1 + rows / 4) < WAKING_BYTES else None


NO_WEIGHTS = torch.empty(0, dtype=torch.float32)


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """The projections before DOWN, gate before up."""
    before = [name for name in names if name != DOWN]
    return tuple(sorted(before)) if set(before) == set(GATED) else tuple(before)


class PackedLayer:
    """The experts of a layer as they are multiplied; see `description.PreparedLayer`.

    form: what it is compiled for; prefill: rows of an expert from which it is unpacked and multiplied by torch.
    """

    def __init__(self, layer: LayerOfExperts, form: Form, prefill: int) -> None:
        self.form, self.prefill = form, prefill
        self.gate, self.finish = layer.gate, layer.finish
        self.projections = in_order(layer.matrices[0])
        self.held, (self.first, self.second) = self._arranged(layer)
        known = finish.ACTIVATIONS.get(layer.activation or "")
        self.activation = known if self.projections in (GATED, ALONE) else None

    def _arranged(self, layer: LayerOfExperts) -> tuple[Tensor, list[Matrices]]:
        return flat(layer, [self.projections, (DOWN,)])

    @property
    def nbytes(self) -> int:
        return sum([self.held.nbytes, *(part.table.nbytes + part.biases.nbytes for part in (self.first, self.second))])

    def matrix(self, expert: int, projection: str) -> Matrix:
        if projection == DOWN:
            return self.second.matrix(expert, 0)
        return self.first.matrix(expert, self.projections.index(projection))

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """As `description.PreparedLayer`; ValueError for shapes that do not belong together."""
        if hidden.dim() != 2 or hidden.shape[1] != self.first.inputs or index.shape != weights.shape:
            given = [list(part.shape) for part in (hidden, index, weights)]
            raise ValueError(f"hidden, index and weights are {given}, not [T, {self.first.inputs}], [T, k] and [T, k]")
        if index.dim() != 2 or len(index) != len(hidden) or index.is_floating_point():
            raise ValueError(f"index is {index.dtype} {list(index.shape)}, not whole numbers [{len(hidden)}, k]")
        with torch.no_grad():
            return self._sum(hidden.detach(), index, weights.detach())

    def _sum(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        both = self.first, self.second
        pairs = hidden.dtype == torch.bfloat16 and all(part.pairs for part in both)
        form = self.form.taking(pairs, all(part.units for part in both))
        flat_index = index.reshape(-1).to(torch.int64).contiguous().numpy()
        routed = _Routed.of(flat_index, len(self.first.shapes), form, self.prefill)
        share = weights.reshape(-1).to(torch.float32).contiguous()
        out = torch.zeros(len(hidden), self.second.rows, dtype=torch.float32)
        if len(routed.tiles):
            source = hidden.float().contiguous()
            if self.activation is not None and self.finish is None:
                self._fused(source, form, routed, share, index.shape[1], out)
            else:
                self._apart(source, hidden.dtype, form, routed, share, index.shape[1], out)
        for expert in routed.whole(self.prefill):
            self._unpacked(hidden, expert, routed, share, index.shape[1], out)
        return out.to(hidden.dtype)

    def _fused(self, source: Tensor, form: Form, routed: _Routed, share: Tensor, top_k: int, out: Tensor) -> None:
        """All in one call: the activation in the pass of gate and up, weights and sum in that of down."""
        first = _Stage(self.first, form, routed, by_block=False)
        second = _Stage(self.second, form, routed, by_block=True)
        inner = torch.empty(1, len(routed.order), self.first.rows, dtype=torch.float32)
        one = first.arguments(source, top_k, self.activation or 0, NO_WEIGHTS, 1, inner)
        two = second.arguments(inner[0], 0, finish.WEIGHTED, share, top_k, out[None])
        numbers = np.empty(2 * schedule.NUMBERS, np.int64)
        schedule.describe(*one, numbers[: schedule.NUMBERS])
        schedule.describe(*two, numbers[schedule.NUMBERS :])
        together(entry(schedule.two_stages), numbers, _threads(first.nbytes + second.nbytes, routed.rows))

    def _apart(
        self, source: Tensor, dtype: torch.dtype, form: Form, routed: _Routed, share: Tensor, top_k: int, out: Tensor
    ) -> None:
        """The gate, or what finishes rows, is Python's: a call before it and one after it."""
        last = int(routed.tiles[:, columns.FIRST : columns.SIZE].sum(1).max())
        first = _products(self.first, form, routed, source, top_k)[:, :last].to(dtype)
        shapes = self.first.shapes[0]
        parts = {name: part[:, : shape.rows] for name, part, shape in zip(self.projections, first, shapes, strict=True)}
        inner = self.gate(parts).float().contiguous()
        rows = _products(self.second, form, routed, inner, 0)[0, :last]
        if self.finish is not None:
            rows = self.finish(rows.to(dtype)).float()
        order = torch.from_numpy(routed.order[:last])
        kept = torch.from_numpy(np.isin(np.arange(last), _rows_of(routed.tiles)))
        out.index_add_(0, order[kept] // top_k, rows[kept] * share[order[kept], None])

    def _unpacked(self, hidden: Tensor, expert: int, routed: _Routed, share: Tensor, top_k: int, out: Tensor) -> None:
        """One expert with many rows: its matrices as values, a tile at a time, and torch's products."""
        order = torch.from_numpy(routed.order[routed.starts[expert] : routed.starts[expert + 1]])
        rows = hidden[order // top_k]
        parts = {
            name: self.first.product(rows, expert, which, self.form) for which, name in enumerate(self.projections)
        }
        result = self.second.product(self.gate(parts), expert, 0, self.form)
        result = result if self.finish is None else self.finish(result)
        out.index_add_(0, order // top_k, result.float() * share[order, None])


def _rows_of(tiles: Integers) -> Integers:
    """The places of all rows of tiles among those sorted by expert."""
    spans = [np.arange(tile[columns.FIRST], tile[columns.FIRST] + tile[columns.COUNT]) for tile in tiles]
    return np.concatenate(spans)


def _products(matrices: Matrices, form: Form, routed: _Routed, source: Tensor, per_row: int) -> Tensor:
    """Products [C, P, N] in float32 of a source's rows, by expert; what no tile has is 0."""
    stage = _Stage(matrices, form, routed, by_block=False)
    out = torch.zeros(len(matrices.shapes[0]), len(routed.order), matrices.rows, dtype=torch.float32)
    arguments = stage.arguments(source, per_row, finish.PRODUCTS, NO_WEIGHTS, 1, out)
    numbers = np.empty(schedule.NUMBERS, np.int64)
    schedule.describe(*arguments, numbers)
    together(entry(schedule.one_stage), numbers, _threads(stage.nbytes, routed.rows))
    return out


class _Shared(threading.local):
    """The numbers of `schedule.alone_together`, which take microseconds to make: a thread makes one call at a time."""

    def __init__(self) -> None:
        self.numbers = (ctypes.c_int64 * schedule.TOGETHER_ALONE)()
        self.address = ctypes.addressof(self.numbers)

    def put(self, *numbers: int) -> int:
        """Where they lie, the counter at its beginning."""
        self.numbers[0] = 0
        self.numbers[schedule.LINE :] = list(numbers)
        return self.address


_shared = _Shared()


class PackedLinear:
    """One matrix as it is multiplied; see `description.PreparedLinear`."""

    def __init__(self, matrix: Matrix, bias: Tensor | None, form: Form, prefill: int) -> None:
        self.form, self.prefill = form, prefill
        biases: list[Mapping[str, Tensor]] = [{} if bias is None else {DOWN: bias}]
        layer = LayerOfExperts(matrices=[{DOWN: matrix}], biases=biases, gate=lambda parts: parts[DOWN])
        self.held, (self.matrices,) = flat(layer, [(DOWN,)])
        self.held_bytes = self.held.nbytes
        self._alone: dict[tuple[str, int, bool], tuple[Integers, int]] = {}

    @property
    def nbytes(self) -> int:
        return self.held.nbytes + self.matrices.table.nbytes + self.matrices.biases.nbytes

    def matrix(self) -> Matrix:
        return self.matrices.matrix(0, 0)

    def some(self, rows: Tensor) -> Matrix:
        return self.matrices.some(rows)

    def __call__(self, rows: Tensor) -> Tensor:
        """As `description.PreparedLinear`; ValueError for rows of another length."""
        if rows.dim() != 2 or rows.shape[1] != self.matrices.inputs:
            raise ValueError(f"rows are {list(rows.shape)}, not [T, {self.matrices.inputs}]")
        rows, count, dtype = rows.detach(), rows.shape[0], rows.dtype
        if count >= self.prefill:
            return self.matrices.product(rows, 0, 0, self.form)
        if not count:
            return rows.new_empty(0, self.matrices.rows)
        form = self.form.taking(dtype == torch.bfloat16 and self.matrices.pairs, self.matrices.units)
        if count <= form.rows[-1]:
            return self._product_alone(rows, form)
        source = rows.float().contiguous()
        routed = _Routed.of(np.zeros(count, np.int64), 1, form, self.prefill)
        return _products(self.matrices, form, routed, source, 1)[0].to(dtype)

    def _product_alone(self, rows: Tensor, form: Form) -> Tensor:
        """As a call, of few rows: in this thread, or shared out where that pays."""
        short, count = rows.dtype == torch.bfloat16, rows.shape[0]
        given = (rows if short else rows.float()).contiguous()
        out = torch.empty(count, self.matrices.rows, dtype=given.dtype)
        how = self._how_alone(form, bisect_left(form.rows, count), short)
        threads = torch.get_num_threads()
        if threads > 1 and self._divided(count):
            where = _shared.put(how, self._step(threads), given.data_ptr(), out.data_ptr(), count)
            together(entry(schedule.alone_together), where)
        else:
            call(schedule.alone)(how, given.data_ptr(), out.data_ptr(), count)
        return out if rows.dtype == out.dtype else out.to(rows.dtype)

    def _divided(self, count: int) -> bool:
        """Whether other threads have a part: of much, always; of less, where they are awake, as they are while calls
        follow each other."""
        if _threads(self.held_bytes, count) is None:
            return True
        return self.held_bytes * (1 + count / 4) >= DIVIDED_BYTES and awake()

    def _step(self, threads: int) -> int:
        """Blocks that a thread takes at a time: all have the same bytes."""
        multiple = schedule.MOST_TOGETHER
        most = -(-self.matrices.rows // LANES) // (ITEMS * threads)
        return min(max(1, most // multiple), schedule.MOST_BLOCKS // multiple) * multiple

    def _how_alone(self, form: Form, place: int, short: bool) -> int:
        """The address of `schedule.alone`'s numbers, which do not depend on the rows."""
        key = form.name, place, short
        if key not in self._alone:
            matrices = self.matrices
            matrices.compile_one(form, 0, place)
            parts = matrices.layouts(form), matrices.table, matrices.functions(form), matrices.grids, matrices.biases
            numbers = np.array(
                [
                    place, form.rows[place], len(form.rows), *(part.ctypes.data for part in parts),
                    len(matrices.biases), self.held.data_ptr(), AHEAD_BYTES, matrices.inputs, matrices.rows, short,
                ],
                np.int64,
            )  # fmt: skip
            self._alone[key] = numbers, int(numbers.ctypes.data)
        return self._alone[key][1]
