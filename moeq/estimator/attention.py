"""What a model keeps of a text, layer by layer: keys and values, compressed ones, those of a window, or a state.

Read from the configuration as transformers' caches and serving runtimes keep it: multi-head latent attention
(DeepSeek-V2, 2405.04434, section 2.1) one latent vector and one rotary key a token; layers with a sliding window or
chunks no more tokens than that; linear attention and state-space layers a state of one size however long the text is.
A token attends to what is kept, in chunks to those of its own alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

LAYERS = ("num_hidden_layers", "n_layers", "num_layers", "n_layer")
KINDS = ("layer_types", "layers_block_type")
KEYS = (
    *LAYERS, *KINDS, "kv_lora_rank", "qk_rope_head_dim", "sliding_window", "use_sliding_window", "attention_chunk_size",
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim", "linear_num_heads", "linear_head_dim",
    "mamba_n_heads", "mamba_num_heads", "mamba_d_head", "mamba_head_dim", "mamba_d_state",
    "ssm_state_size", "mamba_d_conv", "conv_kernel", "mamba_expand", "mamba_n_groups", "n_groups", "is_encoder_decoder",
)  # fmt: skip
INTERVALS = (  # keys whose families say by rules of their own which layers are of which kind
    "full_attention_interval", "attention_chunk_size", "attn_layer_period", "mamba_d_state", "ssm_state_size",
    "linear_num_value_heads", "hybrid_override_pattern", "zero_expert_num",
)  # fmt: skip
NOTHING = {"moe", "mlp", "dense", "conv"}  # kinds of layers that keep nothing, or next to nothing
CHUNKED = "chunked_attention"
WINDOWS = {"sliding_attention": "sliding_window", CHUNKED: "attention_chunk_size"}
STATES = {"linear_attention", "mamba", "mamba2", "recurrent"}
STATE_BYTES = 4  # of an element of a state, which runtimes keep in float32
STATE_HEADS = ("linear_num_value_heads", "linear_num_heads", "mamba_n_heads", "mamba_num_heads")
ELEMENT_BYTES = 2  # of keys and values


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Layers of one kind: what each keeps of a token, of no more tokens than the window (None: of all), and of a text.

    token_bytes, state_bytes: FP16 keys and values, float32 states. token_macs: multiply-adds of a new token with each
    one that it attends to. chunked: a text is cut into pieces as long as the window. parts: among how many GPUs they
    can be divided, beyond which they are there several times; None: as many as there are heads of keys and values.
    """

    layers: int
    token_bytes: float
    token_macs: float
    window: int | None = None
    state_bytes: float = 0.0
    parts: int | None = None
    chunked: bool = False

    def tokens(self, context: ArrayLike) -> NDArray[np.float64]:
        """Tokens that are kept of so many. Shape: that of `context`."""
        kept = np.asarray(context, dtype=np.float64)
        return kept if self.window is None else np.minimum(kept, self.window)

    def tokens_seen(self, context: ArrayLike) -> NDArray[np.float64]:
        """Tokens that one after so many others attends to. Shape: that of `context`."""
        if not self.chunked or self.window is None:
            return self.tokens(context)
        return np.mod(np.asarray(context, dtype=np.float64), self.window)

    def tokens_before(self, prompt: ArrayLike) -> NDArray[np.float64]:
        """Tokens that one of a prompt of so many attends to, on average over the prompt. Shape: that of `prompt`."""
        whole = np.asarray(prompt, dtype=np.float64)
        if self.chunked and self.window is not None:
            last = self.tokens_seen(whole)
            return ((whole - last) * self.window + last**2) / (2 * whole)
        kept = self.tokens(whole)  # the first so many see all before them, the others so many each
        return kept - kept**2 / (2 * whole)


def usual(layers: int, heads: int, kv_heads: int, head_dim: int) -> tuple[Attention, ...]:
    """Keys and values of grouped queries in every layer."""
    token = 2 * ELEMENT_BYTES * kv_heads * head_dim
    return (Attention(layers=layers, token_bytes=token, token_macs=2 * heads * head_dim),)


def says_all(config: Mapping[str, Any]) -> bool:
    """Whether config.json tells the kinds of its layers by itself, without the family's own rules."""
    if any(config.get(key) for key in KINDS):
        return True
    return not any(config.get(key) for key in (*INTERVALS, "sliding_window"))


def attention_of(config: Mapping[str, Any], heads: int, kv_heads: int, head_dim: int) -> tuple[Attention, ...] | None:
    """The kinds of a configuration's layers, dense ones too; None where it does not say how many there are, and of
    encoder-decoders.

    A kind of which nothing is known counts as one that keeps keys and values of the whole text.
    """
    kinds = next((config[key] for key in KINDS if config.get(key)), None)
    count = _number(config, *LAYERS) if kinds is None else len(kinds)
    if not count or config.get("is_encoder_decoder"):
        return None
    whole = usual(1, heads, kv_heads, head_dim)[0]
    latent, rotary = _number(config, "kv_lora_rank"), _number(config, "qk_rope_head_dim")
    if latent:
        macs = heads * (2 * latent + rotary)
        whole = Attention(layers=1, token_bytes=ELEMENT_BYTES * (latent + rotary), token_macs=macs, parts=1)
    if kinds is None:
        windowed = config.get("use_sliding_window") is not False and _number(config, "sliding_window")
        kinds = ["sliding_attention" if windowed else "full_attention"] * count
    return tuple(_kind(kind, layers, whole, config) for kind, layers in Counter(map(str, kinds)).items())


def _kind(kind: str, layers: int, whole: Attention, config: Mapping[str, Any]) -> Attention:
    if kind in NOTHING:
        return Attention(layers=layers, token_bytes=0.0, token_macs=0.0)
    if kind in STATES:
        elements, convolved = _state(config)
        state = STATE_BYTES * elements + ELEMENT_BYTES * convolved
        heads = _number(config, *STATE_HEADS) or None
        return Attention(layers=layers, token_bytes=0.0, token_macs=0.0, state_bytes=state, parts=heads)
    window = _number(config, WINDOWS[kind]) if kind in WINDOWS else 0
    return replace(whole, layers=layers, window=window or None, chunked=kind == CHUNKED and window > 0)


def _state(config: Mapping[str, Any]) -> tuple[int, int]:
    """Elements of the state of one layer and of what its convolution looks back at; zeros where nothing tells."""
    if heads := _number(config, "linear_num_value_heads"):
        keys, values = _number(config, "linear_key_head_dim"), _number(config, "linear_value_head_dim")
        channels = 2 * _number(config, "linear_num_key_heads") * keys + heads * values
        return heads * keys * values, channels * _number(config, "linear_conv_kernel_dim")
    if heads := _number(config, "linear_num_heads"):  # Kimi Delta Attention: queries, keys and values of one width
        width = _number(config, "linear_head_dim")
        return heads * width**2, 3 * heads * width * _number(config, "linear_conv_kernel_dim")
    inner = _number(config, "mamba_n_heads", "mamba_num_heads") * _number(config, "mamba_d_head", "mamba_head_dim")
    inner = inner or _number(config, "mamba_expand") * _number(config, "hidden_size")
    state = _number(config, "mamba_d_state", "ssm_state_size")
    channels = inner + 2 * _number(config, "mamba_n_groups", "n_groups") * state
    return inner * state, channels * _number(config, "mamba_d_conv", "conv_kernel")


def _number(config: Mapping[str, Any], *keys: str) -> int:
    """The first that is stated, 0 where none is."""
    return next((value for key in keys if isinstance(value := config.get(key), int) and value > 0), 0)
