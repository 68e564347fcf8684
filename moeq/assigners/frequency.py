"""frequency: widths by rank of activation frequency, within the budget.

Experts are taken from the most to the least chosen; each gets the widest width that leaves enough for those after it
at the narrowest. Without a list of widths these are the two that enclose the budget: at 2.5 code bits the more frequent
half has 3 and the rest 2, at 3 they have 4 and 2. Scope layer (the default) ranks within a layer and spends the same
share in each, more where the narrowest width takes more; scope model ranks by the share of the layer's activations.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moeq.artifacts.assignment import Assignment
from moeq.assigners.allocator import Allocator
from moeq.assigners.inputs import AssignInputs, build, hot_masks, ranking
from moeq.assigners.limits import Limit, choices, limit_of


def assign(inputs: AssignInputs) -> Assignment:
    """Assign by rank; AssignmentError for a budget that cannot be met."""
    hot = hot_masks(inputs)
    limit = limit_of(inputs, choices(inputs), hot)
    pair = np.arange(len(limit.widths)) if inputs.config.widths else enclosing(limit)
    layers = range(len(hot))
    shares = [_frequency(inputs, layer) for layer in layers]
    bits = [np.full(len(mask), limit.widths[pair[0]]) for mask in hot]
    cold = [(layer, expert) for layer in layers for expert in np.flatnonzero(~hot[layer]).tolist()]
    if inputs.config.scope == "model":
        groups = [(cold, limit.total)]
    else:
        totals = enumerate(_by_layer(limit, int(pair[0])))
        groups = [([place for place in cold if place[0] == layer], total) for layer, total in totals]
    for experts, total in groups:
        order = ranking(np.array([shares[layer][expert] for layer, expert in experts]))
        costs = limit.costs[[experts[index][0] for index in order]][:, pair] if experts else np.zeros((0, len(pair)))
        for index, choice in zip(order, spend(costs, total), strict=True):
            layer, expert = experts[index]
            bits[layer][expert] = limit.widths[pair[choice]]
    return build(inputs, bits, hot)


def _by_layer(limit: Limit, narrowest: int) -> list[int]:
    """The limit cut into layers, none of which has less than its experts cost at the narrowest width, by its place."""
    least = limit.counts * limit.costs[:, narrowest]
    raised = np.zeros(len(least), bool)
    while True:
        rest = replace(limit, counts=np.where(raised, 0, limit.counts), total=limit.total - int(least[raised].sum()))
        shares = np.where(raised, least, rest.by_layer())
        if (shares >= least).all():
            return [int(share) for share in shares]
        raised |= shares < least


def _frequency(inputs: AssignInputs, layer: int) -> np.ndarray:
    """Share of the layer's activations, [E]."""
    counts, _ = inputs.profile.total(layer, inputs.phase())
    return np.asarray(counts / max(1, counts.sum()))


def enclosing(limit: Limit) -> np.ndarray:
    """Positions of the widest width that all experts could have for less than the limit, and of the narrowest for more.

    The narrowest or widest width alone where there is none.
    """
    uniform = limit.uniform()
    below, above = np.flatnonzero(uniform < limit.total), np.flatnonzero(uniform > limit.total)
    ends = (below[-1] if len(below) else 0, above[0] if len(above) else len(uniform) - 1)
    return np.unique(np.array(ends))


def spend(costs: np.ndarray, total: int) -> list[int]:
    """Choices of experts in order of rank: costs [N, W] rising along a row; the first ones get as much as they can."""
    left = total - int(costs[:, 0].sum()) if len(costs) else total
    chosen = []
    for row in costs:
        choice = max(int(np.searchsorted(row - row[0], left, side="right")) - 1, 0)
        left -= int(row[choice] - row[0])
        chosen.append(choice)
    return chosen


ALLOCATOR = Allocator(
    name="frequency",
    help="wider the more often an expert is chosen, between the two widths that enclose the budget",
    assign=assign,
    budgets=("bits_per_weight", "code_bits", "expert_bytes", "size"),
    weighs=("statistics",),
    reads=("widths", "scope"),
    implied={"scope": "layer"},
    within_target=True,
)
