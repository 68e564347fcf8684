"""The method `moeq` of SGLang: which of a model's modules are packed, and how."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

from moeq_kernels.checkpoint import Stored
from moeq_kernels.widths import FULL, METHOD, Width
from moeq_sglang.experts import MoeqExperts
from moeq_sglang.linear import MoeqLinear

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


class MoeqConfig(QuantizationConfig):  # type: ignore[misc]
    """stored: what the checkpoint says of its packed weights; fused: {module of SGLang's: the checkpoint's in it}.

    made: those of the models that are being loaded; asked: what a model has asked a method for, of what is packed.
    """

    made: ClassVar[list[MoeqConfig]] = []

    def __init__(self, stored: Stored, fused: Mapping[str, list[str]] | None = None) -> None:
        super().__init__()
        self.stored, self.packed_modules_mapping = stored, FUSED | dict(fused or {})
        bits = stored.others.bits if stored.others is not None else {}
        self.bits = {below(name): width for name, width in bits.items()}
        self.experts: dict[int, list[Width]] = {}
        for name, widths in stored.experts.items():
            found = LAYER.search(name)
            if found is None or int(found[1]) in self.experts:
                raise ValueError(f"moeq: {name}: experts outside of a row of layers are not served")
            self.experts[int(found[1])] = list(widths)
        self.asked: set[int | str] = set()
        self.made.append(self)

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
        return cls(Stored.of(config), config.get("packed_modules_mapping"))

    def get_scaled_act_names(self) -> list[str]:
        return []

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, FusedMoE):
            found = LAYER.search(prefix)
            widths = self.experts.get(int(found[1])) if found else None
            if found and widths is not None:
                self.asked.add(int(found[1]))
            return UnquantizedFusedMoEMethod() if widths is None else MoeqExperts(self.stored.grid, widths)
        packed = self._packed(prefix)
        self.asked |= packed.keys()
        if packed and isinstance(layer, VocabParallelEmbedding):
            raise ValueError(f"moeq: {prefix}: packed embeddings and heads are not served by SGLang; export without")
        if packed and self.stored.others is not None:
            return MoeqLinear(self.stored.others.grid, packed, prefix)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None

    def _packed(self, prefix: str) -> dict[str, int]:
        """{module of the checkpoint: width} of the matrices of a layer, empty where none is packed."""
        before, _, last = below(prefix).rpartition(".")
        names = [f"{before}.{name}" for name in self.packed_modules_mapping.get(last, ())] or [below(prefix)]
        return {name: self.bits.get(name, FULL) for name in names} if any(name in self.bits for name in names) else {}

    def check(self) -> None:
        """ValueError where a model passed over what is packed: SGLang leaves such tensors out without a word."""
        lost = [f"the experts of layer {layer}" for layer in self.experts if layer not in self.asked]
        lost += [name for name in self.bits if name not in self.asked]
        if lost:
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            raise ValueError(f"moeq: SGLang's model does not take {lost[0]}{more} packed; export without, or use vLLM")


def checked(load: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """The model that SGLang's loader gives, once all that is packed was asked for."""
    MoeqConfig.made.clear()
    model = load(*given, **named)
    for config in MoeqConfig.made:
        config.check()
    return model


def below(name: str) -> str:
    """A module's name below the model: some of SGLang's models leave out what they are called themselves."""
    return name.removeprefix("model.")
