"""The experts of one layer in SGLang: packed, each matrix in its own width, one call of a kernel for all of them.

Letters: E experts, T tokens, k experts a token, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from torch import Tensor

from moeq_kernels.checkpoint import Grid
from moeq_kernels.choice import policy, prepared_layer
from moeq_kernels.description import PreparedLayer
from moeq_kernels.freed import return_memory
from moeq_kernels.parts import ALL_PARTS, GATE, GUARD, STEMS, UP, LayerParts, drop, placeholder
from moeq_kernels.widths import Width

GATES = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}  # act(gate_proj) * up_proj
SPECIAL = ("gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit")  # of gates of another form
SCALED = "routed_scaling_factor"  # applied by the kernels on CUDA and by SGLang's models elsewhere: not run, so refused


class MoeqExperts(FusedMoEMethodBase):  # type: ignore[misc]
    """widths: of every expert of the layer. A layer is arranged as soon as its last tensor has come."""

    def __init__(self, grid: Grid, widths: Sequence[Width]) -> None:
        self.grid, self.widths = grid, widths
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
        if len(self.widths) != num_experts:
            what = f"{len(self.widths)} widths for {num_experts} experts"
            raise ValueError(f"moeq: {name}: {what}; export the checkpoint again")
        odd = [key for key in SPECIAL if getattr(config, key) is not None]
        odd += ["biases"] if with_bias else []
        odd += [SCALED] if getattr(config, SCALED) not in (None, 1.0) else []
        if odd or not config.is_gated or config.activation not in GATES:
            raise ValueError(f"moeq: {name}: experts with {', '.join(odd) or config.activation} are not served")
        self.dtype = params_dtype
        self.parts: LayerParts | None = LayerParts(
            name,
            self.grid,
            dict(enumerate(self.widths)),
            (hidden_size, intermediate_size_per_partition),
            slice(0, intermediate_size_per_partition),
        )
        for stem in STEMS:
            for part in (*ALL_PARTS, GUARD):
                self.device = placeholder(layer, f"{stem}_{part}", partial(self.take, layer))

    def take(
        self, layer: Any, param: Tensor, loaded_weight: Tensor, weight_name: str, shard_id: str, expert_id: int
    ) -> None:
        """One tensor of one expert; guards are passed over."""
        part = weight_name.rpartition("_")[2]
        if part != GUARD:
            assert self.parts is not None, "a tensor came after all had come"
            if self.parts.take(expert_id, shard_id, part, loaded_weight.to(param.device), weight_name):
                self.arrange(layer)

    def arrange(self, layer: Any) -> None:
        """Have a kernel take the layer; what was loaded is let go."""
        assert self.parts is not None, "arranged twice"
        activation = layer.moe_runner_config.activation
        given = self.parts.layer(self.dtype, lambda parts: GATES[activation](parts[GATE]) * parts[UP], activation)
        self.parts = None
        self.prepared, why = prepared_layer(given, self.device, policy())
        del given
        return_memory()
        if self.prepared is None:
            raise ValueError(f"moeq: {layer.layer_name}: no kernel takes it: {why}")

    def process_weights_after_loading(self, layer: Any) -> None:
        """ValueError where a tensor never came."""
        if self.prepared is None:
            self.arrange(layer)  # which names what is missing
        drop(layer, *(name for name, _ in list(layer.named_parameters(recurse=False)) if name.startswith(STEMS)))

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
