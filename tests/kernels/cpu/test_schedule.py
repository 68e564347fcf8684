"""How the work of a layer is cut into items that threads claim."""

from __future__ import annotations

import numba
import numpy as np
import pytest
from packed_layers import layer_of

from moeq_kernels.cpu.columns import COUNT, EXPERT, LANES, PLACE, ROWS, SIZE, STRIDE
from moeq_kernels.cpu.forms import FORMS
from moeq_kernels.cpu.kernel import CpuKernel
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
