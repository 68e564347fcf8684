"""Biases that a family's configuration allows and a checkpoint does without: they can be given to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

ROUTER_BIAS = "router_bias"  # a key of the configuration; modules called router or routers gain biases


def gain_router_biases(model: Any) -> list[str]:
    """Give every router a bias of zeros, where the configuration has a key for it that is off; returns their names."""
    if getattr(model.config, ROUTER_BIAS, True):
        return []
    biases: list[str] = []
    for name, module in model.named_modules():
        parts = name.split(".")
        if isinstance(module, nn.Linear) and module.bias is None and {"router", "routers"} & set(parts[-2:]):
            module.bias = nn.Parameter(torch.zeros(module.out_features), requires_grad=False)
            biases.append(f"{name}.bias")
    return biases
