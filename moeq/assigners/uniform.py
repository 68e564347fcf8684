"""uniform: every expert at the same width (those on the GPU in full precision): `bits`, or the widest that fits."""

from __future__ import annotations

import numpy as np

from moeq.artifacts.assignment import Assignment
from moeq.assigners.inputs import AssignInputs, build, hot_masks
from moeq.assigners.limits import choices, limit_of


def assign(inputs: AssignInputs) -> Assignment:
    """Give every NDP expert one width; the top `gpu_experts` of each layer stay in full precision on the GPU.

    Raises AssignmentError for a budget that the narrowest width exceeds.
    """
    hot = hot_masks(inputs)
    bits = inputs.config.bits or _widest(inputs, hot)
    return build(inputs, [np.full(len(mask), bits) for mask in hot], hot)


def _widest(inputs: AssignInputs, hot: list[np.ndarray]) -> int:
    limit = limit_of(inputs, choices(inputs), hot)
    return limit.widths[int(np.flatnonzero(limit.uniform() <= limit.total)[-1])]
