"""mopeq: paper 003, Algorithm 2: experts clustered by importance, the clusters given the widths in order.

Importance is the activation frequency, the Hessian trace of the Frobenius norm (summed over an expert's matrices), or
the product of both, each min-max normalized over the experts that are clustered together: those of a layer, or of the
model. k-means runs on sorted values with a fixed seed and ten starts, so that the order of experts does not matter;
where fewer values differ than there are widths, the clusters take the widest ones. There is no budget: it lands where
it lands.
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
SEED, STARTS = 0, 10


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
    falling = sorted(set(widths), reverse=True)
    count = min(len(falling), len(np.unique(values)))
    if count < 2:
        return np.full(len(values), falling[0])
    from sklearn.cluster import KMeans

    order = np.argsort(values, kind="stable")
    column = values[order][:, None]
    labels = KMeans(n_clusters=count, n_init=STARTS, random_state=SEED).fit_predict(column)
    means = np.array([column[labels == label].mean() for label in range(count)])
    rank = np.empty(count, int)
    rank[np.argsort(-means, kind="stable")] = np.arange(count)
    chosen = np.empty(len(values), int)
    chosen[order] = np.array(falling)[rank[labels]]
    return chosen


def _trials(inputs: AssignInputs, averages: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every metric that there is, within layers and over the model."""
    for metric in get_args(Metric) if inputs.traces is not None else ("frequency",):
        for scope in ("layer", "model"):
            yield f"mopeq {metric}, {scope}", {"metric": metric, "scope": scope}


ALLOCATOR = Allocator(
    name="mopeq",
    help="experts clustered by importance, the clusters given the widths in order; there is no budget",
    assign=assign,
    settings=MopeqSettings,
    reads=("widths", "scope", "trace", "trace_samples"),
    implied={"widths": PAPER_WIDTHS, "scope": "layer"},
    trials=_trials,
)
