"""prefix-split: paper 000, Algorithm 1 and section 4.2.

The K most important experts of each layer go to the GPU in full precision. The others, in order of importance, are cut
into four runs of n4, n3, n2 and n1 experts at 4, 3, 2 and 1 bits with

    n4 + n3 + n2 + n1 = E_ndp,    3*n4 + 2*n3 + n2 = R = E_ndp * (average - 1),    all >= 0

(the paper's ranges forget n1 >= 0), and the cut with the largest total gain over all at 1 bit wins. Prefix sums of the
gains give each candidate in constant time; all (n4, n3) of all layers are scored at once. Deliberate deviation: by
default an expert's loss is weighted by its share of the layer's routing weight (`loss_weighting: none` is the paper's).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

from moeq.artifacts.assignment import Assignment
from moeq.assigners.allocator import Allocator, Cost
from moeq.assigners.inputs import AssignInputs, build, hot_experts, importance, ranking
from moeq.assigners.limits import Limit, apportioned, limit_of
from moeq.assigners.sensitivity import tables
from moeq.errors import AssignmentError
from moeq.recipe import AssignSection

WIDTHS = (1, 2, 3, 4)


def increments(counts: Sequence[int], average: Fraction) -> list[int]:
    """Bit increments R of each layer, whole numbers that add up to floor(sum(counts) * (average - 1)).

    counts: NDP experts of each layer. Raises AssignmentError when average is outside [1, 4].
    """
    if not 1 <= average <= 4:
        raise AssignmentError(f"average of {average} code bits", do="choose between 1 and 4")
    exact = [count * (average - 1) for count in counts]
    return apportioned(exact, int(sum(exact, Fraction(0))))


def split(losses: np.ndarray, counts: np.ndarray, budgets: np.ndarray) -> np.ndarray:
    """Best (n4, n3, n2, n1) of every layer, [L, 4].

    losses: [L, E, 4] loss at 1, 2, 3, 4 bits of the experts in order of importance (rows beyond a layer's count are
    ignored); counts: [L] experts to decide on; budgets: [L] increments, each at most 3 * count. Layers with the same
    count and budget have the same candidates and are scored together.
    """
    result = np.zeros((len(losses), 4), int)
    for count, budget in sorted(set(zip(counts.tolist(), budgets.tolist(), strict=True))):
        here = np.flatnonzero((counts == count) & (budgets == budget))
        runs = candidates(count, budget)
        gains = losses[here, :count, :1] - losses[here, :count]  # [l, count, 4]
        prefix = np.concatenate([np.zeros((len(here), 1, 4)), gains.cumsum(1)], 1)
        to_two, to_three, to_four = prefix[..., 1], prefix[..., 2] - prefix[..., 1], prefix[..., 3] - prefix[..., 2]
        ends = runs[:, :3].cumsum(1)  # experts that have at least 4, 3, 2 bits
        total = to_four.take(ends[:, 0], 1) + to_three.take(ends[:, 1], 1) + to_two.take(ends[:, 2], 1)
        result[here] = runs[total.argmax(1)]
    return result


def candidates(count: int, budget: int) -> np.ndarray:
    """All (n4, n3, n2, n1) >= 0 that add up to `count` and spend `budget` increments, [C, 4]."""
    four, three = np.indices((budget // 3 + 1, budget // 2 + 1)).reshape(2, -1)
    two = budget - 3 * four - 2 * three
    runs = np.stack([four, three, two, count - four - three - two], 1)
    return runs[(runs >= 0).all(1)]


def assign(inputs: AssignInputs) -> Assignment:
    """Assign every layer; AssignmentError when the loss table lacks a width or the budget cannot be met."""
    layers = range(len(inputs.profile.layers))
    scores = [importance(inputs, layer) for layer in layers]
    hot = [hot_experts(inputs, scores[layer], layer) for layer in layers]
    if not inputs.config.selector:
        average = Fraction(inputs.config.code_bits or "0")
        return build(inputs, [np.full(len(s), int(average)) for s in scores], hot)
    order = [np.array([e for e in ranking(scores[layer]) if not hot[layer][e]], int) for layer in layers]
    losses = _ordered_losses(inputs, order)

    def cut(average: Fraction) -> list[np.ndarray]:
        counts = [len(experts) for experts in order]
        runs = split(losses, np.array(counts), np.array(increments(counts, average)))
        bits = []
        for layer in layers:
            widths = np.full(len(scores[layer]), 1)
            widths[order[layer]] = np.repeat([4, 3, 2, 1], runs[layer])
            bits.append(widths)
        return bits

    if inputs.config.code_bits is not None:
        return build(inputs, cut(Fraction(inputs.config.code_bits)), hot)
    return build(inputs, _largest_that_fits(cut, limit_of(inputs, WIDTHS, hot), order), hot)


def _largest_that_fits(
    cut: Callable[[Fraction], list[np.ndarray]], limit: Limit, order: list[np.ndarray]
) -> list[np.ndarray]:
    """Widths of the largest number of increments whose bytes are within the limit.

    Bytes rise with the increments but for zero points, which cuts of as many bits can differ in: the search halves,
    then steps down until the cut fits.
    """
    count = sum(map(len, order))

    def fits(steps: int) -> list[np.ndarray] | None:
        bits = cut(1 + Fraction(steps, max(1, count)))
        used = sum(
            int(limit.costs[layer][bits[layer][experts] - 1].sum())
            for layer, experts in enumerate(order)
            if len(experts)
        )
        return bits if used <= limit.total else None

    low, high = 0, 3 * count
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) is not None else (low, middle - 1)
    for steps in range(low, -1, -1):
        bits = fits(steps)
        if bits is not None:
            return bits
    return cut(Fraction(1))


def _ordered_losses(inputs: AssignInputs, order: list[np.ndarray]) -> np.ndarray:
    """Losses [L, E, 4] of the NDP experts in the given order, weighted as the recipe says."""
    result = np.zeros((len(order), max(map(len, order), default=0), len(WIDTHS)))
    for layer, (table, experts) in enumerate(zip(tables(inputs), order, strict=True)):
        missing = [width for width in WIDTHS if width not in table.losses]
        if missing:
            raise AssignmentError(
                f"prefix-split needs losses at {WIDTHS} bits, the table lacks {missing}",
                where=table.name,
                do="add them to losses.bits",
            )
        losses = np.stack([table.losses[width] for width in WIDTHS], 1)
        result[layer, : len(experts)] = losses[experts]
    return result


def _foreseen(section: AssignSection, counts: Sequence[int], cost: Cost) -> list[list[int]] | None:
    """Of several cuts of the same number of bits the one of most bytes: they differ by zero points."""
    if section.code_bits is None:
        return None
    average = Fraction(section.code_bits)
    if not section.selector:
        return [[int(average)] * count for count in counts]
    widths: list[list[int]] = []
    for layer, (count, budget) in enumerate(zip(counts, increments(counts, average), strict=True)):
        runs = candidates(count, budget)
        costs = np.array([cost(layer, bits) for bits in (4, 3, 2, 1)])
        widths.append(np.repeat([4, 3, 2, 1], runs[(runs @ costs).argmax()]).tolist())
    return widths


ALLOCATOR = Allocator(
    name="prefix-split",
    help="experts in order of importance cut into runs of 4, 3, 2 and 1 code bits, the cut of the largest gain",
    assign=assign,
    budgets=("bits_per_weight", "code_bits", "expert_bytes", "size"),
    weighs=("alpha", "normalization", "statistics", "loss_weighting", "layer_weighting", "selector"),
    widths=WIDTHS,
    foreseen=_foreseen,
)
