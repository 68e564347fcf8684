from __future__ import annotations

from typing import Any

from moeq.stages.context import Context

NAME = "report.html"


def run(context: Context) -> dict[str, Any]:
    context.directory("report").mkdir(exist_ok=True)
    return {}
