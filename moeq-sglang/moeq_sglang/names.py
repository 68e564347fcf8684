"""What SGLang's models get of a native checkpoint, and what they call it; Mixtral's with fused experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from moeq_kernels.method import GUARDS
from moeq_kernels.widths import METHOD
from moeq_sglang.config import MoeqConfig

ROUTER = ".mlp.gate."


def fused(choose: Callable[..., Any], config: Any) -> Any:
    """The model's class and name: SGLang takes another Mixtral, of experts apart, for methods that it does not list."""
    model, name = choose(config)
    if config.quantization == METHOD and name == "QuantMixtralForCausalLM":
        from sglang.srt.models.mixtral import MixtralForCausalLM

        return MixtralForCausalLM, "MixtralForCausalLM"
    return model, name


def weights(read: Callable[..., Any], loader: Any, config: Any, model: Any) -> Any:
    """A checkpoint's tensors as the model knows them; those of experts go to their layers.

    ValueError where the model, now built, has passed over what is packed, or has another gate than config.json says.
    """
    found = read(loader, config, model)
    if config.quantization != METHOD:
        return found
    alpha = getattr(config.hf_text_config, "swiglu_alpha", None)
    for made in MoeqConfig.made:
        made.check()
        others = {experts.alpha for experts in made.layers.values()} - {None, alpha}  # type: ignore[attr-defined]
        if alpha is not None and others:
            raise ValueError(f"moeq: SGLang's model has {others.pop()} for swiglu_alpha, config.json {alpha}")
    return known(found, mixtral=type(model).__name__ == "MixtralForCausalLM")


def known(found: Iterable[tuple[str, Tensor]], *, mixtral: bool) -> Iterator[tuple[str, Tensor]]:
    """Tensors that are not of packed experts, without the guards, which some models do not pass over."""
    for name, tensor in found:
        if not GUARDS.search(name) and not any(made.take(name, tensor) for made in MoeqConfig.made):
            yield name.replace(ROUTER, ".block_sparse_moe.gate.") if mixtral else name, tensor
