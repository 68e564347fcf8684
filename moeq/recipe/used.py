"""What of an assignment's parameters had a say in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeq.recipe.assign import BUDGETS, SHARED
from moeq.recipe.earlier import shown_parameters
from moeq.registry import ALLOCATORS

PLACING = ("alpha", "normalization", "statistics")  # of experts on the GPU, by every method
ALWAYS = ("quantizer", "target")
WEIGHING = (*PLACING, "loss_weighting", "layer_weighting", "selector")


def used_parameters(method: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that the method read, by the names that they have now; of a method that is not installed, all."""
    shown = shown_parameters(parameters)
    allocator = ALLOCATORS.find(method)
    if allocator is None:
        return shown
    hot = bool(parameters.get("gpu_experts"))
    read = {*ALWAYS, *BUDGETS, *allocator.reads, *(WEIGHING if allocator.weighs is None else allocator.weighs)}
    read |= {"gpu_experts", *PLACING} if hot else set()
    unread = {*SHARED, *WEIGHING, "gpu_experts", "hardware"} - read
    return {name: value for name, value in shown.items() if name not in unread}


def parameters_text(method: str, parameters: Mapping[str, Any]) -> str:
    """Those parameters as one line of a page."""
    return ", ".join(f"{name} {value}" for name, value in sorted(used_parameters(method, parameters).items()))
