"""Evaluations side by side: measures with standard errors, and paired differences from the first one.

A row is {"name", "lm_eval": lm-eval's results with samples or None, "perplexity": what `score_text` found or None,
"divergence": what its scorer found or None}.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moeq.artifacts.evaluation import Change, Divergence, Flips
from moeq.evaluation.paired import Items, compare, standard_error
from moeq.evaluation.results import checked, items_of, items_of_text, leaves, main_metric, members, pooled, scores_of
from moeq.numerics.inference import holm
from moeq.tables import NATS

AVERAGE, PERPLEXITY, KL, SAME_TOP = "average", "perplexity", "KL", "equal top-1"
AVERAGED = ("acc", "acc_norm", "exact_match")  # metrics that a mean over tasks makes sense of


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One measure of one row; change: from the first row's, None for that itself and where items are not known; flips:
    answers that are right in one of the two alone, None of other measures."""

    metric: str
    value: float
    stderr: float | None
    change: Change | None = None
    flips: Flips | None = None

    def as_json(self) -> dict[str, Any]:
        change, flips = (None if found is None else found.model_dump() for found in (self.change, self.flips))
        return {"metric": self.metric, "value": self.value, "stderr": self.stderr, "change": change, "flips": flips}


def table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry a row: {"name", "cells": {task, average, perplexity, KL or equal top-1: Cell}}.

    KL and equal top-1 are to the first row; a row that was compared with another has neither. The differences of one
    measure are a family: their p values are adjusted together. Raises EvaluationError where items differ.
    """
    first: dict[str, _Measure] = {}
    entries = []
    for number, row in enumerate(rows):
        measures = _measures(row)
        average = _average(measures, first)
        cells = {} if average is None else {AVERAGE: average}
        for name, measure in measures.items():
            cells[name] = _cell(measure, first.get(name), f"{row['name']}, {name}")
        cells |= _divergences(row, rows[0]["name"])
        entries.append({"name": row["name"], "cells": cells})
        first = first if number else measures
    for name in dict.fromkeys(name for entry in entries for name in entry["cells"]):
        _adjust([entry["cells"] for entry in entries if name in entry["cells"]], name)
    return entries


def _adjust(rows: Sequence[dict[str, Cell]], name: str) -> None:
    """Put Holm's p values of one measure into its cells."""
    changes = [(cells, cells[name].change) for cells in rows]
    tested = [(cells, change, change.p) for cells, change in changes if change is not None and change.p is not None]
    adjusted = holm(np.array([p for _, _, p in tested]))
    for (cells, change, _), p in zip(tested, adjusted.tolist(), strict=True):
        cells[name] = replace(cells[name], change=change.model_copy(update={"adjusted_p": p}))


@dataclass(frozen=True, kw_only=True)
class _Measure:
    metric: str
    value: float
    stderr: float | None
    items: Items | None


def _measures(row: Mapping[str, Any]) -> dict[str, _Measure]:
    measures = {}
    results = row.get("lm_eval") or {"results": {}}
    hidden = members(results)
    for task, result in results["results"].items():
        scores = scores_of(result)
        metric = main_metric(scores)
        if metric is None or task in hidden:
            continue
        items = _items(results, task, metric, scores[metric])
        name, comma, chosen = metric.partition(",")
        error = scores.get(f"{name}_stderr{comma}{chosen}") if items is None else standard_error(items)
        measures[task] = _Measure(metric=metric, value=scores[metric], stderr=error, items=items)
    text = row.get("perplexity")
    if text is not None:
        measures[PERPLEXITY] = _Measure(
            metric=PERPLEXITY, value=text["perplexity"], stderr=text["perplexity_stderr"], items=items_of_text(text)
        )
    return measures


def _items(results: Mapping[str, Any], task: str, metric: str, value: float) -> Items | None:
    """Items of a task, or of all tasks of a group."""
    parts = leaves(dict(results), task)
    items = [items_of(results, part, metric) for part in parts]
    if parts != [task]:
        return pooled(items, value)
    return None if items[0] is None else checked(items[0], value)


def _cell(own: _Measure, first: _Measure | None, where: str) -> Cell:
    change = flips = None
    if first is not None and own.items is not None and first.items is not None and own.metric == first.metric:
        change = compare([own.items], [first.items], where=where)
        flips = _flips(own.metric, own.items.values, first.items.values)
    return Cell(metric=own.metric, value=own.value, stderr=own.stderr, change=change, flips=flips)


def _flips(metric: str, own: np.ndarray, first: np.ndarray) -> Flips | None:
    """Of the same items, right or wrong [n]; None for other values."""
    if metric.partition(",")[0] not in AVERAGED or not np.isin([own, first], (0, 1)).all():
        return None
    return Flips(items=len(own), lost=int((own < first).sum()), gained=int((own > first).sum()))


def _divergences(row: Mapping[str, Any], first: str) -> dict[str, Cell]:
    if row.get("divergence") is None or (found := Divergence.of(row["divergence"])).base != first:
        return {}
    return {
        KL: Cell(metric=NATS, value=found.kl, stderr=found.kl_stderr),
        SAME_TOP: Cell(metric=SAME_TOP, value=found.same_top, stderr=found.same_top_stderr),
    }


def _average(measures: Mapping[str, _Measure], first: Mapping[str, _Measure]) -> Cell | None:
    """The mean over tasks with an accuracy, where there are several; changes only where the first row has the same."""
    chosen = {name: own for name, own in measures.items() if own.metric.partition(",")[0] in AVERAGED}
    if len(chosen) < 2:
        return None
    known = [own.stderr for own in chosen.values() if own.stderr is not None]
    stderr = sum(error**2 for error in known) ** 0.5 / len(chosen) if len(known) == len(chosen) else None
    same = [name for name, own in chosen.items() if name in first and first[name].metric == own.metric]
    pairs = [(chosen[name].items, first[name].items) for name in same]
    both = [(items, others) for items, others in pairs if items is not None and others is not None]
    change = compare([items for items, _ in both], [others for _, others in both]) if len(both) == len(chosen) else None
    value = sum(own.value for own in chosen.values()) / len(chosen)
    return Cell(metric="mean accuracy", value=value, stderr=stderr, change=change)
