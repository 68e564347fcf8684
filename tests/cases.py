"""Which tests `make test` runs, and which only the long sweeps do."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest


def examples(count: int) -> int:
    """How many examples of a property `make test` tries: half of those that long sweeps and GPUs do."""
    every = os.environ.get("MOEQ_FULL") == "1" or os.environ.get("MOEQ_CASES") == "all"
    return count if every else count // 2


def left_for_long(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """What `make test` leaves to `make test-full`: tests marked full, and all but so many cases of others.

    The cases that stay lie evenly over those that were asked for, the first among them. MOEQ_CASES=all: they all stay,
    as on a GPU, where they are soon run.
    """
    left = {item for item in items if item.get_closest_marker("full")}
    if os.environ.get("MOEQ_CASES") == "all":
        return left
    tests: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item not in left and item.get_closest_marker("cases") and not item.get_closest_marker("cuda"):
            tests.setdefault((item.path, item.name.partition("[")[0]), []).append(item)
    for cases in tests.values():
        mark = cases[0].get_closest_marker("cases")
        assert mark is not None
        stay = min(mark.args[0], len(cases))
        left |= set(cases) - {cases[place * len(cases) // stay] for place in range(stay)}
    return left
