"""What llama.cpp wants to know of a family beside what it wants of all, and what of a configuration it does not do.

Each function is given a transformers configuration, and returns {key without the architecture: value}, or says reasons.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Value = int | float | bool | str | list[str] | list[int] | list[float] | list[bool]

CASED = "gpt-4o"  # the pattern of words that llama.cpp has for the letters of English alone
LITTLE = 0.25  # radians, by which a few pairs of a head may be turned otherwise at the end of the context
FREQUENCIES = "rope_freqs.weight"  # a tensor that no checkpoint has: what those of a head's pairs are divided by
SOFTMAX, SIGMOID = 1, 2  # of llama.cpp's numbers for what makes weights of a router's logits


def rope_of(config: Any) -> Mapping[str, Any]:
    """rope_parameters; those of full attention, where windows have others; of a base that a fixed alpha stretches,
    those without it."""
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if rope.get("rope_type") == "dynamic" and rope.get("alpha"):
        size = head_size(config)
        base = rope.get("rope_theta", 10000.0) * rope["alpha"] ** (size / (size - 2))
        return {"rope_type": "default", "rope_theta": base}
    return rope


def layers(config: Any) -> list[Any]:
    """The configuration of every layer."""
    each = getattr(config, "per_layer_config", None) or {}
    return [each[at] if each else config for at in range(config.num_hidden_layers)]


def head_size(config: Any) -> int:
    """Of queries and keys."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def heads(config: Any) -> dict[str, Value]:
    size = head_size(config)
    turned = int(size * rope_of(config).get("partial_rotary_factor", 1))
    return {"attention.key_length": size, "attention.value_length": size, "rope.dimension_count": turned}


def qwen(config: Any) -> dict[str, Value]:
    lengths: dict[str, Value] = {"expert_feed_forward_length": config.moe_intermediate_size}
    shared = getattr(config, "shared_expert_intermediate_size", None)
    return lengths | ({} if shared is None else {"expert_shared_feed_forward_length": shared})


def whole_heads(config: Any) -> Iterator[str]:
    size = head_size(config)
    if size * config.num_attention_heads != config.hidden_size:
        yield f"heads of {size} that do not add up to the hidden size"


def olmoe_reasons(config: Any) -> Iterator[str]:
    yield from whole_heads(config)
    yield from own_keys(config)


def dense_layers(config: Any) -> int:
    """How many layers without experts come first."""
    kinds = getattr(config, "mlp_layer_types", None)
    if kinds is None:
        return int(getattr(config, "first_k_dense_replace", 0))
    return next((at for at, kind in enumerate(kinds) if kind != "dense"), len(kinds))


def dense_reasons(config: Any) -> Iterator[str]:
    kinds = getattr(config, "mlp_layer_types", None) or ()
    if "dense" in kinds[dense_layers(config) :]:
        yield "dense layers among those with experts"


def routed(config: Any) -> dict[str, Value]:
    """Of experts chosen by corrected sigmoids, after dense layers."""
    return {
        "leading_dense_block_count": dense_layers(config),
        "expert_feed_forward_length": config.moe_intermediate_size,
    } | weighed(config)


def weighed(config: Any) -> dict[str, Value]:
    """Of shared experts, and of the weights of those that corrected sigmoids choose."""
    return {
        "expert_shared_count": shared_experts(config),
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": bool(config.norm_topk_prob),
        "expert_gating_func": SIGMOID,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
    }


def latent(config: Any) -> dict[str, Value]:
    """Of deepseek's attention."""
    rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
    values: dict[str, Value] = {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": config.qk_nope_head_dim + rope,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": rope,
    }
    if config.q_lora_rank is not None:
        values["attention.q_lora_rank"] = config.q_lora_rank
    scaled = rope_of(config)
    if scaled.get("rope_type") == "yarn" and scaled.get("mscale_all_dim"):
        values["rope.scaling.yarn_log_multiplier"] = 0.1 * float(scaled["mscale_all_dim"])
    return values


def latent_reasons(config: Any) -> Iterator[str]:
    if not getattr(config, "rope_interleave", True):
        yield "rotary embeddings of halves (rope_interleave: false)"
    yield from shared_reasons(config)
    layers = config.num_hidden_layers
    if (config.q_lora_rank is None) != (layers in (26, 27) or (layers, config.vocab_size) == (48, 128256)):
        yield f"{config.num_hidden_layers} layers with q_lora_rank {config.q_lora_rank}"
    rope = rope_of(config)
    if rope.get("rope_type") == "linear":
        yield "rotary embeddings of type linear in latent attention"
    mscale, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    if rope.get("rope_type") == "yarn" and not (mscale and mscale == of_all):
        yield f"yarn with mscale {mscale} and mscale_all_dim {of_all}, which must be equal"


def all_sparse(config: Any) -> dict[str, Value]:
    return {"leading_dense_block_count": 0}


def shared_experts(config: Any) -> int:
    """How many experts' size the shared one has."""
    named = (getattr(config, name, None) for name in ("n_shared_experts", "num_shared_experts"))
    return next((int(count) for count in named if count is not None), 0)


def shared_reasons(config: Any) -> Iterator[str]:
    if not shared_experts(config):
        yield "layers without a shared expert"
    yield from dense_reasons(config)


def own_keys(config: Any) -> Iterator[str]:
    if config.num_key_value_heads != config.num_attention_heads:
        yield "heads that share keys and values"


def ernie(config: Any) -> dict[str, Value]:
    return {
        "interleave_moe_layer_step": config.moe_layer_interval,
        "leading_dense_block_count": config.moe_layer_start_index,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.moe_num_shared_experts,
        "expert_shared_feed_forward_length": config.moe_intermediate_size * config.moe_num_shared_experts,
    }


def ernie_reasons(config: Any) -> Iterator[str]:
    if config.moe_layer_interval != 1 or config.moe_layer_end_index != config.num_hidden_layers - 1:
        yield "dense layers among those with experts"
    if config.use_bias:
        yield "linears with biases (use_bias)"
    if config.moe_norm_min > config.num_experts_per_tok / config.num_experts:
        yield f"routing weights divided by no less than {config.moe_norm_min} (moe_norm_min)"


def is_near(config: Any) -> list[bool]:
    """Of every layer whether it has a window."""
    return [kind == "sliding_attention" for kind in config.layer_types]


def windows(config: Any) -> dict[str, Value]:
    if "sliding_attention" not in config.layer_types:
        return {}
    return {
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": is_near(config),
    }


def gpt_oss(config: Any) -> dict[str, Value]:
    return heads(config) | windows(config) | {"expert_feed_forward_length": config.intermediate_size}


def gpt_oss_reasons(config: Any) -> Iterator[str]:
    if (config.swiglu_alpha, config.swiglu_limit) != (1.702, 7.0):
        yield f"experts with swiglu_alpha {config.swiglu_alpha} and swiglu_limit {config.swiglu_limit}"
    yield from window_reasons(config)


def minimax(config: Any) -> dict[str, Value]:
    return {
        "expert_feed_forward_length": config.intermediate_size,
        "expert_gating_func": SIGMOID,
    }


def hunyuan(config: Any) -> dict[str, Value]:
    return {
        "expert_used_count": _one_of(config.moe_topk),
        "expert_count": _one_of(config.num_experts),
        "expert_feed_forward_length": config.intermediate_size,
        "expert_shared_feed_forward_length": config.intermediate_size,
    }


def _one_of(values: Any) -> int:
    return int(values if isinstance(values, int) else values[0])


def hunyuan_reasons(config: Any) -> Iterator[str]:
    for name in ("moe_topk", "num_experts"):
        values = getattr(config, name)
        if not isinstance(values, int) and len(set(values)) != 1:
            yield f"other {name} in other layers"


def recurrent(config: Any) -> dict[str, Value]:
    """Of Qwen's gated delta nets."""
    return {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
        "full_attention_interval": _interval(config),
    }


def _interval(config: Any) -> int:
    """Every how many layers the attention is full: as of the first such."""
    kinds = config.layer_types
    return kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1


def recurrent_reasons(config: Any) -> Iterator[str]:
    every = _interval(config)
    wanted = ["linear_attention" if (at + 1) % every else "full_attention" for at in range(config.num_hidden_layers)]
    if list(config.layer_types) != wanted:
        yield f"full attention in other layers than every {every}th (layer_types)"
    if config.linear_key_head_dim != config.linear_value_head_dim:
        yield f"linear attention with keys of {config.linear_key_head_dim}, values of {config.linear_value_head_dim}"
    if config.linear_num_value_heads % config.linear_num_key_heads:
        yield "linear attention with heads of values that are no multiple of those of keys"
    if config.rms_norm_eps != 1e-6:
        yield f"linear attention beside norms with rms_norm_eps {config.rms_norm_eps}, not 1e-6"


def _sections(config: Any) -> list[int]:
    unsaid = (24, 20, 20) if config.model_type == "qwen3_vl_moe_text" else (11, 11, 10)
    return [*(rope_of(config).get("mrope_section") or unsaid)]


def sections(config: Any) -> dict[str, Value]:
    """Parts of a head for time, height and width, which are one for a text."""
    parts = _sections(config)
    return {"rope.dimension_sections": [*parts, 0]}


def _unturned(config: Any) -> dict[int, float]:
    """{pair of a head that llama.cpp does not turn: its angle at the last position of the context, in radians}."""
    parts = _sections(config)
    pairs = int(heads(config)["rope.dimension_count"]) // 2  # type: ignore[arg-type]
    still = [at for at in range(pairs) if at % sum(parts) >= 3 * parts[at % sum(parts) % 3]]
    base = float(rope_of(config).get("rope_theta", 10000.0))
    return {at: config.max_position_embeddings * base ** (-at / pairs) for at in still}


def sections_reasons(config: Any) -> Iterator[str]:
    if any(angle > LITTLE for angle in _unturned(config).values()):
        yield f"rotary embeddings with mrope_section {_sections(config)}"


def sections_remarks(config: Any) -> Iterator[str]:
    still = _unturned(config)
    if still:
        yield (
            f"llama.cpp does not turn {len(still)} of the slowest pairs of a head (mrope_section {_sections(config)}): "
            f"by {max(still.values()):.1g} rad at the last position of the context, by less before it"
        )


def deepstack(whole: Any) -> dict[str, Value]:
    """How many of its layers are given something of an image, too."""
    return {"n_deepstack_layers": len(whole.vision_config.deepstack_visual_indexes)}


def lfm2(config: Any) -> dict[str, Value]:
    shared = config.num_key_value_heads
    return {
        "attention.head_count_kv": [shared if kind == "full_attention" else 0 for kind in config.layer_types],
        "shortconv.l_cache": config.conv_L_cache,
        "leading_dense_block_count": config.num_dense_layers,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_gating_func": SIGMOID,
    }


def lfm2_reasons(config: Any) -> Iterator[str]:
    yield from whole_heads(config)
    if config.conv_bias:
        yield "convolutions with biases (conv_bias)"
    if not config.use_expert_bias:
        yield "experts that are chosen without biases (use_expert_bias)"
    if config.routed_scaling_factor != 1:
        yield f"routing weights times {config.routed_scaling_factor} (routed_scaling_factor)"


def exaone(config: Any) -> dict[str, Value]:
    return {"expert_shared_feed_forward_length": config.moe_intermediate_size * config.num_shared_experts}


def window_reasons(config: Any) -> Iterator[str]:
    if not config.sliding_window or "sliding_attention" not in config.layer_types:
        yield "attention without a window"


def afmoe(config: Any) -> dict[str, Value]:
    return {
        "leading_dense_block_count": config.num_dense_layers,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.num_shared_experts,
        "expert_weights_scale": float(config.route_scale),
        "expert_weights_norm": True,
        "expert_gating_func": SIGMOID,
    }


def afmoe_reasons(config: Any) -> Iterator[str]:
    yield from window_reasons(config)
    if not config.mup_enabled:
        yield "embeddings that are not scaled (mup_enabled: false)"
    if any((kind == "sliding_attention") != bool((at + 1) % 4) for at, kind in enumerate(config.layer_types)):
        yield "windows in other layers than all but every fourth (layer_types)"


def softmax(config: Any) -> dict[str, Value]:
    """Of deepseek_v2's experts."""
    return {
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": False,
        "expert_gating_func": SOFTMAX,
    }


def mistral4(config: Any) -> dict[str, Value]:
    rope = rope_of(config)
    return {
        "expert_gating_func": SOFTMAX,
        "attention.temperature_scale": float(rope.get("llama_4_scaling_beta") or 0),
        "attention.temperature_length": int(rope.get("original_max_position_embeddings") or 0),
    }


def softmax_reasons(config: Any) -> Iterator[str]:
    if config.topk_method != "greedy":
        yield f"experts chosen by topk_method {config.topk_method}"
    if config.mlp_bias:
        yield "experts with biases (mlp_bias)"


def hy_v3(config: Any) -> dict[str, Value]:
    return {
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.moe_intermediate_size * config.num_shared_experts,
        "expert_weights_scale": float(config.router_scaling_factor),
        "expert_weights_norm": True,
        "expert_gating_func": SIGMOID,
    }


def hy_v3_reasons(config: Any) -> Iterator[str]:
    if not config.num_shared_experts:
        yield "layers without a shared expert"
    if config.mlp_bias:
        yield "linears with biases (mlp_bias)"


def near_rope(config: Any) -> Mapping[str, Any]:
    """Of layers with windows; none where there are no such layers."""
    rope: Mapping[str, Any] = config.rope_parameters.get("sliding_attention") or {}
    return rope if "sliding_attention" in config.layer_types else {}


def near_reasons(config: Any) -> Iterator[str]:
    if near_rope(config).get("rope_type", "default") != "default":
        yield "scaled rotary embeddings within windows"
    if "sliding_attention" in config.layer_types and not config.sliding_window:
        yield "windows of no size"


def mellum_reasons(config: Any) -> Iterator[str]:
    if "dense" in config.mlp_layer_types:
        yield "dense layers among those with experts"
    far = rope_of(config)["rope_theta"]
    if near_rope(config).get("rope_theta", far) != far:
        yield "rotary embeddings with another rope_theta within windows"


def laguna(config: Any) -> dict[str, Value]:
    near = near_rope(config)
    values: dict[str, Value] = {
        "attention.head_count": list(config.num_attention_heads_per_layer),
        "leading_dense_block_count": dense_layers(config),
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": 1,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        "expert_weights_scale": float(config.moe_routed_scaling_factor),
        "expert_weights_norm": True,
        "expert_gating_func": SIGMOID,
    }
    if near:
        values["rope.freq_base_swa"] = float(near["rope_theta"])
        values["rope.dimension_count_swa"] = int(head_size(config) * near.get("partial_rotary_factor", 1))
    return values


def laguna_reasons(config: Any) -> Iterator[str]:
    yield from dense_reasons(config)
    near, far = (rope.get("partial_rotary_factor", 1) for rope in (near_rope(config), rope_of(config)))
    if near_rope(config) and near != far and config.layer_types[0] == "sliding_attention":
        yield "a window in the first layer, where rotary embeddings are of another part of a head than elsewhere"
    if config.moe_router_logit_softcapping:
        yield "routers' logits with a soft cap (moe_router_logit_softcapping)"
