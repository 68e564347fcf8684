"""Tiny models of the families that are written as GGUF, with all that sets them apart."""

from typing import Any

from family_models import GEMMA4_VISION
from made_sources import SIZES

WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
MIXED = ["dense", "sparse", "sparse"]
ROPE = {"rope_type": "default", "rope_theta": 50000.0}  # not what llama.cpp takes where nothing is said
HALF = ROPE | {"partial_rotary_factor": 0.5}
ROUTED = {
    "first_k_dense_replace": 1, "n_shared_experts": 2, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "num_hidden_layers": 3,
}  # fmt: skip
DELTA = {
    "head_dim": 64,
    "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "rope_parameters": ROPE | {"partial_rotary_factor": 0.25}, "rms_norm_eps": 1e-6,
}  # fmt: skip
PLAIN_YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 50000.0,
}  # fmt: skip
YARN = PLAIN_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}
GRANITE = {
    "intermediate_size": 96, "logits_scaling": 3.0, "residual_multiplier": 0.5, "embedding_multiplier": 4.0,
    "attention_multiplier": 0.2, "attention_bias": True, "rope_parameters": ROPE,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "num_hidden_layers": 3, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "q_lora_rank": 64, "kv_lora_rank": 64, "head_dim": None, "n_shared_experts": 2,
}  # fmt: skip
LLAMA3 = ROPE | {
    "rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
NEAR_AND_FAR = ["sliding_attention", "sliding_attention", "full_attention"]
GEMMA4 = {
    "enable_moe_block": True, "num_hidden_layers": 3, "layer_types": NEAR_AND_FAR, "sliding_window": 8, "head_dim": 32,
    "hidden_size_per_layer_input": 32, "final_logit_softcapping": 20.0,
    "per_layer_config": {"2": {"head_dim": 64}},
    "rope_parameters": {
        "sliding_attention": ROPE,
        "full_attention": ROPE | {"rope_type": "proportional", "rope_theta": 70000.0, "partial_rotary_factor": 0.25},
    },
}  # fmt: skip
LLAMA4 = {
    "intermediate_size": 96, "intermediate_size_mlp": 192, "num_hidden_layers": 4, "moe_layers": None,
    "interleave_moe_layer_step": 2, "head_dim": 64, "num_experts_per_tok": 1, "rope_parameters": LLAMA3,
    "attention_chunk_size": 8192,
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "glm4_moe": ROUTED | {"head_dim": 64, "use_qk_norm": True, "attention_bias": True, "rope_parameters": HALF},
    "ernie4_5_moe": {
        "num_hidden_layers": 3, "moe_layer_start_index": 1, "moe_num_shared_experts": 2, "num_attention_heads": 4,
    },
    "gpt_oss": {
        "head_dim": 64,
        "intermediate_size": 96, "num_hidden_layers": 3, "layer_types": sorted(WINDOWS, reverse=True),
        "sliding_window": 8,
        "rope_parameters": ROPE,
    },
    "qwen3_next": DELTA | {"mlp_only_layers": [], "norm_topk_prob": True},
    "minimax_m2": {"head_dim": 64, "intermediate_size": 96, "rope_parameters": HALF},
    "dots1": ROUTED | {"rope_parameters": ROPE, "sliding_window": None, "num_key_value_heads": 4},
    "hunyuan_v1_moe": {
        "head_dim": 64,
        "intermediate_size": 96,
        "rope_parameters": {"rope_type": "dynamic", "alpha": 8.0, "factor": 1.0, "rope_theta": 10000.0},
    },
    "qwen3_5_moe_text": DELTA,
    "qwen3_5_moe": {"text_config": SIZES | DELTA, "vision_config": {"out_hidden_size": 128}},
    "gemma4": {"text_config": SIZES | GEMMA4, "vision_config": GEMMA4_VISION, "audio_config": None},
    "gemma4_text": GEMMA4,
    "llama4": {"text_config": SIZES | LLAMA4, "vision_config": {"intermediate_size": 144}},
    "llama4_text": LLAMA4,
    "qwen3_vl_moe": {
        "text_config": SIZES | {
            "head_dim": 64, "num_hidden_layers": 3, "mlp_only_layers": [],
            "rope_parameters": ROPE | {"mrope_section": [11, 11, 10]},
        },
        "vision_config": {"out_hidden_size": 128, "deepstack_visual_indexes": [0, 1]},
    },
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "tie_word_embeddings": True,
    },
    "granitemoe": GRANITE,
    "granitemoeshared": GRANITE | {"shared_intermediate_size": 160},
    "deepseek_v2": LATENT | {"routed_scaling_factor": 2.5, "rope_parameters": YARN},
    "glm4_moe_lite": LATENT | ROUTED | {"rope_parameters": ROPE, "mlp_layer_types": MIXED},
    "solar_open": ROUTED | {"head_dim": 64},
    "hy_v3": {"head_dim": 64, "num_hidden_layers": 3, "mlp_layer_types": MIXED, "num_shared_experts": 2},
    "exaone_moe": ROUTED | {
        "rope_parameters": ROPE, "head_dim": 64,
        "num_experts": 8, "num_shared_experts": 2, "sliding_window": 8, "layer_types": WINDOWS,
        "mlp_layer_types": MIXED, "sliding_window_pattern": 2,
    },
    "afmoe": {
        "rope_parameters": ROPE, "head_dim": 64,
        "num_hidden_layers": 5, "num_dense_layers": 1, "num_shared_experts": 2, "route_scale": 2.5, "mup_enabled": True,
        "sliding_window": 8, "layer_types": [*["sliding_attention"] * 3, "full_attention", "sliding_attention"],
    },
    "mellum": {
        "head_dim": 64,
        "mlp_layer_types": None, "layer_types": WINDOWS, "num_hidden_layers": 3, "sliding_window": 8,
        "rope_parameters": {"full_attention": PLAIN_YARN, "sliding_attention": ROPE},
    },
    "laguna": {
        "head_dim": 64,
        "mlp_layer_types": MIXED, "layer_types": [*WINDOWS[1:], "full_attention"], "num_hidden_layers": 3,
        "sliding_window": 8, "moe_routed_scaling_factor": 2.5, "num_attention_heads_per_layer": [4, 2, 4],
        "rope_parameters": {"full_attention": HALF | {"rope_theta": 500000.0}, "sliding_attention": ROPE},
    },
    "granitemoehybrid": GRANITE | {
        "shared_intermediate_size": 160, "layer_types": ["mamba", "attention", "mamba"], "num_hidden_layers": 3,
        "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 32, "mamba_chunk_size": 8,
        "position_embedding_type": None,
    },
    "nemotron_h": {
        "head_dim": 64,
        "layer_types": ["linear_attention", "moe", "full_attention", "moe"], "num_hidden_layers": None,
        "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 32, "moe_latent_size": 96,
        "moe_shared_expert_intermediate_size": 160, "routed_scaling_factor": 2.5, "n_routed_experts": 8, "n_group": 4,
        "topk_group": 2, "num_experts_per_tok": 3, "chunk_size": 8, "sliding_window": None,
    },
    "mimo_v2_flash": {
        "head_dim": 64,
        "num_hidden_layers": 3, "mlp_layer_types": MIXED, "layer_types": WINDOWS, "sliding_window": 8,
        "attention_value_scale": 0.707, "v_head_dim": 48, "num_key_value_heads": 2,
        "rope_parameters": {"full_attention": HALF | {"rope_theta": 500000.0}, "sliding_attention": HALF},
    },
    "mistral4": LATENT | ROUTED | {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.5}},
    "cohere2_moe": {
        "rope_parameters": ROPE, "head_dim": 64,
        "num_hidden_layers": 3, "layer_types": [*WINDOWS[1:], "full_attention"], "sliding_window": 8,
        "mlp_layer_types": MIXED, "intermediate_size": 96, "prefix_dense_intermediate_size": 160,
        "num_shared_experts": 2, "logit_scale": 0.5, "tie_word_embeddings": True,
    },
}  # fmt: skip
