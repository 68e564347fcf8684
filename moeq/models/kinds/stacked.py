"""Experts stacked in three-dimensional parameters, called with hidden, indices and weights: about sixty families.

transformers marks what differs by flags on the module: transposed matrices [E, in, out], interleaved gate and up,
biases, no gate at all, a norm on every expert's output; and by the family's own `_apply_gate`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations import moe as hf_moe

from moeq.models.kinds.base import GATED, NON_GATED, Gate, Kind, act_alone, act_then_multiply

FUSED = "gate_up_proj"
BIAS = "_bias"
_KNOWN = {f"{name}{suffix}" for name in (FUSED, *GATED) for suffix in ("", BIAS)}


class Stacked(Kind):
    """gate_up_proj [E, 2I, H] or up_proj [E, I, H], and down_proj [E, H, I], in any of the layouts of transformers."""

    name = "stacked"

    def holds(self, module: nn.Module) -> bool:
        own = dict(module.named_parameters(recurse=False))
        stacked = [name for name in (FUSED, "up_proj", "down_proj") if name in own and own[name].dim() == 3]
        return "down_proj" in stacked and len(stacked) > 1 and _arguments(module) >= 3  # shared experts take one

    def refusal(self, module: nn.Module) -> str | None:
        unknown = sorted({name for name, _ in module.named_parameters(recurse=False)} - _KNOWN)
        if unknown:
            return f"it has a parameter that moeq does not know, {unknown[0]}"
        return None

    def sizes(self, module: nn.Module) -> tuple[int, int, int]:
        down = self.weights(module, slice(None))["down_proj"]
        return down.shape[0], down.shape[1], down.shape[2]

    def projections(self, module: nn.Module) -> tuple[str, ...]:
        return GATED if hasattr(module, FUSED) else NON_GATED

    def parameters(self, module: nn.Module) -> tuple[str, ...]:
        return tuple(name for name, _ in module.named_parameters(recurse=False))

    def weights(self, module: nn.Module, experts: slice) -> dict[str, Tensor]:
        of: Any = module
        count = of.down_proj.shape[0]
        first, down = (
            _upright(module, getattr(of, name).data[:count][experts]) for name in (_first(module), "down_proj")
        )
        return {**_split(module, first, 1), "down_proj": down}

    def biases(self, module: nn.Module, experts: slice) -> dict[str, Tensor]:
        of: Any = module
        if getattr(module, f"{_first(module)}{BIAS}", None) is None:
            return {}
        first, down = (getattr(of, f"{name}{BIAS}").data[experts] for name in (_first(module), "down_proj"))
        return {**_split(module, first, 1), "down_proj": down}

    def gate(self, module: nn.Module) -> Gate:
        of: Any = module
        own = _gate_of(module)
        if not hasattr(module, FUSED):
            return act_alone(of.act_fn)
        if own is None:
            return act_then_multiply(of.act_fn)
        join = _concatenate if getattr(module, "is_concatenated", True) else _interleave
        return lambda parts: own(module, join(parts["gate_proj"], parts["up_proj"]))

    def finish(self, module: nn.Module) -> Callable[[Tensor], Tensor] | None:
        return module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None  # type: ignore[return-value]

    def remarks(self, module: nn.Module) -> tuple[str, ...]:
        found = {
            "transposed": getattr(module, "is_transposed", False),
            "interleaved": not getattr(module, "is_concatenated", True),
            "biases": hasattr(module, f"{_first(module)}{BIAS}"),
            "no gate": not hasattr(module, FUSED),
            "own gate": _gate_of(module) is not None,
            "norm after": getattr(module, "has_post_expert_norm", False),
            "identity experts": self.identity_beyond(module),
        }
        return tuple(name for name, here in found.items() if here)

    def identity_beyond(self, module: nn.Module) -> bool:
        return hasattr(module, "identity_expert")


def _first(module: nn.Module) -> str:
    return FUSED if hasattr(module, FUSED) else "up_proj"


def _upright(module: nn.Module, stack: Tensor) -> Tensor:
    """[e, rows, inputs] as a view."""
    return stack.mT if getattr(module, "is_transposed", False) else stack


def _split(module: nn.Module, stack: Tensor, axis: int) -> dict[str, Tensor]:
    """gate_proj and up_proj of what holds both, or up_proj alone; views."""
    if not hasattr(module, FUSED):
        return {"up_proj": stack}
    if getattr(module, "is_concatenated", True):
        gate, up = stack.chunk(2, axis)
    else:
        gate, up = stack[:, ::2], stack[:, 1::2]
    return {"gate_proj": gate, "up_proj": up}


def _concatenate(gate: Tensor, up: Tensor) -> Tensor:
    return torch.cat([gate, up], -1)


def _interleave(gate: Tensor, up: Tensor) -> Tensor:
    return torch.stack([gate, up], -1).flatten(-2)


def _gate_of(module: nn.Module) -> Callable[[Any, Tensor], Tensor] | None:
    """The family's own gate function, None where it is the usual one."""
    own = getattr(type(module), "_apply_gate", None)
    return None if own is hf_moe._default_apply_gate else own


def _arguments(module: nn.Module) -> int:
    """How many arguments its forward takes; a decorated one takes any number."""
    parameters = list(inspect.signature(inspect.unwrap(type(module).forward)).parameters.values())
    return 3 if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(parameters) - 1
