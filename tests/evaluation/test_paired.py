"""Differences of the same items against what is known of them, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from moeq.artifacts.evaluation import Change
from moeq.errors import EvaluationError
from moeq.evaluation.comparison import AVERAGE, PERPLEXITY, table
from moeq.evaluation.paired import Items, compare, standard_error
from moeq.evaluation.results import items_of_text, text_of_items
from moeq.numerics.inference import FEWEST_IN_ORDER, FEWEST_ITEMS, holm


def items(values: np.ndarray, weights: np.ndarray | None = None, kind: str = "mean", **dependence: Any) -> Items:
    counted = np.ones(len(values)) if weights is None else weights
    names = tuple(map(str, range(len(values))))
    return Items(kind=kind, values=values, weights=counted, names=names, **dependence)


def test_a_difference_is_what_eval_json_keeps() -> None:
    found = compare([items(np.array([0.0, 1, 1] * 3))], [items(np.array([0.0, 0, 1] * 3))])
    assert isinstance(found, Change)
    assert found.effective_items == found.items == 9
    assert Change(**found.model_dump(mode="json")) == found
    before = {"difference": 1, "low": 0, "high": 2, "p": 0.2, "stderr": 0.5, "items": 9, "resamples": 2000, "seed": 1}
    assert Change(**before).shown_p == 0.2, "as earlier versions wrote it"


def test_the_interval_is_that_of_the_paired_differences() -> None:
    rng = np.random.default_rng(0)
    first = (rng.random(400) < 0.6).astype(float)
    mine = np.where(rng.random(400) < 0.1, 1 - first, first)
    found = compare([items(mine)], [items(first)])
    differences = mine - first
    error = differences.std(ddof=1) / 20
    assert found.difference == pytest.approx(differences.mean())
    assert found.stderr == pytest.approx(error, rel=0.04)
    assert (found.low, found.high) == pytest.approx(
        (differences.mean() - 1.966 * error, differences.mean() + 1.966 * error), abs=0.15 * error
    )
    unpaired = (first.var() / 400 + mine.var() / 400) ** 0.5
    assert found.stderr < 0.6 * unpaired, "what is common to an item cancels"


def test_p_values_of_no_difference_are_uniform_and_of_a_real_one_small() -> None:
    rng = np.random.default_rng(1)
    below = sum(compare([items(rng.normal(size=12))], [items(rng.normal(size=12))]).p < 0.1 for _ in range(2000))
    assert 160 <= below <= 240
    first = rng.normal(size=200)
    assert compare([items(first + 0.3 + 0.2 * rng.normal(size=200))], [items(first)]).p < 0.002
    same = compare([items(first)], [items(first)])
    assert (same.difference, same.low, same.high, same.p) == (0, 0, 0, 1)


def test_perplexity_is_of_all_tokens_together() -> None:
    sums, tokens = np.array([-10.0, -6.0, -40.0]), np.array([5.0, 3.0, 16.0])
    one = items(sums, tokens, "perplexity")
    assert one.value == pytest.approx(np.exp(56 / 24))
    assert items(sums, tokens, "bits").value == pytest.approx(56 / 24 / np.log(2))
    parts = (-sums - 56 / 24 * tokens) / 24
    assert standard_error(one) == pytest.approx(one.value * np.sqrt(3 * parts.var(ddof=1)))
    assert standard_error(items(sums, tokens, "bits")) == pytest.approx(np.sqrt(3 * parts.var(ddof=1)) / np.log(2))


def losses(rng: np.random.Generator, repeats: int, count: int, mean: float) -> Iterator[tuple[Items, Items]]:
    """Windows of one text whose losses, and what is added to them, have a lag-1 correlation of .3."""
    drawn = rng.normal(size=(2, repeats, count))
    for place in range(1, count):
        drawn[..., place] = 0.3 * drawn[..., place - 1] + np.sqrt(1 - 0.3**2) * drawn[..., place]
    tokens = np.full(count, 64.0)
    text = {"strata": ("all",) * count, "documents": (0,) * count}
    for loss, added in zip(3 + 0.3 * drawn[0], mean + 0.1 * drawn[1], strict=True):
        yield items(-64 * (loss + added), tokens, "perplexity", **text), items(-64 * loss, tokens, "perplexity", **text)


@pytest.mark.full
@pytest.mark.parametrize(("count", "repeats"), [(40, 6000), (100, 4000)])
def test_intervals_of_perplexities_cover_and_false_positives_are_few(count: int, repeats: int) -> None:
    """The simulation's own error is .3 points of either; tests/numerics/test_inference.py has more, without figures."""
    rng = np.random.default_rng(count)
    truth = np.exp(3.3) - np.exp(3)
    found = [compare([own], [first]) for own, first in losses(rng, repeats // 2, count, 0.3)]
    assert 0.93 <= np.mean([one.low <= truth <= one.high for one in found]) <= 0.97
    none = [compare([own], [first]) for own, first in losses(rng, repeats, count, 0.0)]
    assert np.mean([one.p < 0.05 for one in none]) <= 0.065
    assert all((one.p < 0.05) == (not one.low <= 0 <= one.high) for one in none), "one says what the other does"


def test_windows_in_order_are_fewer_than_they_look() -> None:
    rng = np.random.default_rng(2)
    pairs = list(losses(rng, 40, 400, 0.0))
    shown = [compare([own], [first]) for own, first in pairs]
    assert np.median([found.effective_items for found in shown]) == pytest.approx(400 * 0.7 / 1.3, rel=0.12)
    alone = [items(own.values, own.weights, "perplexity") for own, _ in pairs]
    wider = [standard_error(own) / standard_error(one) for (own, _), one in zip(pairs, alone, strict=True)]
    assert np.mean(wider) == pytest.approx((1.3 / 0.7) ** 0.5, rel=0.1)


def test_the_same_items_give_the_same_numbers_in_any_order() -> None:
    rng = np.random.default_rng(2)
    own, first = rng.normal(size=(2, 50))
    found = compare([items(own)], [items(first)])
    assert compare([items(own)], [items(first)]) == found
    turned = compare([items(own[::-1])], [items(first[::-1])]).model_dump()
    assert turned == pytest.approx(found.model_dump())


def test_earlier_results_know_less_of_their_windows() -> None:
    """Without documents windows are one text in order; totals of documents are independent."""
    own, first = next(losses(np.random.default_rng(7), 1, 60, 0.1))
    cut = {"window": 65, "stride": 64, "text": "x", "unit": "window"}
    new, other = (text_of_items(one, **cut) for one in (own, first))
    assert new["items"]["documents"] == [["all", 60]]
    again = items_of_text(new)
    assert (again.strata, again.documents, again.values.tolist()) == (own.strata, own.documents, own.values.tolist())
    old = {**new, "items": {name: new["items"][name] for name in ("logprob", "tokens")}}
    assert compare([items_of_text(old)], [items_of_text(other)]) == compare([again], [items_of_text(other)])
    assert items_of_text({**old, "unit": "document"}).documents is None
    for wrong in ([["all", 59]], [["all", -1], ["all", 61]], [["all"]], []):
        with pytest.raises(ValueError, match=r"documents of other|unpack"):
            items_of_text({**new, "items": new["items"] | {"documents": wrong}})


def row(name: str, values: list[float], perplexity: float, text: str = "one") -> dict[str, object]:
    samples = [{"doc_id": n, "doc_hash": str(n), "acc": value} for n, value in enumerate(values)]
    results = {task: {"acc,none": float(np.mean(values)), "acc_stderr,none": 0.1} for task in ("a", "b")}
    scores = {
        "perplexity": perplexity, "perplexity_stderr": 0.1, "unit": "window", "window": 8, "stride": 4,
        "text": text,
        "items": {"logprob": [-np.log(perplexity) * 4] * 16, "tokens": [4] * 16},
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
    with pytest.raises(EvaluationError, match="made of other items \\(16 and 16\\)"):  # as many windows, another text
        table([row("one", [1, 0], 10.0), row("two", [1, 1], 12.0, text="another")])


def test_p_values_of_a_measure_are_adjusted_together() -> None:
    rng = np.random.default_rng(8)
    answers = [(rng.random(60) < share).astype(float).tolist() for share in (0.8, 0.5, 0.6, 0.7)]
    rows = table([row(str(number), values, 10.0 + number) for number, values in enumerate(answers)])
    changes = [entry["cells"]["a"].change for entry in rows[1:]]
    assert [change.adjusted_p for change in changes] == holm(np.array([change.p for change in changes])).tolist()
    assert changes[0].adjusted_p > changes[0].p


def test_few_items_are_never_sure() -> None:
    first = np.zeros(100)
    for count in (4, 6, 12):
        exact = 2.0 ** (1 - count)
        found = compare([items((np.arange(100) < count).astype(float))], [items(first)])
        assert exact <= found.p < 2.5 * exact, "the exact test of signs is the least that there can be"
        other = compare([items((np.arange(100) < count) * 1.5)], [items(first)])
        assert other.p >= exact, "of figures that are no answers, too"


def test_too_few_items_have_neither_interval_nor_p() -> None:
    values = np.arange(20.0)
    for count, documents, fewest in ((7, None, FEWEST_ITEMS), (15, (0,) * 15, FEWEST_IN_ORDER)):
        pair = [items(part[:count], documents=documents) for part in (values, values[::-1])]
        found = compare(*([one] for one in pair))
        assert (found.low, found.high, found.p, found.fewest_items) == (None, None, None, fewest)
        assert found.stderr > 0
    enough = compare([items(values[:8])], [items(values[8:16])])
    assert enough.fewest_items is None
    assert enough.p is not None
    both = compare([items(values[:8]), items(values[:3])], [items(values[8:16]), items(values[3:6])])
    assert both.p is None, "a mean over tasks is no surer than each of them"
    one = items(np.array([0.5]))
    assert compare([one], [one]).stderr is None
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
