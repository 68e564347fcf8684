"""Folded models compute the same, in float32 and in float64, whatever the family; edges that must not be folded."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from family_models import FAMILIES, build, inputs
from folded_models import eager, edges_of, fold
from integer_models import made, pixels
from torch import nn

from moeq.errors import MoeqError, NotFiniteError, QuantizationError
from moeq.integers.edges import Edge
from moeq.integers.folding import gain_router_biases

LIMITS = {torch.float32: 1e-5, torch.float64: 1e-9}
CHOSEN = ("mixtral", "qwen3_next", "deepseek_v2", "qwen2_moe", "gpt_oss", "aria_text", "llama4_text", "dbrx", "jetmoe")
UNFOLDABLE = {"qwen4_exp_text", "qwen4_exp"}  # no norm of theirs leads to linears alone
REFUSED = {"diffusion_gemma"}  # a norm there is only ever given zeros


def consumers(edge: Edge) -> set[str]:
    return {one.weight.split(".", 3)[-1] for one in edge.consumers}


def same_outputs(family: str, dtype: torch.dtype, **settings: Any) -> Any:
    """Fold a family's tiny model; returns edges and folds."""
    model = eager(build(family, **settings))
    call = lambda: model(**inputs(family))  # noqa: E731
    edges = edges_of(model, call)
    model.to(dtype)
    error, folds = fold(model, call, edges)
    assert 0 < error < LIMITS[dtype]
    return edges, folds


@pytest.mark.cases(7)
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("family", CHOSEN)
def test_a_folded_family_computes_the_same(family: str, dtype: torch.dtype) -> None:
    edges, folds = same_outputs(family, dtype)
    blocks = [one for one in edges.edges if any(part.isdigit() for part in one.norm.name.split("."))]
    assert len(blocks) >= 6
    assert all(folded.why is not None for folded in folds)


@pytest.mark.full
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_folds_or_says_why_not(family: str, dtype: torch.dtype) -> None:
    model = eager(build(family))
    edges = edges_of(model, lambda: model(**inputs(family)))
    given = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs(family).items()}
    call = lambda: model(**given)  # noqa: E731
    for why in (*edges.refused.values(), *edges.left.values()):
        assert why
        assert "\n" not in why
    assert bool(edges.edges) == (family not in UNFOLDABLE)
    if family in REFUSED:
        with pytest.raises(MoeqError, match="channel 0"):
            fold(model.to(dtype), call, edges)
    elif edges.edges:
        error, _ = fold(model.to(dtype), call, edges)
        assert error < LIMITS[dtype]


def test_layer_norms_with_biases_all_around_take_zero_points() -> None:
    """Queries, keys and values of PhiMoE have biases, its experts have none."""
    _, folds = same_outputs("phimoe", torch.float64, attention_bias=True)
    modes = {folded.edge.norm.name: folded.why for folded in folds}
    assert modes["model.layers.0.input_layernorm"] is None
    assert modes["model.layers.0.post_attention_layernorm"] == ("model.layers.0.mlp.experts.gate_up_proj has no bias")
    assert modes["model.norm"] is None
    shifted = next(folded for folded in folds if folded.edge.norm.name == "model.layers.0.input_layernorm")
    assert shifted.fold.shifts
    assert {one.bias for one in shifted.edge.consumers} == {
        f"model.layers.0.self_attn.{name}_proj.bias" for name in "qkv"
    }


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("kind", ["ViT", "DeiT"])
def test_a_vision_transformer_takes_zero_points_everywhere(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    sizes = {
        "hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 44, "image_size": 16,
        "patch_size": 4, "num_labels": 7,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}ForImageClassification")(config).eval()
    for weight in model.parameters():
        weight.data += 0.2 * torch.randn(weight.shape)
    images = torch.randn(4, 3, 16, 16)
    edges = edges_of(model, lambda: model(images))
    model.to(dtype)
    error, folds = fold(model, lambda: model(images.to(dtype)), edges)
    assert 0 < error < LIMITS[dtype]
    assert [folded.why for folded in folds] == [None] * 5
    assert not edges.refused


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("kind", ["moe", "tasks"])
def test_a_mixture_of_vision_experts_takes_zero_points_everywhere(kind: str, dtype: torch.dtype) -> None:
    """Routers gain biases where they have none, and every task's router is a consumer."""
    model = made(kind)
    images = pixels(model, 12)
    gained = gain_router_biases(model, torch.device("cpu"))
    assert gained == (["blocks.1.moe.router.bias"] if kind == "moe" else [])
    tasks = range(model.config.num_tasks)
    edges = edges_of(model, *(lambda task=task: model(images, task=task) for task in tasks))
    model.to(dtype)
    error, folds = fold(model, lambda: model(images.to(dtype), task=tasks[-1]), edges)
    assert 0 < error < LIMITS[dtype]
    assert [folded.why for folded in folds] == [None] * (5 if kind == "moe" else 4)  # a mean takes the last one's
    routers = [one.weight for edge in edges.edges for one in edge.consumers if "router" in one.weight]
    assert len(routers) == len(tasks)


def test_experts_without_tokens_are_consumers() -> None:
    """Switch has a parameter an expert, and two tokens cannot reach all of them."""
    model = build("switch_transformers")
    few = {name: ids[:1, :2] for name, ids in inputs("switch_transformers").items()}
    edges = edges_of(model, lambda: model(**few))
    experts = [one.weight for edge in edges.edges for one in edge.consumers if ".experts." in one.weight]
    assert len(experts) == 6 * 4
    error, _ = fold(model, lambda: model(**inputs("switch_transformers")), edges)
    assert error < LIMITS[torch.float32]


def test_identity_experts_without_tokens_hand_the_norm_through() -> None:
    """LongCat's give the norm's output itself, and a few tokens choose none of them in the first layer."""
    model = build("longcat_flash")
    few = {name: ids[:1, :8] for name, ids in inputs("longcat_flash", rows=1).items()}
    edges = edges_of(model, lambda: model(**few))
    for layer in range(2):
        why = edges.refused[f"model.layers.{layer}.post_attention_layernorm.0"]
        assert re.search(rf"in model\.layers\.{layer}\.mlp\.experts$", why)
    error, _ = fold(model, lambda: model(**inputs("longcat_flash")), edges)
    assert error < LIMITS[torch.float32]


def test_rows_scaled_before_the_experts_take_no_zero_points() -> None:
    model = build("llama4_text")
    edges = edges_of(model, lambda: model(**inputs("llama4_text")))
    edge = next(one for one in edges.edges if one.norm.name == "model.layers.1.post_attention_layernorm")
    assert [one.weight.rpartition(".")[2] for one in edge.consumers if one.scaled] == ["gate_up_proj"]
    first = ("experts.gate_up_proj", "router.weight", "shared_expert.gate_proj.weight", "shared_expert.up_proj.weight")
    assert consumers(edge) == {f"feed_forward.{name}" for name in first}


@pytest.mark.parametrize(
    ("family", "norm", "why"),
    [
        ("minimax", "model.layers.0.input_layernorm", "also used by add in model.layers.0"),
        ("jetmoe", "model.norm", r"lm_head\.weight, .* also used by embedding in model\.embed_tokens"),
        ("zaya", "model.layers.0.input_layernorm", "v_proj_delayed"),
    ],
)
def test_a_norm_that_leads_elsewhere_is_refused(family: str, norm: str, why: str) -> None:
    model = build(family)
    edges = edges_of(model, lambda: model(**inputs(family)))
    assert norm not in {edge.norm.name for edge in edges.edges}
    assert re.search(why, edges.refused[norm])


class Twice(nn.Module):
    """One linear behind two norms."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.linear = nn.LayerNorm(6), nn.LayerNorm(6), nn.Linear(6, 4)

    def get_expanded_tied_weights_keys(self, all_submodels: bool) -> dict[str, str]:
        return {}

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.linear(self.one(values)) + self.linear(self.two(values))  # type: ignore[no-any-return]


def test_a_weight_behind_two_norms_is_refused() -> None:
    model = Twice()
    edges = edges_of(model, lambda: model(torch.randn(3, 6)))
    assert edges.refused == {
        "one": "linear.weight, which it feeds, is also fed by two",
        "two": "linear.weight, which it feeds, is also fed by one",
    }


def test_a_constant_channel_is_named() -> None:
    model = build("mixtral")
    call = lambda: model(**inputs("mixtral"))  # noqa: E731
    edges = edges_of(model, call)
    model.model.layers[1].input_layernorm.weight.data[7] = 0
    with pytest.raises(QuantizationError, match=r"model\.layers\.1\.input_layernorm: channel 7 .* always 0 .*leave"):
        fold(model, call, edges)


def test_a_channel_of_nan_is_named() -> None:
    model = build("phimoe")
    call = lambda: model(**inputs("phimoe"))  # noqa: E731
    edges = edges_of(model, call)
    model.model.layers[0].input_layernorm.weight.data[3] = float("nan")
    with pytest.raises(NotFiniteError, match=r"model\.layers\.0\.input_layernorm: channel 3 .*not finite"):
        fold(model, call, edges)
