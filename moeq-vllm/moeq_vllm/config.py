"""The method `moeq` of vLLM: which of a model's modules are packed, and how."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import WeightsMapper

from moeq_kernels.checkpoint import Stored
from moeq_kernels.widths import FULL, METHOD, Width
from moeq_vllm.experts import MoeqExperts
from moeq_vllm.linear import MoeqEmbedding, MoeqLinear, MoeqTiedHead

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
GUARDS = re.compile(r"\.experts\.(?:gate_up_proj|gate_proj|up_proj|down_proj)(?:_bias)?$")  # of stacks of experts


class MoeqConfig(QuantizationConfig):  # type: ignore[misc]
    """stored: what the checkpoint says of its packed weights."""

    def __init__(self, stored: Stored) -> None:
        super().__init__()
        self.stored = stored
        self.bits = dict(stored.others.bits) if stored.others is not None else {}
        self.tied = set(stored.others.tied.values()) if stored.others is not None else set()
        self.experts: dict[int, list[Width]] = {}
        for name, widths in stored.experts.items():
            found = LAYER.search(name)
            if found is None or int(found[1]) in self.experts:
                raise ValueError(f"moeq: {name}: experts outside of a row of layers are not served")
            self.experts[int(found[1])] = list(widths)
        self.family = ""

    @classmethod
    def get_name(cls) -> str:
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80  # of NVIDIA GPUs: what Triton's programs are compiled for

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # config.json says it

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> MoeqConfig:
        return cls(Stored.of(config))

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        self.family = getattr(hf_config, "model_type", "")

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        """Modules by vLLM's names, where it has others than the checkpoint."""
        self.bits = hf_to_vllm_mapper.apply_dict(self.bits)
        self.tied = set(hf_to_vllm_mapper.apply_list(sorted(self.tied)))

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:  # type: ignore[override]
        """Without the guards; Mixtral's experts have another name in vLLM."""
        renamed: dict[re.Pattern[str], str | None] = {GUARDS: None}
        if self.family == "mixtral":
            renamed[re.compile(r"\.mlp\.experts\.")] = ".block_sparse_moe.experts."
        return WeightsMapper(orig_to_new_regex=renamed)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, RoutedExperts):
            found = LAYER.search(prefix)
            widths = self.experts.get(int(found[1])) if found else None
            if widths is None:
                return UnquantizedFusedMoEMethod(layer.moe_config)
            return MoeqExperts(layer.moe_config, self.stored.grid, widths)
        packed = self._packed(prefix)
        if packed and self.stored.others is not None:
            kind = MoeqEmbedding if isinstance(layer, VocabParallelEmbedding) else MoeqLinear
            return kind(self.stored.others.grid, packed)
        if isinstance(layer, ParallelLMHead) and prefix in self.tied:
            return MoeqTiedHead()
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None

    def _packed(self, prefix: str) -> dict[str, int]:
        """{module of the checkpoint: width} of the matrices of a layer, empty where none is packed."""
        before, _, last = prefix.rpartition(".")
        names = [f"{before}.{name}" for name in self.packed_modules_mapping.get(last, ())] or [prefix]
        return {name: self.bits.get(name, FULL) for name in names} if any(name in self.bits for name in names) else {}
