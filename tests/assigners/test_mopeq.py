"""MoPEQ's clusters: the optimum of the sum of squares, whatever the order, the unit and the range of the values."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from sklearn.cluster import KMeans

from moeq.assigners.mopeq import cluster

WIDTHS = (1, 2, 3, 4)


def squares(values: Sequence[float]) -> Fraction:
    """The sum of squares around the mean, exactly."""
    exact = list(map(Fraction, values))
    mean = sum(exact, Fraction(0)) / len(exact)
    return sum(((value - mean) ** 2 for value in exact), Fraction(0))


def within(values: np.ndarray, chosen: np.ndarray) -> Fraction:
    """The sum of squares within the clusters that were given one width each."""
    return sum((squares(values[chosen == width].tolist()) for width in set(chosen.tolist())), Fraction(0))


def least(values: np.ndarray, clusters: int) -> Fraction:
    """The least sum of squares of so many runs of the sorted values, by trying all."""
    rising = sorted(values.tolist())
    inner = itertools.combinations(range(1, len(rising)), clusters - 1)
    return min(
        sum((squares(rising[start:end]) for start, end in itertools.pairwise((0, *cuts, len(rising)))), Fraction(0))
        for cuts in inner
    )


def instance(rng: np.random.Generator) -> np.ndarray:
    """Few values of one of several kinds: whole numbers with equal ones among them, a lump far off, many magnitudes."""
    count = int(rng.integers(4, 10))
    kinds = (
        rng.integers(0, 8, count).astype(float),
        rng.gamma(0.5, 1.0, count),
        1e9 + rng.normal(0, 1e-3, count) + 1e3 * rng.integers(0, 2, count),
        10.0 ** rng.uniform(-8, 8, count),
    )
    return kinds[int(rng.integers(len(kinds)))]


def test_clusters_are_the_best_of_all_partitions() -> None:
    rng = np.random.default_rng(19)
    for _ in range(400):
        values = instance(rng)
        clusters = min(int(rng.integers(2, 5)), len(set(values.tolist())))
        chosen = cluster(values, WIDTHS[:clusters])
        assert len(set(chosen.tolist())) == clusters
        assert within(values, chosen) <= least(values, clusters) * (1 + Fraction(1, 10**12)), values.tolist()
        order = np.argsort(values, kind="stable")
        assert (np.diff(chosen[order]) >= 0).all(), "larger values have wider widths"
        assert all(len({int(w) for w in chosen[values == value]}) == 1 for value in values), "and equal ones the same"


@pytest.mark.parametrize("seed", range(4))
def test_k_means_of_ten_starts_is_never_better(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = np.concatenate([rng.lognormal(0, 2, 150), rng.normal(20, 3, 100)])
    for widths in ((2, 3, 4), (1, 2, 3, 4, 8)):
        labels = KMeans(n_clusters=len(widths), n_init=10, random_state=seed).fit_predict(values[:, None])
        assert within(values, cluster(values, widths)) <= within(values, labels)


def test_neither_order_nor_unit_changes_a_width() -> None:
    rng = np.random.default_rng(5)
    for values in (rng.gamma(1, 1, 64), rng.integers(0, 30, 64).astype(float)):
        chosen = cluster(values, (2, 3, 4))
        order = rng.permutation(len(values))
        assert np.array_equal(cluster(values[order], (2, 3, 4)), chosen[order])
        for factor in (2.0**-900, 2.0**100, 2.0**900):
            assert np.array_equal(cluster(values * factor, (2, 3, 4)), chosen), factor
    values = rng.gamma(1, 1, 64)  # no two partitions are equally good
    for factor, offset in ((3.7, 0.0), (1e-5, 1.0), (1.0, -4e3), (1e300, 1e299)):
        moved = cluster(values * factor + offset, (2, 3, 4))
        assert np.array_equal(moved, cluster(values, (2, 3, 4))), (factor, offset)


def test_clusters_far_below_the_largest_value_are_told_apart() -> None:
    """Their squares are 1e200 times less than those of the largest, and decide where one more cluster goes."""
    small = np.array([1.0, 2.0, 9.0, 10.0]) * 1e-100
    assert cluster(np.append(small, 1.0), (2, 3, 4)).tolist() == [2, 2, 3, 3, 4]
    assert cluster(np.append(small, 1e200), (2, 3, 4)).tolist() == [2, 2, 3, 3, 4]
    near = 1e15 + np.array([0.0, 1.0, 5.0, 6.0])
    assert cluster(np.append(near, 0.0), (2, 3, 4)).tolist() == [3, 3, 4, 4, 2]


def test_few_values_take_the_widest() -> None:
    assert cluster(np.array([]), (2, 3, 4)).tolist() == []
    assert cluster(np.array([7.0]), (2, 3, 4)).tolist() == [4]
    assert cluster(np.zeros(3), (2, 3, 4)).tolist() == [4, 4, 4]
    assert cluster(np.array([5.0, 5.0, 0.0]), (2, 3, 4)).tolist() == [4, 4, 3]
    assert cluster(np.array([0.0, 1.0, 2.0]), (3, 4)).tolist() == [3, 4, 4], "where sums tie, more at the wider"


def test_the_experts_of_a_large_model_take_seconds() -> None:
    """58 layers of 256 experts, clustered over the model."""
    values = np.random.default_rng(0).gamma(1, 1, 58 * 256)
    before = time.process_time()
    chosen = cluster(values, (2, 3, 4))
    assert time.process_time() - before < 10
    means = [values[chosen == width].mean() for width in (2, 3, 4)]
    for value, width in zip(values, chosen, strict=True):  # every value is with the nearest mean, as k-means ends
        assert abs(value - means[width - 2]) <= min(abs(value - mean) for mean in means)
