"""Layers that draft later tokens (multi-token prediction): what a checkpoint has of them, which is left behind.

They lie behind the last layer of a configuration that says how many there are (DeepSeek-V3, GLM-4.5), or below a module
whose name begins with `mtp` (Qwen3-Next). transformers makes no module of them when it loads a model, so that moeq has
no statistics of their experts; a checkpoint without them answers the same, and drafts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from moeq.artifacts.reading import TensorHeader
from moeq.models.stored_experts import LAYER, LAYERS, is_named_draft, stated
from moeq.tables import human_bytes

NUMBER = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_layers", "mtp_num_hidden_layers")


def draft_keys(keys: Iterable[str], config: Mapping[str, Any]) -> list[str]:
    """The tensors that belong to such layers: as many behind the last one as the configuration states, no more."""
    layers, more = stated(config, LAYERS), stated(config, NUMBER) or 0
    behind = range(0) if layers is None else range(layers, layers + more)
    return [key for key in keys if is_named_draft(key) or _layer(key) in behind]


def _layer(key: str) -> int | None:
    number = LAYER.search(key)
    return None if number is None else int(number[1])


def without_drafting(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration that states no such layers where it stated some, for a checkpoint that has none."""
    return {
        name: without_drafting(value) if isinstance(value, dict) else 0 if name in NUMBER and value else value
        for name, value in config.items()
    }


def left_drafts(drafts: Mapping[str, TensorHeader]) -> str | None:
    """One line on the tensors of such layers that a checkpoint has, which are left behind; None without any."""
    if not drafts:
        return None
    size = human_bytes(sum(header.bytes for header in drafts.values()))
    return f"left out: layers that draft later tokens (multi-token prediction), {len(drafts):,} tensors, {size}"
