"""The experts module of a packed checkpoint: every expert in its own width, dequantized as it is used.

Stands in for a family's experts module of pattern P0: forward(hidden[T, H], top_k_index[T, k], top_k_weights[T, k]).
State: `{expert}.{projection}.{codes|scales|zeros}` for packed experts, `{expert}.{projection}.dense` for those left as
in the checkpoint, and a guard under the original name `gate_up_proj` and `down_proj`, of a shape that no real model
has: whoever loads the checkpoint without moeq gets an error instead of random experts.

Letters: T tokens, H hidden size, I intermediate size, k experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moeq.models.experts import PROJECTIONS, ExpertLayer
from moeq.numerics.packed import PackedWeight, packed_shapes

FULL = 16
GUARD_SHAPES = {"gate_up_proj": (1, 2, 1), "down_proj": (1, 1, 1)}
GUARD_DTYPE = torch.float16


class PackedLinear(nn.Module):
    """One matrix of one expert, packed or dense."""

    def __init__(
        self, rows: int, inputs: int, bits: int, group_size: int, symmetric: bool, dense_dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.inputs, self.bits, self.group_size, self.symmetric = inputs, bits, group_size, symmetric
        if bits == FULL:
            self.register_buffer("dense", torch.empty(rows, inputs, dtype=dense_dtype))
            return
        for part, (shape, dtype) in packed_shapes(rows, inputs, bits, group_size, symmetric).items():
            self.register_buffer(part, torch.empty(shape, dtype=dtype))

    def values(self, dtype: torch.dtype) -> Tensor:
        """The matrix [N, K] in `dtype`."""
        if self.bits == FULL:
            return self.get_buffer("dense").to(dtype)
        return PackedWeight(
            codes=self.get_buffer("codes"),
            scales=self.get_buffer("scales"),
            zeros=self.get_buffer("zeros") if "zeros" in self._buffers else None,
            bits=self.bits,
            group_size=self.group_size,
            inputs=self.inputs,
            symmetric=self.symmetric,
        ).dequantize(dtype)


class PackedExpert(nn.Module):
    """One expert: three matrices of the same width."""

    def __init__(self, layer: ExpertLayer, bits: int, group_size: int, symmetric: bool, dtype: torch.dtype) -> None:
        super().__init__()
        for projection in PROJECTIONS:
            self.add_module(projection, PackedLinear(*layer.shape(projection), bits, group_size, symmetric, dtype))

    def values(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """gate and up stacked [2I, H], and down [H, I]."""
        gate, up, down = (self.get_submodule(projection).values(dtype) for projection in PROJECTIONS)  # type: ignore[operator]
        return torch.cat([gate, up]), down


class PackedExperts(nn.Module):
    """All experts of one layer, each in its own width."""

    def __init__(
        self,
        layer: ExpertLayer,
        bits: Sequence[int],
        *,
        group_size: int,
        symmetric: bool,
        act_fn: Any,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.num_experts = layer.num_experts
        self.act_fn = act_fn
        for expert, width in enumerate(bits):
            self.add_module(str(expert), PackedExpert(layer, width, group_size, symmetric, dtype))
        for name, shape in GUARD_SHAPES.items():
            self.register_buffer(name, torch.zeros(shape, dtype=GUARD_DTYPE))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Sum over each token's experts of routing weight times expert output, [T, H]."""
        result = torch.zeros_like(hidden_states)
        for expert in torch.unique(top_k_index).tolist():
            if expert >= self.num_experts:
                continue  # the sentinel of expert parallelism
            token, place = torch.where(top_k_index == expert)
            gate_up, down = self.get_submodule(str(expert)).values(hidden_states.dtype)  # type: ignore[operator]
            gate, up = nn.functional.linear(hidden_states[token], gate_up).chunk(2, dim=-1)
            output = nn.functional.linear(self.act_fn(gate) * up, down) * top_k_weights[token, place, None]
            result.index_add_(0, token, output.to(result.dtype))
        return result
