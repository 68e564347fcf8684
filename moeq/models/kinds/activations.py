"""Names of the activation functions that a kernel may compute by itself.

A function is recognized by its class alone: a subclass, a clipped or a parametrized one may compute something else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn import functional
from transformers import activations

_NAMES: dict[Any, str] = {
    nn.SiLU: "silu",
    activations.SiLUActivation: "silu",
    functional.silu: "silu",
    activations.GELUActivation: "gelu",
    activations.GELUTanh: "gelu_pytorch_tanh",
    activations.NewGELUActivation: "gelu_pytorch_tanh",  # the same formula
    nn.ReLU: "relu",
    functional.relu: "relu",
    activations.ReLUSquaredActivation: "relu2",
    activations.QuickGELUActivation: "quick_gelu",
}
_GELU = {"none": "gelu", "tanh": "gelu_pytorch_tanh"}


def activation_name(act: Callable[..., Any]) -> str | None:
    """The name of an activation, None for one that is not known."""
    if type(act) is nn.GELU:
        return _GELU.get(act.approximate)
    return _NAMES.get(type(act)) or (_NAMES.get(act) if not isinstance(act, nn.Module) else None)
