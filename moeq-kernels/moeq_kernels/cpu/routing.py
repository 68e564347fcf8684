"""Tokens sorted by expert and cut into tiles, and these sorted by the code that multiplies them; compiled.

Letters as in `schedule`.
"""

from __future__ import annotations

from moeq_kernels.cpu.columns import COUNT, EXPERT, FIRST, PLACE, SIZE, SLOT
from moeq_kernels.cpu.kept_code import compiler, internal
from moeq_kernels.cpu.memory import new_int64s

_compile, _inner = compiler(), internal()


@_compile  # type: ignore[untyped-decorator]
def route(index, starts, sizes, whole, order, tiles):  # type: ignore[no-untyped-def]
    """Sort rows by expert; how many tiles there are, and of how many experts.

    index: [P] experts of rows, E and more for none; starts [E + 1] is filled with the first row of each expert in
    order [P], which is filled too; sizes: rows that are compiled, ascending; experts with `whole` rows and more get no
    tiles [P, 5].
    """
    experts = starts.shape[0] - 1
    starts[:] = 0
    for row in range(index.shape[0]):
        if 0 <= index[row] < experts:
            starts[index[row] + 1] += 1
    for expert in range(experts):
        starts[expert + 1] += starts[expert]
    at = starts[:experts].copy()
    for row in range(index.shape[0]):
        expert = index[row]
        if 0 <= expert < experts:
            order[at[expert]] = row
            at[expert] += 1
    most, number, tiled = sizes[-1], 0, 0
    for expert in range(experts):
        first, stop = starts[expert], starts[expert + 1]
        tiled += 0 < stop - first < whole
        while first < stop and stop - starts[expert] < whole:
            count = min(most, stop - first)
            place = 0
            while sizes[place] < count:
                place += 1
            tiles[number, EXPERT] = expert
            tiles[number, FIRST] = first
            tiles[number, COUNT] = count
            tiles[number, SIZE] = sizes[place]
            tiles[number, PLACE] = place
            first += count
            number += 1
    return number, tiled


@_inner  # type: ignore[untyped-decorator]
def by_code(tiles, table):  # type: ignore[no-untyped-def]
    """Tiles [S, 5] of a stage's table with those one after the other whose experts' first matrix one piece of code
    multiplies, experts of each in order: where an item is few blocks of all experts, as on many cores, code that comes
    into the cache is used for several. Items of one block took .91 of the time in layers of two and three widths."""
    codes = 1
    for tile in range(tiles.shape[0]):
        codes = max(codes, table[tiles[tile, EXPERT], 0, SLOT] + 1)
    if codes == 1:
        return tiles
    found, number = new_int64s(tiles.shape), 0
    for code in range(codes):
        for tile in range(tiles.shape[0]):
            if table[tiles[tile, EXPERT], 0, SLOT] == code:
                found[number] = tiles[tile]
                number += 1
    return found
