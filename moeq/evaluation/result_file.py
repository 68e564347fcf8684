"""The result file of `moeq eval` without a run: settings, lm-eval's results with every sample, and the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moeq.artifacts.files import write_json
from moeq.artifacts.reading import read_json_file
from moeq.errors import ArtifactError
from moeq.evaluation.comparison import table
from moeq.evaluation.context_options import of_result
from moeq.evaluation.paired import HOW
from moeq.version import __version__

KIND, SCHEMA_VERSION = "moeq evaluation", 1
REMEDY = "run `moeq eval --out` again"
ITEMS = ("samples", "items")  # what the short form is without
Row = dict[str, Any]


def document(rows: Sequence[Row], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that is known of the rows."""
    entries = [
        {"name": entry["name"], "cells": {name: cell.as_json() for name, cell in entry["cells"].items()}}
        for entry in table(rows)
    ]
    return {
        "kind": KIND,
        "schema_version": SCHEMA_VERSION,
        "moeq_version": __version__,
        "settings": dict(settings),
        "differences": {"from": rows[0]["name"], "how": HOW},
        "table": entries,
        "rows": list(rows),
    }


def short(whole: Mapping[str, Any]) -> dict[str, Any]:
    """The document without samples and items."""
    rows = [
        {
            name: {key: kept for key, kept in value.items() if key not in ITEMS} if isinstance(value, dict) else value
            for name, value in row.items()
        }
        for row in whole["rows"]
    ]
    return {**whole, "rows": rows}


def write(path: Path, whole: Mapping[str, Any]) -> None:
    write_json(path, dict(whole))


def summary(path: Path) -> dict[str, Any]:
    """What a result file holds, in short; ArtifactError for another file."""
    rows = [
        {"name": row["name"]} | {name: cell.value for name, cell in row["cells"].items()}
        for row in table(read_rows(path))
    ]
    return {"kind": KIND, "rows": rows}


def read_rows(path: Path) -> list[Row]:
    """The rows of a result file; ArtifactError for another file."""
    try:
        whole = read_json_file(path)
        if (whole["kind"], whole["schema_version"]) != (KIND, SCHEMA_VERSION):
            raise ValueError(f"{whole['kind']}, schema version {whole['schema_version']}")
        rows: list[Row] = [of_result({**row, "name": str(row["name"])}) for row in whole["rows"]]
        if not rows:
            raise ValueError("no rows")
        with np.errstate(over="raise", invalid="raise"):
            table(rows)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, ArithmeticError) as error:
        raise ArtifactError(f"not a result of `moeq eval --out` ({error})", where=str(path), do=REMEDY) from None
    return rows
