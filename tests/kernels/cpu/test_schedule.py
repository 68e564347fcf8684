"""How the work of a layer is cut into items that threads claim."""

from __future__ import annotations

import numba
import numpy as np
import pytest
from packed_layers import layer_of

from moeq_kernels.cpu.columns import COUNT, EXPERT, FIRST, LANES, PLACE, ROWS, SIZE, SLOT, STRIDE
from moeq_kernels.cpu.forms import FORMS
from moeq_kernels.cpu.kernel import CpuKernel
from moeq_kernels.cpu.routing import by_code
from moeq_kernels.cpu.schedule import MOST_BLOCKS, ROWS_AS_BYTES, plan


@numba.njit
def items_of(tiles, table, functions, layouts, by_block, pieces, multiple):  # type: ignore[no-untyped-def]
    return plan(tiles, table, functions, layouts, by_block, pieces, multiple)[3]


@pytest.mark.parametrize("by_block", [False, True])
def test_items_hold_about_equal_parts_of_the_work(by_block: bool) -> None:
    """Whatever widths and rows experts have; each block of each tile is in one of them."""
    form = FORMS["plain"]
    layer = CpuKernel(form.name).layer(layer_of([2, 4, 8], 64, 16 * 80))
    matrices = layer.second if by_block else layer.first
    tiles = np.zeros((4, 5), np.int64)
    tiles[:, EXPERT], tiles[:, COUNT], tiles[:, SIZE], tiles[:, PLACE] = (0, 1, 1, 2), (1, 16, 14, 2), 16, 1
    blocks = -(-matrices.table[0, 0, ROWS] // LANES)
    work = matrices.table[:, :, STRIDE].sum(1)[tiles[:, EXPERT]] * (ROWS_AS_BYTES + tiles[:, COUNT])
    arrays = matrices.table, matrices.functions(form), matrices.layouts(form)
    for pieces, multiple in ((1, 1), (8, 1), (40, 1), (8, 4), (10**6, 4)):
        items = items_of(tiles, *arrays, by_block, pieces, multiple)
        done = np.zeros((len(tiles), blocks), np.int64)
        for first, last, begin, end in items:
            done[first:last, begin:end] += 1
            a_block = work[first:last].sum()
            assert by_block or len(set(tiles[first:last, EXPERT])) == 1
            assert end - begin <= MOST_BLOCKS
            assert end - begin <= multiple or a_block * (end - begin) <= blocks * work.sum() / pieces
        assert (done == 1).all()
        few = len(tiles) * blocks / MOST_BLOCKS
        assert len(items) <= few + 2 * pieces or multiple > 1


@numba.njit
def sorted_tiles(tiles, table):  # type: ignore[no-untyped-def]
    return by_code(tiles, table)


def test_experts_of_one_code_follow_each_other() -> None:
    """In order, with all their tiles; tiles of one code stay as they are."""
    widths = [4, 2, 3, 2, 4, 4, 3, 2]
    table = CpuKernel("plain").layer(layer_of(widths, 64, 64)).second.table
    tiles = np.zeros((9, 5), np.int64)
    tiles[:, EXPERT], tiles[:, FIRST] = (0, 1, 2, 2, 3, 4, 5, 6, 7), np.arange(9)
    made = sorted_tiles(tiles, table)
    by_width = {width: [expert for expert, own in enumerate(widths) if own == width] for width in set(widths)}
    experts = sorted(by_width.values(), key=lambda some: table[some[0], 0, SLOT])
    assert list(dict.fromkeys(made[:, EXPERT])) == [expert for some in experts for expert in some]
    assert sorted(map(tuple, made)) == sorted(map(tuple, tiles))
    assert list(made[made[:, EXPERT] == 2, FIRST]) == [2, 3]
    alike = tiles[[0, 5, 6]]
    assert (sorted_tiles(alike[:2], table) == alike[:2]).all()
