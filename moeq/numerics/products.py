"""Matrix products in vector code, for CPUs whose AVX-512 torch's library leaves idle.

torch's products are MKL's, which uses AVX-512 on Intel's CPUs alone: on AMD's they run at half of what the CPU can.
Both operands of GPTQ's products have the columns that are summed over as lines, so that they are packed block by block
into the nearer caches and multiplied panel by panel in registers (panels.py). Every sum is taken in the same order,
blocks of SUMMED columns one after the other, whatever else is computed with it.

Letters: E experts, K inputs, R rows times widths, k columns that are summed over, i columns that get the sums.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from llvmlite import binding
from torch import Tensor

from moeq.numerics.panels import PANEL, VECTOR_BYTES, VECTORS, multiply_strip, pack_strip
from moeq.numerics.sweep import compiled, in_threads, inside

SUMMED = 256  # columns that are summed before the next ones are packed
STRIPS = 4  # strips of a tile, what threads divide among each other
LEAST_INPUTS = 512  # from which on packing pays


@cache
def faster_here() -> bool:
    """If this CPU has AVX-512 and is none that MKL uses it on."""
    return VECTOR_BYTES == 64 and binding.get_host_cpu_name().startswith("znver")


def pays(factor: Tensor) -> bool:
    """If products with a factor [E, K, K] are faster here than as torch's. It depends on nothing that is computed side
    by side, so that no result does."""
    return factor.device.type == "cpu" and factor.shape[-1] >= LEAST_INPUTS and faster_here()


@inside  # type: ignore[untyped-decorator]
def _pack_weights(into, weights, sign, expert, begin, end, start, stop):  # type: ignore[no-untyped-def]
    """Lines begin to end, columns start to stop: PANEL columns after another, in them line after line."""
    length = end - begin
    whole = (stop - start) // PANEL
    for k in range(length):
        line = weights[expert, begin + k, start:stop]
        for panel in range(whole):
            for index in range(PANEL):
                into[panel * length + k, index] = sign * line[panel * PANEL + index]
        for index in range(stop - start - whole * PANEL):
            into[whole * length + k, index] = sign * line[whole * PANEL + index]


@compiled  # type: ignore[untyped-decorator]
def _add_product(  # type: ignore[no-untyped-def]
    weights, lines, into, offset, begin, end, start, stop, lanes, sign, first, last
):
    """Tiles first to last of `add_product`'s lanes, expert after expert."""
    strip = VECTORS * VECTOR_BYTES // lines.itemsize
    tile = STRIPS * strip
    tiles = (lanes + tile - 1) // tile
    columns = stop - start
    own = np.empty(((columns + PANEL - 1) // PANEL * SUMMED, PANEL), lines.dtype)
    gifts = np.empty((SUMMED, strip), lines.dtype)
    for expert in range(first // tiles, (last + tiles - 1) // tiles):
        left = (max(first, expert * tiles) - expert * tiles) * tile
        right = min((min(last, expert * tiles + tiles) - expert * tiles) * tile, lanes)
        for near in range(begin, end, SUMMED):
            length = min(SUMMED, end - near)
            _pack_weights(own, weights, sign, expert, near, near + length, start, stop)
            for place in range(left, right, strip):
                count = min(strip, right - place)
                pack_strip(lines[expert, near : near + length, place : place + count], gifts, length, count)
                some = into[expert, offset : offset + columns, place : place + count]
                multiply_strip(own, gifts, some, columns, length, count)


def add_product(
    into: Tensor,
    offset: int,
    weights: Tensor,
    lines: Tensor,
    *,
    summed: tuple[int, int],
    columns: tuple[int, int],
    lanes: int | None = None,
    negative: bool = False,
) -> None:
    """Add sum over k of weights[:, k, i] * lines[:, k] to into[:, offset + i - columns[0]]; k and i from, to.

    weights: [E, K, K]; lines: [E, K, R], of which the first `lanes` of R are computed (None: all); into: [E, .., R];
    negative: subtract it. Floats of one type, float32 or float64; contiguous, in main memory.
    """
    lanes = lines.shape[2] if lanes is None else lanes
    tile = STRIPS * VECTORS * VECTOR_BYTES // lines.element_size()
    sign = lines.numpy().dtype.type(-1 if negative else 1)
    arguments = (weights, lines, into, offset, *summed, *columns, lanes, sign)
    in_threads(_add_product, len(lines) * -(-lanes // tile), *arguments)
