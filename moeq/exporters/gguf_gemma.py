"""As `gguf_parameters`, of Gemma 4: heads of two sizes, windows, embeddings of every layer, experts beside an MLP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from moeq.exporters.gguf_parameters import FREQUENCIES, Value, is_near, layers, near_rope, rope_of

NEVER = 1e30  # what the frequency of a pair is divided by that is not turned
NAMES = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2", "post_feedforward_layernorm": "post_ffw_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1", "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "router.proj": "ffn_gate_inp", "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale", "layer_scalar": "layer_output_scale.weight",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm", "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm",
}  # fmt: skip


def _far(config: Any) -> Any:
    """The configuration of a layer without a window; the last always is one."""
    return layers(config)[-1]


def _shared_from(config: Any) -> int:
    """The first of the layers that take keys and values of earlier ones."""
    return int(config.num_hidden_layers - config.num_kv_shared_layers)


def gemma4(config: Any) -> dict[str, Value]:
    far = _far(config).head_dim
    near = next((layer.head_dim for layer, near in zip(layers(config), is_near(config), strict=True) if near), far)
    dense = [config.intermediate_size] * config.num_hidden_layers
    if config.use_double_wide_mlp:
        dense[_shared_from(config) :] = [2 * size for size in dense[_shared_from(config) :]]
    return {
        "feed_forward_length": dense,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input or 0,
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "attention.key_length": far,
        "attention.value_length": far,
        "attention.key_length_swa": near,
        "attention.value_length_swa": near,
        "rope.dimension_count": far,
        "rope.dimension_count_swa": near,
        "rope.freq_base_swa": float(near_rope(config).get("rope_theta", 10000.0)),
        "final_logit_softcapping": float(config.final_logit_softcapping or 0.0),  # else it takes 30
    }


def gemma4_reasons(config: Any) -> Iterator[str]:
    if config.hidden_activation != "gelu_pytorch_tanh":
        yield f"its activation {config.hidden_activation}"
    if rope_of(config).get("rope_type", "default") not in ("default", "proportional"):
        yield f"rotary embeddings of type {rope_of(config)['rope_type']} in layers without a window"
    if config.use_bidirectional_attention == "all":
        yield "attention to later tokens (use_bidirectional_attention)"
    if config.hidden_size_per_layer_input and config.vocab_size_per_layer_input != config.vocab_size:
        yield "embeddings of every layer for another number of tokens (vocab_size_per_layer_input)"
    kinds, start = is_near(config), _shared_from(config)
    if config.num_kv_shared_layers and kinds[max(start - 2, 0) : start] != [True, False]:
        yield "keys and values of other layers than the last two before those that share them (num_kv_shared_layers)"
    if len({each.head_dim for each, near in zip(layers(config), kinds, strict=True) if near}) > 1:
        yield "heads of other sizes in other layers with windows"


def frequencies(config: Any) -> Mapping[str, Tensor]:
    """{name: what the frequencies of a head's pairs are divided by} in layers without a window."""
    rope, size = rope_of(config), _far(config).head_dim
    turned = int(rope.get("partial_rotary_factor", 1.0) * size // 2)
    factors = torch.full((size // 2,), float(rope.get("factor") or 1.0))
    factors[turned:] = NEVER
    return {FREQUENCIES: factors}
