"""What a model keeps of a text, layer by layer: keys and values, compressed ones, those of a window, or a state.

Read from the configuration as transformers' caches and serving runtimes keep it: multi-head latent attention
(DeepSeek-V2, 2405.04434, section 2.1) one latent vector and one rotary key a token; layers with a sliding window or
chunks no more tokens than that; linear attention and state-space layers a state of one size however long the text is.
A token attends to what is kept, in chunks to those of its own alone, and of sparse attention to those that an indexer
selects, by keys of its own of all tokens. What waits to be compressed (DeepSeek-V4) and what short convolutions look
back at, where there is no state beside it, is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moeq.models.visits import LOOP, times

LAYERS = ("num_hidden_layers", "n_layers", "num_layers", "n_layer")
KINDS = ("layer_types", "layers_block_type")
KEYS = (
    *LAYERS, *KINDS, "kv_lora_rank", "qk_rope_head_dim", "sliding_window", "use_sliding_window", "attention_chunk_size",
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim", "linear_num_heads", "linear_head_dim",
    "mamba_n_heads", "mamba_num_heads", "mamba_d_head", "mamba_head_dim", "mamba_d_state",
    "ssm_state_size", "mamba_d_conv", "conv_kernel", "mamba_expand", "mamba_n_groups", "n_groups", "is_encoder_decoder",
    "v_head_dim", "sliding_window_size", "swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim",
    "num_attention_heads_per_layer", "kv_sharing_modes", "conv_kernel_size", "compress_rates", "index_topk",
    "index_head_dim", "index_n_heads", "indexer_types", "index_kpool", "index_topk_blocks", "index_block_size",
    "indexer_budget", "indexer_head_dim", "indexer_n_heads", "indexer_compress_ratio", *LOOP,
)  # fmt: skip
PER_LAYER = "per_layer_config"  # {layer: what is another there}
INTERVALS = (  # keys whose families say by rules of their own which layers are of which kind
    "full_attention_interval", "attention_chunk_size", "attn_layer_period", "mamba_d_state", "ssm_state_size",
    "linear_num_value_heads", "hybrid_override_pattern", "zero_expert_num", "sliding_window_size", "local_layer_ids",
)  # fmt: skip
OWN_RULES = (  # keys whose families make sizes of some layers of them, whether kinds are stated or not
    "index_topk", "index_topk_blocks", "sparse_attention_config", "indexer_budget", "compress_rates", "compress_ratios",
    "global_head_dim", "num_global_key_value_heads", "num_kv_shared_layers", "attention_other_setting",
    "loop_num_passes", "loop_config",
)  # fmt: skip
NOTHING = {"moe", "mlp", "dense", "conv", "dummy"}  # kinds of layers that keep nothing, or next to nothing
CHUNKED, SLIDING = "chunked_attention", "sliding_attention"
COMPRESSED = {"compressed_sparse_attention", "heavily_compressed_attention"}
INDEXED = {
    "indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention", "compressed_sparse_attention",
    "minimax_m3_sparse",
}  # fmt: skip
WINDOWS = {
    CHUNKED: ("attention_chunk_size",),
    **dict.fromkeys((SLIDING, "hybrid_sliding", *COMPRESSED), ("sliding_window", "sliding_window_size")),
}
STATES = {"linear_attention", "mamba", "mamba2", "recurrent"}
STATE_BYTES = 4  # of an element of a state, which runtimes keep in float32
ELEMENT_BYTES = 2  # of keys and values


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Layers of one kind: what each keeps of a token, of no more tokens than the window (None: of all), and of a text.

    token_bytes, state_bytes: FP16 keys and values, float32 states. token_macs: multiply-adds of a new token with each
    one that it attends to. chunked: a text is cut into pieces as long as the window. selected: of what is kept a token
    attends to no more than so many. parts: among how many GPUs they can be divided, beyond which they are there several
    times; None: as many as there are heads of keys and values. beside: kept by the layers of another kind, beside what
    that says of them. shared: another layer's, which keeps them.
    """

    layers: int
    token_bytes: float
    token_macs: float
    window: int | None = None
    state_bytes: float = 0.0
    parts: int | None = None
    chunked: bool = False
    selected: int | None = None
    beside: bool = False
    shared: bool = False

    def tokens(self, context: ArrayLike) -> NDArray[np.float64]:
        """Tokens that are kept of so many. Shape: that of `context`."""
        kept = np.asarray(context, dtype=np.float64)
        return kept if self.window is None else np.minimum(kept, self.window)

    def tokens_seen(self, context: ArrayLike) -> NDArray[np.float64]:
        """Tokens that one after so many others attends to. Shape: that of `context`."""
        if not self.chunked or self.window is None:
            return self._selected(self.tokens(context))
        return np.mod(np.asarray(context, dtype=np.float64), self.window)

    def tokens_before(self, prompt: ArrayLike) -> NDArray[np.float64]:
        """Tokens that one of a prompt of so many attends to, on average over the prompt. Shape: that of `prompt`."""
        whole = np.asarray(prompt, dtype=np.float64)
        if self.chunked and self.window is not None:
            last = self.tokens_seen(whole)
            return ((whole - last) * self.window + last**2) / (2 * whole)
        seen = self._selected(self.tokens(whole))  # the first so many see all before them, the others so many each
        return seen - seen**2 / (2 * whole)

    def _selected(self, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        return tokens if self.selected is None else np.minimum(tokens, self.selected)


def usual(layers: int, heads: int, kv_heads: int, head_dim: int) -> tuple[Attention, ...]:
    """Keys and values of grouped queries in every layer."""
    token = 2 * ELEMENT_BYTES * kv_heads * head_dim
    return (Attention(layers=layers, token_bytes=token, token_macs=2 * heads * head_dim),)


def says_all(config: Mapping[str, Any]) -> bool:
    """Whether config.json tells the kinds and sizes of its layers by itself, without the family's own rules."""
    if any(config.get(key) for key in OWN_RULES):
        return False
    if any(config.get(key) for key in KINDS):
        return True
    return not any(config.get(key) for key in (*INTERVALS, "sliding_window"))


def attention_of(config: Mapping[str, Any], heads: int, kv_heads: int, head_dim: int) -> tuple[Attention, ...] | None:
    """The kinds of a configuration's layers, dense ones too; None where it does not say how many there are, and of
    encoder-decoders.

    A kind of which nothing is known counts as one that keeps keys and values of the whole text; a layer in a loop keeps
    them of every time that a token goes through it.
    """
    kinds = next((config[key] for key in KINDS if config.get(key)), None)
    count = _number(config, *LAYERS) if kinds is None else len(kinds)
    if not count or config.get("is_encoder_decoder"):
        return None
    if kinds is None:
        windowed = config.get("use_sliding_window") is not False and _number(config, "sliding_window")
        kinds = [SLIDING if windowed else "full_attention"] * count
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    own = {int(layer): values for layer, values in (config.get(PER_LAYER) or {}).items()}
    found: Counter[Attention] = Counter()
    for layer, kind in enumerate(map(str, kinds)):
        each = _of_layer(kind, layer, {**config, **sizes, **own.get(layer, {})}, kv_heads)
        found.update(each * times(config, layer))
    return tuple(replace(kind, layers=layers) for kind, layers in found.items())


def _of_layer(kind: str, layer: int, config: Mapping[str, Any], usual_heads: int) -> list[Attention]:
    """What one layer keeps, and what beside that; usual_heads: of keys and values, where the layer says none."""
    if kind in NOTHING:
        return [Attention(layers=1, token_bytes=0.0, token_macs=0.0)]
    if kind in STATES:
        elements, convolved, heads = _state(config)
        state = STATE_BYTES * elements + ELEMENT_BYTES * convolved
        return [Attention(layers=1, token_bytes=0.0, token_macs=0.0, state_bytes=state, parts=heads or None)]
    sharing = config.get("kv_sharing_modes")
    shares = str(sharing[layer]) if sharing else ""
    rate = (config.get("compress_rates") or {}).get(kind, 1)
    blocks = _number(config, "index_topk_blocks") * _number(config, "index_block_size")
    selected = (rate * _number(config, "index_topk", "indexer_budget") or blocks) if kind in INDEXED else 0
    whole = replace(_keys(kind, layer, config, usual_heads), shared=shares.startswith("reuse"))
    window = _number(config, *WINDOWS.get(kind, ()))
    near = replace(whole, window=window or None, chunked=kind == CHUNKED and window > 0)
    if kind in COMPRESSED:  # the last tokens, and one of so many for all
        kept = [near, replace(_every(rate, whole), beside=True, selected=selected or None)]
    else:
        kept = [replace(near, selected=selected or None)]
    types = config.get("indexer_types")
    if kind not in INDEXED or shares == "reuse" or (types and types[layer] == "shared"):
        return kept  # tokens that no layer selects, or another one does
    return kept + [_every(rate, one) for one in _indexer(config)]


def _keys(kind: str, layer: int, config: Mapping[str, Any], usual_heads: int) -> Attention:
    """Keys and values of a layer, of the whole text."""
    near = "swa_" if kind in (SLIDING, "hybrid_sliding") else ""
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    heads, kv_heads, width = (_number(config, near + name, name) for name in names)
    if near and config.get("model_type") == "mimo_v2_flash" and not config.get("swa_num_key_value_heads"):
        kv_heads *= 2  # by the family's code
    if isinstance(each := config.get("num_attention_heads_per_layer"), list):
        heads = each[layer]
    if latent := _number(config, "kv_lora_rank"):
        rotary = _number(config, "qk_rope_head_dim")
        macs = heads * (2 * latent + rotary)
        return Attention(layers=1, token_bytes=ELEMENT_BYTES * (latent + rotary), token_macs=macs, parts=1)
    if config.get("compress_rates"):  # DeepSeek-V4: one vector is both key and value
        return Attention(layers=1, token_bytes=ELEMENT_BYTES * width, token_macs=2 * heads * width, parts=1)
    both = width + (_number(config, "v_head_dim") or width)
    kernel = _number(config, "conv_kernel_size") if kind.startswith("hybrid") else 0
    convolved = kernel * (kv_heads * both + 2 * _number(config, "hidden_size"))  # keys, values, and what layers add
    return Attention(
        layers=1,
        token_bytes=ELEMENT_BYTES * kv_heads * both,
        token_macs=heads * both,
        state_bytes=ELEMENT_BYTES * convolved,
        parts=None if kv_heads == usual_heads else kv_heads,
    )


def _indexer(config: Mapping[str, Any]) -> list[Attention]:
    """The keys of one head by which queries of several select tokens, alone or in pools."""
    width, pool = _number(config, "index_head_dim", "indexer_head_dim"), _number(config, "index_kpool")
    elements = 2 * width + 1 if pool else width  # a pool is made of keys, of what weighs them, and of which there are
    macs = _number(config, "index_n_heads", "indexer_n_heads") * width
    macs_each = macs / (pool or _number(config, "indexer_compress_ratio") or 1)
    token = ELEMENT_BYTES * elements
    return [Attention(layers=1, token_bytes=token, token_macs=macs_each, parts=1, beside=True)] if width else []


def _every(tokens: int, kept: Attention) -> Attention:
    """One of so many tokens."""
    return replace(kept, token_bytes=kept.token_bytes / tokens, token_macs=kept.token_macs / tokens)


def _state(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Elements of the state of one layer, of what its convolution looks back at, and heads; zeros where nothing tells.

    A layer of which nothing but heads is stated is lightning attention (MiniMax): keys by values, nothing convolved.
    """
    if heads := _number(config, "linear_num_value_heads"):
        keys, values = _number(config, "linear_key_head_dim"), _number(config, "linear_value_head_dim")
        channels = 2 * _number(config, "linear_num_key_heads") * keys + heads * values
        return heads * keys * values, channels * _number(config, "linear_conv_kernel_dim"), heads
    if heads := _number(config, "linear_num_heads"):  # Kimi Delta Attention: queries, keys and values of one width
        width = _number(config, "linear_head_dim")
        return heads * width**2, 3 * heads * width * _number(config, "linear_conv_kernel_dim"), heads
    heads = _number(config, "mamba_n_heads", "mamba_num_heads")
    inner = heads * _number(config, "mamba_d_head", "mamba_head_dim")
    inner = inner or _number(config, "mamba_expand") * _number(config, "hidden_size")
    if not inner:
        heads = _number(config, "num_attention_heads")
        return heads * _number(config, "head_dim") ** 2, 0, heads
    state = _number(config, "mamba_d_state", "ssm_state_size")
    channels = inner + 2 * _number(config, "mamba_n_groups", "n_groups") * state
    return inner * state, channels * _number(config, "mamba_d_conv", "conv_kernel"), heads


def _number(config: Mapping[str, Any], *keys: str) -> int:
    """The first that is stated, 0 where none is."""
    return next((value for key in keys if isinstance(value := config.get(key), int) and value > 0), 0)
