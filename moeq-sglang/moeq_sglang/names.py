"""What SGLang's models call the tensors of a native checkpoint, and Mixtral's with fused experts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from moeq_kernels.method import GUARDS
from moeq_kernels.parts import NUMBERS
from moeq_kernels.widths import METHOD

EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.")
ROUTER = ".mlp.gate."


def fused(choose: Callable[..., Any], config: Any) -> Any:
    """The model's class and name: SGLang takes another Mixtral, of experts apart, for methods that it does not list."""
    model, name = choose(config)
    if config.quantization == METHOD and name == "QuantMixtralForCausalLM":
        from sglang.srt.models.mixtral import MixtralForCausalLM

        return MixtralForCausalLM, "MixtralForCausalLM"
    return model, name


def weights(read: Callable[..., Any], loader: Any, config: Any, model: Any) -> Any:
    """A checkpoint's tensors as the model knows them."""
    found = read(loader, config, model)
    if config.quantization != METHOD:
        return found
    return known(found, mixtral=type(model).__name__ == "MixtralForCausalLM")


def known(found: Iterable[tuple[str, Tensor]], *, mixtral: bool) -> Iterator[tuple[str, Tensor]]:
    """Tensors without the guards, which some models do not pass over; Mixtral's experts have another name in SGLang."""
    for name, tensor in found:
        if not GUARDS.search(name):
            yield renamed(name) if mixtral else name, tensor


def renamed(name: str) -> str:
    """A tensor's name in SGLang's Mixtral, which knows nothing of what it does not find."""
    called = EXPERT.sub(lambda found: f".block_sparse_moe.experts.{found[1]}.{NUMBERS[found[2]]}.", name)
    return called.replace(ROUTER, ".block_sparse_moe.gate.")
