"""As `gguf_parameters`, of families with state space layers (Mamba 2), and of those whose layers differ otherwise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from moeq.exporters.gguf_parameters import (
    SIGMOID,
    SOFTMAX,
    Value,
    dense_layers,
    dense_reasons,
    head_size,
    is_near,
    near_rope,
    rope_of,
    weighed,
)


def granite(config: Any) -> dict[str, Value]:
    shared = getattr(config, "shared_intermediate_size", None)
    return {
        "logit_scale": float(config.logits_scaling),
        "residual_scale": float(config.residual_multiplier),
        "embedding_scale": float(config.embedding_multiplier),
        "attention.scale": float(config.attention_multiplier),
    } | ({} if shared is None else {"expert_shared_feed_forward_length": shared})


def granite_reasons(config: Any) -> Iterator[str]:
    scales = ("logits_scaling", "residual_multiplier", "embedding_multiplier", "attention_multiplier")
    for name in scales:
        if not getattr(config, name):
            yield f"{name}: 0"


def is_attention(kind: str) -> bool:
    return kind in ("attention", "full_attention")


def _first(config: Any, *names: str) -> Any:
    """The first attribute that a configuration has."""
    return next(getattr(config, name) for name in names if hasattr(config, name))


def mamba(config: Any) -> dict[str, Value]:
    """Of Mamba 2, and which layers have attention instead."""
    heads, size = _first(config, "mamba_n_heads", "mamba_num_heads"), _first(config, "mamba_d_head", "mamba_head_dim")
    shared = config.num_key_value_heads
    return {
        "attention.head_count_kv": [shared if is_attention(kind) else 0 for kind in config.layer_types],
        "ssm.conv_kernel": _first(config, "mamba_d_conv", "conv_kernel"),
        "ssm.state_size": _first(config, "mamba_d_state", "ssm_state_size"),
        "ssm.group_count": _first(config, "mamba_n_groups", "n_groups"),
        "ssm.inner_size": heads * size,
        "ssm.time_step_rank": heads,
    }


def mamba_reasons(config: Any) -> Iterator[str]:
    if not _first(config, "mamba_conv_bias", "use_conv_bias"):
        yield "convolutions without biases"
    if config.mamba_proj_bias:
        yield "state spaces with biases (mamba_proj_bias)"
    if tuple(config.time_step_limit or ()) != (0.0, math.inf):
        yield f"time steps within {config.time_step_limit} (time_step_limit)"


def granite_hybrid(config: Any) -> dict[str, Value]:
    return {"rope.scaling.finetuned": config.position_embedding_type == "rope"}


def granite_hybrid_reasons(config: Any) -> Iterator[str]:
    if config.mamba_expand != 2:
        yield f"state spaces of {config.mamba_expand} times the hidden size (mamba_expand)"
    if not config.shared_intermediate_size:
        yield "layers without a shared expert"


def mamba_shapes(config: Any, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of what llama.cpp keeps by head, or by group."""
    if name in ("ssm_a", "ssm_d"):
        return (*shape, 1)
    if name == "ssm_norm.weight":
        groups = _first(config, "mamba_n_groups", "n_groups")
        return (groups, shape[0] // groups)
    return shape


def nemotron(config: Any) -> dict[str, Value]:
    size, latent = config.moe_intermediate_size, config.moe_latent_size
    return (
        {
            "attention.layer_norm_epsilon": float(config.layer_norm_epsilon),
            "feed_forward_length": [size if kind == "moe" else 0 for kind in config.layer_types],
            "expert_feed_forward_length": size,
            "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
        }
        | weighed(config)
        | ({} if latent is None else {"moe_latent_size": latent})
    )


def nemotron_reasons(config: Any) -> Iterator[str]:
    if "mlp" in config.layer_types:
        yield "dense layers among those with experts"
    if config.mlp_hidden_act != "relu2":
        yield f"its activation {config.mlp_hidden_act}"
    if config.mlp_bias or config.use_bias:
        yield "linears with biases (mlp_bias, use_bias)"


def mimo(config: Any) -> dict[str, Value]:
    shared, scale = config.num_key_value_heads, config.attention_value_scale
    return {
        "attention.head_count_kv": [2 * shared if one else shared for one in is_near(config)],
        "attention.value_length": config.v_head_dim,
        "attention.value_scale": 1.0 if scale is None else float(scale),
        "rope.freq_base_swa": float(near_rope(config)["rope_theta"]),
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
    }


def mimo_reasons(config: Any) -> Iterator[str]:
    near, far = near_rope(config), rope_of(config)
    if {near.get("rope_type", "default"), far.get("rope_type", "default")} != {"default"}:
        yield "scaled rotary embeddings"
    if near.get("partial_rotary_factor", 1) != far.get("partial_rotary_factor", 1):
        yield "rotary embeddings of another part of a head within windows"
    if int(head_size(config) * far.get("partial_rotary_factor", 1)) % 2:
        yield "rotary embeddings of an odd number of dimensions"
    if config.routed_scaling_factor != 1:
        yield f"routing weights times {config.routed_scaling_factor} (routed_scaling_factor)"


def cohere(config: Any) -> dict[str, Value]:
    """An epsilon of 0 of RMSNorm stands for LayerNorm."""
    soft = config.expert_selection_fn == "softmax"
    size, shared = config.intermediate_size, config.num_shared_experts
    return {
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps or 0),
        "attention.layer_norm_epsilon": float(config.layer_norm_eps),
        "logit_scale": float(config.logit_scale),
        "feed_forward_length": config.prefix_dense_intermediate_size or size,
        "leading_dense_block_count": dense_layers(config),
        "expert_feed_forward_length": size,
        "expert_shared_count": shared,
        "expert_shared_feed_forward_length": size * shared,
        "expert_weights_norm": soft or bool(config.norm_topk_prob),
        "expert_gating_func": SOFTMAX if soft else SIGMOID,
    }


def cohere_reasons(config: Any) -> Iterator[str]:
    yield from dense_reasons(config)
    first = config.layer_types[: dense_layers(config)]
    if "full_attention" in first and config.prefix_dense_sliding_window_pattern != 1:
        yield "full attention without rotary embeddings in dense layers (prefix_dense_sliding_window_pattern)"
    if config.num_shared_experts and config.shared_expert_combination_strategy != "average":
        yield f"shared experts of which it takes the {config.shared_expert_combination_strategy}"
