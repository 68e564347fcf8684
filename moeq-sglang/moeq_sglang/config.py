"""The method `moeq` of SGLang: which of a model's modules are packed, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from moeq_kernels.checkpoint import Stored
from moeq_kernels.method import Method, layer_of
from moeq_sglang.experts import MoeqExperts
from moeq_sglang.linear import MoeqEmbedding, MoeqLinear

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


class MoeqConfig(Method, QuantizationConfig):  # type: ignore[misc]
    """fused: {module of SGLang's: the checkpoint's in it}, beside FUSED; made: those of models that are loaded now."""

    runtime = "SGLang"
    made: ClassVar[list[MoeqConfig]] = []

    def __init__(self, stored: Stored, fused: Mapping[str, list[str]] | None = None) -> None:
        super().__init__(stored)
        self.packed_modules_mapping = FUSED | dict(fused or {})
        self.bits = {self.known(name): width for name, width in self.bits.items()}
        self.tied = {self.known(head) for head in self.tied}
        self.made.append(self)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> MoeqConfig:
        return cls(Stored.of(config), config.get("packed_modules_mapping"))

    def known(self, prefix: str) -> str:
        """A module's name below the model: some of SGLang's models leave out what they are called themselves."""
        return prefix.removeprefix("model.")

    def get_scaled_act_names(self) -> list[str]:
        return []

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, FusedMoE):
            widths = self.widths_in(prefix)
            if widths is None:
                return UnquantizedFusedMoEMethod()
            self.layers[layer_of(prefix)] = experts = MoeqExperts(self.stored.encoding, widths)
            return experts
        packed = self.packed_in(prefix)
        if isinstance(layer, ParallelLMHead) and self.known(prefix) in self.tied:
            raise ValueError(f"moeq: {prefix} is the packed embeddings, but not in SGLang's model; export without")
        if packed and self.stored.others is not None:
            kind = MoeqEmbedding if isinstance(layer, VocabParallelEmbedding) else MoeqLinear
            return kind(self.stored.others.encoding, packed, prefix)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


def checked(load: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """The model that SGLang's loader gives, once all that is packed was asked for."""
    MoeqConfig.made.clear()
    model = load(*given, **named)
    for config in MoeqConfig.made:
        config.check()
    MoeqConfig.made.clear()
    return model


def build_table(build: Callable[..., None], layer: VocabParallelEmbedding, *given: Any, **named: Any) -> None:
    """The constructor of SGLang's tables, for whom many of its models name no method (Mixtral, OLMoE)."""
    if MoeqConfig.made:
        MoeqConfig.made[-1].build_table(build, layer, isinstance(layer, ParallelLMHead), *given, **named)
    else:
        build(layer, *given, **named)
