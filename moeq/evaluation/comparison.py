"""Evaluations side by side: measures with standard errors, and paired differences from the first one.

A row is {"name", "lm_eval": lm-eval's results with samples or None, "perplexity": what `score_text` found or None}.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moeq.artifacts.evaluation import Change
from moeq.evaluation.paired import Items, compare, standard_error
from moeq.evaluation.results import checked, items_of, items_of_text, leaves, main_metric, members, pooled, scores_of
from moeq.numerics.inference import holm

AVERAGE, PERPLEXITY = "average", "perplexity"
AVERAGED = ("acc", "acc_norm", "exact_match")  # metrics that a mean over tasks makes sense of


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One measure of one row; change: from the first row's, None for that itself and where items are not known."""

    metric: str
    value: float
    stderr: float | None
    change: Change | None

    def as_json(self) -> dict[str, Any]:
        change = None if self.change is None else self.change.model_dump()
        return {"metric": self.metric, "value": self.value, "stderr": self.stderr, "change": change}


def table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry a row: {"name", "cells": {task, average or perplexity: Cell}}; EvaluationError where items differ.

    The differences of one measure are a family: their p values are adjusted together.
    """
    first: dict[str, _Measure] = {}
    entries = []
    for number, row in enumerate(rows):
        measures = _measures(row)
        average = _average(measures, first)
        cells = {} if average is None else {AVERAGE: average}
        for name, measure in measures.items():
            cells[name] = _cell(measure, first.get(name), f"{row['name']}, {name}")
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
    samples, parts = results.get("samples", {}), leaves(dict(results), task)
    items = [items_of(samples[part], metric) if part in samples else None for part in parts]
    if parts != [task]:
        return pooled(items, value)
    return None if items[0] is None else checked(items[0], value)


def _cell(own: _Measure, first: _Measure | None, where: str) -> Cell:
    change = None
    if first is not None and own.items is not None and first.items is not None and own.metric == first.metric:
        change = compare([own.items], [first.items], where=where)
    return Cell(metric=own.metric, value=own.value, stderr=own.stderr, change=change)


def _average(measures: Mapping[str, _Measure], first: Mapping[str, _Measure]) -> Cell | None:
    """The mean over tasks with an accuracy, where there are several; changes only where the first row has the same."""
    chosen = {name: own for name, own in measures.items() if own.metric.partition(",")[0] in AVERAGED}
    if len(chosen) < 2:
        return None
    known = [own.stderr for own in chosen.values() if own.stderr is not None]
    stderr = sum(error**2 for error in known) ** 0.5 / len(chosen) if len(known) == len(chosen) else None
    pairs = [(own.items, first[name].items) for name, own in chosen.items() if name in first]
    both = [(items, others) for items, others in pairs if items is not None and others is not None]
    change = compare([items for items, _ in both], [others for _, others in both]) if len(both) == len(chosen) else None
    value = sum(own.value for own in chosen.values()) / len(chosen)
    return Cell(metric="mean accuracy", value=value, stderr=stderr, change=change)
