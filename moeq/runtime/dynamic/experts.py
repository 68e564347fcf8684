"""The experts module of a layer whose experts change their precision: called as the packed one is.

What its tokens chose is noted for whoever controls precision; nothing waits for it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from moeq.errors import ModelError
from moeq.models.experts import ExpertLayer
from moeq.runtime.arranged import refuse
from moeq.runtime.dynamic.seen import Notes
from moeq.runtime.experts_by_row import TakenOver
from moeq.runtime.packed_experts import PACKED
from moeq_kernels.description import Versioned


class DynamicExperts(TakenOver):
    """Mixed into the packed module of a family's kind, which says how the module is called."""

    def __init__(self, layer: ExpertLayer, original: nn.Module) -> None:
        nn.Module.__init__(self)
        self.layer = layer
        self.take_over(layer, original)
        self.versions: Versioned | None = None
        self.seen: Notes | None = None

    def through(self, hidden: Tensor, weights: Tensor) -> Any:
        """The versions that were published last."""
        assert self.versions is not None, "no expert has a version yet"
        refuse(hidden)
        return self._run

    def _run(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        assert self.versions is not None
        if self.seen is not None:
            self.seen.add(index, weights)
        return self.versions(hidden, index, weights)

    def _stored_sum(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """What gradients would be computed with."""
        what = "experts whose precision changes have no gradients"
        raise ModelError(what, where=self.layer.name, do="train the model before it is made dynamic")


DYNAMIC: dict[str, type[DynamicExperts]] = {
    name: type(f"{kind.__name__}Dynamic", (DynamicExperts, kind), {}) for name, kind in PACKED.items()
}
