"""PREFIXSPLIT and the placement of one sequence, for runtimes: all layers at once from its prefill statistics.

Letters: L layers, E experts of every layer, K of them on the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from moeq.artifacts.assignment import FULL
from moeq.assigners.prefix_split import increments, split
from moeq.errors import AssignmentError


@dataclass(frozen=True, kw_only=True)
class Decision:
    """[L, E] each. hot: which experts go to the GPU in full precision; bits: 16 for those; importance."""

    hot: np.ndarray
    bits: np.ndarray
    importance: np.ndarray


def decide(
    counts: np.ndarray,
    scores: np.ndarray,
    losses: np.ndarray,
    average: Fraction | int | str,
    *,
    gpu_experts: int = 0,
    alpha: float = 0.5,
    weighted: bool = True,
    selector: bool = True,
) -> Decision:
    """Placement and widths for one sequence (paper 000, Algorithm 1, lines 9 to 22).

    counts, scores: [L, E] how often prefill chose every expert, and the sum of its routing weights; losses: [L, E, 4]
    at 1, 2, 3 and 4 bits, measured once; average: code bits of experts on NDP, 1 to 4; weighted: multiply losses by the
    share of the routing weight (False: as the paper prints them); selector: False gives all experts on NDP the average,
    which must then be a whole number (the paper's ablation). Raises AssignmentError for shapes that do not match or a
    budget that cannot be met.
    """
    layers, experts = counts.shape
    if scores.shape != counts.shape or losses.shape != (layers, experts, 4):
        raise AssignmentError(
            f"counts {counts.shape}, scores {scores.shape} and losses {losses.shape} do not match",
            do="give [L, E], [L, E] and [L, E, 4]",
        )
    if not 0 <= gpu_experts <= experts:
        raise AssignmentError(f"gpu_experts is {gpu_experts}, a layer has {experts} experts")
    mass = _shares(scores)
    importance = alpha * _shares(counts) + (1 - alpha) * mass
    order = np.argsort(-importance, axis=1, kind="stable")
    hot = np.zeros((layers, experts), bool)
    np.put_along_axis(hot, order[:, :gpu_experts], True, 1)
    if not selector:
        bits = np.where(hot, FULL, _whole(Fraction(average)))
        return Decision(hot=hot, bits=bits, importance=importance)
    cold = order[:, gpu_experts:]
    ordered = np.take_along_axis(losses * mass[..., None] if weighted else losses, cold[..., None], 1)
    count = experts - gpu_experts
    budgets = np.array(increments([count] * layers, Fraction(average)))
    runs = split(ordered, np.full(layers, count), budgets)
    widths = 4 - (np.arange(count) >= runs[:, :3].cumsum(1)[..., None]).sum(1)
    bits = np.full((layers, experts), FULL)
    np.put_along_axis(bits, cold, widths, 1)
    return Decision(hot=hot, bits=bits, importance=importance)


def _whole(average: Fraction) -> int:
    if average.denominator != 1 or not 1 <= average <= 4:
        raise AssignmentError(f"average of {average} bits without the selector", do="choose 1, 2, 3 or 4")
    return int(average)


def _shares(values: np.ndarray) -> np.ndarray:
    """Rows [L, E] divided by their sums; rows of zeros stay."""
    total = values.sum(1, keepdims=True)
    return np.asarray(np.where(total > 0, values / np.where(total > 0, total, 1), 0.0))
