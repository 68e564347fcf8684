"""Walks that are found at once and are not the best: for tests of what becomes of codes, not of the codes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moeq_kernels.trellis import states

KEPT = 4  # ways at a time
BEFORE = 16  # of the last steps, that come first, too: the first ones then have about the right steps before them


def walks(tiles: Tensor, values: Tensor, bits: int, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `moeq.numerics.trellis.walks`, but that only the best few ways go on, and importance has no say."""
    state_bits, count = (len(values) - 1).bit_length(), len(tiles)
    newest, value, wanted = np.arange(1 << bits) << state_bits - bits, values.numpy(), tiles.float().numpy()
    state, cost, row = np.zeros((count, 1), np.int64), np.zeros((count, 1), np.float32), np.arange(count)[:, None]
    taken = []
    for step in range(-BEFORE, 256):
        ways = (state[:, :, None] >> bits | newest).reshape(count, -1)
        costs = np.repeat(cost, 1 << bits, 1) + (value[ways] - wanted[:, step, None]) ** 2
        best = np.argsort(costs, 1)[:, :KEPT]
        state, cost = ways[row, best], costs[row, best]
        taken.append(best)
    steps, way = np.empty((count, 256), np.uint8), np.zeros(count, np.int64)
    for step in range(255, -1, -1):
        best = taken[BEFORE + step][row[:, 0], way]
        steps[:, step], way = best & (1 << bits) - 1, best >> bits
    found = torch.from_numpy(steps)
    return found, values[states(found, bits, state_bits).long()].float()
