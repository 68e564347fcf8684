"""Mixtral in SGLang: the model with fused experts, and what it calls the tensors of a native checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from moeq_kernels.widths import METHOD

EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.")
GUARD = re.compile(r"\.mlp\.experts\.(?:gate_up_proj|gate_proj|up_proj|down_proj)(?:_bias)?$")  # of stacks of experts
ROUTER = ".mlp.gate."
MATRICES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def fused(choose: Callable[..., Any], config: Any) -> Any:
    """The model's class and name: SGLang takes another Mixtral, of experts apart, for methods that it does not list."""
    model, name = choose(config)
    if config.quantization == METHOD and name == "QuantMixtralForCausalLM":
        from sglang.srt.models.mixtral import MixtralForCausalLM

        return MixtralForCausalLM, "MixtralForCausalLM"
    return model, name


def mixtral(load: Callable[..., Any], model: Any, weights: Iterable[tuple[str, Tensor]]) -> Any:
    """Mixtral's experts are called otherwise in SGLang, which knows nothing of what it does not find."""
    return load(model, renamed(weights))


def renamed(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Tensors by SGLang's names of Mixtral's; without the guards."""
    for name, tensor in weights:
        if not GUARD.search(name):
            called = EXPERT.sub(lambda found: f".block_sparse_moe.experts.{found[1]}.{MATRICES[found[2]]}.", name)
            yield called.replace(ROUTER, ".block_sparse_moe.gate."), tensor
