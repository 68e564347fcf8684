"""Which experts of a layer go to the low width first: by hotness, or in an order that a seed decides.

Paper 001, Figure 4, demotes more and more experts of every layer, the rarely activated first.

Letters: L layers, E experts of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moeq.artifacts.low_precision import COLDEST, HOTTEST, RANDOM

Order = list[list[int]]  # of every layer: its experts, those first that go to the low width first
Chosen = tuple[frozenset[int], ...]  # of every layer: the experts at the low width


def orders(counts: Sequence[NDArray[np.int64]], seeds: int, seed: int) -> dict[tuple[str, int | None], Order]:
    """{(name, number of the random order): order} by counts [E] a layer: coldest first, hottest first, and random ones.

    Experts that were chosen equally often stand by their number. Random orders repeat with the same `seed`.
    """
    coldest = [np.argsort(layer, kind="stable").tolist() for layer in counts]
    by_name: dict[tuple[str, int | None], Order] = {
        (COLDEST, None): coldest,
        (HOTTEST, None): [layer[::-1] for layer in coldest],
    }
    for number in range(seeds):
        generator = np.random.default_rng([seed, number])
        by_name[RANDOM, number] = [generator.permutation(len(layer)).tolist() for layer in counts]
    return by_name


def low_experts(order: Order, share: float) -> Chosen:
    """The experts at the low width when it has this share of every layer, rounded to whole experts (half: up)."""
    return tuple(frozenset(layer[: int(share * len(layer) + 0.5)]) for layer in order)
