"""How good an assignment is: its objective beside the proven optimum, the price of targets, the frontier of methods."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from pydantic import ValidationError

from moeq.artifacts.assignment import DROPPED, FULL, Assignment, matrix_widths
from moeq.artifacts.targets import FINENESS, MIXED, OF_MATRICES, Granularity, Target, refuse_grid, targets
from moeq.assigners import latency
from moeq.assigners.allocator import Allocator, Widths
from moeq.assigners.inputs import AssignInputs, Loaded, decided, expert_widths
from moeq.assigners.limits import Limit, byte_limit, gpu_bytes, limit_of, loads, spent
from moeq.assigners.optimal import Optimum, optimum
from moeq.assigners.sensitivity import objective, objective_of
from moeq.errors import AssignmentError, BudgetError, FormatError
from moeq.recipe import BUDGETS, AssignSection
from moeq.registry import ALLOCATORS

KEPT = ("quantizer", "gpu_experts", "alpha", "loss_weighting", "layer_weighting", "normalization", "statistics")
UNIFORM, THIS = "one width for all", "this run"
OPTIMAL: dict[Granularity, str] = {"expert": "optimal by expert", "projection": "optimal by matrix"}
SAME = 1e-9  # relative difference below which objectives count as equal


@dataclass(frozen=True, kw_only=True)
class SeenBy:
    """What targets make of a model, whose matrices the inputs do not know.

    refuse: why one cannot load a width of them, or None; loaded: what one loads of each, as `AssignInputs.loaded`;
    sizes: the inputs' fields of bytes as one stores them for a section, none where they are the same.
    """

    refuse: Callable[[Target, int], FormatError | None] = lambda *_: None
    loaded: Callable[[Target], Loaded] = lambda _: ()
    sizes: Callable[[AssignSection, Target], Mapping[str, Any]] = lambda *_: {}


@dataclass(frozen=True, kw_only=True)
class Score:
    """objective of an assignment; optimum: the least that was found of any mix of widths within the same limits (of
    matrices where the assignment was to decide them, else of experts).

    proven: whether it is the least; bound: none can have less. gap: how far the objective lies above the optimum, None
    where the optimum is 0; gap_to_bound, where nothing is proven: how far above the bound.
    """

    objective: float
    optimum: float
    proven: bool
    bound: float

    @property
    def gap(self) -> float | None:
        if self.optimum <= 0:
            return None
        above = self.objective / self.optimum - 1
        return above if above > SAME else 0.0  # sums in another order differ in the last digit

    def as_json(self) -> dict[str, Any]:
        figures = asdict(self) | {"gap_to_optimum": self.gap}
        bound = figures.pop("bound")
        if self.proven:
            return figures
        return figures | {"bound": bound, "gap_to_bound": self.objective / bound - 1 if bound > 0 else None}


@dataclass(frozen=True, kw_only=True)
class Price:
    """The optimum within a target; ratio: to that of any mix. refusal: why it cannot be had there, or None.

    bits_per_weight: stored for a weight of all experts, which take expert_bytes.
    """

    target: str
    objective: float | None = None
    ratio: float | None = None
    bits_per_weight: float | None = None
    expert_bytes: int | None = None
    refusal: str | None


@dataclass(frozen=True, kw_only=True)
class Point:
    """One assignment of a method on the frontier; dominated: another is as small and as good, and better in one."""

    method: str
    bits_per_weight: float
    expert_bytes: int
    objective: float
    dominated: bool = False


def budget_of(
    inputs: AssignInputs,
    assignment: Assignment,
    widths: Sequence[int],
    granularity: Granularity = "expert",
    counted: AssignInputs | None = None,
) -> Limit:
    """The section's budget over some widths; where none but a width is given, what `spent` says."""
    if any(getattr(inputs.config, name) is not None for name in BUDGETS):
        limit = limit_of(inputs, widths, assignment.hot(), granularity)
        return latency.limited(inputs, limit, assignment.hot())
    return spent(inputs, assignment, widths, granularity, counted)


def finest(inputs: AssignInputs) -> Granularity:
    """What the optimum decides that assignments are held against."""
    return "projection" if inputs.config.granularity == "projection" else "expert"


def score(inputs: AssignInputs, assignment: Assignment) -> Score:
    """The assignment's objective and the proven optimum of its budget over all widths of the loss table, whatever the
    target loads."""
    inputs, granularity, hot = replace(inputs, loaded=()), finest(inputs), assignment.hot()
    used = [bits for _, width in decided(assignment.expert_widths(), hot) for bits in matrix_widths(width)]
    limit = budget_of(inputs, assignment, inputs.measured(*used), granularity)
    best = optimum(inputs, limit, hot, granularity)
    return Score(objective=objective(inputs, assignment), optimum=best.loss, proven=best.proven, bound=best.bound)


def prices(
    inputs: AssignInputs,
    assignment: Assignment,
    names: Collection[str] | None = None,
    seen: SeenBy = SeenBy(),
) -> list[Price]:
    """What the restriction of every target costs: its optimum on the assignment's budget, in bytes as it stores them.

    names: of targets, None: all.
    """
    inputs, hot = replace(inputs, loaded=()), assignment.hot()
    limit = budget_of(inputs, assignment, inputs.decided_among(), finest(inputs))
    free = optimum(inputs, limit, hot, finest(inputs))
    asked = [target for name, target in targets().items() if names is None or name in names]
    return [_price(inputs, assignment, target, free, seen) for target in asked]


def _price(
    inputs: AssignInputs,
    assignment: Assignment,
    target: Target,
    free: Optimum,
    seen: SeenBy,
) -> Price:
    given = inputs
    inputs = replace(inputs, config=inputs.config.model_copy(update={"target": None}))  # it is of this one, not of that
    inputs = replace(inputs, **seen.sizes(given.config, target))
    hot = assignment.hot()
    reason = refuse_grid(target, symmetric=inputs.symmetric)
    granularity = max(finest(inputs), target.granularity, key=FINENESS.index)
    if target.stacks and finest(inputs) == "projection":
        granularity = "stack"
    if FINENESS.index(granularity) > FINENESS.index("expert") and any(mask.any() and not mask.all() for mask in hot):
        reason = f"gpu_experts mixes 16 bits with others; {MIXED[target.granularity]}"
    refused = {width: None if width == DROPPED else seen.refuse(target, width) for width in inputs.decided_among()}
    loaded = [width for width in refused if loads(inputs, target, width)]
    widths = [width for width in loaded if refused[width] is None]
    if granularity in OF_MATRICES and (shapes := seen.loaded(target)):
        inputs = replace(inputs, loaded=shapes)
        widths = [width for width in loaded if any(width in own for matrices in shapes for own in matrices)]
    if loaded and not widths:  # of other shapes it would be had
        widths, reason = loaded, reason or str(refused[loaded[-1]])
    try:
        if not widths:
            raise _none_of(inputs, target, refused)
        best = optimum(inputs, budget_of(inputs, assignment, widths, granularity, given), hot, granularity)
    except (AssignmentError, FormatError) as error:
        other = reason if isinstance(error, BudgetError) else None  # which another budget would not change
        return Price(target=target.name, refusal=other or str(error))
    chosen = expert_widths(inputs, best.bits, hot)
    return Price(
        target=target.name,
        objective=best.loss,
        ratio=best.loss / free.loss if free.loss > 0 else None,
        bits_per_weight=_bits(inputs, chosen),
        expert_bytes=_bytes(inputs, chosen),
        refusal=reason,
    )


def _none_of(inputs: AssignInputs, target: Target, refused: Mapping[int, FormatError | None]) -> FormatError:
    """Why a target loads none of the widths that there are: of those that it knows the widest speaks for all."""
    known = [width for width in refused if width in target.widths]
    if not known:
        measured, loaded = (", ".join(map(str, widths)) for widths in (refused, target.widths))
        return FormatError(f"losses.bits are {measured}; {target.name} loads {loaded}")
    widest = max(known, key=lambda width: (loads(inputs, target, width), width))
    grid = f"{inputs.group_size} {'symmetric' if inputs.symmetric else 'with zero points'}"
    return refused[widest] or FormatError(f"{widest} bits in groups of {grid}; {target.name} has no type for them")


def _bytes(inputs: AssignInputs, chosen: Widths) -> int:
    """Bytes of all experts of every layer."""
    return sum(inputs.stored(layer, width) for layer, widths in enumerate(chosen) for width in widths)


def _bits(inputs: AssignInputs, chosen: Widths) -> float:
    """Bits that are stored for a weight of all experts of every layer."""
    weights = sum(inputs.weights_of(layer) * len(widths) for layer, widths in enumerate(chosen))
    return 8 * _bytes(inputs, chosen) / weights


def sections(inputs: AssignInputs, averages: Sequence[str]) -> list[tuple[str, AssignSection]]:
    """What a frontier shows of every method, with the options that the inputs' section shares with them.

    averages: in code bits. Left out is what needs widths that were not measured, or an average that its widths cannot
    have.
    """
    shared, shown = {name: getattr(inputs.config, name) for name in KEPT}, []
    for method in ALLOCATORS:
        trials = _trials(inputs, method, averages) if method.trials is None else method.trials(inputs, averages)
        for label, keys in trials:
            with suppress(ValidationError):
                section = AssignSection.of(method.name, **shared, **keys)
                if {*section.named(), *method.widths} <= {*inputs.measured(), FULL}:
                    shown.append((label, section))
    return shown


def _trials(inputs: AssignInputs, allocator: Allocator, averages: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    if not allocator.budgets:
        return [(allocator.name, {})]
    if "code_bits" in allocator.budgets:
        return [(allocator.name, {"code_bits": average}) for average in averages]
    return [(allocator.name, {"expert_bytes": _bytes_at(inputs, float(Fraction(average)))}) for average in averages]


def _bytes_at(inputs: AssignInputs, average: float) -> int:
    """Bytes of all experts at so many code bits, in straight lines between the measured widths."""
    widths, hot, total = inputs.measured(), inputs.config.gpu_experts, 0.0
    for layer, counts in enumerate(inputs.profile.counts):
        sizes = inputs.bytes_of(layer)
        total += hot * sizes[FULL] + (counts.shape[-1] - hot) * np.interp(average, widths, [sizes[w] for w in widths])
    return int(total)


def frontier(
    inputs: AssignInputs,
    averages: Sequence[str],
    assign: Callable[[AssignInputs], Assignment],
    advance: Callable[[], None] = lambda: None,
) -> list[Point]:
    """Objective and bytes of every method, then of those that have it at the bytes that each of the others takes.

    averages: budgets in code bits of the methods that take one. Unmet ones are left out, dominated points marked.
    """
    inputs, points = replace(inputs, loaded=()), list[Point]()
    for label, section in sections(inputs, averages):
        with suppress(BudgetError):
            points.append(_point(inputs, label, assign(replace(inputs, config=section)).expert_widths()))
        advance()
    for size in sorted({point.expert_bytes for point in points}):
        for method in ALLOCATORS:
            if method.at_bytes is not None:
                points += [_point(inputs, label, chosen) for label, chosen in method.at_bytes(inputs, size)]
    points = list(dict.fromkeys(points))  # the same optimum at several budgets
    return [replace(point, dominated=is_dominated(point, points)) for point in points]


def around(inputs: AssignInputs, assignment: Assignment) -> list[Point]:
    """What an assignment stands among: the optimum at nine sizes between all experts at the least and at the largest
    width, every width for all, and the assignment itself; experts on the GPU stay there.

    AssignmentError when the loss table lacks one of the assignment's widths.
    """
    inputs, granularity, hot, widths = replace(inputs, loaded=()), finest(inputs), assignment.hot(), inputs.measured()
    every = [expert_widths(inputs, [np.full(len(mask), width) for mask in hot], hot) for width in widths]
    uniform = [_point(inputs, UNIFORM, chosen) for chosen in every]
    least, most = uniform[0].expert_bytes, uniform[-1].expert_bytes
    points = []
    for size in sorted({max(least, min(most, round(size))) for size in np.geomspace(least, most, 9)}):
        limit = byte_limit(inputs, inputs.decided_among(), hot, size, gpu_bytes(inputs, hot), granularity)
        best = optimum(inputs, limit, hot, granularity)
        points.append(_point(inputs, OPTIMAL[granularity], expert_widths(inputs, best.bits, hot)))
    return [*points, *uniform, _point(inputs, THIS, assignment.expert_widths())]


def _point(inputs: AssignInputs, label: str, chosen: Widths) -> Point:
    return Point(
        method=label,
        bits_per_weight=_bits(inputs, chosen),
        expert_bytes=_bytes(inputs, chosen),
        objective=objective_of(inputs, chosen),
    )


def is_dominated(point: Point, points: Sequence[Point]) -> bool:
    """Whether another point is no larger and no worse, and better in one of both; rounding does not count."""
    slack = 1 + SAME
    return any(
        other.expert_bytes <= point.expert_bytes
        and other.objective <= point.objective * slack
        and (other.expert_bytes < point.expert_bytes or other.objective * slack < point.objective)
        for other in points
    )


def is_beaten(row: tuple[float, ...], rows: Sequence[tuple[float, ...]]) -> bool:
    """Whether another row is in no column larger and in one smaller; rounding does not count."""
    return any(
        all(theirs <= mine + SAME * abs(mine) for theirs, mine in zip(other, row, strict=True))
        and any(theirs < mine - SAME * abs(mine) for theirs, mine in zip(other, row, strict=True))
        for other in rows
    )
