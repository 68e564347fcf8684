"""Widths of matrices decided one by one, where an expert may also be dropped as a whole.

A matrix alone cannot be dropped: what its expert answers is zero without any one of them. So an expert is one item of
the knapsack, with all ways to give its matrices widths, and that to drop it. Of ways that cost the same the best is
enough, which leaves a few dozen.

Letters: e experts that are decided, P matrices, W widths of a matrix, m = W**P ways, n of them that differ in cost.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Ways:
    """What a layer's experts may be: losses and costs [e, n + 1], and times [e, n + 1] where there is a latency; the
    last column is to be dropped. widths: [e, n + 1, P] of the matrices, 0 where dropped."""

    losses: np.ndarray
    costs: np.ndarray
    times: np.ndarray | None
    widths: np.ndarray

    def padded(self, columns: int) -> Ways:
        """With so many columns: the last one several times, which changes nothing."""
        more = columns - self.losses.shape[1]

        def wider(table: np.ndarray) -> np.ndarray:
            return np.concatenate([table, np.repeat(table[:, -1:], more, 1)], 1)

        times = None if self.times is None else wider(self.times)
        return Ways(losses=wider(self.losses), costs=wider(self.costs), times=times, widths=wider(self.widths))


def ways(
    losses: np.ndarray,
    dropped: np.ndarray,
    costs: np.ndarray,
    nothing: int,
    widths: Sequence[int],
    times: np.ndarray | None,
) -> Ways:
    """The ways of a layer's experts.

    losses [e, P, W] of matrices, dropped [e] of experts that are, costs [P, W], and `nothing` of a dropped expert (what
    files say of it), times [e, W] of whole experts at a width, whose matrices take equal shares; being dropped takes no
    time.
    """
    every = np.array(list(itertools.product(range(len(widths)), repeat=costs.shape[0])))  # [m, P]
    at = np.arange(costs.shape[0])
    loss, cost = losses[:, at, every].sum(2), costs[at, every].sum(1)
    if times is None:
        kinds = [np.flatnonzero(cost == one) for one in np.unique(cost)]
        best = np.stack([kind[loss[:, kind].argmin(1)] for kind in kinds], 1)  # [e, n]
    else:  # ways of one cost may differ in time
        best = np.broadcast_to(np.arange(len(every)), loss.shape)
    last = np.zeros((len(loss), 1))
    spent = None if times is None else np.concatenate([times[:, every].mean(2), last], 1)
    return Ways(
        losses=np.concatenate([np.take_along_axis(loss, best, 1), dropped[:, None]], 1),
        costs=np.concatenate([cost[best], np.full_like(last, nothing, dtype=cost.dtype)], 1),
        times=spent,
        widths=np.concatenate([np.array(widths)[every][best], np.zeros((len(loss), 1, len(at)), int)], 1),
    )


def joined(layers: Sequence[Ways]) -> Ways:
    """The ways of several layers' experts, one layer after the other."""
    columns = max(each.losses.shape[1] for each in layers)
    wide = [each.padded(columns) for each in layers]
    times = [each.times for each in wide if each.times is not None]
    return Ways(
        losses=np.concatenate([each.losses for each in wide]),
        costs=np.concatenate([each.costs for each in wide]),
        times=np.concatenate(times) if times else None,
        widths=np.concatenate([each.widths for each in wide]),
    )
