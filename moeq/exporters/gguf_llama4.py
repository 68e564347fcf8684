"""As `gguf_parameters`, of Llama 4: attention within chunks of a text, experts in every so many layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from moeq.exporters.gguf_parameters import FREQUENCIES, Value, head_size, rope_of

EVERY = 4  # layers, of which the last turns nothing and looks at the whole text
CHUNK, SCALE = 8192, 0.1  # tokens of a chunk, and by what the logarithm of their number scales such a layer's queries
WITHOUT_NORMS = 128  # experts of the model whose queries and keys are not normed
NAMES = {"feed_forward.router": "ffn_gate_inp"} | {
    f"feed_forward.{place}{name}_proj": f"ffn_{name}{end}"
    for place, end in (("", ""), ("shared_expert.", "_shexp"))
    for name in ("gate", "up", "down")
}


def llama4(config: Any) -> dict[str, Value]:
    return {
        "feed_forward_length": config.intermediate_size_mlp,
        "expert_feed_forward_length": config.intermediate_size,
        "interleave_moe_layer_step": config.interleave_moe_layer_step,
    }


def llama4_reasons(config: Any) -> Iterator[str]:
    """What llama.cpp has as constants, and asks of no file."""
    turned = [(layer + 1) % EVERY != 0 for layer in range(config.num_hidden_layers)]
    if [bool(one) for one in config.no_rope_layers] != turned:
        yield f"rotary embeddings in other layers than all but every {EVERY}th (no_rope_layers)"
    if [kind == "chunked_attention" for kind in config.layer_types] != turned:
        yield "chunks in other layers than those with rotary embeddings (layer_types)"
    if config.attention_chunk_size != CHUNK:
        yield f"chunks of {config.attention_chunk_size} tokens, which have {CHUNK} (attention_chunk_size)"
    tuned = (bool(config.attn_temperature_tuning), config.floor_scale, config.attn_scale)
    if tuned != (True, CHUNK, SCALE):
        yield "attention scaled otherwise after long texts (attn_temperature_tuning, floor_scale, attn_scale)"
    if bool(config.use_qk_norm) == (config.num_local_experts == WITHOUT_NORMS):
        yield f"queries and keys with use_qk_norm: {str(config.use_qk_norm).lower()} in one of its number of experts"
    step = config.interleave_moe_layer_step
    if sorted(config.moe_layers) != list(range(step - 1, config.num_hidden_layers, step)):
        yield f"experts in other layers than one in {step} (moe_layers)"


def frequencies(config: Any) -> Mapping[str, Tensor]:
    """{name: what the frequencies of a head's pairs are divided by}, of rotary embeddings of Llama 3."""
    rope, size = rope_of(config), head_size(config)
    if rope.get("rope_type", "default") != "llama3":
        return {}
    slow, fast, factor = (float(rope[name]) for name in ("low_freq_factor", "high_freq_factor", "factor"))
    turns = (
        rope["original_max_position_embeddings"] * rope["rope_theta"] ** (-pair / size) / (2 * math.pi)
        for pair in range(0, size, 2)
    )
    return {FREQUENCIES: torch.tensor([_divisor(count, slow, fast, factor) for count in turns])}


def _divisor(turns: float, slow: float, fast: float, factor: float) -> float:
    """Of a pair that turns so often within the context that the model was trained with first."""
    if turns > fast:
        return 1.0
    if turns < slow:
        return factor
    share = (turns - slow) / (fast - slow)
    return 1 / ((1 - share) / factor + share)
