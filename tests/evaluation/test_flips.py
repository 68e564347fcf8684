"""Answers that flipped against the first row."""

from __future__ import annotations

from typing import Any

import numpy as np

from moeq.artifacts.evaluation import Flips
from moeq.evaluation.comparison import AVERAGE, table


def row(name: str, metric: str, *tasks: list[float]) -> dict[str, Any]:
    results = {f"task {n}": {f"{metric},none": float(np.mean(answers))} for n, answers in enumerate(tasks)}
    samples = {
        f"task {n}": [{"doc_id": item, metric: value} for item, value in enumerate(answers)]
        for n, answers in enumerate(tasks)
    }
    return {"name": name, "lm_eval": {"results": results, "samples": samples}}


def test_flips_are_counted_both_ways() -> None:
    rows = [row("one", "acc", [1, 1, 0, 0, 1], [0, 0]), row("two", "acc", [0, 1, 1, 0, 0], [0, 0])]
    first, second = table(rows)
    assert all(cell.flips is None for cell in first["cells"].values())
    assert second["cells"]["task 0"].flips == Flips(items=5, lost=2, gained=1)
    assert second["cells"]["task 1"].flips == Flips(items=2, lost=0, gained=0)
    assert second["cells"]["task 0"].as_json()["flips"] == {"items": 5, "lost": 2, "gained": 1}
    assert second["cells"][AVERAGE].flips is None


def test_scores_that_are_neither_right_nor_wrong_do_not_flip() -> None:
    rows = [row(name, "acc", [0.5, 1, 0]) for name in ("one", "two")]
    assert table(rows)[1]["cells"]["task 0"].flips is None
    rows = [row(name, "bleu", [1, 1, 0]) for name in ("one", "two")]
    assert table(rows)[1]["cells"]["task 0"].flips is None
