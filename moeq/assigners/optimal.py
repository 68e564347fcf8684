"""optimal: the assignment of least objective within the budget, proven (numerics.knapsack).

Every expert that is not on the GPU takes one of the widths, or (granularity projection) each of its matrices does;
scope model (the default) spends one budget over all layers, scope layer the same share in each. With granularity layer,
or within a target that takes one width for a layer or for the model, the experts that share a width are one item; with
granularity projection within one that has one type for a matrix of all of a layer's experts, those are.

With a limit of NDP latency beside the budget the bound is printed where the search ends without a proof
(numerics.two_limits).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from moeq.artifacts.assignment import FULL, Assignment
from moeq.artifacts.targets import OF_MATRICES, TARGETS, Granularity, granularity_within, refuse_grid
from moeq.assigners import latency
from moeq.assigners.allocator import Allocator, Widths
from moeq.assigners.inputs import AssignInputs, build, expert_widths, hot_masks
from moeq.assigners.limits import Limit, byte_limit, choices, limit_of
from moeq.assigners.sensitivity import matrix_tables, tables
from moeq.errors import AssignmentError, BudgetError
from moeq.numerics import knapsack, two_limits


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """bits: [E] a layer, or [E, P] of matrices, those of GPU experts are not decided; loss: their objective; bound:
    none can have less."""

    bits: list[np.ndarray]
    loss: float
    bound: float
    proven: bool


def assign(inputs: AssignInputs) -> Assignment:
    """The optimum as an assignment; AssignmentError for a budget that cannot be met."""
    hot = hot_masks(inputs)
    target = TARGETS[inputs.config.target or "moeq"]
    reason = refuse_grid(target, symmetric=inputs.symmetric)
    if reason is not None:
        raise AssignmentError(reason, where=f"target {target.name}")
    granularity = granularity_within(target, inputs.config.granularity)
    limit = latency.limited(inputs, limit_of(inputs, choices(inputs), hot, granularity), hot)
    found = optimum(inputs, limit, hot, granularity, inputs.config.scope or "model")
    return build(inputs, found.bits, hot)


def optimum(
    inputs: AssignInputs,
    limit: Limit,
    hot: Sequence[np.ndarray],
    granularity: Granularity = "expert",
    scope: str = "model",
) -> Optimum:
    """The least objective within a limit, for granularity projection one of matrices; kept in the inputs' memo."""
    config = inputs.config
    of_matrices = config.granularity == "projection"
    weighting = (config.quantizer, config.loss_weighting, config.layer_weighting, config.statistics, of_matrices)
    masks = b"".join(mask.tobytes() for mask in hot)
    most = None if limit.latency is None else limit.latency.seconds
    key = ("optimum", weighting, limit.unit, limit.total, most, limit.widths, masks, granularity, scope)
    if key not in inputs.memo:
        inputs.memo[key] = _optimum(inputs, limit, hot, granularity, scope)
    found: Optimum = inputs.memo[key]
    return found


def _optimum(
    inputs: AssignInputs, limit: Limit, hot: Sequence[np.ndarray], granularity: Granularity, scope: str
) -> Optimum:
    layers = range(len(hot))
    of = _matrix_losses if granularity in OF_MATRICES else _losses
    values = [of(inputs, layer, limit.widths)[~hot[layer]] for layer in layers]
    if scope == "model":
        solved = [_solve(values, limit, list(layers), limit.total, granularity)]
    else:
        solved = [_solve(values, limit, [layer], total, granularity) for layer, total in enumerate(limit.by_layer())]
    bits = []
    chosen = [part for solution, parts in solved for part in parts]
    for layer in layers:
        widths = np.full((len(hot[layer]), *values[layer].shape[1:-1]), limit.widths[0])
        widths[~hot[layer]] = np.array(limit.widths)[chosen[layer]]
        bits.append(widths)
    return Optimum(
        bits=bits,
        loss=sum(solution.loss for solution, _ in solved),
        bound=sum(solution.bound for solution, _ in solved),
        proven=all(solution.proven for solution, _ in solved),
    )


def _losses(inputs: AssignInputs, layer: int, widths: Sequence[int]) -> np.ndarray:
    """Objective [E, W] of a layer's experts."""
    table = tables(inputs)[layer]
    missing = [width for width in widths if width not in table.losses]
    if missing:
        raise AssignmentError(f"the loss table lacks {missing} bits", where=table.name, do="add them to losses.bits")
    return np.stack([table.losses[width] for width in widths], 1)


def _matrix_losses(inputs: AssignInputs, layer: int, widths: Sequence[int]) -> np.ndarray:
    """Objective [E, P, W] of the matrices of a layer's experts."""
    _losses(inputs, layer, widths)  # raises for widths that were not measured
    matrices = matrix_tables(inputs)[layer].values()
    return np.stack([np.stack([one[width] for width in widths], 1) for one in matrices], 1)


def _groups(tables: Sequence[np.ndarray], layers: Sequence[int], granularity: Granularity) -> list[np.ndarray]:
    """Tables [e, W] of some layers, added up over the experts that share a width."""
    mine = [tables[layer] for layer in layers]
    if granularity == "expert":
        return mine
    sums = [table.sum(0, keepdims=True) for table in mine]
    return sums if granularity == "layer" else [np.asarray(np.sum(sums, 0))]


def _solve(
    values: Sequence[np.ndarray], limit: Limit, layers: Sequence[int], total: int, granularity: Granularity
) -> tuple[knapsack.Solution, list[np.ndarray]]:
    """The knapsack of some layers; the choice [e] of every decided expert, or [e, P] of its matrices, a layer."""
    if granularity in OF_MATRICES:
        return _solve_matrices(values, limit, layers, total, together=granularity == "stack")
    groups = _groups(values, layers, granularity)
    costs = [limit.costs[layer] * (1 if granularity == "expert" else limit.counts[layer]) for layer in layers]
    if granularity == "model":
        costs = [np.asarray(sum(costs, np.zeros(len(limit.widths), np.int64)))]
    stacked = np.concatenate([np.tile(cost, (len(group), 1)) for cost, group in zip(costs, groups, strict=True)])
    where = "the model" if len(layers) == len(values) else f"layer {layers[0]}"
    times = None if limit.latency is None else _groups(limit.latency.times, layers, granularity)
    solution = _within(np.concatenate(groups), stacked, total, limit, where, times)
    if granularity == "model":
        return solution, [np.repeat(solution.choices, len(values[layer])) for layer in layers]
    sizes = [len(group) for group in groups]
    parts = np.split(solution.choices, np.cumsum(sizes)[:-1])
    if granularity == "layer":
        parts = [np.repeat(part, len(values[layer])) for part, layer in zip(parts, layers, strict=True)]
    return solution, parts


def _solve_matrices(
    values: Sequence[np.ndarray], limit: Limit, layers: Sequence[int], total: int, *, together: bool
) -> tuple[knapsack.Solution, list[np.ndarray]]:
    """The knapsack of some layers' matrices, values [e, P, W]; the choice [e, P] of every matrix, a layer.

    together: one matrix of all of a layer's experts is one item.
    """
    if together:
        return _solve_stacks(values, limit, layers, total)
    groups = [values[layer].reshape(-1, len(limit.widths)) for layer in layers]
    stacked = np.concatenate([np.tile(limit.matrices[layer], (len(values[layer]), 1)) for layer in layers])
    where = "the model" if len(layers) == len(values) else f"layer {layers[0]}"
    times = None
    if limit.latency is not None:  # an expert's matrices have equally many weights
        counts = [len(limit.matrices[layer]) for layer in layers]
        times = [
            np.repeat(limit.latency.times[layer] / count, count, 0) for layer, count in zip(layers, counts, strict=True)
        ]
    solution = _within(np.concatenate(groups), stacked, total, limit, where, times)
    parts = np.split(solution.choices, np.cumsum([len(group) for group in groups])[:-1])
    return solution, [part.reshape(values[layer].shape[:2]) for part, layer in zip(parts, layers, strict=True)]


def _solve_stacks(
    values: Sequence[np.ndarray], limit: Limit, layers: Sequence[int], total: int
) -> tuple[knapsack.Solution, list[np.ndarray]]:
    """As `_solve_matrices`, with one width for a matrix of all of a layer's experts."""
    groups = [values[layer].sum(0) for layer in layers]
    costs = np.concatenate([limit.matrices[layer] * len(values[layer]) for layer in layers])
    where = "the model" if len(layers) == len(values) else f"layer {layers[0]}"
    times = None
    if limit.latency is not None:
        counts = [len(limit.matrices[layer]) for layer in layers]
        times = [
            np.tile(limit.latency.times[layer].sum(0) / count, (count, 1))
            for layer, count in zip(layers, counts, strict=True)
        ]
    solution = _within(np.concatenate(groups), costs, total, limit, where, times)
    parts = np.split(solution.choices, np.cumsum([len(group) for group in groups])[:-1])
    return solution, [np.tile(part, (len(values[layer]), 1)) for part, layer in zip(parts, layers, strict=True)]


def _within(
    losses: np.ndarray,
    costs: np.ndarray,
    total: int,
    limit: Limit,
    where: str,
    times: Sequence[np.ndarray] | None,
) -> knapsack.Solution:
    """The solution of least loss that costs at most `total` and keeps the latency; AssignmentError when there is none.

    times: of losses and costs [N, W], in parts; None without a limit of latency.
    """
    least = knapsack.least_cost(costs)
    if least > total:
        raise BudgetError(
            f"its share of the budget is {total} {limit.unit}, the least possible is {least}",
            where=where,
            do="raise the budget",
        )
    if limit.latency is None or times is None:
        return knapsack.solve(losses, costs, total)
    every, most = np.concatenate(times), limit.latency.seconds
    least_time = two_limits.least_time(every, costs, total).loss
    if least_time > most * (1 + two_limits.SLACK):
        raise latency.refusal(least_time, most)
    return two_limits.solve(losses, costs, total, every, most)


def _at_bytes(inputs: AssignInputs, size: int) -> Iterator[tuple[str, Widths]]:
    """The optimum over the model and within layers, by the objective of the inputs' own section."""
    variants: list[tuple[str, Granularity, str]] = [("", "expert", "model"), (", layer", "expert", "layer")]
    if inputs.config.granularity == "projection":
        variants.append((", projection", "projection", "model"))
    hot = hot_masks(inputs)
    counts = np.array([int((~mask).sum()) for mask in hot])
    fixed = sum(int(mask.sum()) * inputs.bytes_of(layer)[FULL] for layer, mask in enumerate(hot))
    for label, granularity, scope in variants:
        limit = byte_limit(inputs, inputs.measured(), counts, size, fixed, granularity)
        with suppress(BudgetError):  # the share of a layer can be below its least where layers differ in size
            found = optimum(inputs, limit, hot, granularity, scope)
            yield f"optimal{label}", expert_widths(inputs, found.bits, hot)


ALLOCATOR = Allocator(
    name="optimal",
    help="the least objective within the budget, proven, over experts, their matrices or layers",
    assign=assign,
    budgets=("average_bits", "expert_bytes", "size"),
    reads=("widths", "scope", "granularity", "ndp_latency_ms"),
    implied={"scope": "model"},
    trials=lambda *_: (),
    at_bytes=_at_bytes,
)
