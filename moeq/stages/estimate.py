from __future__ import annotations
from typing import Any
from moeq.stages.context import Context
def run(context: Context) -> dict[str, Any]:
    context.directory("estimate").mkdir(exist_ok=True); return {}
def hardware_digest(context: Context) -> Any: return ""
