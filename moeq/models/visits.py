"""Looped models: every token goes through some decoder layers several times, with the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

LAYERS = "layers"
LOOP = ("loop_num_passes", "loop_layer_index_start", "loop_layer_index_end")  # of a configuration


def times(config: Mapping[str, Any], layer: int) -> int:
    """How many times a token goes through a decoder layer of a configuration, as transformers has it: once, but in a
    loop."""
    said: list[Any] = [config.get(name) for name in LOOP]
    passes, start, end = (1, 0, 0) if None in said else said
    return int(passes) if start <= layer < end else 1


def visits(model: nn.Module, path: str) -> int:
    """The same of the decoder layer at a path in a model, or around what lies there, as what holds the layers says."""
    holder, found, rest = f".{path}.".partition(f".{LAYERS}.")
    number = rest.partition(".")[0]
    if not found or not number.isdecimal():
        return 1
    config = getattr(model.get_submodule(holder.strip(".")), "config", None)
    return times({name: getattr(config, name, None) for name in LOOP}, int(number))
