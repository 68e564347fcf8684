"""optimal: the assignment of least objective within the budget, proven (numerics.knapsack, numerics.certificate).

Every expert that is not on the GPU takes one of the widths, or (granularity projection) each of its matrices does;
scope model (the default) spends one budget over all layers, scope layer the same share in each. With granularity layer,
or within a target that takes one width for a layer or for the model, the experts that share a width are one item; with
granularity projection within one that has one type for a matrix of all of a layer's experts, those are.

It is called proven when the certificate of every knapsack has been confirmed; where the search ends without (as it can
with a limit of NDP latency beside the budget, numerics.two_limits), the bound is printed.

With `drop` an expert may also have no bits at all: of width 0 nothing is stored, and it answers nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod

import numpy as np

from moeq.artifacts.assignment import DROPPED, Assignment
from moeq.artifacts.targets import OF_MATRICES, Granularity, granularity_within, refuse_grid, target_of
from moeq.assigners import dropping, latency, sensitivity
from moeq.assigners.allocator import Allocator, Widths
from moeq.assigners.inputs import AssignInputs, build, expert_widths, hot_masks
from moeq.assigners.limits import Limit, byte_limit, choices, gpu_bytes, limit_of, next_wider, nothing_kept, stand_ins
from moeq.assigners.sensitivity import matrix_tables, tables
from moeq.errors import AssignmentError, BudgetError, FormatError
from moeq.numerics import knapsack, two_limits


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """bits: [E] a layer, or [E, P] of matrices, those of GPU experts are not decided; loss: their objective; bound:
    none can have less; proven: none has, and the certificates of that are confirmed."""

    bits: list[np.ndarray]
    loss: float
    bound: float
    proven: bool


def assign(inputs: AssignInputs) -> Assignment:
    """The optimum as an assignment; AssignmentError for a budget that cannot be met."""
    hot = hot_masks(inputs)
    target = target_of(inputs.config.target)
    reason = refuse_grid(target, symmetric=inputs.symmetric)
    if reason is not None:
        raise FormatError(reason, where=f"target {target.name}")
    granularity = granularity_within(target, inputs.config.granularity)
    limit = latency.limited(inputs, limit_of(inputs, choices(inputs), hot, granularity), hot)
    return build(inputs, optimum(inputs, limit, hot, granularity, inputs.config.scope or "model").bits, hot)


def remark(inputs: AssignInputs, assignment: Assignment) -> str | None:
    """That no expert can be dropped; what the next wider one would take, where a target has one width for the model."""
    if inputs.config.drop and not inputs.droppable:
        return "drop: no expert is dropped, since they have biases, which answer without weights, too"
    granularity = granularity_within(target_of(inputs.config.target), inputs.config.granularity)
    return next_wider(inputs, assignment) if granularity == "model" else None


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
    costs = b"".join(one.tobytes() for one in (limit.costs, *limit.matrices))
    allowed = (limit.unit, limit.total, most, limit.widths, costs, masks, inputs.loaded)
    return inputs.once(
        ("optimum", weighting, allowed, granularity, scope), lambda: _optimum(inputs, limit, hot, granularity, scope)
    )


def refuse(inputs: AssignInputs, limit: Limit) -> None:
    """BudgetError where a layer's share of the budget is too small, or none pays for one expert that is kept."""
    granularity = granularity_within(target_of(inputs.config.target), inputs.config.granularity)
    layers = [*range(len(limit.counts))]
    shares = [(layers, limit.total)]
    if inputs.config.scope == "layer":
        shares = [([layer], total) for layer, total in enumerate(limit.by_layer())]
    least = limit.costs.min(1)  # [L], of one expert
    kept = limit.costs[:, [width != DROPPED for width in limit.widths]].min(1) - least  # [L], what keeping one adds
    together = limit.counts if granularity == "layer" else np.minimum(limit.counts, 1)
    keeps = inputs.config.gpu_experts > 0
    for group, total in shares:
        left = total - int((limit.counts * least)[group].sum())
        if left < 0:
            raise _too_small(limit, total, total - left, f"layer {group[0]}")
        keeps |= any(limit.counts[layer] and together[layer] * kept[layer] <= left for layer in group)
    if not keeps:
        raise nothing_kept(inputs)


def _too_small(limit: Limit, total: int, least: int, where: str) -> BudgetError:
    what = f"its share of the budget is {total} {limit.unit}, the least possible is {least}"
    return BudgetError(what, where=where, do="raise the budget")


def _optimum(
    inputs: AssignInputs, limit: Limit, hot: Sequence[np.ndarray], granularity: Granularity, scope: str
) -> Optimum:
    if DROPPED in limit.widths and granularity == "projection":
        return _optimum_of_ways(inputs, limit, hot, scope)
    layers = range(len(hot))
    of = _matrix_losses if granularity in OF_MATRICES else _losses
    values = [of(inputs, layer, limit.widths)[~hot[layer]] for layer in layers]
    if scope == "model":
        solved = [_solve(inputs, values, limit, list(layers), limit.total, granularity)]
    else:
        totals = enumerate(limit.by_layer())
        solved = [_solve(inputs, values, limit, [layer], total, granularity) for layer, total in totals]
    bits = []
    chosen = [part for solution, parts in solved for part in parts]
    for layer in layers:
        widths, places = np.full((len(hot[layer]), *values[layer].shape[1:-1]), limit.widths[0]), chosen[layer]
        if granularity in OF_MATRICES:
            places = stand_ins(inputs, layer, limit.widths)[np.arange(places.shape[1]), places]
        widths[~hot[layer]] = np.array(limit.widths)[places]
        bits.append(widths)
    return Optimum(
        bits=bits,
        loss=sum(solution.loss for solution, _ in solved),
        bound=sum(solution.bound for solution, _ in solved),
        proven=all(solution.proven for solution, _ in solved),
    )


def _optimum_of_ways(inputs: AssignInputs, limit: Limit, hot: Sequence[np.ndarray], scope: str) -> Optimum:
    """As `_optimum`, of matrices of experts that may also be dropped."""
    kept, gone = [place for place, width in enumerate(limit.widths) if width != DROPPED], limit.widths.index(DROPPED)
    widths, every = [limit.widths[place] for place in kept], []
    for layer, mask in enumerate(hot):
        losses, dropped = _matrix_losses(inputs, layer, widths), _losses(inputs, layer, [DROPPED])[:, 0]
        times = None if limit.latency is None else limit.latency.times[layer][:, kept]
        costs, nothing = limit.matrices[layer][:, kept], int(limit.costs[layer, gone])
        every.append(dropping.ways(losses[~mask], dropped[~mask], costs, nothing, widths, times))
    parts = [(every, limit.total, "the model")]
    if scope != "model":
        totals = enumerate(limit.by_layer())
        parts = [([every[layer]], total, f"layer {layer}") for layer, total in totals]
    solved, bits = [], [np.full((len(mask), len(limit.matrices[0])), widths[0]) for mask in hot]
    chosen: list[np.ndarray] = []
    for own, total, where in parts:
        table = dropping.joined(own)
        solved.append(_within(table.losses, table.costs, total, limit, where, table.times))
        found = table.widths[np.arange(len(table.widths)), solved[-1].choices]
        chosen += np.split(found, np.cumsum([len(each.losses) for each in own])[:-1])
    for of, mask, found in zip(bits, hot, chosen, strict=True):
        of[~mask] = found
    return Optimum(
        bits=bits,
        loss=sum(solution.loss for solution in solved),
        bound=sum(solution.bound for solution in solved),
        proven=all(solution.proven for solution in solved),
    )


def _losses(inputs: AssignInputs, layer: int, widths: Sequence[int]) -> np.ndarray:
    """Objective [E, W] of a layer's experts."""
    table = tables(inputs)[layer]
    if DROPPED in widths and DROPPED not in table.losses:
        raise AssignmentError("what its experts answer was not measured", where=table.name, do=sensitivity.AGAIN)
    missing = [width for width in widths if width not in table.losses]
    if missing:
        raise AssignmentError(f"the loss table lacks {missing} bits", where=table.name, do="add them to losses.bits")
    return np.stack([table.losses[width] for width in widths], 1)


def _matrix_losses(inputs: AssignInputs, layer: int, widths: Sequence[int]) -> np.ndarray:
    """Objective [E, P, W] of the matrices of a layer's experts."""
    _losses(inputs, layer, widths)  # raises for widths that were not measured
    matrices = matrix_tables(inputs)[layer].values()
    plain = np.stack([np.stack([losses[width] for width in widths], 1) for losses in matrices], 1)
    return np.take_along_axis(plain, stand_ins(inputs, layer, widths)[None], 2)


def _solve(
    inputs: AssignInputs,
    values: Sequence[np.ndarray],
    limit: Limit,
    layers: Sequence[int],
    total: int,
    granularity: Granularity,
) -> tuple[knapsack.Solution, list[np.ndarray]]:
    """The knapsack of some layers, values [e, W], or [e, P, W] of matrices; the choice [e] or [e, P] of every layer.

    What shares a width is one item: with granularity layer or stack (of one matrix) all of a layer's experts.
    """
    shapes = [values[layer].shape for layer in layers]
    shared = granularity in ("layer", "stack", "model")

    def items(tables: Sequence[np.ndarray]) -> np.ndarray:
        """Tables of the shapes of values as rows [N, W], added up over what shares a width."""
        parts = [table.sum(0, keepdims=True) if shared else table for table in tables]
        if granularity == "model":
            parts = [np.asarray(np.sum(parts, 0))]
        return np.concatenate([part.reshape(-1, part.shape[-1]) for part in parts])

    costs = [(limit.matrices or limit.costs)[layer] for layer in layers]
    times = None
    if limit.latency is not None:
        times = items([_times(inputs, limit, layer, values[layer].shape) for layer in layers])
    solution = _within(
        items([values[layer] for layer in layers]),
        items([np.broadcast_to(cost, shape) for cost, shape in zip(costs, shapes, strict=True)]),
        total,
        limit,
        "the model" if len(layers) == len(values) else f"layer {layers[0]}",
        times,
    )
    if granularity == "model":
        return solution, [np.full(shape[:-1], solution.choices[0]) for shape in shapes]
    counts = [prod(shape[1:-1]) if shared else prod(shape[:-1]) for shape in shapes]
    parts = np.split(solution.choices, np.cumsum(counts)[:-1])
    return solution, [
        np.broadcast_to(part.reshape(-1, *shape[1:-1]), shape[:-1]) for part, shape in zip(parts, shapes, strict=True)
    ]


def _times(inputs: AssignInputs, limit: Limit, layer: int, shape: tuple[int, ...]) -> np.ndarray:
    """Seconds of a layer's experts at every width, [e, W], or of their matrices, which have equally many weights."""
    assert limit.latency is not None
    seconds = limit.latency.times[layer]
    if len(shape) == seconds.ndim:
        return seconds
    every = np.broadcast_to(seconds[:, None] / shape[1], shape)
    return np.take_along_axis(every, stand_ins(inputs, layer, limit.widths)[None], 2)


def _within(
    losses: np.ndarray,
    costs: np.ndarray,
    total: int,
    limit: Limit,
    where: str,
    times: np.ndarray | None,
) -> knapsack.Solution:
    """The solution of least loss that costs at most `total` and keeps the latency; AssignmentError when there is none.

    times: as losses and costs [N, W]; None without a limit of latency.
    """
    least = knapsack.least_cost(costs)
    if least > total:
        raise _too_small(limit, total, least, where)
    try:
        knapsack.refuse_infinite(losses)
    except ValueError as error:
        raise AssignmentError(str(error), where=where, do="run `moeq losses` again") from error
    if limit.latency is None or times is None:
        return knapsack.solve(losses, costs, total)
    most = limit.latency.seconds
    least_time = two_limits.least_time(times, costs, total)
    if least_time > most * (1 + two_limits.SLACK):
        raise latency.refusal(least_time, most)
    return two_limits.solve(losses, costs, total, times, most)


def _at_bytes(inputs: AssignInputs, size: int) -> Iterator[tuple[str, Widths]]:
    """The optimum over the model and within layers, by the objective of the inputs' own section."""
    variants: list[tuple[str, Granularity, str]] = [("", "expert", "model"), (" within layers", "expert", "layer")]
    if inputs.config.granularity == "projection":
        variants.append((" by matrix", "projection", "model"))
    hot = hot_masks(inputs)
    fixed = gpu_bytes(inputs, hot)
    for label, granularity, scope in variants:
        limit = byte_limit(inputs, inputs.decided_among(), hot, size, fixed, granularity)
        with suppress(BudgetError):  # the share of a layer can be below its least where layers differ in size
            best = optimum(inputs, limit, hot, granularity, scope)
            yield f"optimal{label}", expert_widths(inputs, best.bits, hot)


ALLOCATOR = Allocator(
    name="optimal",
    help="the least objective within the budget, proven, over experts, their matrices or layers",
    assign=assign,
    budgets=("bits_per_weight", "code_bits", "expert_bytes", "size"),
    weighs=("loss_weighting", "layer_weighting", "statistics"),
    reads=("widths", "scope", "granularity", "ndp_latency_ms", "speed", "drop"),
    implied={"scope": "model", "drop": False},
    within_target=True,
    remark=remark,
    refuse=refuse,
    trials=lambda *_: (),
    at_bytes=_at_bytes,
)
