"""Which experts of a layer follow which of the layer before it, by a recorded trace (paper 001, section 3.3: prefetch).

Letters: N tokens, L layers, E experts of a layer, F of the next one, k experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moeq.analysis.hotness import BoolArray, FloatArray
from moeq.artifacts.trace import RoutingTrace


def coactivation(trace: RoutingTrace) -> list[FloatArray]:
    """[E, F] for every layer but the last: which share of what the next layer chose each of its experts has, among
    tokens that chose an expert here; for an expert that none chose, among all."""
    found = []
    for layer, (here, there) in enumerate(zip(trace.num_experts, trace.num_experts[1:], strict=False)):
        first, second = (trace.experts[:, number].astype(np.int64) for number in (layer, layer + 1))
        pairs = first[:, :, None] * there + second[:, None, :]
        known = (first[:, :, None] >= 0) & (second[:, None, :] >= 0)
        counts = np.bincount(pairs[known], minlength=here * there).reshape(here, there).astype(np.float64)
        rows = counts.sum(axis=1, keepdims=True)
        usual = counts.sum(axis=0, keepdims=True) / max(1.0, counts.sum())
        found.append(np.where(rows > 0, counts / np.maximum(rows, 1), usual))
    return found


def soon_hot(
    hotness: Sequence[FloatArray], high: Sequence[BoolArray], follows: Sequence[FloatArray], most: int
) -> list[tuple[int, int]]:
    """Layers and experts, at most so many, that are not in high precision but would be, were every layer as hot as the
    one before it says; by how far, the farthest first.

    hotness, high: [E] of every layer; follows: as `coactivation` gives it.
    """
    found: list[tuple[float, int, int]] = []
    for layer, share in enumerate(follows, 1):
        before, now, there = hotness[layer - 1], hotness[layer], high[layer]
        if before.sum() <= 0 or now.sum() <= 0 or not there.any():
            continue
        expected = (before / before.sum()) @ share
        least = now[there].min() / now.sum()
        hotter = np.flatnonzero(~there & (expected > least))
        found += [(float(least - expected[expert]), layer, expert) for expert in hotter.tolist()]
    return [(layer, expert) for _, layer, expert in sorted(found)[:most]]
