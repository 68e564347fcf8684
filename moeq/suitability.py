"""Is my model one that works? From its config.json and the record of families; nothing of it is loaded or run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from moeq.errors import missing
from moeq.exporters.exporter import Exporter
from moeq.folders import expanded
from moeq.models.source import BUNDLED, open_config
from moeq.models.support import Answer, Support, answer, dense_types
from moeq.runtimes import runtimes


def is_model(name: str) -> bool:
    """Whether a word names a model, a directory, a config.json or a hub id, rather than a family."""
    path = expanded(name)
    try:
        there = path.is_dir() or path.is_file()
    except OSError:  # too long for a file
        return False
    return there or "/" in name or name.startswith((".", "~", BUNDLED)) or name.endswith(".json")


def of_model(name: str) -> dict[str, Any]:
    """What can be done with a model, and what config.json says of its size. Raises ModelError where it cannot be read,
    MissingError for a config.json that is not there.

    Of a hub id its config.json alone is asked for, which the hub's client keeps.
    """
    if name.endswith(".json") and not expanded(name).is_file():
        raise missing(name, "give a config.json, a model directory or a hub id")
    source = open_config(name)
    return {"model": source.name, **as_json(answer(source.config))}


def of_dense_type(name: str) -> dict[str, Any] | None:
    """The answer for the model type of a dense family of transformers; None for any other word."""
    kind = next((known for known in dense_types() if known.replace("-", "_") == name.lower().replace("-", "_")), None)
    return None if kind is None else {"model": name, **as_json(answer({"model_type": kind}))}


def as_json(found: Answer) -> dict[str, Any]:
    """An answer with the runtimes that the family can be written for."""
    row = None if found.family is None else asdict(found.family)
    can = found.family is not None and found.verdict in ("works", "untried")
    return asdict(found) | {"family": row, "runtimes": runtimes_of(found.family) if can else []}


def runtimes_of(family: Support | None) -> list[str]:
    """The runtimes that a family's checkpoints can be written for; none of one that is not quantized.

    Widths, and settings of a model that a runtime computes otherwise, may rule one out: `moeq plan` says so.
    """
    if family is None or not family.quantized:
        return []
    return [name for name, one in runtimes().items() if _takes(one.exporter, family)]


def _takes(exporter: Exporter, family: Support) -> bool:
    if exporter.families is not None and family.model_type not in exporter.families:
        return False
    return family.separate or not exporter.separate


def lines_of(found: dict[str, Any]) -> Iterator[str]:
    """An answer in words: whether it is one that works, its sizes as config.json states them, what it can become."""
    yield f"{found['model']}: {found['line']}{'; ' + found['do'] if found['do'] else ''}"
    counts = {"layers": found["layers"], "experts": found["experts"], "a token": found["experts_a_token"]}
    stated = ", ".join(f"{count} {name}" for name, count in counts.items() if count is not None)
    yield f"model type: {found['model_type']}{f' ({stated})' if stated else ''}"
    if found["family"] is not None:
        yield f"class: {found['family']['model']}, experts {found['family']['experts']}"
    if found["runtimes"]:
        yield f"can be written for: {', '.join(found['runtimes'])}"
