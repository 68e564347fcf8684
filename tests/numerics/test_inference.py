"""Simulations: intervals cover what they say, false positives stay below the level, for one difference and a table."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import gammaln, xlogy

from moeq.numerics.inference import (
    FEWEST_DOCUMENTS,
    FEWEST_IN_ORDER,
    Spread,
    added,
    cosines,
    grouped,
    holm,
    long_run_variance,
    of_answers,
    spread,
)

Floats = NDArray[np.float64]
REPEATS = 20_000  # the simulation's own error is .15 points of a coverage of 95 %, .17 of false positives of 6 %
LEVEL = 0.05


def in_order(rng: np.random.Generator, shape: tuple[int, ...], lag: float) -> Floats:
    """Normal series of variance 1, stationary, with a lag-1 correlation (autoregressive)."""
    drawn = rng.normal(size=shape)
    series = np.empty(shape)
    series[..., 0] = drawn[..., 0]
    for place in range(1, shape[-1]):
        series[..., place] = lag * series[..., place - 1] + np.sqrt(1 - lag**2) * drawn[..., place]
    return series


def of_mean(values: Floats, strata: list[str] | None = None, documents: list[int] | None = None) -> Spread:
    """Of the means of [R, n]."""
    return spread(values / values.shape[-1], grouped(values.shape[-1], strata, documents))


def coverage(values: Floats, truth: float = 0.0, **dependence: list[int] | list[str]) -> float:
    """Of the intervals of the means of [R, n]."""
    return float((abs(values.mean(-1) - truth) <= of_mean(values, **dependence).half_width).mean())


SYMMETRIC = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "heavy tails": lambda rng, shape: rng.laplace(size=shape),
}


@pytest.mark.parametrize("name", list(SYMMETRIC))
@pytest.mark.parametrize("count", [8, 20, 100])
def test_intervals_of_independent_items_cover(count: int, name: str) -> None:
    values = SYMMETRIC[name](np.random.default_rng(count), (REPEATS, count))
    assert 0.93 <= coverage(values) <= 0.97
    assert (of_mean(values).p(values.mean(-1)) <= LEVEL).mean() <= 0.065


@pytest.mark.parametrize(("sigma", "least"), [(0.5, (0.91, 0.925, 0.94)), (1.0, (0.82, 0.86, 0.91))])
def test_skew_costs_coverage(sigma: float, least: tuple[float, ...]) -> None:
    """As the guide says: log-normal items need to be many; their differences, which are symmetric, do not."""
    rng = np.random.default_rng(3)
    for count, bound in zip((8, 20, 100), least, strict=True):
        values = rng.lognormal(0, sigma, (2, REPEATS, count))
        assert bound <= coverage(values[0], float(np.exp(sigma**2 / 2))) < 0.95
        assert 0.93 <= coverage(values[0] - values[1]) <= 0.975


@pytest.mark.parametrize("count", [FEWEST_IN_ORDER, 40, 100])
def test_intervals_of_windows_in_order_cover(count: int) -> None:
    rng, text = np.random.default_rng(count), [0] * count
    for lag, least in ((0.0, 0.93), (0.3, 0.93), (0.5, 0.92)):
        series = in_order(rng, (REPEATS, count), lag)
        assert least <= coverage(series, documents=text) <= 0.97, lag
        false = (of_mean(series, documents=text).p(series.mean(-1)) <= LEVEL).mean()
        assert false <= (0.065 if lag < 0.5 else 0.08), lag
        assert lag == 0 or coverage(series) < 0.88, "as independent items they do not"


def test_documents_are_drawn_where_there_are_enough() -> None:
    """Whatever goes on within them: here half of the variance is theirs."""
    rng, documents = np.random.default_rng(1), [number for number in range(FEWEST_DOCUMENTS) for _ in range(6)]
    own = rng.normal(size=(REPEATS, FEWEST_DOCUMENTS)).repeat(6, axis=-1)
    values = own + in_order(rng, (REPEATS, 6 * FEWEST_DOCUMENTS), 0.3)
    assert 0.93 <= coverage(values, documents=documents) <= 0.97
    assert coverage(values) < 0.8


def test_what_domains_differ_by_is_no_chance() -> None:
    rng = np.random.default_rng(2)
    strata = [name for name in "abcd" for _ in range(20)]
    scale, shift = (np.array(by).repeat(20) for by in ((1.0, 1.5, 2.0, 0.5), (0.0, 5.0, -9.0, 4.0)))
    series = np.concatenate([in_order(rng, (REPEATS, 20), 0.3) for _ in "abcd"], -1) * scale
    text = [0] * 80
    assert 0.93 <= coverage(series + shift, strata=strata, documents=text) <= 0.97
    apart, together = (of_mean(series + shift, by, text).error.mean() for by in (strata, None))
    assert together > 2 * apart
    mixed = rng.permutation(80)
    same = [of_mean((series + shift)[:5, order], [strata[n] for n in order]).error for order in (np.arange(80), mixed)]
    assert same[0] == pytest.approx(same[1]), "the order of domains, and of independent items, is nothing"


def test_strata_of_few_items_are_joined() -> None:
    sizes = lambda groups: sorted(len(group.places) for group in groups)  # noqa: E731
    assert sizes(grouped(30, ["a"] * 20 + ["b"] * 6 + ["c"] * 4)) == [10, 20]
    assert sizes(grouped(30, ["a"] * 20 + ["b"] * 6 + ["c"] * 4, [0] * 30)) == [30], "16 windows, not 8"
    assert sizes(grouped(4, list("abcd"))) == [4]
    assert not grouped(4, list("abcd"))[0].enough
    assert [group.by_document for group in grouped(20, ["a"] * 20, list(range(10)) * 2)] == [True]


def test_effective_items() -> None:
    rng = np.random.default_rng(4)
    values = rng.normal(size=(2000, 240))
    assert (of_mean(values).effective == 240).all()
    alike = values[:, :40].repeat(6, axis=-1)
    of_documents = of_mean(alike, documents=[number for number in range(40) for _ in range(6)])
    assert of_documents.effective.mean() == pytest.approx(40, rel=0.03), "six windows alike say what one does"
    windows = of_mean(in_order(rng, (2000, 240), 0.3), documents=[0] * 240)
    assert np.median(windows.effective) == pytest.approx(240 * 0.7 / 1.3, rel=0.06)


def test_all_cosines_are_the_sample_variance() -> None:
    values = np.random.default_rng(5).normal(size=(3, 17))
    assert long_run_variance(values, 16) == pytest.approx(values.var(-1, ddof=1))
    assert [cosines(count) for count in (2, 16, 40, 100)] == [1, 3, 5, 10]


def test_degrees_of_a_sum_are_satterthwaites() -> None:
    rng = np.random.default_rng(6)
    parts = [rng.normal(size=count) * scale for count, scale in ((9, 1.0), (21, 3.0))]
    found = added([spread(part, grouped(len(part))) for part in parts])
    variances = [len(part) * part.var(ddof=1) for part in parts]
    assert found.variance == pytest.approx(sum(variances))
    assert found.degrees == pytest.approx(sum(variances) ** 2 / (variances[0] ** 2 / 8 + variances[1] ** 2 / 20))


@pytest.mark.parametrize("count", [8, 20, 100])
def test_intervals_of_answers_cover(count: int) -> None:
    """Exact, over all tables of answers that only one of both has right; few such answers cover more than they say."""
    own, other = (side.ravel() for side in np.meshgrid(np.arange(count + 1), np.arange(count + 1)))
    own, other = own[own + other <= count], other[own + other <= count]
    same = count - own - other
    values = np.array([[1.0] * a + [-1.0] * b + [0.0] * c for a, b, c in zip(own, other, same, strict=True)])
    centre, found = of_answers(values)
    ways = gammaln(count + 1) - gammaln(own + 1) - gammaln(other + 1) - gammaln(same + 1)
    for share in (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95):
        for side in (0.5, 0.6, 0.75, 0.9, 1.0):
            first, second = share * side, share * (1 - side)
            likely = np.exp(ways + xlogy(own, first) + xlogy(other, second) + xlogy(same, 1 - share))
            covered = likely @ (abs(centre - (first - second)) <= found.half_width)
            assert covered >= 0.925, (share, side)
            assert covered <= 0.97 or share * count < 20 or side == 1, (share, side)
        equal = np.exp(ways + xlogy(own + other, share / 2) + xlogy(same, 1 - share))
        assert equal @ (found.p(centre) <= LEVEL) <= 0.06, share


def test_holm() -> None:
    assert holm(np.array([0.01, 0.04, 0.03, 0.005])) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm(np.array([0.9, 0.6])) == pytest.approx([1.0, 1.0])
    assert holm(np.array([])).shape == (0,)


@pytest.mark.cases(2)
@pytest.mark.parametrize(("count", "lag"), [(8, 0.0), (20, 0.0), (100, 0.0), (40, 0.3), (100, 0.3)])
def test_a_table_of_ten_rows_has_few_false_positives(count: int, lag: float) -> None:
    """Rows share what they are compared with; one wrong row makes the table wrong."""
    rng = np.random.default_rng(count)
    rows = in_order(rng, (8000, 11, count), lag)
    differences = rows[:, 1:] - rows[:, :1]
    p = of_mean(differences, documents=[0] * count if lag else None).p(differences.mean(-1))
    assert (holm(p) <= LEVEL).any(-1).mean() <= 0.06
    assert (p <= LEVEL).any(-1).mean() > 0.15, "without it there are many"
