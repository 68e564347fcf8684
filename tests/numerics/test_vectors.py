"""Vectors of rows as values of compiled code: every operation, against numpy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moeq.numerics import vectors
from moeq.numerics.vectors import LANES
from moeq_kernels.cpu.kept_code import compiler
from moeq_kernels.cpu.memory import address_of


@compiler()  # type: ignore[untyped-decorator]
def computed(given, whole, out, counted):  # type: ignore[no-untyped-def]
    """Results one after the other; given: three vectors of floats, whole: two of words."""
    first, second = vectors.floats_at(address_of(given), 0), vectors.floats_at(address_of(given), LANES)
    third = vectors.floats_at(address_of(given), 2 * LANES)
    one, other = vectors.words_at(address_of(whole), 0), vectors.words_at(address_of(whole), LANES)
    floating, lower = address_of(out), vectors.less(first, second)
    vectors.put_floats(floating, 0, vectors.add(first, second))
    vectors.put_floats(floating, LANES, vectors.sub(first, second))
    vectors.put_floats(floating, 2 * LANES, vectors.mul(first, second))
    vectors.put_floats(floating, 3 * LANES, vectors.ratio(first, second))
    vectors.put_floats(floating, 4 * LANES, vectors.fused(first, second, third))
    vectors.put_floats(floating, 5 * LANES, vectors.size_of(first))
    vectors.put_floats(floating, 6 * LANES, vectors.root(vectors.size_of(first)))
    vectors.put_floats(floating, 7 * LANES, vectors.negated(first))
    vectors.put_floats(floating, 8 * LANES, vectors.pick(lower, first, second))
    vectors.put_floats(floating, 9 * LANES, vectors.floats(one))
    vectors.put_floats(floating, 10 * LANES, vectors.floats(vectors.number_at(address_of(given), 3)))
    vectors.put_number(floating, 11 * LANES, np.float32(vectors.word_at(address_of(whole), 1)))
    words = address_of(counted)
    vectors.put_words(words, 0, vectors.add(one, other))
    vectors.put_words(words, LANES, vectors.sub(one, other))
    vectors.put_words(words, 2 * LANES, vectors.mul(one, other))
    same, unlike = vectors.equal(one, other), vectors.unlike(one, other)
    vectors.put_words(words, 3 * LANES, vectors.pick(same, vectors.words(7), other))
    vectors.put_words(words, 4 * LANES, vectors.pick(vectors.both(lower, unlike), one, vectors.words(-9)))
    vectors.put_words(words, 5 * LANES, vectors.pick(vectors.differ(lower, unlike), one, vectors.words(-9)))
    vectors.put_word(words, 6 * LANES, np.int32(vectors.somewhere(same)))
    vectors.put_word(words, 6 * LANES + 1, np.int32(vectors.somewhere(vectors.less(one, one))))


@pytest.fixture(scope="module")
def made() -> tuple[Any, ...]:
    random = np.random.default_rng(1)
    given = random.standard_normal((3, LANES)).astype(np.float32)
    whole = random.integers(-4, 4, (2, LANES)).astype(np.int32)
    whole[1, 2] = whole[0, 2]
    out, counted = np.zeros((12, LANES), np.float32), np.zeros((7, LANES), np.int32)
    computed(given, whole, out, counted)
    return given, whole, out, counted


def test_floats(made: tuple[Any, ...]) -> None:
    (first, second, third), (one, _), out, _ = made
    exact = [
        first + second, first - second, first * second, first / second, None, abs(first), np.sqrt(abs(first)), -first,
        np.minimum(first, second), one.astype(np.float32), np.full(LANES, first[3]),
    ]  # fmt: skip
    for place, wanted in enumerate(exact):
        assert wanted is None or np.array_equal(out[place], wanted), place
    np.testing.assert_allclose(out[4], first * second + third, rtol=1e-5, atol=1e-6)
    assert out[11, 0] == one[1]


def test_words_and_truths(made: tuple[Any, ...]) -> None:
    (first, second, _), (one, other), _, counted = made
    lower, unlike = first < second, one != other
    wanted = [
        one + other, one - other, one * other, np.where(one == other, 7, other), np.where(lower & unlike, one, -9),
        np.where(lower ^ unlike, one, -9),
    ]  # fmt: skip
    for place, values in enumerate(wanted):
        assert np.array_equal(counted[place], values), place
    assert counted[6, :2].tolist() == [1, 0]
