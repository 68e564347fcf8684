"""A cache of experts over consecutive steps, as HOBBIT keeps one on the GPU.

Shapes: D layers, S steps, T of them at once, E experts, A places for the experts of a step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_STEPS_AT_ONCE = 256


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
    layers, steps, active = experts.shape
    kind = np.int32 if (steps + 1) * active < np.iinfo(np.int32).max else np.int64
    last: NDArray[Any] = np.full((layers, num_experts), -1, dtype=kind)  # time of the last use
    for start in range(0, steps, _STEPS_AT_ONCE):
        now = slice(start, start + _STEPS_AT_ONCE)
        before, last = _last_uses(experts[:, now], used[:, now], last, start)
        seen = np.take_along_axis(before, experts[:, now].transpose(1, 0, 2), axis=2)
        if places < num_experts:
            oldest = np.partition(before, num_experts - places, axis=2)[..., num_experts - places]
            seen = np.where(seen >= oldest[..., None], seen, -1)
        hits[:, now] = used[:, now] & (seen >= 0).transpose(1, 0, 2)
    return hits


def _last_uses(
    experts: NDArray[np.int64], used: NDArray[np.bool_], last: NDArray[Any], start: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Time of every expert's last use [T, D, E] before each of T steps, and [D, E] after them; -1 for never."""
    steps, active = experts.shape[1:]
    layer, step, place = np.nonzero(used)
    table = np.full((steps + 1, *last.shape), -1, dtype=last.dtype)
    table[0] = last
    table[step + 1, layer, experts[layer, step, place]] = (start + step + 1) * active - place
    for row in range(1, steps + 1):  # several times as fast as maximum.accumulate along the first axis
        np.maximum(table[row], table[row - 1], out=table[row])
    return table[:-1], table[-1]
