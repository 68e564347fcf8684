"""What llama.cpp knows of each family: what it calls the tensors, what it wants to be told, what it does not compute.

Learned from the sources of its models; every family is loaded by it in tests/exporters/test_gguf_families.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from moeq.exporters import gguf_gemma as gemma
from moeq.exporters import gguf_hybrid as hybrid
from moeq.exporters import gguf_llama4 as llama
from moeq.exporters import gguf_orders as ordered
from moeq.exporters import gguf_parameters as of
from moeq.exporters.gguf_orders import Order
from moeq.exporters.gguf_parameters import Value

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b", "self_attn.sinks": "attn_sinks",
    "mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "linear_attn.in_proj_ba": "ssm_ba", "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}  # fmt: skip
WHOLE = {  # of parameters that are no weight or bias of a module
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
    "self_attn.sinks": "attn_sinks.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
}
AFTER_ATTENTION = {"post_attention_layernorm": "post_attention_norm"}
ONE_ADDED, DECAY = "one added", "decay"  # what is written of a tensor w: w + 1, -exp(w)


@dataclass(frozen=True, kw_only=True)
class Family:
    """arch: as GGUF calls it; names: of modules and of whole parameters that are not called as in NAMES and WHOLE;
    changes: what is written of a tensor where that is not the tensor itself, by its name in GGUF; orders(config, stem,
    rows): what a tensor is written as; shapes(config, name, shape): in which shape; own_head: whether a head of tied
    embeddings is written too.

    more: what it wants to know beside the common; of_whole: what of a model that sees, of its whole configuration;
    made(config): tensors that it wants and no checkpoint has, {name: tensor}; reasons: what of a configuration it does
    not compute, beside the common: norm: what norm_topk_prob must be; attention_bias: what it must be; partial: whether
    it turns a part of a head; windows: whether it knows of windows; mscale: of yarn's; ropes: types of rotary
    embeddings beside the common; remarks: what it computes a little otherwise. alike: whether transformers loads its
    GGUF files right.
    """

    arch: str
    more: tuple[Callable[[Any], dict[str, Value]], ...] = ()
    reasons: tuple[Callable[[Any], Iterator[str]], ...] = ()
    ropes: tuple[str, ...] = ()
    made: Callable[[Any], Mapping[str, Tensor]] = lambda config: {}
    remarks: Callable[[Any], Iterator[str]] = lambda config: iter(())
    of_whole: Callable[[Any], dict[str, Value]] = lambda whole: {}
    names: Mapping[str, str] = field(default_factory=dict)
    changes: Mapping[str, str] = field(default_factory=dict)
    orders: Callable[[Any, str, int], list[Order]] = ordered.as_they_are
    shapes: Callable[[Any, str, tuple[int, ...]], tuple[int, ...]] = ordered.in_its_shape
    own_head: bool = False
    norm: bool | None = None
    attention_bias: bool | None = None
    partial: bool = False
    windows: bool = False
    mscale: bool = False
    alike: bool = False


SHARED = {f"mlp.shared_mlp.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")}
NEXT_NAMES = AFTER_ATTENTION | {"linear_attn.in_proj_qkvz": "ssm_in"}
NEXT_NORMS = ("attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm", "output_norm")
NEXT_CHANGES = {f"{name}.weight": ONE_ADDED for name in NEXT_NORMS} | {"ssm_a": DECAY}
QWEN35_NAMES = AFTER_ATTENTION | {
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
}  # fmt: skip
HUNYUAN_NAMES = SHARED | {
    "self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm", "mlp.gate.wg": "ffn_gate_inp",
}  # fmt: skip
AFMOE_NAMES = AFTER_ATTENTION | {
    "pre_mlp_layernorm": "ffn_norm", "post_mlp_layernorm": "post_ffw_norm", "self_attn.gate_proj": "attn_gate",
    "mlp.router.gate": "ffn_gate_inp", "mlp.expert_bias": "exp_probs_b.bias",
}  # fmt: skip
LFM2_NAMES = {
    "model.embedding_norm": "token_embd_norm", "operator_norm": "attn_norm", "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output", "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm",
    "conv.conv": "shortconv.conv", "conv.in_proj": "shortconv.in_proj", "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp", "feed_forward.expert_bias": "exp_probs_b.bias",
}  # fmt: skip
GRANITE_NAMES = {
    "block_sparse_moe.router.layer": "ffn_gate_inp", "shared_mlp.input_linear": "ffn_gate_up_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
}  # fmt: skip
MAMBA = {"dt_bias": "ssm_dt.bias", "A_log": "ssm_a", "D": "ssm_d"} | {
    "in_proj": "ssm_in", "conv1d": "ssm_conv1d", "norm": "ssm_norm", "out_proj": "ssm_out",
}  # fmt: skip
HYBRID_NAMES = GRANITE_NAMES | {f"mamba.{part}": name for part, name in MAMBA.items()}
NEMOTRON_NAMES = {
    "backbone.embeddings": "token_embd", "backbone.norm_f": "output_norm", "norm": "attn_norm",
    **{f"mixer.{part}": name for part, name in MAMBA.items()},
    **{f"mixer.{part}_proj": f"attn_{part}" for part in "qkv"}, "mixer.o_proj": "attn_output",
    "mixer.gate": "ffn_gate_inp", "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.shared_experts.up_proj": "ffn_up_shexp", "mixer.shared_experts.down_proj": "ffn_down_shexp",
    "mixer.fc1_latent_proj": "ffn_latent_down", "mixer.fc2_latent_proj": "ffn_latent_up",
}  # fmt: skip
HY_V3_NAMES = SHARED | {"mlp.router.gate": "ffn_gate_inp", "mlp.expert_bias": "exp_probs_b"}
LAGUNA_NAMES = {"self_attn.g_proj": "attn_gate", "mlp.experts.e_score_correction_bias": "exp_probs_b.bias"}
GRANITE = Family(
    arch="granitemoe", more=(of.heads, hybrid.granite), reasons=(hybrid.granite_reasons,), names=GRANITE_NAMES,
    orders=ordered.granite,
)  # fmt: skip
QWEN35 = Family(
    arch="qwen35moe", more=(of.heads, of.qwen, of.recurrent, of.sections),
    reasons=(of.recurrent_reasons, of.sections_reasons), names=QWEN35_NAMES, changes=NEXT_CHANGES,
    orders=ordered.tiled, remarks=of.sections_remarks, attention_bias=False, partial=True,
)  # fmt: skip
GEMMA4 = Family(
    arch="gemma4", more=(of.windows, gemma.gemma4), reasons=(of.window_reasons, of.near_reasons, gemma.gemma4_reasons),
    names=gemma.NAMES, attention_bias=False, partial=True, windows=True, ropes=("proportional",),
    made=gemma.frequencies,
)  # fmt: skip
LLAMA4 = Family(
    arch="llama4", more=(of.heads, llama.llama4), reasons=(llama.llama4_reasons,), names=llama.NAMES,
    attention_bias=False, ropes=("llama3",), made=llama.frequencies,
)  # fmt: skip
FAMILIES = {
    "mixtral": Family(arch="llama", more=(of.heads,), orders=ordered.halves_interleaved),
    "qwen2_moe": Family(
        arch="qwen2moe", more=(of.qwen,), reasons=(of.whole_heads,), own_head=True, norm=False, alike=True
    ),
    "qwen3_moe": Family(arch="qwen3moe", more=(of.heads, of.qwen), norm=True, attention_bias=False, alike=True),
    "olmoe": Family(arch="olmoe", reasons=(of.olmoe_reasons,), own_head=True, norm=False, attention_bias=False),
    "deepseek_v3": Family(
        arch="deepseek2", more=(of.latent, of.routed), reasons=(of.latent_reasons,), attention_bias=False, mscale=True
    ),
    "deepseek_v2": Family(
        arch="deepseek2", more=(of.latent, of.softmax), reasons=(of.latent_reasons, of.softmax_reasons),
        attention_bias=False, mscale=True,
    ),
    "mistral4": Family(
        arch="mistral4", more=(of.latent, of.routed, of.mistral4), reasons=(of.latent_reasons,),
        attention_bias=False, partial=True, mscale=True,
    ),
    "glm4_moe": Family(
        arch="glm4moe", more=(of.heads, of.routed), reasons=(of.shared_reasons,), names=AFTER_ATTENTION, partial=True
    ),
    "glm4_moe_lite": Family(
        arch="deepseek2", more=(of.latent, of.routed), reasons=(of.latent_reasons,), attention_bias=False, mscale=True
    ),
    "solar_open": Family(
        arch="glm4moe", more=(of.heads, of.routed, of.all_sparse), reasons=(of.shared_reasons,), names=AFTER_ATTENTION,
        partial=True,
    ),
    "ernie4_5_moe": Family(arch="ernie4_5-moe", more=(of.heads, of.ernie), reasons=(of.ernie_reasons,)),
    "gpt_oss": Family(
        arch="gpt-oss", more=(of.heads, of.windows, of.gpt_oss), reasons=(of.gpt_oss_reasons,), names=AFTER_ATTENTION,
        own_head=True, attention_bias=True, windows=True,
    ),
    "qwen3_next": Family(
        arch="qwen3next", more=(of.heads, of.qwen, of.recurrent), reasons=(of.recurrent_reasons,), names=NEXT_NAMES,
        changes=NEXT_CHANGES, orders=ordered.by_group, norm=True, attention_bias=False, partial=True,
    ),
    "qwen3_5_moe_text": QWEN35,
    "qwen3_5_moe": QWEN35,
    "gemma4": GEMMA4,
    "gemma4_text": GEMMA4,
    "llama4": LLAMA4,
    "llama4_text": LLAMA4,
    "qwen3_vl_moe": Family(
        arch="qwen3vlmoe", more=(of.heads, of.qwen, of.sections), reasons=(of.sections_reasons,),
        remarks=of.sections_remarks, of_whole=of.deepstack, attention_bias=False,
    ),
    "minimax_m2": Family(arch="minimax-m2", more=(of.heads, of.minimax), own_head=True, partial=True),
    "lfm2_moe": Family(
        arch="lfm2moe", more=(of.heads, of.lfm2), reasons=(of.lfm2_reasons,), names=LFM2_NAMES, norm=True
    ),
    "granitemoe": GRANITE,
    "granitemoeshared": GRANITE,
    "granitemoehybrid": Family(
        arch="granitehybrid", more=(of.heads, hybrid.granite, hybrid.mamba, hybrid.granite_hybrid),
        reasons=(hybrid.granite_reasons, hybrid.mamba_reasons, hybrid.granite_hybrid_reasons), names=HYBRID_NAMES,
        changes={"ssm_a": DECAY}, orders=ordered.granite, shapes=hybrid.mamba_shapes,
    ),
    "nemotron_h": Family(
        arch="nemotron_h_moe", more=(of.heads, hybrid.mamba, hybrid.nemotron),
        reasons=(hybrid.mamba_reasons, hybrid.nemotron_reasons), names=NEMOTRON_NAMES, changes={"ssm_a": DECAY},
        shapes=hybrid.mamba_shapes,
    ),
    "mimo_v2_flash": Family(
        arch="mimo2", more=(of.heads, of.windows, hybrid.mimo), reasons=(of.window_reasons, hybrid.mimo_reasons),
        names={"self_attn.attention_sink_bias": "attn_sinks.weight"}, own_head=True, norm=True, attention_bias=False,
        partial=True, windows=True,
    ),
    "cohere2_moe": Family(
        arch="cohere2moe", more=(of.heads, of.windows, hybrid.cohere),
        reasons=(of.window_reasons, hybrid.cohere_reasons), attention_bias=False, windows=True,
    ),
    "dots1": Family(
        arch="dots1", more=(of.heads, of.routed), reasons=(of.shared_reasons, of.own_keys), own_head=True,
        attention_bias=False,
    ),
    "hunyuan_v1_moe": Family(
        arch="hunyuan-moe", more=(of.heads, of.hunyuan), reasons=(of.hunyuan_reasons,), names=HUNYUAN_NAMES,
        attention_bias=False,
    ),
    "hy_v3": Family(
        arch="hy_v3", more=(of.heads, of.hy_v3), reasons=(of.hy_v3_reasons,), names=HY_V3_NAMES, attention_bias=False
    ),
    "exaone_moe": Family(
        arch="exaone-moe", more=(of.heads, of.windows, of.routed, of.exaone),
        reasons=(of.shared_reasons, of.window_reasons), own_head=True, windows=True,
        names={"mlp.e_score_correction_bias": "exp_probs_b.bias"},
    ),
    "afmoe": Family(
        arch="afmoe", more=(of.heads, of.windows, of.afmoe), reasons=(of.shared_reasons, of.afmoe_reasons),
        names=AFMOE_NAMES, attention_bias=False, windows=True,
    ),
    "mellum": Family(
        arch="mellum", more=(of.heads, of.windows, of.qwen), reasons=(of.near_reasons, of.mellum_reasons),
        own_head=True, norm=True, attention_bias=False, windows=True,
    ),
    "laguna": Family(
        arch="laguna", more=(of.heads, of.windows, of.laguna), reasons=(of.near_reasons, of.laguna_reasons),
        names=LAGUNA_NAMES, attention_bias=False, partial=True, windows=True,
    ),
}  # fmt: skip
