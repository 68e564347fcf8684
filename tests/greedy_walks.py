"""Walks that are found at once and are not the best: for tests of what becomes of codes, not of the codes."""

from __future__ import annotations

import torch
from torch import Tensor

from moeq_kernels.trellis import states

KEPT = 4  # ways at a time


def walks(tiles: Tensor, values: Tensor, bits: int, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `moeq.numerics.trellis.walks`, but that only the best few ways go on, and importance has no say.

    Some of the last steps come first, too, so that the first ones have about the right steps before them.
    """
    state_bits, count = (len(values) - 1).bit_length(), len(tiles)
    newest = torch.arange(1 << bits) << state_bits - bits
    steps = torch.zeros(count, 1, 256, dtype=torch.uint8)
    state, cost = torch.zeros(count, 1, dtype=torch.long), torch.zeros(count, 1)
    for step in (*range(240, 256), *range(256)):
        ways = ((state >> bits).unsqueeze(2) | newest).flatten(1)
        costs = cost.repeat_interleave(1 << bits, 1) + (values[ways] - tiles[:, step : step + 1]).square()
        cost, best = costs.topk(min(KEPT, costs.shape[1]), 1, largest=False)
        steps = steps.gather(1, (best >> bits).unsqueeze(2).expand(-1, -1, 256))
        steps[:, :, step], state = (best & (1 << bits) - 1).to(torch.uint8), ways.gather(1, best)
    found = steps[:, 0].contiguous()
    return found, values[states(found, bits, state_bits).long()].float()
