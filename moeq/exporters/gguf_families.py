"""Families that llama.cpp knows: what it calls their tensors, how it turns some of them, what it wants to know.

It computes a family as its own code says, whatever config.json says beside it: what that code does not do is refused.
Letters: H attention heads, D their size, R the latent size of deepseek's keys and values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moeq.artifacts.targets import ANY_GRID
from moeq.errors import FormatError
from moeq.exporters.gguf import STACKS
from moeq.models.experts import ExpertLayer

Value = int | float | bool | str | list[str] | list[int] | list[float]

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}  # fmt: skip
HEAD, TABLE = "output.weight", "token_embd.weight"
CORRECTION = "mlp.gate.e_score_correction_bias"
IN_FLOAT32 = ("ffn_gate_inp", "ffn_gate_inp_shexp", "exp_probs_b")  # beside all vectors
_KEY = re.compile(r"(?:model\.layers\.(?P<block>\d+)\.)?(?P<module>.+)\.(?P<leaf>weight|bias)")
_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One tensor of a file, made of one tensor of the checkpoint.

    rows: the order of its rows, where it is another; split: which part of deepseek's kv_b_proj it is.
    """

    name: str
    shape: tuple[int, ...]
    rows: Tensor | None = None
    split: str = ""

    @property
    def as_it_is(self) -> bool:
        """Whether it has the bytes of the checkpoint's tensor, but for its type."""
        return self.rows is None and not self.split

    @property
    def in_float32(self) -> bool:
        """Whether llama.cpp wants it in float32."""
        return len(self.shape) == 1 or self.name.split(".")[-2] in IN_FLOAT32


@dataclass(frozen=True, kw_only=True)
class Family:
    """arch: as GGUF calls it; turned: whether q_proj and k_proj are kept with a head's two halves interleaved;
    own_head: whether a head of tied embeddings is written too; norm: what norm_topk_prob must be; more: what it wants
    to know beside the common; alike: whether transformers loads its GGUF files right."""

    arch: str
    more: Callable[[Any], dict[str, Value]]
    turned: bool = False
    own_head: bool = False
    norm: bool | None = None
    alike: bool = False


def _nothing(config: Any) -> dict[str, Value]:
    return {}


def _qwen(config: Any) -> dict[str, Value]:
    lengths: dict[str, Value] = {"expert_feed_forward_length": config.moe_intermediate_size}
    if config.model_type == "qwen2_moe":
        lengths["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    return lengths


def _heads(config: Any) -> dict[str, Value]:
    size = _head_size(config)
    return {"attention.key_length": size, "attention.value_length": size, "rope.dimension_count": size}


def _deepseek(config: Any) -> dict[str, Value]:
    rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
    values: dict[str, Value] = {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": config.qk_nope_head_dim + rope,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": rope,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": bool(config.norm_topk_prob),
        "expert_gating_func": 2,  # sigmoid
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
    }
    if config.q_lora_rank is not None:
        values["attention.q_lora_rank"] = config.q_lora_rank
    scaled = _rope(config)
    if scaled.get("rope_type") == "yarn" and scaled.get("mscale_all_dim"):
        values["rope.scaling.yarn_log_multiplier"] = 0.1 * float(scaled["mscale_all_dim"])
    return values


FAMILIES = {
    "mixtral": Family(arch="llama", more=_heads, turned=True),
    "qwen2_moe": Family(arch="qwen2moe", more=_qwen, own_head=True, norm=False, alike=True),
    "qwen3_moe": Family(arch="qwen3moe", more=lambda config: _heads(config) | _qwen(config), norm=True, alike=True),
    "olmoe": Family(arch="olmoe", more=_nothing, own_head=True, norm=False),
    "deepseek_v3": Family(arch="deepseek2", more=_deepseek),
}


def family_of(config: Any) -> Family:
    """The family of a transformers configuration; FormatError for another, or where llama.cpp computes it otherwise."""
    family = FAMILIES.get(config.model_type)
    where = f"for llama.cpp: model_type {config.model_type}"
    if family is None:
        known = f"it is written for {', '.join(FAMILIES)}; {ANY_GRID}"
        raise FormatError("moeq knows no names of its tensors in GGUF", where=where, do=known)
    for reason in _reasons(config, family):
        raise FormatError(f"llama.cpp does not compute {reason}", where=where, do=ANY_GRID)
    return family


def _reasons(config: Any, family: Family) -> Iterator[str]:
    """What of a configuration llama.cpp's code for the family does not do."""
    window = getattr(config, "sliding_window", None)
    used = window if getattr(config, "use_sliding_window", True) else None
    if used and used < config.max_position_embeddings:
        yield f"its attention within a window of {used} tokens"
    if config.hidden_act not in ("silu", "swish"):
        yield f"its activation {config.hidden_act}"
    if family.norm is not None and bool(config.norm_topk_prob) != family.norm:
        yield f"routing weights with norm_topk_prob: {str(not family.norm).lower()}"
    if getattr(config, "mlp_only_layers", None) or getattr(config, "decoder_sparse_step", 1) != 1:
        yield "dense layers among those with experts"
    if getattr(config, "clip_qkv", None) is not None:
        yield "clipped queries, keys and values (clip_qkv)"
    if family.arch in ("qwen2moe", "olmoe") and _head_size(config) * config.num_attention_heads != config.hidden_size:
        yield f"heads of {_head_size(config)} that do not add up to the hidden size"
    if family.arch == "olmoe" and config.num_key_value_heads != config.num_attention_heads:
        yield "heads that share keys and values"
    if family.arch in ("qwen3moe", "olmoe", "deepseek2") and getattr(config, "attention_bias", False):
        yield "attention with biases (attention_bias)"
    if family.arch == "deepseek2":
        yield from _deepseek_reasons(config)
    yield from _rope_reasons(config)


def _deepseek_reasons(config: Any) -> Iterator[str]:
    if not config.rope_interleave:
        yield "rotary embeddings of halves (rope_interleave: false)"
    if not config.n_shared_experts:
        yield "layers without a shared expert"
    if (config.q_lora_rank is None) != (config.num_hidden_layers in (26, 27)):
        yield f"{config.num_hidden_layers} layers with q_lora_rank {config.q_lora_rank}"
    rope = _rope(config)
    if rope.get("rope_type") == "linear":
        yield "rotary embeddings of type linear in latent attention"
    mscale, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    if rope.get("rope_type") == "yarn" and not (mscale and mscale == of_all):
        yield f"yarn with mscale {mscale} and mscale_all_dim {of_all}, which must be equal"


def _rope_reasons(config: Any) -> Iterator[str]:
    rope = _rope(config)
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "linear", "yarn"):
        yield f"rotary embeddings of type {kind} as moeq would write them"
    if kind == "yarn" and (rope.get("attention_factor") is not None or rope.get("truncate") is False):
        yield "yarn with attention_factor or truncate: false as moeq would write them"
    if kind == "yarn" and ((rope.get("beta_fast") or 32) != 32 or (rope.get("beta_slow") or 1) != 1):
        yield "yarn with another beta_fast than 32, or beta_slow than 1: it does not take them from the file"
    if kind == "yarn" and config.model_type != "deepseek_v3" and rope.get("mscale") and rope.get("mscale_all_dim"):
        yield "yarn with mscale and mscale_all_dim"
    if rope.get("partial_rotary_factor", 1) != 1:
        yield "rotary embeddings of a part of a head"


def _rope(config: Any) -> Mapping[str, Any]:
    parameters: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    return parameters


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def parameters(config: Any, family: Family) -> dict[str, Value]:
    """What llama.cpp wants to know of a model, {key without the architecture: value}."""
    rope = _rope(config)
    experts = next(getattr(config, name) for name in ("num_local_experts", "num_experts") if hasattr(config, name))
    values: dict[str, Value] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
        "expert_count": experts,
        "expert_used_count": config.num_experts_per_tok,
    }
    if rope.get("rope_type") in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope.get("rope_type") == "yarn":
        values |= {
            "rope.scaling.original_context_length": int(
                rope.get("original_max_position_embeddings") or config.max_position_embeddings
            ),
            "rope.scaling.yarn_beta_fast": float(rope.get("beta_fast") or 32),
            "rope.scaling.yarn_beta_slow": float(rope.get("beta_slow") or 1),
        }
    return values | family.more(config)


def block_of(layer: ExpertLayer) -> int:
    """The number of the decoder layer that holds a layer's experts."""
    numbered = _LAYER.search(layer.name)
    if numbered is None:
        raise FormatError("experts are in no numbered layer", where=f"for llama.cpp: {layer.name}")
    return int(numbered[1])


def stack_name(layer: ExpertLayer, projection: str) -> str:
    """What GGUF calls one matrix of all of a layer's experts."""
    return f"blk.{block_of(layer)}.{STACKS[projection]}.weight"


def stack_shapes(layers: Iterable[ExpertLayer]) -> dict[str, tuple[int, ...]]:
    """{name: shape} of the stacks of layers' experts."""
    return {
        stack_name(layer, projection): (layer.num_experts, *layer.shape(projection))
        for layer in layers
        for projection in layer.projections
    }


def is_beyond(config: Any, key: str) -> bool:
    """Whether a tensor is of a layer after the last: of those that predict further tokens, which no loader runs."""
    parts = _KEY.fullmatch(key.replace(CORRECTION, "mlp.gate.bias"))
    return parts is not None and parts["block"] is not None and int(parts["block"]) >= config.num_hidden_layers


def pieces(config: Any, family: Family, key: str, shape: tuple[int, ...], *, tied: bool) -> list[Piece]:
    """What a file holds of a tensor that is not of a routed expert; FormatError where its name is not known.

    tied: whether the head is the embeddings, which is not so where a checkpoint has both with other values.
    """
    if key.endswith(f".{CORRECTION}"):
        return [Piece(name=f"blk.{key.split('.')[2]}.exp_probs_b.bias", shape=shape)]
    parts = _KEY.fullmatch(key)
    stem = None if parts is None else NAMES.get(parts["module"])
    if parts is None or stem is None or (parts["block"] is None) != (parts["module"] in list(NAMES)[:3]):
        do = "write it for another runtime"
        raise FormatError("moeq knows no name for it in GGUF", where=f"for llama.cpp: {key}", do=do)
    start = "" if parts["block"] is None else f"blk.{parts['block']}."
    name = f"{start}{stem}.{parts['leaf']}"
    if stem == "attn_kv_b":
        heads, rank = config.num_attention_heads, config.kv_lora_rank
        return [
            Piece(name=f"{start}attn_k_b.weight", shape=(heads, rank, config.qk_nope_head_dim), split="k"),
            Piece(name=f"{start}attn_v_b.weight", shape=(heads, config.v_head_dim, rank), split="v"),
        ]
    if stem == "ffn_gate_inp_shexp":
        shape = shape[-1:]
    rows = None
    if family.turned and stem in ("attn_q", "attn_k"):
        heads = config.num_attention_heads if stem == "attn_q" else config.num_key_value_heads
        rows = torch.arange(shape[0]).view(heads, 2, -1).mT.reshape(-1)
    if stem == "output" and tied:
        return []
    doubled = stem == "token_embd" and tied and family.own_head
    head = [Piece(name=HEAD, shape=shape)] if doubled else []
    return [Piece(name=name, shape=shape, rows=rows), *head]


def made(config: Any, piece: Piece, tensor: Tensor) -> Tensor:
    """A piece of a tensor of the checkpoint."""
    if piece.split:
        nope = config.qk_nope_head_dim
        heads = tensor.view(config.num_attention_heads, nope + config.v_head_dim, -1)
        return heads[:, :nope].mT if piece.split == "k" else heads[:, nope:]
    return (tensor if piece.rows is None else tensor[piece.rows]).reshape(piece.shape)


def restored(first: Piece, parts: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    """The tensor of the checkpoint that pieces were made of; first: of them."""
    if first.split:
        return torch.cat([parts[0].mT, parts[1]], 1).reshape(shape)
    if first.rows is None:
        return parts[0].reshape(shape)
    whole = torch.empty_like(parts[0])
    whole[first.rows] = parts[0]
    return whole.reshape(shape)
