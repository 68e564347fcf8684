"""A packed source without a run: a tiny model's experts rounded to given widths, and what its runtimes must compute."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import family_models
import torch
from family_models import build
from packed_layers import any_codes
from torch import Tensor

from moeq.bundled import bundled_path
from moeq.exporters.packed_source import Matrices
from moeq.exporters.readers import open_packed
from moeq.models.experts import ExpertLayer, set_expert_weights
from moeq.models.loading import describe, expert_keys, load_model, skeleton, source_dtype
from moeq.models.single import ExpertReader
from moeq.models.source import open_source
from moeq.numerics.gptq import quantize
from moeq.numerics.storing import packed_of
from moeq_kernels.packed import PackedWeight
from moeq_kernels.widths import Encoding

Choose = Callable[[int, int, str], int]  # layer, expert, projection -> width
SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 192, "moe_intermediate_size": 64, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 2, "shared_expert_intermediate_size": 64, "num_hidden_layers": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 96},
    "qwen3_moe": {"mlp_only_layers": []},
    "olmoe": {"intermediate_size": 96},
    "deepseek_v3": {
        "num_key_value_heads": 4, "num_hidden_layers": 3, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32,
        "v_head_dim": 32, "q_lora_rank": 64, "kv_lora_rank": 64, "head_dim": 32,
    },
}  # fmt: skip
LAYERS = {"num_hidden_layers": 3}
OF_MLX: dict[str, dict[str, Any]] = {  # families that mlx-lm computes, as it does
    "mixtral": {"sliding_window": None, "intermediate_size": 96},
    "qwen2_moe": {"mlp_only_layers": []},
    "qwen3_vl_moe": {
        "text_config": {**SIZES, **LAYERS, "mlp_only_layers": [0]}, "vision_config": {"out_hidden_size": 128},
    },
    "qwen3_5_moe": {
        "text_config": {
            **SIZES, "num_hidden_layers": 4, "layer_types": [*["linear_attention"] * 3, "full_attention"],
            "linear_num_value_heads": 32, "linear_value_head_dim": 4, "linear_num_key_heads": 16,
            "linear_key_head_dim": 8,
        },
        "vision_config": {"out_hidden_size": 128},
    },
    "gemma4": {"text_config": {**family_models.GEMMA4, **SIZES, **LAYERS}},
    "gemma4_text": {**family_models.GEMMA4, **LAYERS},
    "deepseek_v2": {
        **FAMILIES["deepseek_v3"], "head_dim": None, "topk_method": "greedy", "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
            "mscale": 0.7, "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1,
        },
    },
    "mistral4": {**FAMILIES["deepseek_v3"], "head_dim": None},
    "glm4_moe": LAYERS,
    "glm4_moe_lite": FAMILIES["deepseek_v3"],
    "gpt_oss": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "original_max_position_embeddings": 32,
            "truncate": True,  # else mlx-lm rounds the ends of the ramp, and the model does not
        },
    },
    "minimax_m2": {"intermediate_size": 96},
    "lfm2_moe": LAYERS,
    "dots1": LAYERS,
    "afmoe": {**LAYERS, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "granitemoe": {"intermediate_size": 96},
    "exaone_moe": LAYERS,
    "solar_open": {},
    "laguna": LAYERS,
}  # fmt: skip


def save_model(folder: Path, family: str, **settings: Any) -> Path:
    """A tiny model of a family whose matrices are multiples of 32 and of no two equal sides."""
    build(family, **SIZES | FAMILIES.get(family, {}) | settings).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(bundled_path("tiny-mixtral") / name, folder / name)
    return folder


def rounded(weight: Tensor, bits: int, group_size: int, symmetric: bool) -> PackedWeight:
    """One matrix [N, K] rounded to the nearest codes."""
    found = quantize(weight[None], None, bits=(bits,), group_size=group_size, symmetric=symmetric)
    packed = packed_of(found, bits, symmetric)
    return packed.map(lambda part: part[0])


class MadeSource:
    """A PackedSource over a plain model.

    choose: the width of every matrix, 16 for full precision; others: {module: bits} of linears outside of the experts;
    positive: the magnitudes of the experts' weights are taken, so that all zero points are 0; exl3: experts have any
    codes of EXL3 instead of those nearest on a grid; floats: or any of nvfp4 or mxfp4; iq: or any of a set of i-quants.
    """

    def __init__(
        self,
        path: Path,
        choose: Choose,
        *,
        group_size: int = 32,
        symmetric: bool = True,
        others: dict[str, int] | None = None,
        positive: bool = False,
        exl3: bool = False,
        floats: str = "",
        iq: str = "",
    ) -> None:
        self.source = open_source(str(path))
        self.config = self.source.config
        self.model, self.layers = describe(self.source)
        self.choose, self.group_size, self.symmetric = choose, group_size, symmetric
        self._others, self.positive = others or {}, positive
        self.encoding = Encoding.exl3() if exl3 else Encoding(group_size=group_size, symmetric=symmetric)
        if floats:
            self.encoding = Encoding.floating(floats)
        if iq:
            self.encoding = Encoding.iq(iq)
        self._reader = ExpertReader(self.source, skeleton(self.source, source_dtype(self.source)))

    def expert(self, layer: ExpertLayer, expert: int) -> tuple[Matrices, dict[str, Tensor]]:
        weights, biases = self._reader.read(layer, expert)
        found: Matrices = {}
        for projection, weight in weights.items():
            bits = self.choose(layer.index, expert, projection)
            weight = weight.abs() if self.positive else weight
            if bits == 16:
                found[projection] = weight
            elif self.encoding.codebook:
                seed = 100 * layer.index + 10 * expert + len(projection)
                found[projection] = any_codes(*weight.shape, bits, self.encoding, seed=seed)
            else:
                found[projection] = rounded(weight, bits, self.group_size, self.symmetric)
        return found, biases

    def other_names(self) -> list[str]:
        return list(self._others)

    def others(self) -> Iterator[tuple[str, PackedWeight]]:
        for name, bits in self._others.items():
            weight = self._reader._index.handle(f"{name}.weight")[:]
            yield name, rounded(weight, bits, self.group_size, self.symmetric)

    def rest(self) -> list[str]:
        gone = expert_keys(self.source, self.model, self.layers) | {f"{name}.weight" for name in self._others}
        return sorted(set(self.source.tensors) - gone)


def reference(source: MadeSource) -> Any:
    """The model with the dequantized values, in float32."""
    model: Any = load_model(replace(source.source), torch.float32, torch.device("cpu"))
    for layer in source.layers:
        for expert in range(layer.num_experts):
            matrices, _ = source.expert(layer, expert)
            values = {
                name: matrix if isinstance(matrix, Tensor) else matrix.dequantize() for name, matrix in matrices.items()
            }
            set_expert_weights(model, layer, expert, values)
    for name, weight in source.others():
        module = model.get_submodule(name)
        module.weight.data.copy_(weight.dequantize())
    return model


IDS = torch.arange(3, 99).reshape(2, 48) * 7 % 2000


def reference_logits(source: MadeSource) -> Tensor:
    """Logits of the dequantized model for IDS."""
    with torch.no_grad():
        logits: Tensor = reference(source)(input_ids=IDS).logits
    return logits


def quantization_of(directory: Path) -> dict[str, Any]:
    """The quantization_config of a checkpoint."""
    found: dict[str, Any] = json.loads((directory / "config.json").read_text("utf-8"))["quantization_config"]
    return found


def alike(native: Path, other: Path) -> Iterator[tuple[int, int, str, PackedWeight]]:
    """Layer, expert, name and weight of every matrix of a checkpoint, which lies in another with the same parts."""
    first, second = (open_packed(path, as_values=True) for path in (native, other))
    for layer in first.layers:
        for expert in range(layer.num_experts):
            theirs = second.expert(layer, expert)[0]
            for name, matrix in first.expert(layer, expert)[0].items():
                found = theirs[name]
                assert isinstance(found, PackedWeight)
                assert isinstance(matrix, PackedWeight)
                assert all(torch.equal(found.parts()[part], one) for part, one in matrix.parts().items())
                yield layer.index, expert, name, matrix
