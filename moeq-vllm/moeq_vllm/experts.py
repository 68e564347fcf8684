"""The experts of one layer in vLLM: packed, each matrix in its own width, one call of a kernel for all of them.

Letters: E experts, T tokens, k experts a token, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.activation import MoEActivation, apply_moe_activation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from moeq_kernels.checkpoint import Grid
from moeq_kernels.choice import policy, prepared_layer
from moeq_kernels.description import PreparedLayer
from moeq_kernels.freed import return_memory
from moeq_kernels.parts import ALL_PARTS, GATE, GUARD, STEMS, UP, LayerParts, drop, placeholder
from moeq_kernels.widths import Width
from moeq_vllm.operators import make_known, routed

NAMES = {  # of vLLM's activations, as kernels know them
    MoEActivation.SILU: "silu", MoEActivation.GELU: "gelu", MoEActivation.GELU_TANH: "gelu_pytorch_tanh",
}  # fmt: skip


class MoeqExperts(FusedMoEMethodBase):
    """widths: of every expert of the layer. A layer is arranged as soon as its last tensor has come."""

    def __init__(self, moe: FusedMoEConfig, grid: Grid, widths: Sequence[Width]) -> None:
        super().__init__(moe)
        self.grid, self.widths = grid, widths
        self.prepared: PreparedLayer | None = None

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """num_experts: of this device."""
        if len(self.widths) != layer.global_num_experts:
            what = f"{len(self.widths)} widths for {layer.global_num_experts} experts"
            raise ValueError(f"moeq: {layer.layer_name}: {what}; export the checkpoint again")
        if not self.moe.is_act_and_mul or layer.activation == MoEActivation.SWIGLUOAI:
            raise ValueError(f"moeq: {layer.layer_name}: experts with {layer.activation.value} are not served")
        self.name = make_known(layer.layer_name, self)
        self.dtype, self.own = params_dtype, num_experts
        ranks = self.moe.moe_parallel_config
        first, count = ranks.tp_rank * intermediate_size_per_partition, intermediate_size_per_partition
        local = {self._local(layer, expert): width for expert, width in enumerate(self.widths)}
        self.parts: LayerParts | None = LayerParts(
            layer.layer_name,
            self.grid,
            {expert: width for expert, width in sorted(local.items()) if expert >= 0},
            (hidden_size, ranks.tp_size * intermediate_size_per_partition),
            slice(first, first + count),
            biased=self.moe.has_bias,
            leads=ranks.tp_rank == 0,
        )
        for stem in STEMS:
            for part in (*ALL_PARTS, GUARD, *(("bias",) if self.moe.has_bias else ())):
                self.device = placeholder(layer, f"{stem}_{part}", partial(self.take, layer))

    def take(
        self,
        layer: Any,
        param: Tensor,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """One tensor of one expert; guards, and experts of other devices, are passed over."""
        local, part = self._local(layer, expert_id), weight_name.rpartition("_")[2]
        if local >= 0 and part != GUARD:
            assert self.parts is not None, "a tensor came after all had come"
            if self.parts.take(local, shard_id, part, loaded_weight.to(param.device), weight_name):
                self.arrange(layer)
        return local >= 0 if return_success else None

    def _local(self, layer: Any, expert: int) -> int:
        """The number of an expert on this device, -1 for one of another device."""
        local: int = layer._map_global_expert_id_to_local_expert_id(expert)
        return local

    def arrange(self, layer: Any) -> None:
        """Have a kernel take the layer; what was loaded is let go."""
        assert self.parts is not None, "arranged twice"
        given = self.parts.layer(self.dtype, partial(self._gate, layer), NAMES.get(layer.activation))
        self.parts = None
        self.prepared, why = prepared_layer(given, self.device, policy())
        del given
        return_memory()
        if self.prepared is None:
            raise ValueError(f"moeq: {layer.layer_name}: no kernel takes it: {why}")

    def _gate(self, layer: Any, parts: dict[str, Tensor]) -> Tensor:
        """Of activations that a kernel does not compute itself: vLLM's own."""
        joined = torch.cat([parts[GATE], parts[UP]], -1)
        output = torch.empty_like(parts[GATE])
        apply_moe_activation(layer.activation, output, joined)
        return output

    def process_weights_after_loading(self, layer: Any) -> None:
        """ValueError where a tensor never came."""
        if self.prepared is None:
            self.arrange(layer)  # which names what is missing
        drop(layer, *(name for name, _ in list(layer.named_parameters(recurse=False)) if name.startswith(STEMS)))

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig | None:
        return None

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """x [T, H], weights and ids [T, k] -> [T, H]; the runner adds what other devices compute."""
        if layer.expert_map is not None:  # global numbers; -1 for other devices' experts
            local = layer.expert_map[topk_ids.long()].long()
            topk_ids = local.masked_fill(local < 0, self.own)
        if layer.apply_router_weight_on_input:
            x, topk_weights = x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
        if torch.compiler.is_compiling():
            return routed(x, topk_weights, topk_ids, self.name)
        return self.compute(x, topk_weights, topk_ids)

    def compute(self, hidden: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """hidden [T, H], weights and experts [T, k] -> [T, H]."""
        assert self.prepared is not None, "called before it was loaded"
        return self.prepared(hidden, experts, weights)
