"""Running packed checkpoints in transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moeq.runtime.dynamic.model import DynamicMoE

__all__ = ["DynamicMoE"]


def __getattr__(name: str) -> Any:
    """`DynamicMoE`, imported when it is asked for: it brings torch."""
    if name != "DynamicMoE":
        raise AttributeError(f"module 'moeq.runtime' has no attribute {name!r}")
    from moeq.runtime.dynamic.model import DynamicMoE

    return DynamicMoE
