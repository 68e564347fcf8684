"""The experts of one layer in vLLM: packed, each matrix in its own width, one call of a kernel for all of them.

Letters: E experts, T tokens, k experts a token, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation, apply_moe_activation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from moeq_kernels.description import Gate, PreparedLayer
from moeq_kernels.gates import clamped
from moeq_kernels.parts import GATE, UP, LayerParts
from moeq_kernels.widths import Encoding, Width
from moeq_vllm.operators import make_known, routed

NAMES = {  # of vLLM's activations, as kernels know them
    MoEActivation.SILU: "silu", MoEActivation.GELU: "gelu", MoEActivation.GELU_TANH: "gelu_pytorch_tanh",
}  # fmt: skip
CLAMPED = {  # activations with a clamp: how far, alpha and beta, as vLLM has them for layers that say nothing
    MoEActivation.SILU: (None, 1.0, 0.0),
    MoEActivation.SWIGLUOAI: (7.0, 1.702, 1.0),
    MoEActivation.SWIGLUOAI_UNINTERLEAVE: (None, 1.0, 0.0),
}


def of_vllm(activation: MoEActivation, parts: Mapping[str, Tensor]) -> Tensor:
    """vLLM's own, of gate and up [P, I] -> [P, I]."""
    output = torch.empty_like(parts[GATE])
    apply_moe_activation(activation, output, torch.cat([parts[GATE], parts[UP]], -1))
    return output


def gate_of(moe: FusedMoEConfig, model: Any) -> tuple[Gate, str | None]:
    """What makes one of a layer's gate and up, and its name where kernels compute it themselves.

    model: the configuration of transformers' model, which reads from it what vLLM has as constants (gpt-oss).
    """
    activation = moe.activation
    limit, alpha, beta = CLAMPED.get(activation, (None, 1.0, 0.0))
    if activation == MoEActivation.SWIGLUOAI:
        limit, alpha = getattr(model, "swiglu_limit", limit), getattr(model, "swiglu_alpha", alpha)
    layers = (moe.swiglu_limit, moe.swiglu_alpha, moe.swiglu_beta)
    limit, alpha, beta = (
        own if own is not None else usual for own, usual in zip(layers, (limit, alpha, beta), strict=True)
    )
    if activation in CLAMPED and limit is not None:
        return partial(clamped, limit, alpha, beta), None
    return partial(of_vllm, activation), NAMES.get(activation)


class MoeqExperts(FusedMoEMethodBase):
    """widths: of every expert of the layer. A layer is arranged as soon as its last tensor has come."""

    def __init__(self, moe: FusedMoEConfig, encoding: Encoding, widths: Sequence[Width]) -> None:
        super().__init__(moe)
        self.encoding, self.widths = encoding, widths
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
        if not self.moe.is_act_and_mul:
            raise ValueError(f"moeq: {layer.layer_name}: experts with {layer.activation.value} are not served")
        self.name = make_known(layer.layer_name, self)
        self.own = num_experts
        ranks = self.moe.moe_parallel_config
        first, count = ranks.tp_rank * intermediate_size_per_partition, intermediate_size_per_partition
        self.parts = LayerParts(
            layer.layer_name,
            self.encoding,
            self.widths,
            layer.global_num_experts,
            (hidden_size, ranks.tp_size * count),
            params_dtype,
            *gate_of(self.moe, get_current_vllm_config().model_config.hf_text_config),
            mine=slice(first, first + count),
            local=layer._map_global_expert_id_to_local_expert_id,
            biased=self.moe.has_bias,
            leads=ranks.tp_rank == 0,
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        """ValueError where a tensor never came."""
        self.prepared = self.parts.finish()

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
