"""A cache of experts over consecutive steps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def lru_hits(
    experts: NDArray[np.int64], used: NDArray[np.bool_], *, num_experts: int, places: int
) -> NDArray[np.bool_]:
    """Which of the experts[D, S, A] that are used[D, S, A] lie in a cache of `places` experts a layer, empty at first.

    A step looks all its experts up before the least recently used make room for those that missed. Of the experts of
    one step the first counts as the most recent.
    """
    hits = np.zeros(experts.shape, dtype=np.bool_)
    if places < 1:
        return hits
    layer = np.arange(len(experts))[:, None]
    last = np.full((len(experts), num_experts), -1, dtype=np.int64)  # time of the last use
    active = experts.shape[2]
    for step in range(experts.shape[1]):
        now, there = experts[:, step], used[:, step]
        seen = last[layer, now]
        newer = (last[:, None, :] > seen[:, :, None]).sum(axis=2)
        hits[:, step] = there & (seen >= 0) & (newer < places)
        time = (step + 1) * active - np.arange(active)
        last[np.broadcast_to(layer, now.shape)[there], now[there]] = np.broadcast_to(time, now.shape)[there]
    return hits
