"""lm-eval's own results without what changes from run to run, and the items of each task's measure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from moeq.artifacts.files import digest_of
from moeq.evaluation.paired import Items, standard_error

VOLATILE = (
    "date", "git_hash", "pretty_env_info", "transformers_version", "lm_eval_version", "upper_git_hash",
    "total_evaluation_time_seconds", "start_time", "end_time", "system_info",
)  # fmt: skip
MAIN = ("acc", "acc_norm", "exact_match", "word_perplexity", "perplexity", "byte_perplexity", "bits_per_byte")
_KINDS = dict.fromkeys(("word_perplexity", "perplexity", "byte_perplexity"), "perplexity") | {"bits_per_byte": "bits"}


def kept(results: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """lm-eval's results as JSON, samples included; `model` stands in the configuration as what was evaluated."""
    stable = {name: value for name, value in results.items() if name not in VOLATILE}
    stable["config"] = {name: value for name, value in stable.get("config", {}).items() if name != "device"} | model
    cleaned: dict[str, Any] = _as_json(stable)
    for config in cleaned.get("configs", {}).values():
        metadata = config.get("metadata") or {}
        if "config_source" in metadata:  # where it lies on this machine is nobody's business
            metadata["config_source"] = Path(str(metadata["config_source"])).name
    for task, samples in cleaned.get("samples", {}).items():
        if cleaned["configs"][task].get("doc_to_image") is not None:
            for sample in samples:  # lm-eval's own hash is of where an image lies in memory; `doc` has its bytes' hash
                sample["doc_hash"] = digest_of(sample["doc"])
    return cleaned


def _as_json(value: Any) -> Any:
    """Values that JSON has; functions by their name, numbers that are none as null."""
    if isinstance(value, dict):
        return {str(name): _as_json(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(inner) for inner in value]
    if isinstance(value, np.generic):
        return _as_json(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | bool | int):
        return value
    return getattr(value, "__name__", str(value))


def scores_of(result: dict[str, Any]) -> dict[str, float]:
    """lm-eval's `metric,filter` keys without the filter when there is one only; values that are numbers."""
    scores = {}
    for key, value in result.items():
        metric, comma, chosen = key.partition(",")
        if comma and isinstance(value, int | float) and math.isfinite(value):
            scores[metric if chosen == "none" else f"{metric},{chosen}"] = float(value)
    return scores


def members(results: dict[str, Any]) -> set[str]:
    """Tasks and groups of lm-eval's results that belong to a group."""
    return {name for inside in results.get("group_subtasks", {}).values() for name in inside}


def leaves(results: dict[str, Any], name: str) -> list[str]:
    """The tasks of a group, those of its groups included; a task is its own."""
    groups: dict[str, list[str]] = results.get("group_subtasks", {})
    found: dict[str, bool] = {}  # every task and group on the way, and whether it is a task
    left = [name]
    while left:
        member = left.pop()
        if member not in found:
            inside = groups.get(member, [])
            found[member] = not inside
            left += reversed(inside)
    return [member for member, is_task in found.items() if is_task]


def main_metric(scores: dict[str, float]) -> str | None:
    """The metric that stands for a task: the first known one, else the first that there is."""
    plain = [name for name in scores if not name.partition(",")[0].endswith("_stderr")]
    known = (name for wanted in MAIN for name in plain if name.partition(",")[0] == wanted)
    return next(known, next(iter(plain), None))


def items_of(results: Mapping[str, Any], task: str, metric: str) -> Items | None:
    """A metric's items of a task, in the order of the documents; None where its samples have no number for it.

    What names them are the document, the target, and how many examples stand before it.
    """
    samples, shots = results.get("samples", {}).get(task), results.get("n-shot", {}).get(task)
    if samples is None:
        return None
    name, _, chosen = metric.partition(",")
    rows = sorted(
        (row for row in samples if name in row and row.get("filter", chosen or "none") == (chosen or "none")),
        key=lambda row: int(row["doc_id"]),
    )
    values = [_number(row[name]) for row in rows]
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    pairs = np.array(known, float)
    names = tuple(digest_of([row["doc_id"], row.get("doc_hash"), row.get("target_hash"), shots])[:16] for row in rows)
    return Items(kind=_KINDS.get(name, "mean"), values=pairs[:, 0], weights=pairs[:, 1], names=names)


def pooled(parts: list[Items | None], value: float) -> Items | None:
    """Items of several tasks as one measure's; None where some are not known, or the mean over them is not `value`."""
    known = [items for items in parts if items is not None]
    if not known or len(known) < len(parts) or {items.kind for items in known} != {"mean"}:
        return None
    values, weights = (np.concatenate([getattr(items, side) for items in known]) for side in ("values", "weights"))
    names = tuple(name for items in known for name in items.names)
    return checked(Items(kind="mean", values=values, weights=weights, names=names), value)


def checked(items: Items, value: float) -> Items | None:
    """The items, None where the measure made of them is not `value`: a metric of all of them at once, such as F1."""
    with np.errstate(divide="ignore", invalid="ignore"):
        own = items.value
    return items if math.isclose(own, value, rel_tol=1e-6, abs_tol=1e-9) else None


def _number(value: Any) -> tuple[float, float] | None:
    """(value, weight) of one sample: a number, or a log-likelihood with the number of its words or bytes."""
    if isinstance(value, bool | int | float):
        return float(value), 1.0
    if isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(part, int | float) for part in value):
        return float(value[0]), float(value[1])
    return None


def text_of_items(items: Items, **cut: Any) -> dict[str, Any]:
    """What a measured text says of its items, for `items_of_text`; cut: documents, window, stride, counted and unit.

    documents: {domain: a document's number of items}, one after another; of text without documents, all of a domain's.
    """
    found: dict[str, Any] = {"logprob": items.values.tolist(), "tokens": items.weights.astype(int).tolist()}
    if items.strata is not None and items.documents is not None:
        own = groupby(zip(items.documents, items.strata, strict=True))
        found["documents"] = [[domain, sum(1 for _ in run)] for (_, domain), run in own]
    return {"perplexity_stderr": standard_error(items), "items": found} | cut


def items_of_text(measured: dict[str, Any]) -> Items:
    """The items that a perplexity is made of; ValueError where there are none, or their documents have others."""
    values, weights = (np.array(measured["items"][name], float) for name in ("logprob", "tokens"))
    settings = f"of window {measured['window']}, stride {measured['stride']}, text {measured['text']}"
    unit = measured["unit"]
    names = tuple(f"{unit} {number} of {int(weight)} tokens, {settings}" for number, weight in enumerate(weights))
    return Items(kind="perplexity", values=values, weights=weights, names=names, **dependence_of(measured))


def dependence_of(measured: dict[str, Any]) -> dict[str, Any]:
    """The documents and strata of a measured text's items, as `Items` takes them.

    Of results that do not name them: documents are independent, windows follow one another.
    """
    count, runs = len(measured["items"]["logprob"]), measured["items"].get("documents")
    if count == 0:
        raise ValueError("a text without items")
    if runs is None:
        return {} if measured["unit"] == "document" else {"documents": (0,) * count}
    if not all(isinstance(size, int) and size > 0 for _, size in runs) or sum(size for _, size in runs) != count:
        raise ValueError(f"documents of other items than these {count}")
    return {
        "documents": tuple(number for number, (_, size) in enumerate(runs) for _ in range(size)),
        "strata": tuple(str(domain) for domain, size in runs for _ in range(size)),
    }
