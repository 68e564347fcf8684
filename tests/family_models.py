"""Tiny random models of every Mixture-of-Experts family that transformers has, and of moeq's own.

A family is a line of FAMILIES: its configuration class, its model class and the settings that differ from the common
ones. Sizes are all different (hidden 40, intermediate 56 and 24, heads times head size 32, 2048 words), so that a
transposed or mixed-up weight cannot pass (only attention is square where a family ties its heads to the hidden size);
weights, biases and routers' corrections are random, norms lie near one.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING

from moeq.bundled import bundled_path
from moeq.integers.vit import configuration as vit_configuration
from moeq.integers.vit import modeling as vit_modeling
from moeq.models.disk_names import DiskNames
from moeq.models.experts import ExpertLayer

PLACES = (transformers, vit_configuration, vit_modeling)
VOCABULARY = 2048  # as many words as the bundled tokenizer has
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 40, "intermediate_size": 56, "moe_intermediate_size": 24,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    "num_experts_per_tok": 2, "num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6, "moe_num_experts": 6,
    "moe_topk": 2, "moe_k": 2, "top_k_experts": 2, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1,
    "shared_expert_intermediate_size": 32, "shared_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1, "num_dense_layers": 1, "num_mtp_layers": 0, "sliding_window": 8,
    "q_lora_rank": 18, "kv_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 6, "v_head_dim": 11,
    "index_topk": 8, "index_n_heads": 2, "index_head_dim": 12,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 9,
    "linear_head_dim": 9, "linear_num_heads": 4, "hc_mult": 2, "hc_sinkhorn_iters": 3,
    "hc_count": 2, "hc_lowrank": 10, "router_hidden_size": 14, "lm_head_bias": True,
    "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": VOCABULARY, "num_key_value_heads_swa": 2,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "d_rel": 6, "rel_extent": 16,
    "sliding_window_size": 8, "unpadded_vocab_size": VOCABULARY, "shared_experts_intermediate_size": 32,
    "dense_intermediate_size": 56, "index_block_size": 4, "index_topk_blocks": 3, "attention_chunk_size": 8,
    "intermediate_size_mlp": 56, "share_expert_dim": 32, "kv_channels": 8, "o_groups": 2, "o_lora_rank": 14,
    "gated_norm_rank": 6, "mamba_d_state": 6, "chunk_size": 8, "ngram_size": 2, "heads_per_ngram": 2,
    "canvas_length": 8, "projector_hidden_size": 28,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 36, "embed_dim": 36, "intermediate_size": 44, "num_hidden_layers": 2, "num_layers": 2, "depth": 2,
    "num_attention_heads": 3, "num_heads": 3, "num_key_value_heads": 3, "image_size": 16, "patch_size": 4,
    "out_hidden_size": 40, "output_dim": 40, "head_dim": 12, "encoder_layers": 2, "encoder_attention_heads": 3,
    "d_model": 36, "encoder_ffn_dim": 44, "vocab_size": 64, "max_position_embeddings": 64, "mlp_dim": 44,
    "vision_output_dim": 44, "projector_input_dim": 44, "projector_output_dim": 44, "downsample_hidden_size": 12,
    "pos_emb_height": 4, "pos_emb_width": 4, "num_position_embeddings": 16, "mel_vocab_size": 16, "n_mel_bins": 8,
    "projection_intermediate_size": 28, "projection_hidden_dim": 28,
}  # fmt: skip
MIXED = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
MLA = {"num_key_value_heads": 4}
HYBRID = ["linear_attention", "full_attention", "linear_attention"]
ROPE_3D = {
    "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, "mrope_section": [2, 1, 2],
}  # fmt: skip
GEMMA4 = {"enable_moe_block": True, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
GEMMA4_VISION = {"position_embedding_size": 32}
QWEN4 = {
    "layer_types": HYBRID, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 12, "indexer_budget": 8,
    "indexer_compress_ratio": 2, "ple_layer_ids": [1], "ple_embed_dim": 12, "ngram_vocab_size_base": 64,
    "split_ngram_parts": 2, "make_ngram_vocab_size_divisible_by": 8,
}  # fmt: skip
DOTS3 = {
    **MLA, **MIXED, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_q_lora_rank": 14,
    "swa_kv_lora_rank": 12, "swa_head_dim": 14, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 10,
}  # fmt: skip
MOE_VIT = {
    "image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10, "moe_layers": [0, 2], "router_bias": True,
}  # fmt: skip
LOOP = {
    "num_hidden_layers": 4,
    "n_layers_per_attn_res_block": 1,
    "loop_layer_index_start": 1,
    "loop_layer_index_end": 3,
    "loop_num_passes": 2,
    "loop_gate_rank": 6,
}
LLAMA4 = {"intermediate_size": 24, "moe_layers": [1, 2]}
MINIMAX_M3 = {**MIXED, "intermediate_size": 24}
SAM = {"output_channels": 20, "downsample_channels": [24, 36], "window_size": 2, "global_attn_indexes": [1]}
NLLB = {
    "d_model": 40, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 1,
}  # fmt: skip
SWITCH = {
    "d_model": 40, "d_kv": 8, "d_ff": 24, "num_layers": 4, "num_decoder_layers": 4, "num_sparse_encoder_layers": 2,
    "num_sparse_decoder_layers": 2, "num_heads": 4,
}  # fmt: skip
DRAWN_BUFFERS = ("correction_bias", "expert_bias", "tid2eid", "layer_scalar")  # others are computed, not learned
VLM_TOKENS = {
    "image_token_id": 5, "image_token_index": 5, "video_token_id": 6, "vision_start_token_id": 7,
    "vision_end_token_id": 8, "audio_token_id": 9, "image_start_token_id": 10, "image_end_token_id": 11,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Family:
    """Configuration class, model class, and settings beside (or instead of) the common ones; None drops a common one.

    Settings of parts, such as text_config, are dictionaries.
    """

    config: str
    model: str
    settings: dict[str, Any]


def text(name: str, **settings: Any) -> Family:
    """A decoder: NameConfig and NameForCausalLM."""
    return Family(f"{name}Config", f"{name}ForCausalLM", settings)


def vision(name: str, model: str = "", **settings: Any) -> Family:
    """A model of text and images: NameConfig and NameForConditionalGeneration."""
    return Family(f"{name}Config", model or f"{name}ForConditionalGeneration", settings)


EVERY: dict[str, Family] = {
    "afmoe": text("Afmoe"),
    "aria_text": text("AriaText", intermediate_size=24),
    "axk1": text("AXK1", **MLA, **MIXED),
    "axk2": text("AXK2", **MLA, **MIXED),
    "bailing_hybrid": text("BailingHybrid", **MLA, layer_types=HYBRID, first_k_dense_replace=1),
    "beam": text("Beam", **MIXED),
    "cohere2_moe": text("Cohere2Moe", **MIXED, intermediate_size=24, prefix_dense_intermediate_size=56),
    "deepseek_v2": text("DeepseekV2", **MLA, head_dim=None),
    "deepseek_v3": text("DeepseekV3", **MLA),
    "deepseek_v32": text("DeepseekV32", **MLA, **MIXED),
    "deepseek_v4": text("DeepseekV4", num_key_value_heads=1, mlp_layer_types=["hash_moe", "moe", "moe"]),
    "dots1": text("Dots1"),
    "dots3_note_text": Family("Dots3NoteTextConfig", "Dots3NoteForCausalLM", DOTS3),
    "ernie4_5_moe": text("Ernie4_5_Moe"),
    "exaone_moe": text("ExaoneMoe", num_hidden_layers=4),
    "flex_olmo": text("FlexOlmo", intermediate_size=24),
    "flint": text("Flint", mlp_only_layers=[0]),
    "gemma4_text": Family("Gemma4TextConfig", "Gemma4ForCausalLM", GEMMA4),
    "glm4_moe": text("Glm4Moe"),
    "glm4_moe_lite": text("Glm4MoeLite", **MLA, **MIXED),
    "glm_moe_dsa": text("GlmMoeDsa", **MLA, **MIXED),
    "gpt_oss": text("GptOss", intermediate_size=24),
    "granitemoe": text("GraniteMoe", intermediate_size=24),
    "granitemoe_swa": text("GraniteMoeSWA", intermediate_size=24),
    "granitemoehybrid": text(
        "GraniteMoeHybrid", intermediate_size=24, layer_types=["mamba", "attention", "mamba"], mamba_n_heads=4,
        mamba_chunk_size=8,
    ),
    "granitemoeshared": text("GraniteMoeShared", intermediate_size=24),
    "hunyuan_v1_moe": text("HunYuanMoEV1", intermediate_size=24),
    "hy_v3": text("HYV3", **MIXED),
    "hy_v4": text("HYV4", **MLA, **MIXED),
    "inkling_text": Family("InklingTextConfig", "InklingForCausalLM", MIXED),
    "inkling2_text": Family("Inkling2TextConfig", "Inkling2ForCausalLM", {}),
    "inkling2_loop_text": Family("Inkling2LoopTextConfig", "Inkling2LoopForCausalLM", LOOP),
    "jamba": text("Jamba", attn_layer_period=2, attn_layer_offset=1, num_hidden_layers=4),
    "kimi_linear": text("KimiLinear", **MLA, **MIXED, layer_types=HYBRID),
    "kolibri1": text("Kolibri1"),
    "laguna": text("Laguna", **MIXED),
    "lara_mini": text("LaraMini", layer_types=HYBRID),
    "lfm2_moe": text("Lfm2Moe", layer_types=["conv", "full_attention", "conv"]),
    "mellum": text("Mellum", **MIXED),
    "mimo_v2_flash": text("MiMoV2Flash", **MIXED),
    "minimax": text("MiniMax", intermediate_size=24),
    "minimax_m2": text("MiniMaxM2", intermediate_size=24),
    "minimax_m3_vl_text": Family("MiniMaxM3VLTextConfig", "MiniMaxM3VLForCausalLM", MINIMAX_M3),
    "mistral4": text("Mistral4", **MLA),
    "mixtral": text("Mixtral", intermediate_size=24),
    "nemotron_h": text(
        "NemotronH", layer_types=["linear_attention", "moe", "full_attention", "mlp", "moe"], num_hidden_layers=None,
        mamba_num_heads=4, mamba_head_dim=8, n_groups=2, ssm_state_size=6, moe_latent_size=28,
    ),
    "olmoe": text("Olmoe", intermediate_size=24),
    "openai_privacy_filter": Family(
        "OpenAIPrivacyFilterConfig", "OpenAIPrivacyFilterForTokenClassification", {"intermediate_size": 24}
    ),
    "phimoe": text("Phimoe", intermediate_size=24),
    "qwen2_moe": text("Qwen2Moe", mlp_only_layers=[0]),
    "qwen3_5_moe_text": Family("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {"layer_types": HYBRID}),
    "qwen3_moe": text("Qwen3Moe", mlp_only_layers=[0]),
    "qwen3_next": text("Qwen3Next", mlp_only_layers=[0], layer_types=HYBRID),
    "qwen4_exp_text": Family("Qwen4ExpTextConfig", "Qwen4ExpForCausalLM", QWEN4),
    "solar_open": text("SolarOpen"),
    "zaya": text("Zaya", num_experts_per_tok=1),
    "dbrx": text(
        "Dbrx", d_model=40, n_heads=4, n_layers=3, max_seq_len=128, ffn_config={"ffn_hidden_size": 24, "moe_top_k": 2},
        attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
    ),
    "doge": text("Doge", is_moe=True, num_experts=16),
    "jetmoe": text("JetMoe", intermediate_size=24),
    "llama4_text": Family("Llama4TextConfig", "Llama4ForCausalLM", LLAMA4),
    "longcat_flash": text(
        "LongcatFlash", **MLA, num_layers=2, ffn_hidden_size=56, expert_ffn_hidden_size=24, zero_expert_num=2
    ),
    "nllb-moe": Family("NllbMoeConfig", "NllbMoeForConditionalGeneration", NLLB),
    "switch_transformers": Family("SwitchTransformersConfig", "SwitchTransformersForConditionalGeneration", SWITCH),
    "aria": vision("Aria", text_config={"intermediate_size": 24}, vision_config={"vocab_size": None}),
    "deepseek_ocr2": vision(
        "DeepseekOcr2", text_config=MIXED, vision_config={"sam_config": SAM, "encoder_config": {"head_dim": None}}
    ),
    "diffusion_gemma": vision("DiffusionGemma", "DiffusionGemmaForBlockDiffusion", vision_config=GEMMA4_VISION),
    "dots3_note": vision(
        "Dots3Note", text_config=DOTS3,
        vision_config={
            "adapter_in_dim": 36, "adapter_out_dim": 40, "mlp_layer_types": ["dense", "sparse"], "num_local_experts": 5,
            "moe_intermediate_size": 22,
        },
        audio_config={"adapter_input_size": 36, "adapter_out_dim": 40, "downsample_hidden_size": 12, "head_dim": None},
    ),
    "ernie4_5_vl_moe": vision(
        "Ernie4_5_VLMoe", text_config={**MIXED, "moe_intermediate_size": [24, 12], "head_dim": 10,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 1]}}
    ),
    "gemma4": vision(
        "Gemma4", text_config=GEMMA4, vision_config=GEMMA4_VISION, audio_config=None
    ),
    "glm4v_moe": vision("Glm4vMoe", text_config={"rope_parameters": ROPE_3D}),
    "glm5_next": vision(
        "Glm5Next", text_config={**MLA, **MIXED, "qk_rope_head_dim": 0, "layer_types": HYBRID, "index_kpool": 2}
    ),
    "hy_v4_vl": vision(
        "HYV4VL", text_config={**MLA, **MIXED, "rope_parameters": ROPE_3D | {"mrope_section": [1, 1, 2]}}
    ),
    "inkling2_loop": vision("Inkling2Loop", text_config=LOOP, vision_config={"text_hidden_size": 40}),
    "inkling_mm_model": vision("Inkling", text_config=MIXED),
    "inkling2": vision("Inkling2", vision_config={"text_hidden_size": 40}),
    "llama4": vision("Llama4", text_config=LLAMA4, vision_config={"intermediate_size": 144}),
    "minimax_m3_vl": vision("MiniMaxM3VL", "MiniMaxM3SparseForConditionalGeneration", text_config=MINIMAX_M3),
    "mistral_large4": vision(
        "MistralLarge4", text_config={**MLA, **MIXED, "kv_source_layers": [0, 1, 1],
        "indexer_types": ["full", "full", "shared"]},
    ),
    "muse_spark": vision(
        "MuseSpark", out_hidden_size=36, text_config={**MIXED, "moe_hidden_size": 28},
        audio_config={"num_hidden_layers": 2, "patch_sizes": [4, 4], "hidden_sizes": [12, 20], "depths": [1, 1]},
    ),
    "qwen3_5_moe": vision("Qwen3_5Moe", text_config={"layer_types": HYBRID}),
    "qwen3_omni_moe_thinker": vision("Qwen3OmniMoeThinker"),
    "qwen3_vl_moe": vision("Qwen3VLMoe", text_config={"mlp_only_layers": [0]}),
    "qwen4_exp": vision("Qwen4Exp", text_config=QWEN4),
    "step3p7": vision("Step3p7", text_config=MIXED),
    "unlimited_ocr": vision("UnlimitedOcr", vision_config={"sam_config": SAM}),
    "moe_vit": Family("MoeViTConfig", "MoeViTForImageClassification", MOE_VIT),
}  # fmt: skip
FAMILIES = {  # those of newer transformers than the installed one are left out
    name: family for name, family in EVERY.items() if any(hasattr(place, family.model) for place in PLACES)
}
SEEING = ("gemma4", "glm4v_moe", "ernie4_5_vl_moe", "llama4", "minimax_m3_vl", "qwen3_5_moe", "qwen3_vl_moe")
CLASSIFIERS = ("moe_vit",)  # of images: they take no tokens
LOOPED = ("inkling2_loop_text", "inkling2_loop")  # they run some layers several times
ENCODER_DECODERS = ("nllb-moe", "switch_transformers", "diffusion_gemma")
NOT_BUILT = {
    "qwen3_omni_moe": "the whole of thinker, talker and vocoder has no forward; its thinker is in the table",
    "vitpose_backbone": "takes images only, and its experts are chosen by the data set, not by a router",
}


def of_name(name: str) -> Any:
    """A class of transformers, or of moeq's own models."""
    return next(getattr(place, name) for place in PLACES if hasattr(place, name))


def configuration(family: str, **settings: Any) -> Any:
    """The family's configuration with tiny sizes; `settings` replace the table's."""
    entry = FAMILIES[family]
    return _configure(of_name(entry.config), entry.settings | settings, COMMON)


def _configure(kind: Any, settings: dict[str, Any], sizes: dict[str, Any]) -> Any:
    """`kind` with those of the common sizes that it declares, and with parts made the same way."""
    declared = {field.name for field in dataclasses.fields(kind)}
    values = {name: value for name, value in (sizes | VLM_TOKENS).items() if name in declared}
    parts = {part: (spec.config_class, spec.model_type) for part, spec in kind.sub_configs_defaults.items()}
    parts = parts or {part: (of, None) for part, of in kind.sub_configs.items()}
    values |= {name: value for name, value in settings.items() if name not in parts or value is None}
    values = {name: value for name, value in values.items() if value is not None or name in parts}
    for part, (of, model_type) in parts.items():
        if settings.get(part, {}) is not None:
            of = CONFIG_MAPPING[model_type] if model_type else of
            inner = VISION if sizes is VISION or part in ("vision_config", "audio_config") else COMMON
            values[part] = _configure(of, settings.get(part, {}), inner)
    return kind(**values)


def build(family: str, **settings: Any) -> Any:
    """The model, in float32, in evaluation mode; the same weights every time."""
    torch.manual_seed(11)
    model = of_name(FAMILIES[family].model)(configuration(family, **settings)).eval()
    _randomize(model)
    return model


def _randomize(model: nn.Module) -> None:
    """Every weight random; what was constant (norms, biases, corrections of routers) gets noise around its constant."""
    generator = torch.Generator().manual_seed(13)
    drawn = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith(DRAWN_BUFFERS)]
    with torch.no_grad():
        for _, weight in [*model.named_parameters(), *drawn]:
            if not weight.is_floating_point():
                weight.copy_(torch.randint(0, 6, weight.shape, generator=generator))
                continue
            first = weight.flatten()[0].item()
            constant = weight.numel() > 1 and weight.dim() == 1 and bool((weight == first).all())
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(first + 0.1 * noise if constant or weight.numel() == 1 else 0.15 * noise)


def matrices_on_disk(model: Any, layers: list[ExpertLayer]) -> str:
    """What the matrices of experts that are separate on the disk are called there."""
    names = DiskNames(model)
    return " ".join(sorted({key.split(".")[-2] for layer in layers for key in names.experts(layer).values()}))  # type: ignore[union-attr]


def save(family: str, folder: Path, with_tokenizer: bool = True, **settings: Any) -> Path:
    """The model as a checkpoint directory, with the bundled tokenizer unless told otherwise."""
    build(family, **settings).save_pretrained(folder)
    if with_tokenizer:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(bundled_path("tiny-mixtral") / name, folder / name)
    return folder


def inputs(family: str, rows: int = 2, length: int = 12) -> dict[str, torch.Tensor]:
    """Ordinary arguments of forward: input_ids [rows, length], decoder_input_ids of an encoder-decoder; or pixels."""
    generator = torch.Generator().manual_seed(17)
    if family in CLASSIFIERS:
        return {"pixel_values": torch.rand(rows, 1, 8, 8, generator=generator)}
    ids = torch.randint(20, VOCABULARY, (rows, length), generator=generator)
    found = {"input_ids": ids}
    if family in ENCODER_DECODERS:
        found["decoder_input_ids"] = torch.randint(20, VOCABULARY, (rows, length - 3), generator=generator)
    return found


def inputs_with_image(family: str) -> dict[str, torch.Tensor]:
    """Arguments of forward for one of SEEING: a row of 12 tokens of which four stand for an image of 16 patches."""
    generator = torch.Generator().manual_seed(19)
    ids = inputs(family, rows=1)["input_ids"]
    ids[0, 2:6] = VLM_TOKENS["image_token_id"]
    of_image = (ids == VLM_TOKENS["image_token_id"]).int()
    if family == "llama4":
        return {"input_ids": ids, "pixel_values": torch.randn(1, 3, 16, 16, generator=generator)}
    if family == "gemma4":
        places = torch.tensor([[[place % 6, place // 6] for place in range(36)]])
        pixels = torch.randn(1, 36, 48, generator=generator)
        return {
            "input_ids": ids, "pixel_values": pixels, "image_position_ids": places, "mm_token_type_ids": of_image,
        }  # fmt: skip
    width = 48 if family == "ernie4_5_vl_moe" else 96  # 3 colours of 4 x 4 pixels, of two frames in the others
    found = {
        "input_ids": ids,
        "pixel_values": torch.randn(16, width, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }
    if family != "minimax_m3_vl":
        found["mm_token_type_ids"] = of_image
    if family == "ernie4_5_vl_moe":
        found["moe_mm_token_type_ids"] = of_image
    return found
