"""Families that mlx-lm knows: where it keeps the stacks of their experts, and which of their settings it does not heed.

It computes a family as its own code says, whatever config.json says beside it: what that code does not do is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

EXPERTS = ".experts."
STACKS = (".switch_mlp.", ".experts.switch_glu.", EXPERTS)  # what holds a layer's stacks, by family
SWITCH, GLU, _ = STACKS
INNER = ("model.language_model.", "language_model.model.")  # of a model that sees, too: on disk, and in mlx-lm
PLAIN = ("default",)
SCALED = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class Family:
    """How mlx-lm has a family.

    taken: {setting: the value that mlx-lm takes it for, or how that follows from the configuration}, whatever
    config.json says; plain: {end of a module's name: why it stays in full precision}; stacks: what holds the stacks of
    a layer's experts; sees: whether the language model is in a module of its own; more: what it wants to find in
    config.json beside what transformers writes, of the configuration; rope: types of rotary embeddings that it
    computes; one_more: ends of the names of vectors that it adds 1 to, in the type that they are stored in.
    """

    taken: Mapping[str, Any] = field(default_factory=dict)
    plain: Mapping[str, str] = field(default_factory=dict)
    stacks: str = SWITCH
    sees: bool = False
    more: Callable[[Any], dict[str, Any]] = lambda config: {}
    rope: tuple[str, ...] = PLAIN
    one_more: tuple[str, ...] = ()

    def own(self, name: str) -> str:
        """What mlx-lm calls a module, by its name on disk."""
        if not self.sees:
            return name
        before, now = INNER
        return f"{now}{name.removeprefix(before)}" if name.startswith(before) else f"language_model.{name}"

    def unheeded(self, config: Any) -> Iterator[tuple[str, Any, Any]]:
        """(setting, its value, what mlx-lm computes as if it were) where the two differ; config: of the text."""
        for name, taken in ({"hidden_act": "silu"} | dict(self.taken)).items():
            wanted = taken(config) if callable(taken) else taken
            own = getattr(config, name, wanted)
            if own != wanted:
                yield name, own, wanted
        for rope in ropes(config):
            kind = rope.get("rope_type", "default")
            if kind not in self.rope:
                yield "rope_type", kind, self.rope[0]
            if kind == "yarn" and rope.get("attention_factor") is not None:
                yield "attention_factor", rope["attention_factor"], None

    def remarks(self, config: Any) -> Iterator[str]:
        """What it computes a little otherwise; config: of the text."""
        if any(rope.get("rope_type") == "yarn" and rope.get("truncate") is False for rope in ropes(config)):
            yield "mlx-lm rounds the ends of yarn's ramp, which truncate: false forbids; far positions differ a little"
        if self.one_more:
            yield "mlx-lm adds 1 to the weights of norms, and rounds the sums to the type that they are stored in"


def ropes(config: Any) -> list[Mapping[str, Any]]:
    """The parameters of a model's rotary embeddings: of all layers, or of each type of them."""
    whole: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    each = [one for one in whole.values() if isinstance(one, Mapping)]
    return each or [whole]


def _interval(config: Any) -> list[str]:
    every = getattr(config, "full_attention_interval", None) or 4
    return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(config.num_hidden_layers)]


def _full(config: Any) -> list[str]:
    return ["full_attention"] * config.num_hidden_layers


def _first_dense(config: Any) -> int:
    """How many layers have no experts, where these are the first."""
    return sum(kind == "dense" for kind in config.mlp_layer_types)


def _dense_first(config: Any) -> list[str]:
    dense = _first_dense(config)
    return ["dense"] * dense + ["sparse"] * (config.num_hidden_layers - dense)


def _turned(config: Any) -> float:
    return float(ropes(config)[0].get("partial_rotary_factor", 1.0))


def _minimax(config: Any) -> dict[str, Any]:
    size = config.head_dim or config.hidden_size // config.num_attention_heads
    return {"shared_intermediate_size": 0, "rotary_dim": int(size * _turned(config))}


LATENT = {"kv_b_proj": "mlx-lm divides kv_b_proj and would quantize it again"}
NUMBERED = dict.fromkeys((".w1", ".w2", ".w3"), "mlx-lm renames the weights of w1, w2 and w3, and not their scales")
ZERO_CENTERED = ("_layernorm.weight", "model.norm.weight", ".q_norm.weight", ".k_norm.weight")
QWEN2 = {"norm_topk_prob": False, "use_sliding_window": False, "mlp_only_layers": [], "decoder_sparse_step": 1}
QWEN3 = {"use_sliding_window": False, "attention_bias": False}
GPT_OSS = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "attention_bias": True, "tie_word_embeddings": False}
UNTIED = {"tie_word_embeddings": False}
GEMMA4 = Family(taken={"hidden_activation": "gelu_pytorch_tanh"}, stacks=GLU, rope=("default", "proportional"))
FAMILIES: dict[str, Family] = {
    "mixtral": Family(taken={"sliding_window": None}),
    "qwen2_moe": Family(taken=QWEN2),
    "qwen3_moe": Family(taken=QWEN3),
    "qwen3_vl_moe": Family(taken=QWEN3, sees=True, more=lambda config: {"norm_topk_prob": True}),
    "qwen3_5_moe": Family(taken={"attention_bias": False, "layer_types": _interval}, sees=True, one_more=ZERO_CENTERED),
    "olmoe": Family(taken={"clip_qkv": None}, rope=SCALED),
    "deepseek_v3": Family(taken={"rope_interleave": True}, plain=LATENT, rope=SCALED),
    "deepseek_v2": Family(taken=UNTIED | {"norm_topk_prob": False, "mlp_bias": False}, rope=("yarn",)),
    "mistral4": Family(plain=LATENT, rope=SCALED),
    "glm4_moe": Family(taken=UNTIED),
    "glm4_moe_lite": Family(
        taken=UNTIED | {"rope_interleave": True, "mlp_layer_types": _dense_first},
        plain=LATENT,
        more=lambda config: {"first_k_dense_replace": _first_dense(config)},
        rope=SCALED,
    ),
    "gpt_oss": Family(taken=GPT_OSS, stacks=EXPERTS, rope=SCALED),
    "minimax_m2": Family(more=_minimax),
    "gemma4": replace(GEMMA4, sees=True),
    "gemma4_text": GEMMA4,
    "lfm2_moe": Family(taken={"tie_word_embeddings": True}, plain=NUMBERED),
    "dots1": Family(taken={"attention_bias": False, "layer_types": _full}, stacks=EXPERTS, rope=SCALED),
    "afmoe": Family(taken={"attention_bias": False}, stacks=EXPERTS, rope=SCALED),
    "granitemoe": Family(rope=SCALED),
    "exaone_moe": Family(
        more=lambda config: {"is_moe_layer": [kind == "sparse" for kind in config.mlp_layer_types]}, rope=SCALED
    ),
    "solar_open": Family(
        more=lambda config: {"first_k_dense_replace": 0, "partial_rotary_factor": _turned(config)},
    ),
    "laguna": Family(taken={"moe_apply_router_weight_on_input": False}),
}
