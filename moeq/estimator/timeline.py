"""When GPU, NDP and link are busy in one decode step, layer after layer: what a Chrome trace can show."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moeq.errors import EstimateError
from moeq.estimator.devices import Hardware
from moeq.estimator.geometry import ModelGeometry
from moeq.estimator.placement import Placement
from moeq.estimator.policies import by_label
from moeq.estimator.simulation import build_simulation
from moeq.estimator.step import FloatArray, Resource, Span, Work
from moeq.registry import POLICIES

Layer = tuple[float, float, list[tuple[Span, list[int]]]]  # seconds of the dense part and of experts, spans, experts


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A resource at work: `resource` is gpu, ndp, to_gpu or to_ndp (the directions of the link), or disk.

    `name` is a term of the step (dense, gpu_experts, ndp_experts, activations, fetch, copies, disk); `layer` one of the
    model's MoE layers; `expert` None where it is no single one's.
    """

    resource: Resource
    name: str
    layer: int
    expert: int | None
    start_seconds: float
    seconds: float


def timeline(
    geometry: ModelGeometry,
    hardware: Hardware,
    placement: Placement,
    *,
    policy: str,
    batch: int = 1,
    step: int | None = None,
    **settings: Any,
) -> tuple[Interval, ...]:
    """One decode step of a policy's label ("monde_opt"), by start; other settings are those of `estimate`.

    `step`: which routing outcome (of a trace: which step of the batch); None: in every layer the one whose time is
    closest to the expected, of consecutive steps the first. Copies that a step does not hide run on past its end.

    Raises EstimateError for an unknown policy, one that cannot run the model, or a step that is not there.
    """
    simulation = build_simulation(geometry, hardware, placement, labels=frozenset({policy}), **settings)
    if policy not in by_label():
        raise POLICIES.refused(policy, by_label(), EstimateError)
    run, variant = by_label()[policy]
    refused = simulation.refusals(batch).get(policy)
    if refused is not None:
        raise EstimateError(refused, where=policy, do="give another hardware, placement or batch")
    distinct: list[Layer] = []
    for layers, work in simulation.chunks(batch, in_time=run.in_time):
        plan = simulation.scheduled(run, layers, work, variant)
        spans, expected = plan.spans(), (work.probability * plan.seconds).sum(axis=1)
        for row in range(len(layers.repeats)):
            index = _outcome(work, step, np.abs(plan.seconds[row] - expected[row]))
            experts = work.experts[row, index].tolist()
            cut = [(_cut(span, row, index), experts if span.each else []) for span in spans]
            distinct.append((float(work.dense.seconds), float(plan.seconds[row, index]), cut))
    order = geometry.in_turn(geometry.encoder_layers)
    intervals = _intervals((layer, distinct[simulation.layer_row[layer]]) for layer in order)
    return tuple(sorted(intervals, key=lambda interval: interval.start_seconds))


def _outcome(work: Work, step: int | None, distance: FloatArray) -> int:
    count = len(distance)
    if step is None:
        return 0 if work.in_time else int(np.argmin(distance))
    if not 0 <= step < count:
        raise EstimateError(f"step {step}: there are {count}", do=f"give 0 to {count - 1}")
    return step


def _cut(span: Span, row: int, index: int) -> Span:
    """One layer and outcome of a span: start and seconds [A]."""
    start = np.broadcast_to(span.start, span.seconds.shape)
    return replace(span, start=start[row, index], seconds=span.seconds[row, index])


def _intervals(layers: Iterable[tuple[int, Layer]]) -> Iterator[Interval]:
    now = copied = 0.0
    for layer, (dense_seconds, expert_seconds, spans) in layers:
        yield Interval(resource="gpu", name="dense", layer=layer, expert=None, start_seconds=now, seconds=dense_seconds)
        begin = now + dense_seconds
        for span, experts in spans:
            for place in np.flatnonzero(span.seconds > 0).tolist():
                beside = span.name == "copies"  # a stream of its own, which does not wait for the layer
                start = max(now, copied) if beside else begin + float(span.start[place])
                seconds = float(span.seconds[place])
                copied = start + seconds if beside else copied
                yield Interval(
                    resource=span.resource,
                    name=span.name,
                    layer=layer,
                    expert=experts[place] if experts else None,
                    start_seconds=start,
                    seconds=seconds,
                )
        now = begin + expert_seconds
