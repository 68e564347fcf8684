"""The experts of one layer in SGLang: packed, each matrix in its own width, one call of a kernel for all of them.

Letters: E experts, T tokens, k experts a token, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from torch import Tensor

from moeq_kernels.description import PreparedLayer
from moeq_kernels.parts import GATE, PROJECTIONS, UP, LayerParts
from moeq_kernels.widths import Encoding, Width

GATES = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}  # act(gate_proj) * up_proj
SPECIAL = ("gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit")  # of gates of another form
SCALED = "routed_scaling_factor"  # applied by the kernels on CUDA and by SGLang's models elsewhere: not run, so refused


class MoeqExperts(FusedMoEMethodBase):  # type: ignore[misc]
    """widths: of every expert of the layer. A layer is arranged as soon as its last tensor has come."""

    def __init__(self, encoding: Encoding, widths: Sequence[Width]) -> None:
        self.encoding, self.widths = encoding, widths
        self.prepared: PreparedLayer | None = None

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        with_bias: bool = False,
        **extra_weight_attrs: Any,
    ) -> None:
        """ValueError for what is not served."""
        config, name = layer.moe_runner_config, layer.layer_name
        if layer.moe_ep_size > 1 or layer.moe_tp_size > 1:
            raise ValueError(f"moeq: {name}: experts are served on one device in SGLang; set --tp 1 and --ep 1")
        if layer.num_fused_shared_experts:
            raise ValueError(f"moeq: {name}: start SGLang with --disable-shared-experts-fusion")
        odd = [key for key in SPECIAL if getattr(config, key) is not None]
        odd += ["biases"] if with_bias else []
        odd += [SCALED] if getattr(config, SCALED) not in (None, 1.0) else []
        if odd or not config.is_gated or config.activation not in GATES:
            raise ValueError(f"moeq: {name}: experts with {', '.join(odd) or config.activation} are not served")
        act = GATES[config.activation]
        self.parts = LayerParts(
            name,
            self.encoding,
            self.widths,
            num_experts,
            (hidden_size, intermediate_size_per_partition),
            params_dtype,
            lambda parts: act(parts[GATE]) * parts[UP],
            config.activation,
        )
        self.parts.place(layer, self.take)

    def take(self, param: Tensor, loaded_weight: Tensor, weight_name: str, shard_id: str, expert_id: int) -> None:
        """One tensor of one expert."""
        self.parts.take(expert_id, PROJECTIONS[shard_id], weight_name.rpartition("_")[2], loaded_weight)

    def process_weights_after_loading(self, layer: Any) -> None:
        """ValueError where a tensor never came."""
        self.prepared = self.parts.finish(layer)

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        """None: `apply` computes itself, of standard routing with local numbers."""
        self.runner_config = moe_runner_config

    def apply(self, layer: Any, dispatch_output: Any) -> StandardCombineInput:
        """hidden [T, H], weights and ids [T, k] -> [T, H]; a number below 0 is no expert."""
        assert self.prepared is not None, "called before it was loaded"
        hidden, routed = dispatch_output.hidden_states, dispatch_output.topk_output
        weights, ids = routed.topk_weights, routed.topk_ids
        if self.runner_config.apply_router_weight_on_input:
            hidden, weights = hidden * weights.to(hidden.dtype), torch.ones_like(weights)
        found = self.prepared(hidden, ids.masked_fill(ids < 0, len(self.widths)), weights)
        return StandardCombineInput(hidden_states=found)
