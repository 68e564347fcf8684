"""Families that llama.cpp knows (`gguf_known`): what a file holds of their tensors, and what is refused.

It computes a family as its own code says, whatever config.json says beside it: what that code does not do is refused.
Letters: H attention heads, D their size, R the latent size of deepseek's keys and values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moeq.artifacts.targets import ANY_GRID
from moeq.errors import FormatError
from moeq.exporters.gguf import STACKS
from moeq.exporters.gguf_known import DECAY, FAMILIES, NAMES, ONE_ADDED, WHOLE, Family
from moeq.exporters.gguf_parameters import CASED, Value, layers, rope_of
from moeq.models.experts import ExpertLayer

HEAD, TABLE = "output.weight", "token_embd.weight"
FLAT = ("ffn_gate_inp_shexp", "exp_probs_b", "ssm_conv1d", "shortconv.conv")  # without sides of 1
IN_FLOAT32 = (
    "ffn_gate_inp",
    "ffn_gate_inp_shexp",
    "ssm_conv1d",
    "shortconv.conv",
    "ssm_a",
    "ssm_d",
    "ssm_norm",
)  # beside all vectors
_KEY = re.compile(r"(?:(?:model|backbone)\.layers\.(?P<block>\d+)\.)?(?P<tail>.+)")
_AROUND = re.compile(r"^blk\.\d+\.|\.(?:weight|bias)$")
SEEING = {"model.language_model.": "model.", "language_model.": ""}  # of models that see, and alone
_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One tensor of a file, made of one tensor of the checkpoint.

    rows: which of its rows, in what order, where not all as they are; columns: the order of its columns; split: which
    part of deepseek's kv_b_proj it is; change: what is written instead of its values (see gguf_known).
    """

    name: str
    shape: tuple[int, ...]
    rows: Tensor | None = None
    columns: Tensor | None = None
    split: str = ""
    change: str = ""

    @property
    def as_it_is(self) -> bool:
        """Whether it has the bytes of the checkpoint's tensor, but for its type."""
        return self.rows is None and self.columns is None and not self.split and not self.change

    @property
    def in_float32(self) -> bool:
        """Whether llama.cpp wants it in float32."""
        return len(self.shape) == 1 or _AROUND.sub("", self.name) in IN_FLOAT32


def family_of(config: Any) -> Family:
    """The family of a transformers configuration; FormatError for another, or where llama.cpp computes it otherwise."""
    family = FAMILIES.get(config.model_type)
    where = f"for llama.cpp: model_type {config.model_type}"
    if family is None:
        known = f"it is written for {', '.join(FAMILIES)}; {ANY_GRID}"
        raise FormatError("moeq knows no names of its tensors in GGUF", where=where, do=known)
    for reason in _reasons(config.get_text_config(), family):
        raise FormatError(f"llama.cpp does not compute {reason}", where=where, do=ANY_GRID)
    return family


def _reasons(config: Any, family: Family) -> Iterator[str]:
    """What of a configuration llama.cpp's code for the family does not do."""
    window = getattr(config, "sliding_window", None)
    used = window if getattr(config, "use_sliding_window", True) else None
    if not family.windows and used and used < config.max_position_embeddings:
        yield f"its attention within a window of {used} tokens"
    activation = getattr(config, "hidden_act", "silu")
    if activation not in ("silu", "swish"):
        yield f"its activation {activation}"
    if family.norm is not None and bool(config.norm_topk_prob) != family.norm:
        yield f"routing weights with norm_topk_prob: {str(not family.norm).lower()}"
    if getattr(config, "mlp_only_layers", None) or getattr(config, "decoder_sparse_step", 1) != 1:
        yield "dense layers among those with experts"
    if getattr(config, "clip_qkv", None) is not None:
        yield "clipped queries, keys and values (clip_qkv)"
    if family.attention_bias is not None and bool(getattr(config, "attention_bias", False)) != family.attention_bias:
        yield f"attention {'without' if family.attention_bias else 'with'} biases (attention_bias)"
    for reasons in family.reasons:
        yield from reasons(config)
    yield from _rope_reasons(config, family)


def _rope_reasons(config: Any, family: Family) -> Iterator[str]:
    rope = rope_of(config)
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "linear", "yarn", *family.ropes):
        yield f"rotary embeddings of type {kind} as moeq would write them"
    if kind == "yarn" and rope.get("attention_factor") is not None:
        yield "yarn with attention_factor as moeq would write it"
    if kind == "yarn" and ((rope.get("beta_fast") or 32) != 32 or (rope.get("beta_slow") or 1) != 1):
        yield "yarn with another beta_fast than 32, or beta_slow than 1: it does not take them from the file"
    if kind == "yarn" and not family.mscale and rope.get("mscale") and rope.get("mscale_all_dim"):
        yield "yarn with mscale and mscale_all_dim"
    if not family.partial and rope.get("partial_rotary_factor", 1) != 1:
        yield "rotary embeddings of a part of a head"


def remarks(config: Any, family: Family, values: Mapping[str, Value]) -> Iterator[str]:
    """What a file leaves out, and what llama.cpp computes a little otherwise, whoever wrote it; values: what it says
    of the tokenizer."""
    if sees(config):
        yield (
            "the file holds the language model; llama.cpp takes what sees from an mmproj file, which its own converter "
            "makes of the model"
        )
    text = config.get_text_config()
    yield from family.remarks(text)
    rope = rope_of(text)
    if rope.get("rope_type") == "yarn" and rope.get("truncate") is False:
        yield "llama.cpp rounds the ends of yarn's ramp, which truncate: false forbids; far positions differ a little"
    if values.get("ggml.pre") == CASED:
        yield "llama.cpp cuts words with capitals beyond A to Z, or with marks, into other tokens"


def _epsilon(config: Any) -> float:
    named = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layer_norm_eps")
    return float(next(value for name in named if (value := getattr(config, name, None)) is not None))


def parameters(whole: Any, family: Family) -> dict[str, Value]:
    """What llama.cpp wants to know of a model, {key without the architecture: value}; whole: its configuration."""
    config = whole.get_text_config()
    rope = rope_of(config)
    experts = next(getattr(config, name) for name in ("num_local_experts", "num_experts") if hasattr(config, name))
    used = next(getattr(config, name) for name in ("num_experts_per_tok", "top_k_experts") if hasattr(config, name))
    shared = [int(layer.num_key_value_heads) for layer in layers(config)]
    values: dict[str, Value] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", None) or config.moe_intermediate_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": shared.pop() if len(set(shared)) == 1 else shared,
        "attention.layer_norm_rms_epsilon": _epsilon(config),
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
        "expert_count": experts,
        "expert_used_count": used,
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
    for more in family.more:
        values |= more(config)
    return values | (family.of_whole(whole) if sees(whole) else {})


def block_of(layer: ExpertLayer) -> int:
    """The number of the decoder layer that holds a layer's experts."""
    numbered = _LAYER.search(layer.name)
    if numbered is None:
        raise FormatError("experts are in no numbered layer", where=f"for llama.cpp: {layer.name}")
    return int(numbered[1])


def stack_name(layer: ExpertLayer, projection: str) -> str:
    """What GGUF calls one matrix of all of a layer's experts."""
    return f"blk.{block_of(layer)}.{STACKS[projection]}.weight"


def bias_name(layer: ExpertLayer, projection: str) -> str:
    """What GGUF calls one bias of all of a layer's experts."""
    return f"{stack_name(layer, projection).removesuffix('weight')}bias"


def stack_shapes(layers: Iterable[ExpertLayer]) -> dict[str, tuple[int, ...]]:
    """{name: shape} of the stacks of layers' experts."""
    return {
        stack_name(layer, projection): (layer.num_experts, *layer.shape(projection))
        for layer in layers
        for projection in layer.projections
    }


def expert_shapes(layer: ExpertLayer) -> dict[str, tuple[int, ...]]:
    """{name: shape} of all that a file holds of a layer's experts: the stacks, and their biases."""
    biases = {
        bias_name(layer, projection): (layer.num_experts, layer.shape(projection)[0])
        for projection in layer.projections
    }
    return stack_shapes([layer]) | (biases if layer.biased else {})


def of_text(key: str) -> str:
    """What a tensor of the language model of one that sees is called in the language model alone."""
    return next((alone + key.removeprefix(whole) for whole, alone in SEEING.items() if key.startswith(whole)), key)


def sees(config: Any) -> bool:
    """Whether a model has more than a language model."""
    return config.get_text_config() is not config


def is_beside(config: Any, name: str) -> bool:
    """Whether a parameter, by its name in memory, is no part of the language model."""
    return sees(config) and not name.startswith((*SEEING, "lm_head."))


def is_beyond(config: Any, key: str) -> bool:
    """Whether a tensor is of a layer after the last: of those that predict further tokens, which no loader runs."""
    parts, layers = _KEY.fullmatch(of_text(key)), config.get_text_config().num_hidden_layers
    return parts is not None and parts["block"] is not None and int(parts["block"]) >= layers


def pieces(config: Any, family: Family, key: str, shape: tuple[int, ...], *, tied: bool) -> list[Piece]:
    """What a file holds of a tensor that is not of a routed expert; FormatError where its name is not known.

    tied: whether the head is the embeddings, which is not so where a checkpoint has both with other values.
    """
    stem, leaf, start = _named(family, key)
    config = config.get_text_config()
    if stem == "attn_kv_b":
        heads, rank = config.num_attention_heads, config.kv_lora_rank
        return [
            Piece(name=f"{start}attn_k_b.weight", shape=(heads, rank, config.qk_nope_head_dim), split="k"),
            Piece(name=f"{start}attn_v_b.weight", shape=(heads, config.v_head_dim, rank), split="v"),
        ]
    if stem == "output" and tied:
        return []
    shape = tuple(size for size in shape if size != 1) if stem in FLAT else shape
    shape = family.shapes(config, f"{stem}{leaf}", shape)
    change = family.changes.get(f"{stem}{leaf}", "")
    found = [
        Piece(
            name=f"{start}{name}{leaf}",
            shape=shape if rows is None else (len(rows), *shape[1:]),
            rows=rows,
            columns=columns,
            change=change,
        )
        for name, rows, columns in family.orders(config, stem, shape[0])
    ]
    if stem == "token_embd" and tied and family.own_head:
        found.append(Piece(name=HEAD, shape=shape))
    return found


def _named(family: Family, key: str) -> tuple[str, str, str]:
    """What GGUF calls a tensor: its stem, what follows that, and what comes before."""
    parts = _KEY.fullmatch(of_text(key))
    assert parts is not None, key
    start = "" if parts["block"] is None else f"blk.{parts['block']}."
    whole = family.names.get(parts["tail"]) or WHOLE.get(parts["tail"])
    if start and whole is not None:
        stem, dot, leaf = whole.partition(".")
        return stem, dot + leaf, start
    module, _, leaf = parts["tail"].rpartition(".")
    stem = family.names.get(module) or NAMES.get(module, "")
    of_all = module == "lm_head" or module.startswith(("model.", "backbone."))
    if not stem or leaf not in ("weight", "bias") or bool(start) == of_all:
        do = "write it for another runtime"
        raise FormatError("moeq knows no name for it in GGUF", where=f"for llama.cpp: {key}", do=do)
    return stem, f".{leaf}", start


def made(config: Any, piece: Piece, tensor: Tensor) -> Tensor:
    """A piece of a tensor of the checkpoint."""
    config = config.get_text_config()
    if piece.split:
        nope = config.qk_nope_head_dim
        heads = tensor.view(config.num_attention_heads, nope + config.v_head_dim, -1)
        return heads[:, :nope].mT if piece.split == "k" else heads[:, nope:]
    tensor = tensor if piece.rows is None else tensor[piece.rows]
    tensor = tensor if piece.columns is None else tensor[:, piece.columns]
    if piece.change == ONE_ADDED:
        tensor = tensor.float() + 1
    elif piece.change == DECAY:
        tensor = -tensor.float().exp()
    return tensor.reshape(piece.shape)


def restored(made_of: Sequence[Piece], parts: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    """The tensor of the checkpoint that pieces were made of."""
    if made_of[0].split:
        return torch.cat([parts[0].mT, parts[1]], 1).reshape(shape)
    if made_of[0].as_it_is:
        return parts[0].reshape(shape)
    whole = parts[0].new_empty((shape[0], parts[0].numel() // len(parts[0]) if parts[0].dim() > 1 else 1))
    for piece, part in zip(made_of, parts, strict=True):
        part = {ONE_ADDED: lambda x: x - 1, DECAY: lambda x: (-x).log()}.get(piece.change, lambda x: x)(part)
        part = part.reshape(len(part), -1)
        part = part if piece.columns is None else part[:, piece.columns.argsort()]
        whole[slice(None) if piece.rows is None else piece.rows] = part
    return whole.reshape(shape)
