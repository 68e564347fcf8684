"""The families that are written as GGUF beside those of test_gguf.py: llama.cpp computes each in float32, with dense
layers, shared experts, corrections, windows, parts of a head and what else sets it apart; what it computes otherwise is
refused, and wrong when it is written all the same.

Skipped where gguf, or llama-cpp-python, is not installed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peers
import pytest
import torch
import transformers
from exporters.families_gguf import DELTA, HALF, LLAMA3, PLAIN_YARN, ROPE, SETTINGS, WINDOWS, YARN
from family_models import _randomize as randomize
from family_models import configuration
from gguf_read import check_stacks, llama_logits, tensors_of
from made_sources import FAMILIES, IDS, SIZES, MadeSource, reference_logits, save_model
from safetensors.torch import load_file, save_file

from moeq.conversion import convert
from moeq.errors import ArtifactError, FormatError
from moeq.exporters import gguf, gguf_families, gguf_orders, write
from moeq.exporters.foreign import WriteOptions
from moeq.exporters.gguf_families import bias_name
from moeq.exporters.gguf_known import Family
from moeq.exporters.gguf_parameters import FREQUENCIES
from moeq.exporters.imatrix import matrix_of
from moeq.exporters.readers import open_packed
from moeq.models.non_experts import find_others
from moeq.models.source import open_source
from moeq.progress import Reporter
from moeq.verification.reference import streamed
from moeq.verification.verify import Options, require, verify
from moeq.verification.weights import compare_weights
from moeq_kernels.packed import PackedWeight

RIGHT = 1e-4  # of all logits, in float32
WRONG = 0.002
QUICK = (
    "nemotron_h",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5_moe_text",
    "qwen3_5_moe",
    "granitemoeshared",
    "lfm2_moe",
)  # all that is done to tensors
SOME = [family if family in QUICK else pytest.param(family, marks=pytest.mark.full) for family in SETTINGS]
Change = Callable[[Family], Family]


def made(folder: Path, family: str, **settings: Any) -> Path:
    """A model in float32."""
    folder.parent.mkdir(exist_ok=True)
    save_model(folder, family, **SETTINGS[family] | settings)
    tensors = {key: tensor.float() for key, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}), "utf-8")
    return folder


def exported(source: MadeSource, out: Path) -> Path:
    peers.module("gguf")
    write("llama.cpp", source, out, WriteOptions())
    return out


def plain(path: Path) -> MadeSource:
    return MadeSource(path, lambda *place: 16)


def difference(source: MadeSource, out: Path, folder: Path) -> float:
    """How far llama.cpp's logits are from transformers', relative; infinite where it does not load it, or dies."""
    try:
        logits = llama_logits(out, folder)
    except AssertionError:
        return float("inf")
    wanted = reference_logits(source)
    return float("inf") if isinstance(logits, str) else float((logits - wanted).norm() / wanted.norm())


def test_all_families_are_here() -> None:
    others = {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3"}  # test_gguf.py
    assert {*SETTINGS, *others} == set(gguf_families.FAMILIES) == set(gguf.FAMILIES)


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", SOME)
def test_what_is_written_is_read_back(family: str, tmp_path: Path) -> None:
    """The values of packed experts, biases, and all that llama.cpp has turned, split or changed."""
    source = MadeSource(made(tmp_path / "model", family), lambda layer, expert, projection: (4, 8)[layer % 2])
    out = exported(source, tmp_path / "out")
    check_stacks(source, tensors_of(out))
    read = open_packed(out, as_values=True)
    logits = streamed(read, torch.float32).model(input_ids=IDS, use_cache=False).logits
    assert torch.allclose(logits, reference_logits(source), atol=1e-4)
    packed = open_packed(out)
    for layer, mine in zip(source.layers, packed.layers, strict=True):
        matrices, biases = source.expert(layer, 1)
        there, theirs = packed.expert(mine, 1)
        assert all(torch.equal(biases[name], theirs[name]) for name in (biases if layer.biased else ()))
        for name, matrix in matrices.items():
            found = there[name]
            assert isinstance(matrix, PackedWeight)
            assert isinstance(found, PackedWeight)
            assert all(torch.equal(part, found.parts()[key]) for key, part in matrix.parts().items())


def halved(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    """GELU as llama.cpp has it on a CPU: from a table of float16 for float16, between -10 and 10."""
    near = torch.nn.functional.gelu(hidden.half().float(), approximate="tanh").half().float()
    return torch.where(hidden >= 10, hidden, torch.where(hidden <= -10, 0.0, near))


@pytest.mark.parametrize("family", list(SETTINGS))
def test_llama_cpp_computes_the_families(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peers.interpreter("llama-cpp-python")
    monkeypatch.setattr(transformers.activations.GELUTanh, "forward", halved)
    source = plain(made(tmp_path / "model", family))
    assert difference(source, exported(source, tmp_path / "out"), tmp_path) < RIGHT


@pytest.mark.parametrize("family", ["glm4_moe", "gpt_oss", "qwen3_next", "granitemoeshared"])
def test_verify_finds_packed_experts_right(family: str, tmp_path: Path) -> None:
    """4 and 8 bits by layer."""
    python = peers.interpreter("llama-cpp-python")
    model = made(tmp_path / "model", family)
    source = MadeSource(model, lambda layer, expert, projection: (4, 8)[layer % 2])
    out = exported(source, tmp_path / "out")
    require(verify(out, Options(python=str(python), against=str(model)), Reporter(quiet=True)))


def test_gpt_oss_as_it_was_released_is_written_with_a_note(tmp_path: Path) -> None:
    """Its ramp of yarn ends between two dimensions, which llama.cpp rounds: that is less than its own rounding."""
    rope = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
    rope |= {"original_max_position_embeddings": 4096, "truncate": False}
    source = MadeSource(made(tmp_path / "model", "gpt_oss", head_dim=64, rope_parameters=rope), lambda *_: 8)
    out = exported(source, tmp_path / "out")
    assert "which truncate: false forbids" in (out / "README.md").read_text("utf-8")
    python = peers.interpreter("llama-cpp-python")
    require(verify(out, Options(python=str(python)), Reporter(quiet=True)))


def test_of_a_model_that_sees_the_language_model_is_written(tmp_path: Path) -> None:
    """The file is that of the language model as transformers saves it alone, its tensors called as in the whole."""
    whole = made(tmp_path / "whole", "qwen3_5_moe")
    transformers.AutoModelForCausalLM.from_pretrained(whole).save_pretrained(tmp_path / "text")
    source, alone = (MadeSource(path, lambda *_: 8) for path in (whole, tmp_path / "text"))
    assert any(key.startswith("model.visual.") for key in source.rest())
    assert any(key.startswith("model.language_model.") for key in alone.rest())
    out = exported(source, tmp_path / "out")
    assert "the file holds the language model" in (out / "README.md").read_text("utf-8")
    first, second = (tensors_of(path) for path in (out, exported(alone, tmp_path / "alone")))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    python = peers.interpreter("llama-cpp-python")
    require(verify(out, Options(python=str(python), against=str(whole)), Reporter(quiet=True)))


def test_what_has_no_vision_tower_becomes_no_model_that_sees(tmp_path: Path) -> None:
    """GGUF of one is converted to GGUF, and to nothing else."""
    out = exported(MadeSource(made(tmp_path / "model", "qwen3_vl_moe"), lambda *_: 4), tmp_path / "out")
    with pytest.raises(FormatError, match=r"holds the language model alone .* convert the checkpoint"):
        convert(out, "native", tmp_path / "native")
    convert(out, "llama.cpp", tmp_path / "again", verify=False)
    first, second = (tensors_of(path) for path in (out, tmp_path / "again"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_pairs_that_llama_cpp_does_not_turn_are_noted(tmp_path: Path) -> None:
    """Of Qwen3-VL as it was released: two of 64, the slowest but one, which turn by little in its whole context."""
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    text = SETTINGS["qwen3_vl_moe"]["text_config"] | {"head_dim": 128, "rope_parameters": rope}
    as_released = SETTINGS["qwen3_vl_moe"] | {"text_config": text | {"max_position_embeddings": 262144}}
    config = configuration("qwen3_vl_moe", **as_released)
    said = [*gguf_families.remarks(config, gguf_families.family_of(config), {})]
    assert "does not turn 2 of the slowest pairs" in said[1]
    assert "by 0.1 rad" in said[1]
    text = SETTINGS["qwen3_vl_moe"]["text_config"]
    little = text | {"rope_parameters": text["rope_parameters"] | {"mrope_section": [12, 10, 10]}}
    source = plain(made(tmp_path / "model", "qwen3_vl_moe", text_config=little))
    assert RIGHT < difference(source, exported(source, tmp_path / "out"), tmp_path) < WRONG / 2
    as_released["text_config"]["rope_parameters"] = rope | {"rope_theta": 5e4}
    with pytest.raises(FormatError, match="mrope_section"):
        gguf_families.family_of(configuration("qwen3_vl_moe", **as_released))


NEAR = {"full_attention": ROPE | {"rope_theta": 500000.0}, "sliding_attention": ROPE}
FAR_HEADS = {"head_dim": 64}
SHARING = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "per_layer_config": {"1": FAR_HEADS, "3": FAR_HEADS},
}
SLOWER = {"rope_type": "proportional", "factor": 4.0, "partial_rotary_factor": 0.5}
YARN_OF = {"rope_parameters": PLAIN_YARN | {"beta_fast": 32, "beta_slow": 1}}
SCALED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": ("gpt_oss", {"rope_parameters": PLAIN_YARN}),
    "part of a head": ("glm4_moe", {"rope_parameters": PLAIN_YARN | {"partial_rotary_factor": 0.5}}),
    "linear": ("glm4_moe", {"rope_parameters": HALF | {"rope_type": "linear", "factor": 2.0}}),
    "qwen3_next": ("qwen3_next", {"rope_parameters": PLAIN_YARN | {"partial_rotary_factor": 0.25}}),
    "sections": ("qwen3_5_moe_text", {"rope_parameters": DELTA["rope_parameters"] | {"mrope_section": [2, 1, 1]}}),
    "without windows": ("laguna", {"layer_types": ["full_attention"] * 3}),
    "by element": ("laguna", {"gating": "per-element"}),
    "no bias": ("glm4_moe", {"attention_bias": False, "use_qk_norm": False, "n_group": 1, "topk_group": 1}),
    "as many values": ("qwen3_5_moe_text", {"linear_num_key_heads": 6}),
    "tied": ("gpt_oss", {"tie_word_embeddings": True}),
    "own head": ("lfm2_moe", {"tie_word_embeddings": False}),
    "without scaling": ("hunyuan_v1_moe", {"rope_parameters": ROPE}),
    "by layer": ("hunyuan_v1_moe", {"moe_topk": [2, 2]}),
    "all with experts": ("exaone_moe", {"mlp_layer_types": ["sparse"] * 3}),
    "with rope": ("granitemoehybrid", {"position_embedding_type": "rope"}),
    "one group": ("granitemoehybrid", {"mamba_n_groups": 1, "tie_word_embeddings": True}),
    "not latent": ("nemotron_h", {"moe_latent_size": None}),
    "not latent and not normed": ("nemotron_h", {"norm_topk_prob": False}),
    "values as they are": ("mimo_v2_flash", {"attention_value_scale": 1.0}),
    "sigmoid": ("cohere2_moe", {"expert_selection_fn": "sigmoid", "norm_topk_prob": False, "rms_norm_eps": 1e-5}),
    "place": ("mistral4", {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.0}}),
    "no shared": ("cohere2_moe", {"num_shared_experts": 0, "expert_selection_fn": "sigmoid"}),
    "keys as values": (
        "gemma4_text",
        {"attention_k_eq_v": True, "per_layer_config": {"2": {"head_dim": 64, "num_key_value_heads": 1}}},
    ),
    "shared keys": ("gemma4_text", SHARING | {"use_double_wide_mlp": True}),
    "no embeddings of layers": ("gemma4_text", {"hidden_size_per_layer_input": 0, "final_logit_softcapping": None}),
    "turned as a whole": ("gemma4_text", {"rope_parameters": dict.fromkeys(NEAR, ROPE)}),
    "as released": ("llama4_text", {"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}),
    "yarn of llama": ("llama4_text", {"rope_parameters": PLAIN_YARN}),
    "experts everywhere": ("llama4_text", {"interleave_moe_layer_step": 1, "rope_parameters": ROPE}),
    "without norms": ("llama4_text", {"num_local_experts": 128, "use_qk_norm": False}),
    "slower": ("gemma4_text", {"rope_parameters": NEAR | {"full_attention": ROPE | SLOWER}}),
    "dense anywhere": ("hy_v3", {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
}


@pytest.mark.parametrize("case", list(SCALED))
def test_llama_cpp_computes_other_settings(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peers.interpreter("llama-cpp-python")
    monkeypatch.setattr(transformers.activations.GELUTanh, "forward", halved)
    family, settings = SCALED[case]
    source = plain(made(tmp_path / "model", family, **settings))
    assert difference(source, exported(source, tmp_path / "out"), tmp_path) < RIGHT


def test_llama_cpp_computes_the_light_deepseek(tmp_path: Path) -> None:
    """Which has no latent queries: llama.cpp takes it by its number of layers."""
    peers.interpreter("llama-cpp-python")
    config = configuration("deepseek_v2", **SIZES | SETTINGS["deepseek_v2"] | {"num_hidden_layers": 26})
    config.q_lora_rank = None
    torch.manual_seed(11)
    model = transformers.DeepseekV2ForCausalLM(config).eval()
    randomize(model)
    for name, weight in model.named_parameters():
        weight.data /= 4 if weight.dim() > 1 and ".layers." in name else 1
    model.save_pretrained(tmp_path / "model")
    source = plain(tmp_path / "model")
    assert "model.layers.0.self_attn.q_proj.weight" in source.rest()
    assert difference(source, exported(source, tmp_path / "out"), tmp_path) < RIGHT


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "shared": ("glm4_moe", {"n_shared_experts": 0}, "without a shared expert"),
    "alpha": ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha 1.5"),
    "limit": ("gpt_oss", {"swiglu_limit": 0.5}, "swiglu_limit 0.5"),
    "no window": ("gpt_oss", {"layer_types": ["full_attention"] * 3}, "without a window"),
    "without biases": ("gpt_oss", {"attention_bias": False}, "attention without biases"),
    "interval": ("ernie4_5_moe", {"moe_layer_interval": 2}, "dense layers among"),
    "end": ("ernie4_5_moe", {"moe_layer_end_index": 1}, "dense layers among"),
    "biases": ("ernie4_5_moe", {"use_bias": True}, "use_bias"),
    "norm of ernie": ("ernie4_5_moe", {"moe_norm_min": 0.9}, "moe_norm_min"),
    "layer types": (
        "qwen3_next", {"layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"]},
        "full attention in other layers",
    ),
    "values": ("qwen3_next", {"linear_value_head_dim": 64}, "keys of 32, values of 64"),
    "epsilon": ("qwen3_next", {"rms_norm_eps": 0.01}, "rms_norm_eps 0.01"),
    "norm of next": ("qwen3_next", {"norm_topk_prob": False}, "norm_topk_prob: false"),
    "dense of next": ("qwen3_next", {"mlp_only_layers": [0]}, "dense layers among"),
    "sections": (
        "qwen3_5_moe_text", {"rope_parameters": DELTA["rope_parameters"] | {"mrope_section": [1, 0, 3]}},
        "mrope_section",
    ),
    "keys": ("dots1", {"num_key_value_heads": 2}, "share keys and values"),
    "biases of dots": ("dots1", {"attention_bias": True}, "attention_bias"),
    "window of dots": (
        "dots1", {"sliding_window": 8, "max_window_layers": 0, "layer_types": ["sliding_attention"] * 3}, "window of 8",
    ),
    "counts": ("hunyuan_v1_moe", {"moe_topk": [2, 3]}, "other moe_topk in other layers"),
    "scale": ("lfm2_moe", {"routed_scaling_factor": 2.5}, "routed_scaling_factor"),
    "bias of experts": ("lfm2_moe", {"use_expert_bias": False}, "use_expert_bias"),
    "norm of lfm2": ("lfm2_moe", {"norm_topk_prob": False}, "norm_topk_prob: false"),
    "convolution": ("lfm2_moe", {"conv_bias": True}, "conv_bias"),
    "groups": (
        "deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1}, "group_limited_greedy",
    ),
    "mscale": ("deepseek_v2", {"rope_parameters": PLAIN_YARN}, "mscale None"),
    "halves": ("glm4_moe_lite", {"rope_interleave": False}, "rope_interleave: false"),
    "dense of lite": (
        "glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse", "dense"]}, "dense layers among",
    ),
    "first dense": ("exaone_moe", {"mlp_layer_types": ["sparse", "sparse", "dense"]}, "dense layers among"),
    "mup": ("afmoe", {"mup_enabled": False}, "mup_enabled"),
    "every third": ("afmoe", {"layer_types": [*WINDOWS, *WINDOWS[:2]]}, "layer_types"),
    "theta": ("mellum", {"rope_parameters": NEAR}, "another rope_theta within windows"),
    "scaled": (
        "mellum", {"rope_parameters": {"full_attention": PLAIN_YARN, "sliding_attention": PLAIN_YARN}},
        "scaled rotary embeddings within windows",
    ),
    "norm of mellum": ("mellum", {"norm_topk_prob": False}, "norm_topk_prob: false"),
    "first window": ("laguna", {"layer_types": WINDOWS}, "a window in the first layer"),
    "cap": ("laguna", {"moe_router_logit_softcapping": 0.5}, "soft cap"),
    "time": ("granitemoehybrid", {"time_step_limit": (0.0, 0.5)}, "time_step_limit"),
    "bias of states": ("granitemoehybrid", {"mamba_proj_bias": True}, "mamba_proj_bias"),
    "no bias of states": ("granitemoehybrid", {"mamba_conv_bias": False}, "convolutions without biases"),
    "expand": ("granitemoehybrid", {"mamba_expand": 3, "mamba_n_heads": 12}, "mamba_expand"),
    "dense of nemotron": (
        "nemotron_h", {"layer_types": ["linear_attention", "moe", "full_attention", "mlp"]}, "dense layers among",
    ),
    "activation of nemotron": ("nemotron_h", {"mlp_hidden_act": "silu"}, "activation silu"),
    "scale of mimo": ("mimo_v2_flash", {"routed_scaling_factor": 2.5}, "routed_scaling_factor"),
    "biases of mimo": ("mimo_v2_flash", {"attention_bias": True}, "attention_bias"),
    "norm of mimo": ("mimo_v2_flash", {"norm_topk_prob": False}, "norm_topk_prob: false"),
    "part within windows": (
        "mimo_v2_flash", {"rope_parameters": {"full_attention": HALF, "sliding_attention": ROPE}}, "another part",
    ),
    "odd": (
        "mimo_v2_flash",
        {"rope_parameters": dict.fromkeys(NEAR, ROPE | {"partial_rotary_factor": 0.3})},
        "odd number",
    ),
    "sum": ("cohere2_moe", {"shared_expert_combination_strategy": "sum"}, "takes the sum"),
    "rope of dense": ("cohere2_moe", {"prefix_dense_sliding_window_pattern": 2}, "in dense layers"),
    "activation of gemma": ("gemma4_text", {"hidden_activation": "silu"}, "activation silu"),
    "later tokens": ("gemma4_text", {"use_bidirectional_attention": "all"}, "later tokens"),
    "tokens of layers": ("gemma4_text", {"vocab_size_per_layer_input": 4096}, "vocab_size_per_layer_input"),
    "sharing": (
        "gemma4_text",
        SHARING
        | {
            "num_hidden_layers": 5,
            "layer_types": [*WINDOWS, "sliding_attention", "full_attention"],
            "per_layer_config": {"1": FAR_HEADS, "4": FAR_HEADS},
        },
        "num_kv_shared_layers",
    ),
    "sizes within windows": (
        "gemma4_text", {"per_layer_config": {"1": FAR_HEADS, "2": FAR_HEADS}}, "other sizes in other layers",
    ),
    "yarn of gemma": (
        "gemma4_text", {"rope_parameters": NEAR | {"full_attention": PLAIN_YARN}}, "type yarn in layers without",
    ),
    "scaled of gemma": (
        "gemma4_text", {"rope_parameters": NEAR | {"sliding_attention": PLAIN_YARN}}, "scaled rotary embeddings within",
    ),
    "no windows of gemma": (
        "gemma4_text",
        {"layer_types": ["full_attention"] * 3, "per_layer_config": dict.fromkeys("012", FAR_HEADS)},
        "without a window",
    ),
    "chunks": ("llama4_text", {"attention_chunk_size": 4}, "chunks of 4 tokens"),
    "turned everywhere": ("llama4_text", {"no_rope_layers": [1] * 4}, "no_rope_layers"),
    "chunks everywhere": (
        "llama4_text", {"layer_types": ["chunked_attention"] * 4, "attention_chunk_size": 4}, "layer_types",
    ),
    "temperature": ("llama4_text", {"floor_scale": 4}, "floor_scale"),
    "norms of llama": ("llama4_text", {"use_qk_norm": False}, "use_qk_norm: false"),
    "norms of many": ("llama4_text", {"num_local_experts": 128}, "use_qk_norm: true"),
    "experts here and there": ("llama4_text", {"moe_layers": [1, 2]}, "one in 2"),
    "activation": ("granitemoe", {"hidden_act": "gelu"}, "activation gelu"),
    "part": ("afmoe", {"rope_parameters": HALF}, "a part of a head"),
    "part of hunyuan": ("hy_v3", {"rope_parameters": HALF}, "a part of a head"),
}  # fmt: skip
NOT_MADE = ("part of hunyuan", "part", "shared", "sizes within windows")  # transformers itself does not do it


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_llama_cpp_computes_otherwise_is_refused(case: str) -> None:
    family, settings, why = REFUSED[case]
    config = configuration(family, **SIZES | FAMILIES.get(family, {}) | SETTINGS[family] | settings)
    with pytest.raises(FormatError, match=why):
        gguf_families.family_of(config)
    gguf_families.family_of(configuration(family, **SIZES | FAMILIES.get(family, {}) | SETTINGS[family]))


def forced(source: MadeSource, out: Path, monkeypatch: pytest.MonkeyPatch, change: Change | None = None) -> Path:
    """Write what would be refused, or as another family would be."""
    name = source.config["model_type"]
    with monkeypatch.context() as patch:
        patch.setattr(gguf_families, "_reasons", lambda *arguments: iter(()))
        if change is not None:
            patch.setitem(gguf_families.FAMILIES, name, change(gguf_families.FAMILIES[name]))
        return exported(source, out)


@pytest.mark.parametrize("case", [case for case in REFUSED if case not in NOT_MADE])
def test_what_is_refused_fails_or_lies(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peers.interpreter("llama-cpp-python")
    family, settings, _ = REFUSED[case]
    source = plain(made(tmp_path / "model", family, **settings))
    try:
        out = forced(source, tmp_path / "out", monkeypatch)
    except FormatError:
        return  # a tensor that has no name there
    assert difference(source, out, tmp_path) > WRONG


SHARED_UP = "feed_forward.shared_expert.up_proj"


def renamed(first: str, second: str) -> Change:
    """The family with two names for each other."""

    def change(one: Family) -> Family:
        names = {**gguf_families.NAMES, **one.names}
        return replace(one, names={**one.names, first: names[second], second: names[first]})

    return change


def config_pairs(config: Any) -> int:
    return int(config.per_layer_config[2].head_dim // 2)


WITHOUT: dict[str, tuple[str, Change]] = {
    "norms": ("qwen3_next", lambda one: replace(one, changes={"ssm_a": one.changes["ssm_a"]})),
    "decay": ("qwen3_next", lambda one: replace(one, changes={**one.changes, "ssm_a": ""})),
    "tiles": ("qwen3_5_moe_text", lambda one: replace(one, orders=gguf_orders.as_they_are)),
    "rows": (
        "granitemoeshared",
        lambda one: replace(
            one,
            orders=lambda config, stem, rows: (
                gguf_orders.granite(config, stem, rows)
                if "shexp" in stem
                else gguf_orders.as_they_are(config, stem, rows)
            ),
        ),
    ),
    "turned": ("ernie4_5_moe", lambda one: replace(one, orders=gguf_orders.halves_interleaved)),
    "norms of heads": ("glm4_moe", renamed("self_attn.q_norm", "self_attn.k_norm")),
    "dense": ("glm4_moe", renamed("mlp.gate_proj", "mlp.up_proj")),
    "shared": ("glm4_moe", renamed("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")),
    "norm of the router's input": ("hy_v3", renamed("input_layernorm", "post_attention_layernorm")),
    "frequencies": (
        "gemma4_text",
        lambda one: replace(one, made=lambda config: {FREQUENCIES: torch.ones(config_pairs(config))}),
    ),
    "frequencies of llama": ("llama4_text", lambda one: replace(one, made=lambda config: {})),
    "shared of llama": ("llama4_text", renamed("feed_forward.shared_expert.gate_proj", SHARED_UP)),
    "groups of states": ("nemotron_h", lambda one: replace(one, shapes=gguf_orders.in_its_shape)),
    "decay of states": ("granitemoehybrid", lambda one: replace(one, changes={})),
    "keys": ("exaone_moe", renamed("self_attn.k_proj", "self_attn.v_proj")),
}
for _family in (
    "glm4_moe",
    "dots1",
    "exaone_moe",
    "afmoe",
    "hy_v3",
    "laguna",
    "lfm2_moe",
    "minimax_m2",
    "gpt_oss",
    "granitemoehybrid",
    "nemotron_h",
    "mimo_v2_flash",
):
    WITHOUT[f"parameters of {_family}"] = (_family, lambda one: replace(one, more=one.more[:1]))


@pytest.mark.parametrize("case", list(WITHOUT))
def test_what_is_left_out_is_noticed(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peers.interpreter("llama-cpp-python")
    family, change = WITHOUT[case]
    source = plain(made(tmp_path / "model", family))
    assert difference(source, forced(source, tmp_path / "out", monkeypatch, change), tmp_path) > WRONG


def test_biases_of_experts_lie_in_stacks_beside_theirs(tmp_path: Path) -> None:
    source = MadeSource(made(tmp_path / "model", "gpt_oss"), lambda *place: 4)
    found = tensors_of(exported(source, tmp_path / "out"))
    for layer in source.layers:
        for projection in layer.projections:
            wanted = torch.stack([source.expert(layer, expert)[1][projection] for expert in range(layer.num_experts)])
            assert torch.equal(found[bias_name(layer, projection)], wanted)
            assert wanted.unique().numel() > layer.num_experts


def test_gguf_with_biases_is_converted_from_and_to(tmp_path: Path) -> None:
    source = MadeSource(made(tmp_path / "model", "gpt_oss"), lambda *place: 4)
    out = exported(source, tmp_path / "out")
    convert(out, "native", tmp_path / "native")
    convert(tmp_path / "native", "llama.cpp", tmp_path / "again")
    first, second = (tensors_of(path) for path in (out, tmp_path / "again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_packed_modules_that_are_kept_otherwise_are_refused(tmp_path: Path) -> None:
    """Columns in another order; what is split is packed in llama.cpp's file, and read as values."""
    model = made(tmp_path / "model", "qwen3_5_moe_text")
    with pytest.raises(FormatError, match="GGUF keeps it with its columns in another order"):
        exported(
            MadeSource(model, lambda *place: 4, others={"model.layers.0.linear_attn.out_proj": 4}), tmp_path / "out"
        )
    module = "model.layers.0.linear_attn.in_proj_qkvz"
    source = MadeSource(made(tmp_path / "next", "qwen3_next"), lambda *place: 4, others={module: 8})
    out = exported(source, tmp_path / "out")
    assert torch.equal(
        open_packed(out, as_values=True).source.read(f"{module}.weight"), dict(source.others())[module].dequantize()
    )
    with pytest.raises(FormatError, match="Q8_0 that is a part of"):
        list(open_packed(out).others())


def test_the_importance_matrix_knows_the_names(tmp_path: Path) -> None:
    for family, missing in (("glm4_moe", set()), ("qwen3_next", {"linear_attn.in_proj_qkvz"})):
        source = plain(made(tmp_path / family, family))
        others = find_others(source.model, source.layers, source.source).modules
        without = {module.name for module in others if matrix_of(source.model.config, module) is None}
        assert {name.partition(".layers.")[2].partition(".")[2] for name in without if ".layers." in name} == missing


def test_what_is_computed_of_a_tensor_is_compared_as_it_is_written(tmp_path: Path) -> None:
    """Norms that are near 0 lose digits where 1 is added: `moeq verify --against` holds what is written against it."""
    model = save_model(tmp_path / "model", "qwen3_next", **SETTINGS["qwen3_next"])
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.0.input_layernorm.weight"
    tensors[name][:3] = torch.tensor([1e-6, -3e-7, 0.0])
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    out = exported(plain(model), tmp_path / "out")
    found = compare_weights(open_source(str(model)), open_packed(out), Reporter(quiet=True), False)
    assert not found.changed
    assert not found.problems
    tensors[name][5] += 0.01
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    found = compare_weights(open_source(str(model)), open_packed(out), Reporter(quiet=True), False)
    assert found.changed == [name]


def test_frequencies_that_are_not_those_of_config_json_are_refused(tmp_path: Path) -> None:
    out = exported(plain(made(tmp_path / "model", "gemma4_text")), tmp_path / "out")
    offset = open_packed(out).file.tensors[FREQUENCIES].offset
    with (out / "model.gguf").open("r+b") as file:
        file.seek(offset)
        file.write(struct.pack("<f", 2.0))
    with pytest.raises(ArtifactError, match=rf"model\.gguf: tensor {FREQUENCIES} is not what config\.json says"):
        open_packed(out)


def test_names_are_ggufs_own(tmp_path: Path) -> None:
    """Where its package has the family, and a name for the tensor."""
    package = peers.module("gguf")
    theirs_of = {name: key for key, name in package.MODEL_ARCH_NAMES.items()}
    compared = 0
    for family in ("glm4_moe", "gpt_oss", "ernie4_5_moe", "afmoe", "lfm2_moe", "granitemoe", "hunyuan_v1_moe"):
        source = plain(made(tmp_path / family, family))
        config = source.model.config
        kind = gguf_families.family_of(config)
        theirs = package.get_tensor_name_map(theirs_of[kind.arch], config.num_hidden_layers)
        for key in source.rest():
            own = gguf_families.pieces(config, kind, key, source.source.tensors[key].shape, tied=False)
            name = theirs.get_name(key, try_suffixes=(".weight", ".bias"))
            compared += name is not None
            assert name is None or own[0].name in (name, f"{name}.weight", f"{name}.bias")
    assert compared > 150
