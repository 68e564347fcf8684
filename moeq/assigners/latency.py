"""NDP latency: the expected time a token that the near-data side spends on the experts it was given.

The sum over all experts off the GPU of the tokens that a token sends there (the profile's, of the phase that the recipe
counts) times the time of one expert at its width (AssignInputs.ndp_seconds, the estimator's), at batch 1.

Letters: E experts of a layer, W widths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moeq.artifacts.assignment import Assignment, matrix_widths
from moeq.assigners.inputs import AssignInputs, activation_rate
from moeq.assigners.limits import Latency, Limit
from moeq.errors import AssignmentError, BudgetError

DIGITS = 6  # of the least possible latency in a refusal


def seconds(inputs: AssignInputs, layer: int, widths: Sequence[int]) -> np.ndarray:
    """Expected seconds a token of every expert of a layer at every width, [E, W].

    Raises AssignmentError when the times of the experts were not given.
    """
    if not inputs.ndp_seconds:
        raise AssignmentError("the times of the experts are not known", do="give AssignInputs.ndp_seconds")
    times = inputs.ndp_seconds[layer]
    rate = inputs.tokens_given[layer] if inputs.tokens_given else activation_rate(inputs, layer)
    return np.asarray(rate[:, None] * np.array([times[width] for width in widths]))


def achieved(inputs: AssignInputs, assignment: Assignment) -> float:
    """Expected seconds a token of an assignment's experts off the GPU."""
    total = 0.0
    for layer, (every, hot) in enumerate(zip(assignment.expert_widths(), assignment.hot(), strict=True)):
        widths = sorted({bits for width in every for bits in matrix_widths(width)})
        times = seconds(inputs, layer, widths)
        for expert in np.flatnonzero(~hot).tolist():  # an expert's matrices have equally many weights
            total += float(np.mean([times[expert, widths.index(bits)] for bits in matrix_widths(every[expert])]))
    return total


def limited(inputs: AssignInputs, limit: Limit, hot: Sequence[np.ndarray]) -> Limit:
    """A limit with the section's latency beside it; as it is where the section has none."""
    most = inputs.config.ndp_latency_ms
    if most is None:
        return limit
    times = tuple(seconds(inputs, layer, limit.widths)[~mask] for layer, mask in enumerate(hot))
    return replace(limit, latency=Latency(times=times, seconds=most / 1e3))


def refusal(least: float, most: float) -> BudgetError:
    """The error for a limit below the least possible latency, both in seconds."""
    digits = DIGITS - 1 - math.floor(math.log10(least * 1e3))
    possible = math.ceil(least * 1e3 * 10**digits) / 10**digits  # rounded up, so that it can be asked for
    return BudgetError(
        f"{most * 1e3:g} ms a token on the NDP cannot be met within the budget; the least possible is "
        f"{possible:.{DIGITS}g}",
        where="ndp_latency_ms",
        do=f"ask for at least {possible:.{DIGITS}g}, or name narrower widths or more gpu_experts",
    )
