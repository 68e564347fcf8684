"""Assigners: one file an algorithm, each with an `ALLOCATOR`, found by itself."""

from __future__ import annotations

from moeq.artifacts.assignment import Assignment
from moeq.artifacts.targets import check, loaded_by
from moeq.assigners.inputs import AssignInputs
from moeq.errors import AssignmentError
from moeq.registry import ALLOCATORS


def assign(inputs: AssignInputs) -> Assignment:
    """Run the allocator that the recipe names.

    Raises AssignmentError when the budget cannot be met, or when the target cannot load what was assigned.
    """
    result: Assignment = ALLOCATORS.get(inputs.config.method, AssignmentError).assign(inputs)
    target = loaded_by(inputs.config.target) if inputs.config.target is not None else None
    if target is not None:
        check(
            target,
            result.expert_widths(),
            inputs.profile.layers,
            symmetric=inputs.symmetric,
            group_size=inputs.group_size,
        )
    return result
