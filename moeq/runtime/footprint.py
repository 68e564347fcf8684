"""What a loaded model holds in memory: what kernels took over is in no parameter and in no buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from moeq.runtime.arranged import Puts


def held_by_kernels(model: nn.Module) -> int:
    """Bytes that kernels hold in the place of the buffers of a model's packed modules."""
    held = (getattr(module, "prepared", None) for module in model.modules() if isinstance(module, Puts))
    return sum(int(prepared.nbytes) for prepared in held if prepared is not None)


@dataclass(frozen=True)
class Footprint:
    """`get_memory_footprint` of a model with packed modules: transformers' own sums parameters and buffers alone."""

    model: Any

    def __call__(self, return_buffers: bool = True) -> int:
        """Bytes of the parameters, and with return_buffers of the buffers, packed ones as they lie or kernels hold
        them."""
        own: int = type(self.model).get_memory_footprint(self.model, return_buffers)
        return own + (held_by_kernels(self.model) if return_buffers else 0)
