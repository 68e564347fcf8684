"""Looped models: every token goes through some decoder layers several times, with the same weights."""

from __future__ import annotations

from torch import nn

LAYERS = "layers"


def visits(model: nn.Module, path: str) -> int:
    """How many times a token goes through the decoder layer at a path, or around what lies there: once, but in a loop.

    What holds the layers says which of them are looped, as transformers' configurations have it.
    """
    holder, found, rest = f".{path}.".partition(f".{LAYERS}.")
    config = getattr(model.get_submodule(holder.strip(".")), "config", None) if found else None
    passes = getattr(config, "loop_num_passes", None)
    if config is None or passes is None:
        return 1
    looped = range(config.loop_layer_index_start, config.loop_layer_index_end)
    return int(passes) if int(rest.partition(".")[0]) in looped else 1
