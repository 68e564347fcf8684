"""Assigners: one file an algorithm, found by its name (prefix-split is prefix_split.py), each with `assign(inputs)`."""

from __future__ import annotations

import importlib
import pkgutil

from moeq.artifacts.assignment import Assignment
from moeq.artifacts.targets import TARGETS, check
from moeq.assigners.inputs import AssignInputs
from moeq.errors import AssignmentError

_SHARED = {"inputs", "latency", "limits", "online", "report", "sensitivity"}  # modules that are no assigners


def known_methods() -> list[str]:
    """Names of all assigners, as a recipe writes them."""
    return sorted(m.name.replace("_", "-") for m in pkgutil.iter_modules(__path__) if m.name not in _SHARED)


def assign(inputs: AssignInputs) -> Assignment:
    """Run the assigner that the recipe names.

    Raises AssignmentError when the budget cannot be met, or when the target cannot load what was assigned.
    """
    method = inputs.config.method
    if method not in known_methods():
        raise AssignmentError(f"no assigner {method!r}", do=f"use one of {', '.join(known_methods())}")
    module = importlib.import_module(f"{__name__}.{method.replace('-', '_')}")
    result: Assignment = module.assign(inputs)
    if inputs.config.target is not None:
        check(
            TARGETS[inputs.config.target],
            result.expert_widths(),
            inputs.profile.layers,
            symmetric=inputs.symmetric,
            group_size=inputs.group_size,
        )
    return result
