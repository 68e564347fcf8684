"""The paired bootstrap against what is known of differences, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from moeq.artifacts.evaluation import Change
from moeq.errors import EvaluationError
from moeq.evaluation.comparison import AVERAGE, PERPLEXITY, table
from moeq.evaluation.paired import Items, compare, standard_error


def items(values: np.ndarray, weights: np.ndarray | None = None, kind: str = "mean") -> Items:
    counted = np.ones(len(values)) if weights is None else weights
    return Items(kind=kind, values=values, weights=counted, names=tuple(map(str, range(len(values)))))


def test_a_difference_is_what_eval_json_keeps() -> None:
    found = compare([items(np.array([0.0, 1, 1]))], [items(np.array([0.0, 0, 1]))])
    assert isinstance(found, Change)
    assert Change(**found.model_dump(mode="json")) == found


def test_the_interval_is_that_of_the_paired_differences() -> None:
    rng = np.random.default_rng(0)
    first = (rng.random(400) < 0.6).astype(float)
    mine = np.where(rng.random(400) < 0.1, 1 - first, first)
    found = compare([items(mine)], [items(first)])
    differences = mine - first
    error = differences.std(ddof=1) / 20
    assert found.difference == pytest.approx(differences.mean())
    assert found.stderr == pytest.approx(error, rel=0.1)
    assert (found.low, found.high) == pytest.approx(
        (differences.mean() - 1.96 * error, differences.mean() + 1.96 * error), abs=0.2 * error
    )
    unpaired = (first.var() / 400 + mine.var() / 400) ** 0.5
    assert found.stderr < 0.6 * unpaired, "what is common to an item cancels"


def test_p_values_of_no_difference_are_uniform_and_of_a_real_one_small() -> None:
    rng = np.random.default_rng(1)
    below = 0
    for _ in range(100):
        first, mine = rng.normal(size=80), rng.normal(size=80)
        below += compare([items(mine)], [items(first)], resamples=400).p < 0.1
    assert 3 <= below <= 20
    first = rng.normal(size=200)
    assert compare([items(first + 0.3 + 0.2 * rng.normal(size=200))], [items(first)]).p < 0.002
    same = compare([items(first)], [items(first)])
    assert (same.difference, same.low, same.high, same.p) == (0, 0, 0, 1)


def test_perplexity_is_of_all_tokens_together() -> None:
    sums, tokens = np.array([-10.0, -6.0, -40.0]), np.array([5.0, 3.0, 16.0])
    one = items(sums, tokens, "perplexity")
    assert one.value == pytest.approx(np.exp(56 / 24))
    assert items(sums, tokens, "bits").value == pytest.approx(56 / 24 / np.log(2))
    assert standard_error(one) > 0


def test_the_same_seed_gives_the_same_numbers_and_another_others() -> None:
    rng = np.random.default_rng(2)
    pair = [items(rng.normal(size=50))], [items(rng.normal(size=50))]
    assert compare(*pair) == compare(*pair)
    assert compare(*pair, seed=1).low != compare(*pair, seed=2).low


def row(name: str, values: list[float], perplexity: float, text: str = "one") -> dict[str, object]:
    samples = [{"doc_id": n, "doc_hash": str(n), "acc": value} for n, value in enumerate(values)]
    results = {task: {"acc,none": float(np.mean(values)), "acc_stderr,none": 0.1} for task in ("a", "b")}
    scores = {
        "perplexity": perplexity, "perplexity_stderr": 0.1, "unit": "window", "window": 8, "stride": 4,
        "text": text,
        "items": {"logprob": [-np.log(perplexity) * 4] * 3, "tokens": [4] * 3},
    }  # fmt: skip
    return {
        "name": name,
        "lm_eval": {"results": results, "samples": {"a": samples, "b": samples}},
        "perplexity": scores,
    }


def test_the_table_has_every_measure_and_differences_from_the_first() -> None:
    first, second = table([row("one", [1, 0, 1, 0], 10.0), row("two", [1, 1, 1, 0], 12.0)])
    assert list(second["cells"]) == [AVERAGE, "a", "b", PERPLEXITY]
    assert all(cell.change is None for cell in first["cells"].values())
    assert second["cells"]["a"].change.difference == pytest.approx(0.25)
    assert second["cells"][AVERAGE].value == pytest.approx(0.75)
    assert second["cells"][AVERAGE].change.difference == pytest.approx(0.25)
    assert second["cells"][PERPLEXITY].change.difference == pytest.approx(2.0)
    assert second["cells"][PERPLEXITY].change.low == pytest.approx(2.0), "every item differs alike"


def test_other_items_are_refused() -> None:
    with pytest.raises(EvaluationError, match="made of other items \\(4 and 3\\)"):
        table([row("one", [1, 0, 1], 10.0), row("two", [1, 1, 1, 0], 12.0)])
    with pytest.raises(EvaluationError, match="made of other items \\(3 and 3\\)"):  # as many windows, another text
        table([row("one", [1, 0], 10.0), row("two", [1, 1], 12.0, text="another")])


def test_few_items_are_never_sure() -> None:
    first = np.zeros(100)
    for count, least in ((4, 0.125), (12, 0.001)):
        found = compare([items((np.arange(100) < count).astype(float))], [items(first)])
        assert found.low > 0, "the interval alone is sure already"
        assert found.p == pytest.approx(least, abs=2e-4), "as the exact test of signs, down to the resamples' own least"
    two, one = items(np.array([0.0, 0.0])), items(np.array([0.0]))
    assert compare([items(np.array([1.0, 1.0]))], [two]).p == 0.5
    assert compare([items(np.array([1.0]))], [one]) is None
    assert standard_error(one) is None


def test_items_stand_for_a_figure_only_where_it_is_made_of_them() -> None:
    """Pairs of gold and answer are no values with weights; the answers of another filter are no items."""
    pairs = [{"doc_id": n, "f1": [1, n % 2], "exact_match": 1.0, "filter": "none"} for n in range(4)]
    others = [one | {"exact_match": 0.0, "filter": "loose"} for one in pairs]
    names = ("f1", "exact_match")
    results = [
        {"results": {name: {f"{name},none": value}}, "samples": {name: pairs + others}}
        for name, value in zip(names, (0.667, 1.0), strict=True)
    ]
    cells = [table([{"name": "a", "lm_eval": one}, {"name": "b", "lm_eval": one}])[1]["cells"] for one in results]
    assert cells[0]["f1"].change is None
    assert cells[1]["exact_match"].change.items == 4
