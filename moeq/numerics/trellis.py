"""The nearest walk of a trellis to each tile of weights (Viterbi): compiled, 16 tiles side by side, threads over them.

A walk goes through 256 states, one a weight; a state is the last L bits of the tile's stream, newest highest, of which
a step shifts k in at the top and k out at the bottom (the bitshift trellis of QTIP, arXiv 2406.11235, 3.1). The
stream is cyclic: the first states begin with the last bits, so the walk must end where it began. As in QTIP's
tail-biting approximation (Algorithm 4), a free walk around the seam tells what the bits there are, and the walk of the
tile is held to them.

Letters: T tiles, C sets of importances, L bits of a state, k bits of a step, p what two states in a row share, 2**(L-k)
of them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moeq.numerics.sweep import compiled, in_threads, inside
from moeq.numerics.trellis_steps import LANES, step1, step2, step3, step4

STEPS = 256
SEAM = 64  # weights on each side of the seam that the free walk sees
FAR = np.float32(1e30)  # the cost of a beginning that must not be


@inside  # type: ignore[untyped-decorator]
def _wide_step(bits, before, after, back, wanted, weight, values):  # type: ignore[no-untyped-def]
    """One step of any number of bits, the way to each next p by comparing all of them."""
    ways = 1 << bits
    middles = before.shape[0] >> bits
    for middle in range(middles):
        for newest in range(ways):
            to, first = middle + middles * newest, middle * ways + before.shape[0] * newest
            best, taken = after[to], back[to]
            best[:] = np.float32(3e38)
            for way in range(ways):
                value, cost = values[first + way], before[middle * ways + way]
                for lane in range(LANES):
                    rest = wanted[lane] - weight[lane] * value
                    whole = cost[lane] + rest * rest
                    if whole < best[lane]:
                        best[lane] = whole
                        taken[lane] = np.uint8(way)


@inside  # type: ignore[untyped-decorator]
def _advance(bits, before, after, back, wanted, weight, values):  # type: ignore[no-untyped-def]
    """One step, see trellis_steps.py; of more than 4 bits, whose ways are too many to be written out, in loops."""
    if bits == 1:
        step1(before, after, back, wanted, weight, values)
    elif bits == 2:
        step2(before, after, back, wanted, weight, values)
    elif bits == 3:
        step3(before, after, back, wanted, weight, values)
    elif bits == 4:
        step4(before, after, back, wanted, weight, values)
    else:
        _wide_step(bits, before, after, back, wanted, weight, values)


@inside  # type: ignore[untyped-decorator]
def _seam(bits, wanted, weight, values, costs, back, shared):  # type: ignore[no-untyped-def]
    """Into shared [LANES] what the last state and the first share in the best free walk around the seam."""
    costs[0] = 0
    turn = 0
    for step in range(2 * SEAM):
        place = (step - SEAM) % STEPS
        _advance(bits, costs[turn], costs[1 - turn], back[step], wanted[place], weight[place], values)
        turn = 1 - turn
    last = costs[turn]
    for lane in range(LANES):
        best = 0
        for p in range(1, last.shape[0]):
            if last[p, lane] < last[best, lane]:
                best = p
        for step in range(2 * SEAM - 1, SEAM - 1, -1):
            best = ((best << bits) | back[step, best, lane]) & (last.shape[0] - 1)
        shared[lane] = best


@inside  # type: ignore[untyped-decorator]
def _closed(bits, wanted, weight, values, costs, back, shared, made):  # type: ignore[no-untyped-def]
    """Into made [LANES, STEPS] the states of the best walks whose last state and first share `shared` [LANES]."""
    costs[0] = FAR
    for lane in range(LANES):
        costs[0, shared[lane], lane] = 0
    turn = 0
    for step in range(STEPS):
        _advance(bits, costs[turn], costs[1 - turn], back[step], wanted[step], weight[step], values)
        turn = 1 - turn
    for lane in range(LANES):
        p = shared[lane]
        for step in range(STEPS - 1, -1, -1):
            made[lane, step] = (p << bits) | back[step, p, lane]
            p = made[lane, step] & (costs.shape[1] - 1)


@compiled  # type: ignore[untyped-decorator]
def _walks(tiles, importance, values, bits, codes, nearest, first, last):  # type: ignore[no-untyped-def]
    """Codes and values nearest [T, STEPS] of tiles [T, STEPS], LANES tiles at a time; importance [C, STEPS]: roots."""
    points = values.shape[0] >> bits
    wanted = np.zeros((STEPS, LANES), np.float32)
    weight = np.zeros((STEPS, LANES), np.float32)
    costs = np.zeros((2, points, LANES), np.float32)
    back = np.empty((STEPS, points, LANES), np.uint8)
    shared = np.zeros(LANES, np.int64)
    made = np.zeros((LANES, STEPS), np.int64)
    each = tiles.shape[0] // importance.shape[0]
    for group in range(first, last):
        begin = group * LANES
        count = min(LANES, tiles.shape[0] - begin)
        for lane in range(count):
            counts = importance[(begin + lane) // each]
            for step in range(STEPS):
                weight[step, lane] = counts[step]
                wanted[step, lane] = tiles[begin + lane, step] * counts[step]
        _seam(bits, wanted, weight, values, costs, back, shared)
        _closed(bits, wanted, weight, values, costs, back, shared, made)
        for lane in range(count):
            for step in range(STEPS):
                codes[begin + lane, step] = made[lane, step] // points
                nearest[begin + lane, step] = values[made[lane, step]]


def walks(tiles: Tensor, values: Tensor, bits: int, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The walk nearest to each tile [T, 256]: its steps' bits, uint8 [T, 256] below 2**k, and values, float32 [T, 256].

    values: [2**L], L >= 2k, in units of the tiles; importance: [C, 256], what the square of an error counts, of T / C
    tiles one after the other each; None: the same everywhere. In main memory.
    """
    counts = torch.ones(1, STEPS) if importance is None else importance.float().sqrt().contiguous()
    codes, nearest = torch.empty(tiles.shape, dtype=torch.uint8), torch.empty(tiles.shape)
    wanted, value = tiles.float().contiguous(), values.float().contiguous()
    in_threads(_walks, -(-len(tiles) // LANES), wanted, counts, value, bits, codes, nearest)
    return codes, nearest
