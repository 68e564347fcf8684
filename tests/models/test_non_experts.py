"""What is not a routed expert: found by structure in the families' own models, classed, left alone where it must be."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import init_empty_weights
from family_models import FAMILIES, build, configuration, of_name, save
from safetensors.torch import load_file, save_file
from torch import nn

from moeq.models import loading
from moeq.models.experts import find_expert_layers
from moeq.models.non_experts import (
    OTHER_FILES,
    OTHER_TIES,
    OWN_CLASS,
    READS_WEIGHT,
    OtherModule,
    OtherModules,
    _weights_read,
    find_others,
    weight_keys,
)
from moeq.models.source import open_source

REFUSED = {"doge", "nllb-moe", "diffusion_gemma", "ernie4_5_vl_moe"}
QKVO = "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj"
MLA = "self_attn.q_a_proj self_attn.q_b_proj self_attn.kv_a_proj_with_mqa self_attn.kv_b_proj self_attn.o_proj"
GATED = "gate_proj up_proj down_proj"
ENDS = {"embeddings": "model.embed_tokens", "head": "lm_head"}


def below(path: str, names: str) -> str:
    return " ".join(f"{path}.{name}" for name in names.split())


WANTED: dict[str, dict[str, str]] = {
    "mixtral": ENDS | {"attention": QKVO},
    "qwen2_moe": ENDS | {
        "attention": QKVO, "dense": below("mlp", GATED), "shared": below("mlp.shared_expert", GATED),
    },
    "deepseek_v3": ENDS | {
        "attention": MLA, "dense": below("mlp", GATED), "shared": below("mlp.shared_experts", GATED),
    },
    "gpt_oss": ENDS | {"attention": QKVO},
    "granitemoehybrid": ENDS | {
        "attention": f"mamba.in_proj mamba.out_proj {QKVO}",
        "shared": below("shared_mlp", "input_linear output_linear"),
    },
    "llama4_text": ENDS | {
        "attention": QKVO, "dense": below("feed_forward", GATED),
        "shared": below("feed_forward.shared_expert", GATED),
    },
    "dbrx": {
        "embeddings": "transformer.wte", "head": "lm_head",
        "attention": "norm_attn_norm.attn.Wqkv norm_attn_norm.attn.out_proj",
    },
    "jetmoe": ENDS | {"attention": "self_attention.kv_proj"},
    "jamba": ENDS | {
        "attention": f"mamba.in_proj mamba.x_proj mamba.out_proj {QKVO}", "dense": below("feed_forward", GATED),
    },
    "nemotron_h": {
        "embeddings": "model.embeddings", "head": "lm_head",
        "attention": below("mixer", "in_proj out_proj q_proj k_proj v_proj o_proj"),
        "dense": below("mixer", "up_proj down_proj"),
        "shared": below("mixer", "shared_experts.up_proj shared_experts.down_proj fc1_latent_proj fc2_latent_proj"),
    },
    "longcat_flash": ENDS | {
        "attention": MLA.replace("self_attn.", ""), "shared": GATED,
    },
    "lfm2_moe": ENDS | {
        "attention": "conv.in_proj conv.out_proj self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj",
        "dense": below("feed_forward", "w1 w2 w3"),
    },
    "qwen3_next": ENDS | {
        "attention": f"linear_attn.in_proj_qkvz linear_attn.in_proj_ba linear_attn.out_proj {QKVO}",
        "dense": below("mlp", GATED), "shared": below("mlp.shared_expert", GATED),
    },
    "gemma4": {"attention": QKVO, "shared": below("mlp", GATED)},
    "muse_spark": {
        "head": "lm_head", "attention": f"{QKVO} self_attn.gate_proj", "dense": below("mlp", GATED),
        "shared": "mlp.pre_expert_proj mlp.post_expert_proj",
    },
    "switch_transformers": {
        "attention": " ".join(f"{kind}.{name}" for kind in ("SelfAttention", "EncDecAttention") for name in "qkvo"),
        "dense": "mlp.wi",
    },
    "dots3_note": {
        "embeddings": "model.language_model.embed_tokens", "head": "lm_head",
        "attention": f"{MLA} self_attn.g_proj self_attn.indexer.wq_b self_attn.indexer.wk",
        "dense": below("mlp", GATED), "shared": below("mlp.shared_experts", GATED),
    },
}  # fmt: skip
LEFT = {
    "jamba": {"mamba.dt_proj": READS_WEIGHT},
    "switch_transformers": {"mlp.wo": READS_WEIGHT, "shared": OTHER_TIES, "lm_head": OTHER_TIES},
    "gemma4": {"model.language_model.embed_tokens": OWN_CLASS, "lm_head": OTHER_TIES},
    "muse_spark": {"model.language_model.embed_tokens": OWN_CLASS},
    "dots3_note": {"self_attn.indexer.weights_proj": READS_WEIGHT},
    "hy_v4": {"lm_head": READS_WEIGHT, "self_attn.indexer.weights_proj": READS_WEIGHT},
}


def structure(family: str) -> nn.Module:
    with init_empty_weights(include_buffers=False):
        model: nn.Module = of_name(FAMILIES[family].model)._from_config(configuration(family))
    return model


def others(model: nn.Module) -> OtherModules:
    return find_others(model, find_expert_layers(model))


def end(name: str) -> str:
    """A module's path within its layer."""
    return re.split(r"\.\d+\.", name)[-1]


@pytest.mark.cases(2)
@pytest.mark.parametrize("family", sorted(WANTED))
def test_modules_are_classed_by_structure(family: str) -> None:
    found: dict[str, set[str]] = {}
    for module in others(structure(family)).modules:
        found.setdefault(module.kind, set()).add(end(module.name))
    assert found == {kind: set(names.split()) for kind, names in WANTED[family].items()}


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", sorted(LEFT))
def test_what_is_used_otherwise_stays_as_it_is(family: str) -> None:
    assert {end(name): reason for name, (_, reason) in others(structure(family)).left.items()} == LEFT[family]


@pytest.mark.full
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - REFUSED))
def test_routers_experts_norms_and_towers_are_never_taken(family: str) -> None:
    model = structure(family)
    layers = find_expert_layers(model)
    experts = {f"{layer.name}.{part}" for layer in layers for part in layer.parameters}
    found = others(model)
    assert found.modules
    assert len({module.name for module in found.modules}) == len(found.modules)
    for module in found.modules:
        original = model.get_submodule(module.name)
        assert type(original) is (nn.Embedding if module.lookup else nn.Linear)
        assert tuple(original.weight.shape) == (module.rows, module.inputs)
        assert module.biased == (getattr(original, "bias", None) is not None)
        assert module.weight not in experts
        assert module.rows > 1
        assert not re.search(r"router|vision|visual|audio|layernorm|shared_expert_gate|\.gate(\.|$)", module.name)
        if module.block:
            assert module.name.startswith(f"{module.block}.")


def test_a_dense_part_beside_experts_is_shared_and_one_without_is_dense() -> None:
    found = {module.name: module.kind for module in others(structure("deepseek_v3")).modules}
    assert found["model.layers.0.mlp.up_proj"] == "dense"
    assert found["model.layers.1.mlp.shared_experts.up_proj"] == "shared"


def test_tied_embeddings_and_head_are_one() -> None:
    tied = {m.kind: m for m in others(structure("cohere2_moe")).modules if not m.block}
    assert (tied["embeddings"].tied, tied["head"].tied) == (None, "model.embed_tokens")
    apart = {m.kind: m for m in others(structure("mixtral")).modules if not m.block}
    assert apart["head"].tied is None


@pytest.mark.parametrize("same", [True, False])
def test_a_head_on_disk_beside_tied_embeddings(tmp_path: Path, same: bool) -> None:
    """Of files that are still to be fetched the configuration's word counts."""
    file = save("cohere2_moe", tmp_path / "model") / "model.safetensors"
    tensors = load_file(file)
    table = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": table.clone() if same else table.flip(0)}, file, {"format": "pt"})
    source = open_source(str(tmp_path / "model"))
    model = loading.skeleton(source, torch.float32)
    heads = [
        next(one for one in find_others(model, find_expert_layers(model), of).modules if one.kind == "head")
        for of in (source, replace(source, to_fetch={file.name: 1}))
    ]
    assert [head.tied for head in heads] == ["model.embed_tokens" if same else None, "model.embed_tokens"]


def test_code_that_reads_a_weight_is_seen() -> None:
    source = """
class Layer:
    def _init_weights(self, module):
        module.first.weight.zero_()

    def forward(self, x):
        if self.training and x is None:
            return fused(x, self.second.weight)
        else:
            x = x.to(self.third.weight.device)
        return self.fourth(x) @ self.fifth.weight + self.sixth.weight[0]
"""
    assert set(_weights_read(ast.parse(source))) == {"fifth", "sixth"}


def test_modules_that_the_disk_keeps_with_others_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up are one parameter made of two tensors; a weight that lies in one tensor with another is left."""
    source = open_source(str(save("minimax_m3_vl", tmp_path / "model")))
    model = loading.skeleton(source, torch.float32)
    found = find_others(model, find_expert_layers(model), source)
    dense = [module for module in found.modules if module.name == "model.language_model.layers.0.mlp.gate_up_proj"]
    assert {key.rpartition("layers.")[2] for key in weight_keys(source, model, dense)} == {
        "0.mlp.gate_proj.weight", "0.mlp.up_proj.weight",
    }  # fmt: skip
    from moeq.models import non_experts as room

    index = room.WeightReader._index

    def with_a_stray(self: object) -> None:
        index(self)  # type: ignore[arg-type]
        name = "model.language_model.layers.0.self_attn.q_proj.weight"
        origins = self.origins  # type: ignore[attr-defined]
        origins[name] = [room.WeightReader.__init__.__globals__["Origin"](key="x", targets=(name, "y"), pattern=None)]

    monkeypatch.setattr(room.WeightReader, "_index", with_a_stray)
    left = find_others(model, find_expert_layers(model), source).left
    assert left == {"model.language_model.layers.0.self_attn.q_proj": ("attention", OTHER_FILES)}


def test_classes_are_picked_in_order() -> None:
    found = others(build("mixtral"))
    attention = found.of(["attention"])
    assert [isinstance(module, OtherModule) for module in attention] == [True] * 12
    assert [end(module.name) for module in attention[:4]] == QKVO.split()
    assert found.of([]) == []
