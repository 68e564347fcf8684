"""uniform: every expert at the same width (those on the GPU in full precision)."""

from __future__ import annotations

import numpy as np

from moeq.artifacts.assignment import Assignment
from moeq.assigners.inputs import AssignInputs, build, hot_experts, importance


def assign(inputs: AssignInputs) -> Assignment:
    """Give every NDP expert `bits`; the top `gpu_experts` of each layer stay in full precision on the GPU."""
    layers = range(len(inputs.profile.layers))
    scores = [importance(inputs, layer) for layer in layers]
    hot = [hot_experts(inputs, scores[layer], layer) for layer in layers]
    return build(inputs, [np.full(len(s), inputs.config.bits) for s in scores], hot)
