"""DBRX: the experts of a layer one below the other in three matrices w1, v1, w2 [E*I, H]."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from moeq.models.kinds.base import Experts, Kind, Matrices, ReadsParts, with_parameters


class Dbrx(Kind):
    """w1 is the gate, v1 the other first matrix, w2 the transposed second one."""

    name = "dbrx"
    activation = "mlp.activation_fn"
    remark = "one below the other"

    def holds(self, module: Experts) -> bool:
        inner = getattr(module, "mlp", None)
        return isinstance(inner, nn.Module) and all(
            isinstance(getattr(inner, name, None), nn.Parameter) for name in ("w1", "v1", "w2")
        )

    def sizes(self, module: Experts) -> tuple[int, int, int]:
        rows, hidden = module.mlp.w1.shape
        return module.num_experts, hidden, rows // module.num_experts

    def parameters(self, module: Experts) -> tuple[str, ...]:
        return "mlp.w1", "mlp.v1", "mlp.w2"

    def weights(self, module: Experts, experts: slice) -> dict[str, Tensor]:
        gate, up, down = (
            matrix.data.view(module.num_experts, -1, matrix.shape[1])[experts]
            for matrix in (module.mlp.w1, module.mlp.v1, module.mlp.w2)
        )
        return {"gate_proj": gate, "up_proj": up, "down_proj": down.mT}

    def alone(self, module: Experts, path: str, expert: int, reader: ReadsParts) -> tuple[Matrices, Matrices]:
        start, stop = (number * self.sizes(module)[2] for number in (expert, expert + 1))
        parts = {name: reader.read_rows(f"{path}.{name}", start, stop) for name in self.parameters(module)}
        shell: Any = with_parameters(module, parts)
        shell.num_experts = 1
        return self.first(shell)
