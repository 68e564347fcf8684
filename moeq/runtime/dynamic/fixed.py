"""Experts in fixed precision, computed by the same kernels: what dynamic precision is measured against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from moeq.errors import ModelError
from moeq.models.experts import ExpertLayer
from moeq.runtime.experts_by_row import ReplicaSource, TakenOver, moved
from moeq.runtime.packed_experts import PACKED
from moeq_kernels import choice
from moeq_kernels.description import LayerOfExperts, PreparedLayer


class FixedExperts(TakenOver):
    """Mixed into the packed module of a family's kind, which says how the module is called."""

    def __init__(self, layer: ExpertLayer, original: nn.Module) -> None:
        nn.Module.__init__(self)
        self.take_over(layer, original)

    def through(self, hidden: Tensor, weights: Tensor) -> PreparedLayer | None:
        return self.prepared


FIXED: dict[str, type[FixedExperts]] = {
    name: type(f"{kind.__name__}Fixed", (FixedExperts, kind), {}) for name, kind in PACKED.items()
}


def fix(
    model: Any, layers: Sequence[ExpertLayer], source: ReplicaSource, widths: Sequence[Sequence[int]], policy: Any
) -> int:
    """Every expert [L][E] of a model at one width from now on; bytes that kernels hold of them.

    ModelError where no kernel takes them.
    """
    held, device = 0, next(model.parameters()).device
    for layer, of_layer in zip(layers, widths, strict=True):
        original = model.get_submodule(layer.name)
        module = FIXED[layer.kind.name](layer, original)
        experts = [source.expert(layer, expert, width) for expert, width in enumerate(of_layer)]
        described = LayerOfExperts(
            matrices=[{name: moved(one, device) for name, one in matrices.items()} for matrices, _ in experts],
            biases=[{name: one.to(device) for name, one in biases.items()} for _, biases in experts],
            gate=module.math.gate,
            activation=module.math.activation,
            finish=module.math.finish,
        )
        prepared, why = choice.prepared_layer(described, device, policy)
        if prepared is None:
            raise ModelError(f"no kernel takes its experts: {why}", where=layer.name, do="leave MOEQ_KERNEL out")
        module.prepared = prepared
        held += int(prepared.nbytes)
        model.set_submodule(layer.name, module.train(original.training))
    return held
