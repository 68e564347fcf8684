"""Experts stacked in three-dimensional parameters, called with hidden, indices and weights: about sixty families.

transformers marks what differs by flags on the module: transposed matrices [E, in, out], interleaved gate and up,
biases, no gate at all, a norm on every expert's output; and by the family's own `_apply_gate`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.integrations import moe as hf_moe

from moeq.models.kinds.base import GATED, NON_GATED, Experts, Gate, Kind, without_weights_of

FUSED = "gate_up_proj"
BIAS = "_bias"
_KNOWN = {f"{name}{suffix}" for name in (FUSED, *GATED) for suffix in ("", BIAS)}


class Stacked(Kind):
    """gate_up_proj [E, 2I, H] or up_proj [E, I, H], and down_proj [E, H, I], in any of the layouts of transformers."""

    name = "stacked"
    activation = "act_fn"

    def holds(self, module: Experts) -> bool:
        own = dict(module.named_parameters(recurse=False))
        stacked = [name for name in (FUSED, "up_proj", "down_proj") if name in own and own[name].dim() == 3]
        return "down_proj" in stacked and len(stacked) > 1 and _arguments(module) >= 3  # shared experts take one

    def refusal(self, module: Experts) -> str | None:
        unknown = sorted(set(self.parameters(module)) - _KNOWN)
        return f"it has a parameter that moeq does not know, {unknown[0]}" if unknown else None

    def sizes(self, module: Experts) -> tuple[int, int, int]:
        experts, hidden, inter = self.weights(module, slice(None))["down_proj"].shape
        return experts, hidden, inter

    def projections(self, module: Experts) -> tuple[str, ...]:
        return GATED if hasattr(module, FUSED) else NON_GATED

    def parameters(self, module: Experts) -> tuple[str, ...]:
        return tuple(name for name, _ in module.named_parameters(recurse=False))

    def weights(self, module: Experts, experts: slice) -> dict[str, Tensor]:
        count = module.down_proj.shape[0]
        first, down = (getattr(module, name).data[:count][experts] for name in (_first(module), "down_proj"))
        if getattr(module, "is_transposed", False):
            first, down = first.mT, down.mT
        return {**_split(module, first), "down_proj": down}

    def biases(self, module: Experts, experts: slice) -> dict[str, Tensor]:
        if getattr(module, f"{_first(module)}{BIAS}", None) is None:
            return {}
        first, down = (getattr(module, f"{name}{BIAS}").data[experts] for name in (_first(module), "down_proj"))
        return {**_split(module, first), "down_proj": down}

    def gate(self, module: Experts) -> Gate:
        own = _gate_of(module)
        if own is None or not hasattr(module, FUSED):
            return super().gate(module)
        return OwnGate(own, module, getattr(module, "is_concatenated", True), self.parameters(module))

    def gate_activation(self, module: Experts) -> str | None:
        own = hasattr(module, FUSED) and _gate_of(module) is not None
        return None if own else super().gate_activation(module)

    def finish(self, module: Experts) -> Callable[[Tensor], Tensor] | None:
        return module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None

    def remarks(self, module: Experts) -> tuple[str, ...]:
        marks = {
            "transposed": getattr(module, "is_transposed", False),
            "interleaved": not getattr(module, "is_concatenated", True),
            "biases": hasattr(module, f"{_first(module)}{BIAS}"),
            "no gate": not hasattr(module, FUSED),
            "own gate": _gate_of(module) is not None,
            "norm after": getattr(module, "has_post_expert_norm", False),
            "identity experts": self.identity_beyond(module),
        }
        return tuple(mark for mark, here in marks.items() if here)

    def identity_beyond(self, module: Experts) -> bool:
        return hasattr(module, "identity_expert")


@dataclass(frozen=True)
class OwnGate:
    """A family's own gate, [T, I]; it is handed to another process without the experts' matrices, which it does not
    read. together: whether it takes gate and up one behind the other, or in turns."""

    own: Callable[[Experts, Tensor], Tensor]
    module: Experts
    together: bool
    matrices: tuple[str, ...]

    def __call__(self, parts: dict[str, Tensor]) -> Tensor:
        both = [parts["gate_proj"], parts["up_proj"]]
        return self.own(self.module, torch.cat(both, -1) if self.together else torch.stack(both, -1).flatten(-2))

    def __reduce__(self) -> tuple[Any, ...]:
        shell = without_weights_of(self.module, self.matrices)
        return OwnGate, (self.own, shell, self.together, self.matrices)


def _first(module: Experts) -> str:
    return FUSED if hasattr(module, FUSED) else "up_proj"


def _split(module: Experts, stack: Tensor) -> dict[str, Tensor]:
    """gate_proj and up_proj of what holds both along its second axis, or up_proj alone; views."""
    if not hasattr(module, FUSED):
        return {"up_proj": stack}
    together = getattr(module, "is_concatenated", True)
    gate, up = stack.chunk(2, 1) if together else (stack[:, ::2], stack[:, 1::2])
    return {"gate_proj": gate, "up_proj": up}


def _gate_of(module: Experts) -> Callable[[Experts, Tensor], Tensor] | None:
    """The family's own gate function, None where it is the usual one."""
    own = getattr(type(module), "_apply_gate", None)
    return None if own is hf_moe._default_apply_gate else own


def _arguments(module: Experts) -> int:
    """How many arguments its forward takes; a decorated one takes any number."""
    parameters = list(inspect.signature(inspect.unwrap(type(module).forward)).parameters.values())
    return 3 if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(parameters) - 1
