"""DBRX: the experts of a layer one below the other in three matrices w1, v1, w2 [E*I, H]."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from moeq.models.kinds.base import Gate, Kind, ReadsParts, act_then_multiply, with_parameters


class Dbrx(Kind):
    """w1 is the gate, v1 the other first matrix, w2 the transposed second one."""

    name = "dbrx"

    def holds(self, module: nn.Module) -> bool:
        inner = getattr(module, "mlp", None)
        return isinstance(inner, nn.Module) and all(
            isinstance(getattr(inner, name, None), nn.Parameter) for name in ("w1", "v1", "w2")
        )

    def sizes(self, module: nn.Module) -> tuple[int, int, int]:
        of: Any = module
        return of.num_experts, of.mlp.w1.shape[1], of.mlp.w1.shape[0] // of.num_experts

    def parameters(self, module: nn.Module) -> tuple[str, ...]:
        return "mlp.w1", "mlp.v1", "mlp.w2"

    def weights(self, module: nn.Module, experts: slice) -> dict[str, Tensor]:
        of: Any = module
        gate, up, down = (
            matrix.data.view(of.num_experts, -1, matrix.shape[1])[experts]
            for matrix in (of.mlp.w1, of.mlp.v1, of.mlp.w2)
        )
        return {"gate_proj": gate, "up_proj": up, "down_proj": down.mT}

    def alone(self, module: nn.Module, expert: int, read: ReadsParts) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        rows = self.sizes(module)[2]
        names = self.parameters(module)
        parts = {name: read.read_rows(name, expert * rows, (expert + 1) * rows) for name in names}
        shell: Any = with_parameters(module, parts)
        shell.num_experts = 1
        return self.first(shell)

    def remarks(self, module: nn.Module) -> tuple[str, ...]:
        return ("one below the other",)

    def gate(self, module: nn.Module) -> Gate:
        of: Any = module
        return act_then_multiply(of.mlp.activation_fn)
