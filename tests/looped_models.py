"""A Mixtral whose decoder layers run as a looped model's do: some of them several times for every token.

No family of the transformers that the tests run with is looped.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from moeq.models.visits import LOOP


class Looped(nn.ModuleList):
    """Decoder layers in the order in which their model's configuration has them run."""

    config: Any

    def __getitem__(self, at: Any) -> Any:
        if not isinstance(at, slice):
            return super().__getitem__(at)
        passes, start, end = (getattr(self.config, name) for name in LOOP)
        return [*list(self)[:start], *list(self)[start:end] * passes, *list(self)[end:]]


def looped(model: Any, passes: int, start: int, end: int) -> Any:
    """The model with the layers from `start` on and before `end` in a loop, which its configuration says."""
    model.model.layers.__class__, model.model.layers.config = Looped, model.config
    for name, value in zip(LOOP, (passes, start, end), strict=True):
        setattr(model.config, name, value)
    return model
