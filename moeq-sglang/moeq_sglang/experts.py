"""The experts of one layer in SGLang: packed, each matrix in its own width, one call of a kernel for all of them.

Letters: E experts, T tokens, k experts a token, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from torch import Tensor

from moeq_kernels.description import PreparedLayer
from moeq_kernels.gates import clamped
from moeq_kernels.parts import GATE, UP, LayerParts
from moeq_kernels.widths import Encoding, Width

GATES = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}  # act(gate_proj) * up_proj
CLAMPED = ("gemm1_alpha", "gemm1_clamp_limit")  # of gates with a clamp (gpt-oss)
SPECIAL = "swiglu_limit"  # of gates of another form
SCALED = "routed_scaling_factor"  # applied by the kernels on CUDA and by SGLang's models elsewhere: not run, so refused


def plain(act: Callable[[Tensor], Tensor], parts: Mapping[str, Tensor]) -> Tensor:
    """act(gate) * up of gate and up [P, I] -> [P, I]."""
    return act(parts[GATE]) * parts[UP]


class MoeqExperts(FusedMoEMethodBase):  # type: ignore[misc]
    """widths: of every expert of the layer; alpha: of a gate with a clamp, None for another.

    A layer is arranged as soon as its last tensor has come.
    """

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
        odd = [key for key in (SPECIAL,) if getattr(config, key) is not None]
        odd += [SCALED] if getattr(config, SCALED) not in (None, 1.0) else []
        self.alpha, limit = (getattr(config, key) for key in CLAMPED)
        if (self.alpha is None) != (limit is None) or (limit is not None and config.activation != "silu"):
            odd += CLAMPED
        if odd or not config.is_gated or config.activation not in GATES:
            raise ValueError(f"moeq: {name}: experts with {', '.join(odd) or config.activation} are not served")
        self.parts = LayerParts(
            name,
            self.encoding,
            self.widths,
            num_experts,
            (hidden_size, intermediate_size_per_partition),
            params_dtype,
            partial(plain, GATES[config.activation]) if limit is None else partial(clamped, limit, self.alpha, 1.0),
            config.activation if limit is None else None,
            biased=with_bias,
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        """ValueError where a tensor never came."""
        self.prepared = self.parts.finish()

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
