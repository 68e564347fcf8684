"""The experts of a layer, or one matrix, in one flat buffer, and their products with rows of activations.

Letters: T tokens, k experts a token, P = T*k rows, E experts, A experts with rows, C matrices of a stage, S tiles, H
hidden size, I intermediate size, N rows and K inputs of a matrix.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from moeq_kernels.cpu import calls, columns, finish, routing, schedule
from moeq_kernels.cpu.compiled import call, entry
from moeq_kernels.cpu.forms import Form
from moeq_kernels.cpu.matrices import Integers, Matrices, flat
from moeq_kernels.cpu.threads import team
from moeq_kernels.description import DOWN, LayerOfExperts, Matrix
from moeq_kernels.once import MAKING, made_once

WAKING_BYTES = 2 << 20  # of codes of 4 bits, and as many again for four rows, or what takes as long, see `columns`:
# with less no other thread is woken
DIVIDED_BYTES = 1 << 19  # the same for one matrix, below which even threads that are awake have no part: two of them
# ran at 1.0 to 1.7 times the speed of one from there on, at 0.7 to 1.0 times with half of it and less
AT_ONCE = 256  # rows of one matrix that are laid out and multiplied before the next: they stay in the cache
GATED, ALONE = ("gate_proj", "up_proj"), ("up_proj",)


@cache
def _sizes(form: Form) -> Integers:
    return np.array(form.rows)


@dataclass(frozen=True)
class _Routed:
    """Rows sorted by expert: order [P], the first of every expert [E + 1], and tiles [S, 5] of the experts that are not
    unpacked."""

    order: Integers
    starts: Integers
    tiles: Integers

    @classmethod
    def of(cls, index: Tensor, layer: PackedLayer, form: Form) -> _Routed:
        """A layer's."""
        return cls.rows_of(index.flatten(), len(layer.first.shapes), form, layer.prefill)

    @classmethod
    def rows_of(cls, flat: Tensor, experts: int, form: Form, whole: int) -> _Routed:
        """Those of rows [P] by expert."""
        index = flat.numpy()
        order, starts = np.empty(index.size, np.int64), np.empty(experts + 1, np.int64)
        tiles = np.empty((index.size, 5), np.int64)
        count, _ = routing.route(index, starts, _sizes(form), whole, order, tiles)
        return cls(order, starts, tiles[:count])

    def whole(self, whole: int) -> list[int]:
        """Experts with that many rows and more, which have no tiles."""
        return [] if len(self.order) < whole else np.flatnonzero(np.diff(self.starts) >= whole).tolist()  # type: ignore[no-any-return]


class _Statics:
    """Numbers of matrices and forms that do not change from call to call, see `calls`; made when first asked for."""

    def __init__(self, stages: Sequence[Matrices], whole: int, work: Callable[[int], None], end: int) -> None:
        self._stages, self._how = stages, (whole, entry(work), end)
        self._made: dict[str, tuple[Integers, int]] = {}

    def of(self, form: Form) -> int:
        """Where those of a form lie."""
        made = self._made.get(form.name)
        if made is None:
            with MAKING:
                made = self._made.get(form.name)
                if made is None:
                    made = self._made[form.name] = self._numbers(form)
        return made[1]

    def _numbers(self, form: Form) -> tuple[Integers, int]:
        whole, work, end = self._how
        multiple = schedule.MOST_TOGETHER if form.vectors.slices else 1
        sizes = int(_sizes(form).ctypes.data)
        how = sizes, whole, form.tiles, multiple, WAKING_BYTES, DIVIDED_BYTES, work, end
        numbers = np.concatenate([how, *(stage.bound(form) for stage in self._stages)])
        return numbers, int(numbers.ctypes.data)


def _complete(answer: int) -> None:
    if answer == calls.INCOMPLETE:
        raise RuntimeError("a kernel's blocks are compiled, and not found")


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

    @made_once
    def _fused(self) -> _Statics:
        """Of a call with the activation in the pass of gate and up, weights and sum in that of down."""
        stages = self.first, self.second
        return _Statics(stages, self.prefill, schedule.stages, self.activation or finish.PRODUCTS)

    @made_once
    def _stages(self) -> tuple[_Statics, _Statics]:
        """Of a call of one stage's products."""
        first, second = (
            _Statics([stage], self.prefill, schedule.stages, finish.PRODUCTS) for stage in (self.first, self.second)
        )
        return first, second

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """As `description.PreparedLayer`; ValueError for shapes that do not belong together."""
        if hidden.dim() != 2 or hidden.shape[1] != self.first.inputs or index.shape != weights.shape:
            given = [list(part.shape) for part in (hidden, index, weights)]
            raise ValueError(f"hidden, index and weights are {given}, not [T, {self.first.inputs}], [T, k] and [T, k]")
        if index.dim() != 2 or len(index) != len(hidden) or index.is_floating_point():
            raise ValueError(f"index is {index.dtype} {list(index.shape)}, not whole numbers [{len(hidden)}, k]")
        if index.dtype != torch.int64 or not index.is_contiguous():
            index = index.to(torch.int64).contiguous()
        if self.activation is not None and self.finish is None and index.numel() < self.prefill:
            return self._sum(hidden, index, weights, hidden.dtype)
        with torch.no_grad():
            return self._some_unpacked(hidden.detach(), index, weights.detach())

    def _form(self, dtype: torch.dtype) -> Form:
        """For activations."""
        pairs = dtype == torch.bfloat16 and self.first.pairs and self.second.pairs
        return self.form.taking(pairs, self.first.units and self.second.units)

    def _sum(self, hidden: Tensor, index: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """All in one call, but for experts that are to be unpacked, in a dtype."""
        form, (tokens, top_k) = self._form(hidden.dtype), index.shape
        rows, share = _as_it_lies(hidden), _as_it_lies(weights)
        out = torch.empty(tokens, self.second.rows, dtype=dtype if dtype == torch.bfloat16 else torch.float32)
        short = calls.SHORT_HIDDEN * _is_short(rows) + calls.SHORT_WEIGHTS * _is_short(share)
        given = (
            self._fused.of(form), rows.data_ptr(), tokens, index.data_ptr(), top_k, share.data_ptr(), out.data_ptr(),
            short + calls.SHORT_OUT * _is_short(out), team(),
        )  # fmt: skip
        if call(calls.experts)(*given):
            tiles = _Routed.of(index, self, form).tiles
            self.first.compile(form, tiles)
            self.second.compile(form, tiles)
            _complete(call(calls.experts)(*given))
        return out if out.dtype == dtype else out.to(dtype)

    def _some_unpacked(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Where experts may have to be unpacked, or what lies between their matrices is Python's."""
        form, share = self._form(hidden.dtype), weights.reshape(-1).float()
        routed = _Routed.of(index, self, form)
        if self.activation is not None and self.finish is None:
            out = self._sum(hidden, index, weights, torch.float32)
        else:
            out = torch.zeros(len(hidden), self.second.rows, dtype=torch.float32)
            if len(routed.tiles):
                self._apart(hidden, index, form, routed, share, out)
        for expert in routed.whole(self.prefill):
            self._unpacked(hidden, expert, routed, share, index.shape[1], out)
        return out.to(hidden.dtype)

    def _apart(self, hidden: Tensor, index: Tensor, form: Form, routed: _Routed, share: Tensor, out: Tensor) -> None:
        """The gate, or what finishes rows, is Python's: a call before it and one after it."""
        last, top_k = int(routed.tiles[:, columns.FIRST : columns.SIZE].sum(1).max()), index.shape[1]
        self.first.compile(form, routed.tiles)
        self.second.compile(form, routed.tiles)
        before, after = (statics.of(form) for statics in self._stages)
        first = _products(self.first, before, hidden.float().contiguous(), index, top_k)[:, :last].to(hidden.dtype)
        shapes = self.first.shapes[0]
        parts = {name: part[:, : shape.rows] for name, part, shape in zip(self.projections, first, shapes, strict=True)}
        rows = _products(self.second, after, self.gate(parts).float().contiguous(), index, 0)[0, :last]
        if self.finish is not None:
            rows = self.finish(rows.to(hidden.dtype)).float()
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


def _is_short(given: Tensor) -> bool:
    return given.dtype == torch.bfloat16


def _as_it_lies(given: Tensor) -> Tensor:
    """As compiled code reads it: bf16, or float32, one row after the other."""
    held = given if given.dtype in (torch.bfloat16, torch.float32) else given.detach().float()
    return held if held.is_contiguous() else held.detach().contiguous()


def _products(matrices: Matrices, statics: int, source: Tensor, index: Tensor, per_row: int) -> Tensor:
    """Products [C, P, N] in float32 of a source's rows, by expert; what no tile has is 0."""
    out = torch.zeros(len(matrices.shapes[0]), index.numel(), matrices.rows, dtype=torch.float32)
    where = source.data_ptr(), len(source), index.data_ptr(), index.numel()
    _complete(call(calls.products)(statics, *where, per_row, out.data_ptr(), team()))
    return out


class _Known:
    """What a matrix needs of Python for some rows: the address of `calls.matrix`'s numbers, the size and dtype of what
    comes out, and whether that is the rows' own."""

    def __init__(self, numbers: Integers, size: tuple[int, int], dtype: torch.dtype, as_they_lie: bool) -> None:
        self._numbers, self.address = numbers, int(numbers.ctypes.data)
        self.size, self.dtype, self.as_they_lie = size, dtype, as_they_lie


class PackedLinear:
    """One matrix as it is multiplied; see `description.PreparedLinear`."""

    def __init__(self, matrix: Matrix, bias: Tensor | None, form: Form, prefill: int) -> None:
        self.form, self.prefill = form, prefill
        biases: list[Mapping[str, Tensor]] = [{} if bias is None else {DOWN: bias}]
        layer = LayerOfExperts(matrices=[{DOWN: matrix}], biases=biases, gate=lambda parts: parts[DOWN])
        self.held, (self.matrices,) = flat(layer, [(DOWN,)])
        self._alone, self._tiled = (
            _Statics([self.matrices], prefill, work, finish.PRODUCTS) for work in (schedule.alone, schedule.stages)
        )
        self._known: dict[tuple[torch.dtype, torch.Size], _Known] = {}

    @property
    def nbytes(self) -> int:
        return self.held.nbytes + self.matrices.table.nbytes + self.matrices.biases.nbytes

    def matrix(self) -> Matrix:
        return self.matrices.matrix(0, 0)

    def some(self, rows: Tensor) -> Matrix:
        return self.matrices.some(rows)

    def __call__(self, rows: Tensor) -> Tensor:
        """As `description.PreparedLinear`; ValueError for rows of another length."""
        known = self._known.get((rows.dtype, rows.shape)) or self._know(rows)
        if known is None:
            return self._of_many(rows.detach())
        given = rows if known.as_they_lie and rows.is_contiguous() else _as_it_lies(rows)
        out = torch.empty(*known.size, dtype=known.dtype)  # of two numbers: in half the time of a pair's
        call(calls.matrix)(known.address, given.data_ptr(), out.data_ptr(), team())
        return out if known.as_they_lie else out.to(rows.dtype)

    def _know(self, rows: Tensor) -> _Known | None:
        """What such rows need, None for none and for more than one tile has."""
        if rows.dim() != 2 or rows.shape[1] != self.matrices.inputs:
            raise ValueError(f"rows are {list(rows.shape)}, not [T, {self.matrices.inputs}]")
        count, form = len(rows), self._form(rows.dtype)
        if not count or count >= self.prefill or count > form.rows[-1]:
            return None
        place, dtype = bisect_left(form.rows, count), torch.bfloat16 if _is_short(rows) else torch.float32
        self.matrices.compile_one(form, 0, place)
        how = self._alone.of(form), place, form.rows[place], _is_short(rows), count, self.matrices.work
        known = _Known(np.array(how, np.int64), (count, self.matrices.rows), dtype, rows.dtype == dtype)
        self._known[rows.dtype, rows.shape] = known
        return known

    def _form(self, dtype: torch.dtype) -> Form:
        """For activations."""
        return self.form.taking(dtype == torch.bfloat16 and self.matrices.pairs, self.matrices.units)

    def _of_many(self, rows: Tensor) -> Tensor:
        """Of more rows than one tile has, or of none."""
        if not len(rows):
            return rows.new_empty(0, self.matrices.rows)
        if len(rows) >= self.prefill:
            return self.matrices.product(rows, 0, 0, self.form)
        given, form = _as_it_lies(rows), self._form(rows.dtype)
        out, index = given.new_empty(len(rows), self.matrices.rows), torch.zeros(AT_ONCE, dtype=torch.int64)
        for count in {min(len(rows), AT_ONCE), len(rows) % AT_ONCE or AT_ONCE}:  # all but the last are as many
            self.matrices.compile(form, _Routed.rows_of(index[:count], 1, form, self.prefill).tiles)
        for first in range(0, len(rows), AT_ONCE):
            some, to = given[first : first + AT_ONCE], out[first : first + AT_ONCE]
            where = some.data_ptr(), len(some), _is_short(some), index.data_ptr(), to.data_ptr()
            _complete(call(calls.many)(self._tiled.of(form), *where, team()))
        return out.to(rows.dtype)
