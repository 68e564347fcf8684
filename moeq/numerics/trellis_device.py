"""The nearest walk of a trellis to each tile of weights in plain torch: trellis.py for GPUs and other devices.

The same walks up to ties: costs are summed in the same order, without the marks in their lowest bits. The Triton kernel
of device_walks.py takes over where it runs, for up to 2**14 states.

Letters: T tiles, L bits of a state, k bits of a step, p what two states in a row share, 2**(L-k) of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeq.numerics.gptq_device import has_kernel
from moeq.numerics.trellis import FAR, SEAM, STEPS

BACK_BYTES = 256 << 20  # of the ways back of the tiles that are worked on at once


def walks(tiles: Tensor, values: Tensor, bits: int, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes uint8 [T, 256] and values float32 [T, 256] of the walks nearest to tiles [T, 256]; as `trellis.walks`."""
    if has_kernel(tiles):
        from moeq.numerics import device_walks  # imports Triton, which is large and not for every machine

        if device_walks.fits(values):
            return device_walks.walks(tiles, values, bits, importance)
    wanted = tiles.float()
    counts = torch.ones_like(wanted[:1]) if importance is None else importance.float().sqrt()
    weight = counts.repeat_interleave(len(tiles) // len(counts), 0)
    step = max(1, BACK_BYTES // (STEPS * len(values) >> bits))
    found = [
        _States(some * root, root, values.float(), bits).closed()
        for some, root in zip(wanted.split(step), weight.split(step), strict=True)
    ]
    states = torch.cat(found) if found else wanted.long()
    return (states // (len(values) >> bits)).to(torch.uint8), values.float()[states]


class _States:
    """Some tiles [T, 256] and the roots of what errors count [T, 256], both times them."""

    def __init__(self, wanted: Tensor, weight: Tensor, values: Tensor, bits: int) -> None:
        self.wanted, self.weight, self.values, self.bits = wanted, weight, values, bits
        self.points = len(values) >> bits

    def _forward(self, costs: Tensor, places: range) -> tuple[Tensor, list[Tensor]]:
        """Costs [T, 2**(L-k)] after the steps at some places, and the way to each p, uint8 of the same shape a step."""
        back = []
        for place in places:
            rest = self.wanted[:, place % STEPS, None] - self.weight[:, place % STEPS, None] * self.values
            whole = rest.square().unflatten(1, (1 << self.bits, self.points)) + costs.unsqueeze(1)
            costs, way = whole.flatten(1).unflatten(1, (self.points, 1 << self.bits)).min(-1)
            back.append(way.to(torch.uint8))
        return costs, back

    def _way(self, p: Tensor, back: Tensor) -> Tensor:
        """The state [T] before p [T]."""
        return p << self.bits | back.gather(1, p.unsqueeze(1)).squeeze(1).long()

    def _seam(self) -> Tensor:
        """What the last state and the first share [T] in the best free walk around the seam."""
        costs, back = self._forward(self.wanted.new_zeros(len(self.wanted), self.points), range(-SEAM, SEAM))
        p = costs.argmin(1)
        for step in range(2 * SEAM - 1, SEAM - 1, -1):
            p = self._way(p, back[step]) & (self.points - 1)
        return p

    def closed(self) -> Tensor:
        """States int64 [T, 256] of the best walks that close at the seam."""
        p = self._seam()
        costs = self.wanted.new_full((len(self.wanted), self.points), float(FAR)).scatter_(1, p.unsqueeze(1), 0.0)
        back = self._forward(costs, range(STEPS))[1]
        states = torch.empty_like(self.wanted, dtype=torch.long)
        for step in range(STEPS - 1, -1, -1):
            states[:, step] = self._way(p, back[step])
            p = states[:, step] & (self.points - 1)
        return states
