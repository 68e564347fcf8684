"""mopeq: paper 003, Algorithm 2: experts clustered by importance, the clusters given the widths in order.

Importance is the activation frequency, the Hessian trace of the Frobenius norm (summed over an expert's matrices), or
the product of both, each min-max normalized over the experts that are clustered together: those of a layer, or of the
model. The clusters are the optimum that k-means looks for, so that neither a seed nor the order of experts matters, and
equal values have equal widths; where fewer values differ than there are widths, the clusters take the widest ones.
There is no budget: it lands where it lands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import numpy as np
from pydantic import Field

from moeq.artifacts.assignment import Assignment
from moeq.assigners.allocator import Allocator
from moeq.assigners.inputs import AssignInputs, build, hot_masks
from moeq.errors import AssignmentError
from moeq.recipe import MethodSettings

Metric = Literal["frequency", "hessian", "hybrid"]
PAPER_WIDTHS = (2, 3, 4)
LARGEST = 480  # exponent of the largest value: its squares, times any number of experts, do not overflow


class MopeqSettings(MethodSettings):
    """What the experts are clustered by."""

    metric: Metric = Field(
        "hybrid", description="an expert's importance: its activation frequency, its Hessian trace, or both multiplied"
    )


def assign(inputs: AssignInputs) -> Assignment:
    """Cluster and assign; AssignmentError when the Hessian traces are asked for and were not given."""
    config = inputs.config
    hot = hot_masks(inputs)
    widths = config.widths or PAPER_WIDTHS
    layers = range(len(hot))
    groups = [list(layers)] if config.scope == "model" else [[layer] for layer in layers]
    bits = [np.full(len(mask), min(widths)) for mask in hot]
    for group in groups:
        chosen = cluster(_importance(inputs, group, hot), widths)
        ends = np.cumsum([int((~hot[layer]).sum()) for layer in group])[:-1]
        for layer, part in zip(group, np.split(chosen, ends), strict=True):
            bits[layer][~hot[layer]] = part
    return build(inputs, bits, hot)


def _importance(inputs: AssignInputs, group: Sequence[int], hot: Sequence[np.ndarray]) -> np.ndarray:
    """Importance of the experts of some layers that are not on the GPU, one after the other."""
    metric = inputs.settings(MopeqSettings).metric
    parts = []
    if metric != "hessian":
        parts.append(np.concatenate([inputs.profile.total(layer, inputs.phase())[0][~hot[layer]] for layer in group]))
    if metric != "frequency":
        if inputs.traces is None:
            raise AssignmentError(f"metric {metric} needs the experts' weights", do="use metric frequency")
        traces = inputs.traces()
        for layer in group:
            for expert in np.flatnonzero(~np.isfinite(traces[layer]))[:1].tolist():
                raise AssignmentError(
                    f"the Hessian trace is {traces[layer][expert]:g}",
                    where=f"{inputs.profile.layers[layer]}, expert {expert}",
                    do="use metric frequency",
                )
        parts.append(np.concatenate([traces[layer][~hot[layer]] for layer in group]))
    return parts[0].astype(float) if len(parts) == 1 else hybrid(*parts)


def hybrid(counts: np.ndarray, traces: np.ndarray) -> np.ndarray:
    """Activation frequency times Hessian trace [N], each min-max normalized over these experts (section 3.4)."""
    return np.asarray(spread(counts.astype(float)) * spread(traces))


def spread(values: np.ndarray) -> np.ndarray:
    """Values min-max normalized to [0, 1]; ones where all are the same, so that they don't hide the other factor."""
    if not len(values) or values.max() == values.min():
        return np.ones(len(values))
    return np.asarray((values - values.min()) / (values.max() - values.min()))


def cluster(values: np.ndarray, widths: Sequence[int]) -> np.ndarray:
    """The width [N] of every value: that of its cluster, the cluster of the largest mean has the widest."""
    rising = sorted(set(widths))
    distinct, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    count = min(len(rising), len(distinct))
    if count < 2:
        return np.full(len(values), rising[-1])
    sizes = np.diff([*best_starts(distinct, counts, count), len(distinct)])
    return np.repeat(rising[-count:], sizes)[places]


def best_starts(values: np.ndarray, counts: np.ndarray, clusters: int) -> list[int]:
    """Where each cluster begins in rising distinct values, so that the sum of squares within clusters is least.

    values, counts: [N], N >= clusters, a value standing for as many equal ones. Optimal clusters of numbers are runs of
    the sorted ones, and the best runs of the first j values follow from those of fewer (Wang and Song 2011,
    Ckmeans.1d.dp). Every run's sum is updated from a run without its last value (Welford 1962) rather than taken from
    prefix sums, which would lose small runs beside large values. Where sums tie, the clusters above are the larger.
    Time O(clusters N^2), memory O(clusters N).
    """
    points = np.ldexp(values, LARGEST - int(np.frexp(np.abs(values).max())[1]))
    squares, means, weights = np.zeros((3, len(points)))  # of the run from i to the current value; means less points[i]
    best = np.full((clusters, len(points) + 1), np.inf)  # [c, j] of the first j values in c + 1 clusters
    start = np.zeros((clusters, len(points) + 1), int)  # of the last of these clusters
    for last, (point, weight) in enumerate(zip(points, counts.astype(float), strict=True)):
        runs = slice(last + 1)
        total = weights[runs] + weight
        beyond = point - points[runs] - means[runs]
        squares[runs] += weight * weights[runs] / total * beyond**2
        means[runs] += weight / total * beyond
        weights[runs] = total
        best[0, last + 1] = squares[0]
        for number in range(1, min(clusters, last + 1)):
            sums = best[number - 1, runs] + squares[runs]
            start[number, last + 1] = first = int(sums.argmin())
            best[number, last + 1] = sums[first]
    starts, end = [0] * clusters, len(points)
    for number in range(clusters - 1, 0, -1):
        starts[number] = end = int(start[number, end])
    return starts


def _trials(inputs: AssignInputs, averages: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every metric that there is, within layers and over the model."""
    for metric in get_args(Metric) if inputs.traces is not None else ("frequency",):
        for scope in ("layer", "model"):
            yield f"mopeq {metric}, {scope}", {"metric": metric, "scope": scope}


ALLOCATOR = Allocator(
    name="mopeq",
    label="MoPEQ",
    help="experts clustered by importance, the clusters given the widths in order; there is no budget",
    assign=assign,
    settings=MopeqSettings,
    reads=("widths", "scope", "trace", "trace_samples"),
    weighs=("statistics",),
    implied={"widths": PAPER_WIDTHS, "scope": "layer"},
    trials=_trials,
)
