"""The experts module of a layer whose experts change their precision: called as the packed one is.

What its tokens chose is kept aside, as it lies, for whoever controls precision; nothing waits for it.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor, nn

from moeq.models.experts import ExpertLayer
from moeq.runtime.experts_by_row import TakenOver
from moeq.runtime.packed_experts import PACKED
from moeq_kernels.cpu.versions import VersionedLayer

Chosen = tuple[Tensor, Tensor]  # experts and weights [T, k]


class DynamicExperts(TakenOver):
    """Mixed into the packed module of a family's kind, which says how the module is called."""

    def __init__(self, layer: ExpertLayer, original: nn.Module) -> None:
        nn.Module.__init__(self)
        self.layer = layer
        self.take_over(layer, original)
        self.versions: VersionedLayer | None = None
        self.seen: deque[Chosen] = deque()

    def through(self, hidden: Tensor, weights: Tensor) -> Any:
        """The versions that were published last."""
        assert self.versions is not None, "no expert has a version yet"
        return self._run

    def _run(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        assert self.versions is not None
        self.seen.append((index, weights.detach()))
        return self.versions(hidden, index, weights)


DYNAMIC: dict[str, type[DynamicExperts]] = {
    name: type(f"{kind.__name__}Dynamic", (DynamicExperts, kind), {}) for name, kind in PACKED.items()
}
