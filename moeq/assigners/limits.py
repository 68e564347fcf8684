"""Budgets: bits_per_weight, code_bits, expert_bytes or size, as one limit on the cost of the experts that are decided.

Costs are whole numbers: bits of a weight under code_bits (every expert counts alike), else bytes with scales, zero
points and biases; under size also with all that the checkpoint's files say of an expert. Experts on the GPU stay in
full precision: bits_per_weight and code_bits leave them out, bytes count them.

Where every matrix of an expert is decided by itself, a matrix costs its own bytes, or its share of the weights. A width
that the target does not load of a matrix, whose shape its blocks do not fit, stands for the next wider one.

Letters: L layers, E experts of a layer, P matrices of an expert, W widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, lcm

import numpy as np

from moeq.artifacts.assignment import FULL, Assignment
from moeq.artifacts.targets import (
    OF_MATRICES,
    Granularity,
    Target,
    loaded_by,
    loads_width,
    may_differ,
    target_of,
)
from moeq.assigners.inputs import AssignInputs, decided, hot_masks
from moeq.errors import AssignmentError, BudgetError
from moeq.tables import human_bytes, human_size


@dataclass(frozen=True, kw_only=True)
class Latency:
    """times: [e, W] expected seconds a token of the experts that are decided, a layer; seconds: what they may take."""

    times: tuple[np.ndarray, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Limit:
    """widths: [W] rising; costs: [L, W] of one expert; counts: [L] experts that are decided; total: what they may cost.

    matrices: [P, W] costs of an expert's matrices, a layer, which add up to `costs`; none where experts are decided as
    wholes; latency: a second limit beside the cost, or None.
    """

    unit: str  # bits or bytes
    widths: tuple[int, ...]
    costs: np.ndarray
    counts: np.ndarray
    total: int
    matrices: tuple[np.ndarray, ...] = ()
    latency: Latency | None = None

    @property
    def least(self) -> int:
        """Cost of all experts at their cheapest."""
        return int((self.costs.min(1) * self.counts).sum())

    def uniform(self) -> np.ndarray:
        """Cost of all experts at each width, [W]."""
        return np.asarray(self.counts @ self.costs)

    def widest(self) -> int:
        """The place of the widest that it pays for, of all experts."""
        return int(np.flatnonzero(self.uniform() <= self.total)[-1])

    def by_layer(self) -> list[int]:
        """`total` cut into layers in proportion to what their experts cost at the widest."""
        weights = [int(count * cost) for count, cost in zip(self.counts, self.costs.max(1), strict=True)]
        return apportioned([Fraction(self.total * weight, max(1, sum(weights))) for weight in weights], self.total)


def apportioned(exact: Sequence[Fraction], total: int) -> list[int]:
    """Whole numbers that add up to `total`: the floors of exact parts, what these leave to the largest remainders (the
    first ones, where they are equal)."""
    whole = [int(value) for value in exact]
    order = sorted(range(len(whole)), key=lambda place: (whole[place] - exact[place], place))
    for place in order[: total - sum(whole)]:
        whole[place] += 1
    return whole


def loads(inputs: AssignInputs, target: Target, bits: int) -> bool:
    """Whether a target loads a width of the inputs' grid."""
    return loads_width(target, bits, group_size=inputs.group_size, symmetric=inputs.symmetric)


def choices(inputs: AssignInputs) -> tuple[int, ...]:
    """Widths to choose from, rising: the section's, or all of the loss table; only those that the target loads, of some
    matrix where matrices are decided, else of all."""
    known: Sequence[int] = inputs.config.widths or inputs.measured()
    return widths_within(inputs, [*known, *({*inputs.decided_among()} - {*inputs.measured()})])


def widths_within(inputs: AssignInputs, known: Sequence[int]) -> tuple[int, ...]:
    """Those of some widths, rising, that the section's target loads, all without one; AssignmentError where it loads
    none."""
    target = inputs.config.target
    runtime = None if target is None else loaded_by(target)
    allowed = sorted(width for width in set(known) if runtime is None or loads(inputs, runtime, width))
    of_shapes = [{*widths} for matrices in inputs.loaded for widths in matrices]
    if of_shapes:
        apart = may_differ(target_of(target), inputs.config.granularity)
        fitting = set.union(*of_shapes) if apart else set.intersection(*of_shapes)
        allowed = [width for width in allowed if width in fitting]
    if not allowed:
        every = [] if runtime is None else [width for width in runtime.widths if loads(inputs, runtime, width)]
        raise AssignmentError(
            f"none of the widths {sorted(set(known))} can be loaded",
            where=f"target {target}",
            do=f"choose among {every or 'losses.bits'}",
        )
    return tuple(allowed)


def stand_in(width: int, loaded: Sequence[int]) -> int:
    """The width at which a matrix is stored: the same, or the next wider one that is loaded of it, the widest of them,
    rising, where none is wider."""
    return next((one for one in loaded if one >= width), loaded[-1])


def stand_ins(inputs: AssignInputs, layer: int, widths: Sequence[int]) -> np.ndarray:
    """Of every matrix of a layer, and every one of some widths, rising, the place of its `stand_in` among them,
    [P, W]."""
    of_matrices = inputs.loaded[layer] if inputs.loaded else [widths] * len(inputs.matrix_bytes_of(layer))
    loaded = [[width for width in widths if width in own] or widths for own in of_matrices]
    return np.searchsorted(widths, [[stand_in(width, own) for width in widths] for own in loaded])


def limit_of(
    inputs: AssignInputs,
    widths: Sequence[int],
    hot: Sequence[np.ndarray] | None = None,
    granularity: Granularity = "expert",
) -> Limit:
    """The section's budget over some widths; AssignmentError with the least possible where it cannot be met."""
    config = inputs.config
    hot = hot_masks(inputs) if hot is None else hot
    if config.code_bits is not None:
        average = Fraction(config.code_bits)
        limit = _bits_limit(inputs, widths, _counts(hot), average, granularity)
        if limit.total < limit.least:
            raise BudgetError(
                f"an average of {float(average):g} code bits cannot be met with {list(widths)} bits",
                do=f"ask for {widths[0]} code bits or more{_longer_groups(inputs, widths)}",
            )
        return limit
    if config.bits_per_weight is not None:
        return _stored_limit(inputs, widths, hot, Fraction(config.bits_per_weight), granularity)
    whole = config.expert_bytes if config.expert_bytes is not None else config.size
    if whole is None:
        raise AssignmentError("no budget", do="give bits_per_weight, code_bits, expert_bytes or size")
    inputs = inputs if config.size is None else inputs.in_the_checkpoint()
    fixed = gpu_bytes(inputs, hot) + (inputs.other_bytes if config.size is not None else 0)
    return byte_limit(inputs, widths, hot, whole, fixed, granularity)


def nothing_kept(inputs: AssignInputs) -> BudgetError:
    """The error for a budget that no expert is kept within."""
    limits = "the budget" if inputs.config.ndp_latency_ms is None else "the budget or ndp_latency_ms"
    return BudgetError("every expert would be dropped", where=inputs.name, do=f"raise {limits}")


def next_wider(inputs: AssignInputs, assignment: Assignment) -> str | None:
    """What is said of one width for all experts that are decided: how wide a budget of bytes has it, and what the next
    one would take; None where there is none, or something else than this budget keeps it down."""
    limit = limit_of(inputs, choices(inputs), assignment.hot())
    taken = limit.widest()
    given = {width for _, width in decided(assignment.expert_widths(), assignment.hot())}
    if limit.unit != "bytes" or taken + 1 == len(limit.widths) or given != {limit.widths[taken]}:
        return None
    weights = sum(int(count) * inputs.weights_of(layer) for layer, count in enumerate(limit.counts))
    bits = 8 * int(limit.uniform()[taken + 1]) / max(1, weights)
    own, wider = limit.widths[taken], limit.widths[taken + 1]
    said = f"{own} {'bit' if own == 1 else 'bits'} within the budget; {wider} take {bits:.4g} a weight"
    return f"{inputs.config.method}: {said}"


def _counts(hot: Sequence[np.ndarray]) -> np.ndarray:
    """How many experts of every layer are not on the GPU, [L]."""
    return np.array([int((~mask).sum()) for mask in hot])


def gpu_bytes(inputs: AssignInputs, hot: Sequence[np.ndarray]) -> int:
    """Bytes of the experts on the GPU."""
    return sum(int(mask.sum()) * inputs.bytes_of(layer)[FULL] for layer, mask in enumerate(hot) if mask.any())


def _longer_groups(inputs: AssignInputs, widths: Sequence[int]) -> str:
    """Which groups would let the target load fewer bits, for a message; nothing where none would."""
    target = target_of(inputs.config.target)
    if target.blocks is None:
        return ""
    lengths = {target.run(bits, inputs.symmetric) for bits in range(1, widths[0])} - {None}
    longest = max((length for length in lengths if length is not None), default=0)
    return f", or set losses.group_size: {longest} for fewer" if longest else ""


def _bits_limit(
    inputs: AssignInputs, widths: Sequence[int], counts: np.ndarray, average: Fraction, granularity: Granularity
) -> Limit:
    """A limit on bits of a weight; where matrices are decided, on those times what makes each one's share whole."""
    plain = np.array(widths, np.int64)
    apart = granularity in OF_MATRICES
    shares = [len(inputs.matrix_bytes_of(layer)) if apart else 1 for layer in range(len(counts))]
    whole = lcm(*shares)
    matrices = tuple(
        plain[stand_ins(inputs, layer, widths)] * (whole // share)
        for layer, share in enumerate(shares if apart else ())
    )
    return Limit(
        unit="bits",
        widths=tuple(widths),
        costs=np.stack([own.sum(0) for own in matrices]) if apart else np.tile(plain * whole, (len(counts), 1)),
        counts=counts,
        total=int(average * whole * int(counts.sum())),
        matrices=matrices,
    )


def _stored_limit(
    inputs: AssignInputs, widths: Sequence[int], hot: Sequence[np.ndarray], bits: Fraction, granularity: Granularity
) -> Limit:
    """A limit on bytes: so many bits for every weight of the experts that are not on the GPU."""
    weights = sum(int(count) * inputs.weights_of(layer) for layer, count in enumerate(_counts(hot)))
    limit = _in_bytes(inputs, widths, hot, int(bits * weights / 8), granularity)
    if limit.total < limit.least:
        least = ceil(Fraction(8 * limit.least * 1000, weights)) / 1000
        free = inputs.group_size > 0 and not inputs.codebook  # whose groups are of one length
        longer = _longer_groups(inputs, widths) or (", or lengthen losses.group_size" if free else "")
        raise BudgetError(
            f"{float(bits):g} bits a weight cannot be met; the least possible is {least:g}, scales and zero points "
            "counted",
            where="bits_per_weight",
            do=f"ask for at least {least:g}{longer}",
        )
    return limit


def _in_bytes(
    inputs: AssignInputs, widths: Sequence[int], hot: Sequence[np.ndarray], total: int, granularity: Granularity
) -> Limit:
    """A limit of so many bytes on what is decided, whether it can be met or not."""
    layers = range(len(hot))
    costs = np.array([[inputs.bytes_of(layer)[width] for width in widths] for layer in layers], np.int64)
    matrices: tuple[np.ndarray, ...] = ()
    if granularity in OF_MATRICES:
        sizes = [inputs.matrix_bytes_of(layer).values() for layer in layers]
        plain = [np.array([[size[width] for width in widths] for size in every], np.int64) for every in sizes]
        matrices = tuple(
            np.take_along_axis(own, stand_ins(inputs, layer, widths), 1) for layer, own in enumerate(plain)
        )
        costs = np.stack([own.sum(0) for own in matrices])
    counts = _counts(hot)
    return Limit(unit="bytes", widths=tuple(widths), costs=costs, counts=counts, total=total, matrices=matrices)


def byte_limit(
    inputs: AssignInputs,
    widths: Sequence[int],
    hot: Sequence[np.ndarray],
    whole: int,
    fixed: int,
    granularity: Granularity = "expert",
) -> Limit:
    """A limit of `whole` bytes, `fixed` of which are spent; AssignmentError with the least possible."""
    limit = _in_bytes(inputs, widths, hot, whole - fixed, granularity)
    if limit.total < limit.least:
        least = fixed + limit.least
        raise BudgetError(
            f"{whole} bytes ({human_bytes(whole)}) cannot be met; the least possible is {least} ({human_size(least)})",
            where="size" if inputs.config.size is not None else "expert_bytes",
            do=f"ask for at least {least}" + (", or lower gpu_experts" if inputs.config.gpu_experts else ""),
        )
    return limit


def spent(
    inputs: AssignInputs,
    assignment: Assignment,
    widths: Sequence[int],
    granularity: Granularity = "expert",
    counted: AssignInputs | None = None,
) -> Limit:
    """The bytes that an assignment spends on the experts it decided, as a limit over some widths; counted: the
    inputs by which it spends them, where others say what the widths take."""
    hot = assignment.hot()
    total = sum((counted or inputs).stored(layer, width) for layer, width in decided(assignment.expert_widths(), hot))
    return byte_limit(inputs, widths, hot, total, 0, granularity)
