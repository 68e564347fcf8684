"""A plugin of pytest for `make gpu`: what failed is written as it fails, so that a run that is stopped has told it.

MOEQ_FAILURES=FILE python -m pytest -p failures ...
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest  # which the machine need not have before the wheels are unpacked

VARIABLE = "MOEQ_FAILURES"
MOST_CHARACTERS = 4000  # of what a test says, its last ones


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Of the process that hands tests out, which hears of all of them."""
    file = os.environ.get(VARIABLE)
    if file is None or not report.failed or "PYTEST_XDIST_WORKER" in os.environ:
        return
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    with Path(file).open("a", encoding="utf-8") as into:
        into.write(f"== {report.nodeid} ({report.when})\n{report.longreprtext[-MOST_CHARACTERS:]}\n\n")
