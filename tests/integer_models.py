"""Tiny vision transformers with random weights, and images for them, for tests of the integer forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    DeiTConfig,
    DeiTForImageClassification,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)

from moeq.integers.vit.configuration import MoeViTConfig
from moeq.integers.vit.modeling import MoeViTForImageClassification

SIZES: dict[str, Any] = {"image_size": 6, "patch_size": 2, "hidden_size": 24, "num_attention_heads": 3,
                         "num_hidden_layers": 2, "intermediate_size": 20}  # fmt: skip
MIXTURE: dict[str, Any] = {"moe_layers": [1], "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
KINDS = ("moe", "tasks", "plain", "vit", "deit")


def made(kind: str) -> PreTrainedModel:
    """A model whose weights, norms and biases are all random: MoE, MoE with mean pooling and two tasks, or dense."""
    torch.manual_seed(KINDS.index(kind))
    model: PreTrainedModel
    if kind == "moe":
        model = MoeViTForImageClassification(MoeViTConfig(**SIZES, **MIXTURE, num_channels=1, pixel_scale=1 / 16))
    elif kind == "tasks":
        own = {"pooling": "mean", "gating": "topk_over_softmax", "router_bias": True, "num_tasks": 2}
        model = MoeViTForImageClassification(
            MoeViTConfig(**SIZES, **MIXTURE, **own, num_channels=3, num_labels=[4, 7], pixel_scale=1 / 255)
        )
    elif kind == "plain":
        model = MoeViTForImageClassification(MoeViTConfig(**SIZES, num_channels=1, moe_layers=[], qkv_bias=False))
    elif kind == "vit":
        model = ViTForImageClassification(ViTConfig(**SIZES, num_labels=5))
    else:
        model = DeiTForImageClassification(DeiTConfig(**SIZES, num_labels=5))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = "norm" in name and name.endswith("weight")
            parameter.copy_(torch.randn_like(parameter) * (0.2 if norm else 0.3) + (1 if norm else 0))
    return model.eval()


def pixels(model: PreTrainedModel, count: int, seed: int = 0) -> Tensor:
    """Images [B, C, H, W] as the model is given them: whole multiples of its pixel scale, or real numbers."""
    config: Any = model.config
    shape = (count, config.num_channels, config.image_size, config.image_size)
    generator = torch.Generator().manual_seed(seed)
    if config.model_type != "moe_vit":
        return torch.randn(shape, generator=generator).clamp(-2, 2)
    top = round(1 / config.pixel_scale)
    return torch.randint(0, top + 1, shape, generator=generator) * config.pixel_scale
