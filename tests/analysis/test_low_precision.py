"""Which experts go to the low width first, and how many of them."""

import numpy as np

from moeq.analysis.low_precision import low_experts, orders
from moeq.artifacts.low_precision import COLDEST, HOTTEST, RANDOM

COUNTS = [np.array([5, 0, 9, 5, 1]), np.array([1, 2, 3])]


def test_orders_follow_the_counts_and_the_seed() -> None:
    found = orders(COUNTS, seeds=2, seed=7)
    assert list(found) == [(COLDEST, None), (HOTTEST, None), (RANDOM, 0), (RANDOM, 1)]
    assert found[COLDEST, None] == [[1, 4, 0, 3, 2], [0, 1, 2]]
    assert found[HOTTEST, None] == [[2, 3, 0, 4, 1], [2, 1, 0]]
    for number in range(2):
        assert [sorted(layer) for layer in found[RANDOM, number]] == [list(range(5)), list(range(3))]
    assert found == orders(COUNTS, seeds=2, seed=7)
    assert found != orders(COUNTS, seeds=2, seed=8)
    assert found[RANDOM, 0] != found[RANDOM, 1]


def test_shares_are_of_every_layer_in_whole_experts() -> None:
    order = orders(COUNTS, seeds=0, seed=0)[COLDEST, None]
    sizes = {share: [len(layer) for layer in low_experts(order, share)] for share in (0, 0.1, 0.5, 0.9, 1)}
    assert sizes == {0: [0, 0], 0.1: [1, 0], 0.5: [3, 2], 0.9: [5, 3], 1: [5, 3]}
    assert low_experts(order, 0.4) == (frozenset({1, 4}), frozenset({0}))
