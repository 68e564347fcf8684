"""The method `moeq` of vLLM: which of a model's modules are packed, and how."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import WeightsMapper

from moeq_kernels.checkpoint import Stored
from moeq_kernels.method import GUARDS, Method, layer_of
from moeq_kernels.widths import FULL
from moeq_vllm.experts import MoeqExperts
from moeq_vllm.linear import DenseTable, MoeqEmbedding, MoeqLinear, MoeqTiedHead
from moeq_vllm.names import Names, in_vllm

REORDERED = {"llama4_text": (".q_proj", ".k_proj")}  # modules by family whose rows vLLM puts in another order
BUILD = VocabParallelEmbedding.__init__


class MoeqConfig(Method, QuantizationConfig):  # type: ignore[misc]
    """renamed: what vLLM's model calls otherwise, beside its own mapping."""

    runtime = "vLLM"

    def __init__(self, stored: Stored) -> None:
        super().__init__(stored)
        self.renamed: dict[re.Pattern[str], str | None] = {}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> MoeqConfig:
        return cls(Stored.of(config))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        """Modules by vLLM's names, where it has others than the checkpoint."""
        self.bits, renamed = in_vllm(hf_to_vllm_mapper, self.bits)
        self.renamed |= renamed
        self.tied = set(hf_to_vllm_mapper.apply_list(sorted(self.tied)))

    def known(self, prefix: str) -> str:
        """Granite's Mamba is told another name than it has."""
        other = prefix.replace(".mixer.", ".mamba.")
        return other if other in self.bits else prefix

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:  # type: ignore[override]
        """Without the guards, and without what is of experts, which goes to their layers.

        Asked for when the model is built and nothing is loaded: ValueError where it has passed over what is packed.
        """
        config = get_current_vllm_config_or_none()
        if config is None or (
            config.parallel_config.pipeline_parallel_size == 1  # else other processes have some layers
            and config.speculative_config is None  # else a model that drafts, too, is loaded, and has not all of them
        ):
            self.check()
        return Names(self.take, orig_to_new_regex={GUARDS: None, **self.renamed})

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, RoutedExperts):
            widths = self.widths_in(prefix)
            if widths is None:
                return UnquantizedFusedMoEMethod(layer.moe_config)
            self.layers[layer_of(prefix)] = experts = MoeqExperts(layer.moe_config, self.stored.encoding, widths)
            return experts
        packed = self.packed_in(prefix)
        if packed and self.stored.others is not None:
            check_order(packed)
            kind = MoeqEmbedding if isinstance(layer, VocabParallelEmbedding) else MoeqLinear
            return kind(self.stored.others.encoding, packed)
        if isinstance(layer, ParallelLMHead) and prefix in self.tied:
            return MoeqTiedHead()
        if isinstance(layer, VocabParallelEmbedding):
            return DenseTable()
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


def check_order(packed: Mapping[str, int]) -> None:
    """ValueError for modules whose rows vLLM's model reorders before it loads them, which it does not with parts."""
    family = get_current_vllm_config().model_config.hf_text_config.model_type
    lost = [name for name, width in packed.items() if width != FULL and name.endswith(REORDERED.get(family, ()))]
    if lost:
        do = "quantize with --set others.attention=null"
        raise ValueError(f"moeq: {lost[0]}: vLLM reorders its rows, and is not served with it packed; {do}")


def build_table(layer: VocabParallelEmbedding, *given: Any, **named: Any) -> None:
    """The constructor of vLLM's tables, for whom many of its models name no method (Mixtral), or no name (OLMoE)."""
    config = get_current_vllm_config_or_none()
    method = config.quant_config if config is not None else None
    if isinstance(method, MoeqConfig):
        method.build_table(BUILD, layer, isinstance(layer, ParallelLMHead), *given, **named)
    else:
        BUILD(layer, *given, **named)
