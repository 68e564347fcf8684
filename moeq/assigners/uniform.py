"""uniform: every expert at the same width (those on the GPU in full precision): `bits`, or the widest that fits."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from moeq.artifacts.assignment import Assignment
from moeq.assigners.allocator import Allocator
from moeq.assigners.inputs import AssignInputs, build, hot_masks
from moeq.assigners.limits import choices, limit_of, next_wider
from moeq.recipe import BitsOrFull, MethodSettings


class UniformSettings(MethodSettings):
    """The width, where no budget decides it."""

    bits: BitsOrFull | None = Field(None, description="the width")

    def named(self) -> set[int]:
        """The width, where it is given."""
        return set() if self.bits is None else {self.bits}


def assign(inputs: AssignInputs) -> Assignment:
    """Give every NDP expert one width; the top `gpu_experts` of each layer stay in full precision on the GPU.

    Raises AssignmentError for a budget that the narrowest width exceeds.
    """
    hot = hot_masks(inputs)
    bits: int | None = inputs.settings(UniformSettings).bits
    if bits is None:
        limit = limit_of(inputs, choices(inputs), hot)
        bits = limit.widths[limit.widest()]
    return build(inputs, [np.full(len(mask), bits) for mask in hot], hot)


def remark(inputs: AssignInputs, assignment: Assignment) -> str | None:
    """What the next wider one would take, where a budget decided the width."""
    return None if inputs.settings(UniformSettings).bits is not None else next_wider(inputs, assignment)


ALLOCATOR = Allocator(
    name="uniform",
    help="every expert at one width: the one that is named, or the widest that the budget pays for",
    assign=assign,
    settings=UniformSettings,
    budgets=("bits", "bits_per_weight", "expert_bytes", "size"),
    weighs=(),
    within_target=True,
    remark=remark,
    trials=lambda inputs, _: [("uniform", {"bits": bits}) for bits in inputs.measured()],
)
