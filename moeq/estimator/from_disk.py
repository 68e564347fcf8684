"""Experts that the memory beside the GPU has no room for: they lie on the disk behind it, and every use reads them.

Shapes as in step.py: D distinct layers, E experts, S outcomes, A active experts. Every layer has an equal share of the
memory, which holds the most popular of the versions that a phase reads: what a cache keeps of routing that stays as it
is.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moeq.estimator.offload import in_turn
from moeq.estimator.step import TRAFFIC, BoolArray, FloatArray, Layers, Schedule, Span, Work
from moeq.estimator.terms import Bound, Cost


def on_disk(layers: Layers, near_bytes: FloatArray) -> BoolArray:
    """Which experts [D, E] the memory beside the GPU does not hold, of bytes [D, E] that a phase reads there."""
    if layers.hardware.disk is None:
        return np.zeros(near_bytes.shape, dtype=np.bool_)
    order = np.argsort(layers.popularity_rank, axis=1)
    taken = np.take_along_axis(
        np.cumsum(np.take_along_axis(near_bytes, order, axis=1), axis=1), layers.popularity_rank, 1
    )
    room = layers.hardware.ndp.memory_capacity_bytes / layers.geometry.num_layers
    return np.asarray((taken > room * (1 + 1e-12)) & (near_bytes > 0))


def with_disk_reads(layers: Layers, work: Work, plan: Schedule, near_bytes: FloatArray) -> Schedule:
    """The schedule after what its experts of the near-data memory take to be read from the disk.

    Nothing is read ahead and nothing runs beside it: which experts are used is not known before the dense part is done.
    Copies beside whole steps are of experts that are used often, which the memory holds.
    """
    disk = layers.hardware.disk
    there = on_disk(layers, near_bytes)
    if disk is None or not there.any():
        return plan
    near = [cost.bytes for name, cost in plan.terms.items() if "ndp_memory" in TRAFFIC[name] and cost.bytes.ndim == 3]
    moved = np.where(work.pick(there), np.add.reduce(near), 0.0)
    stream, latency = moved / disk.rate, disk.latency_seconds * (moved > 0)
    bound = np.where(latency > stream, np.int8(Bound.LATENCY), np.int8(Bound.BYTES)) * (moved > 0)
    cost = Cost(seconds=stream + latency, bytes=moved, macs=np.zeros_like(moved), bound=bound.astype(np.int8))
    before = cost.seconds.sum(axis=-1)

    def spans() -> tuple[Span, ...]:
        later = (replace(span, start=span.start + before[..., None]) for span in plan.spans())
        return (Span(resource="disk", name="disk", start=in_turn(cost.seconds), seconds=cost.seconds), *later)

    return replace(plan, seconds=plan.seconds + before, terms={**plan.terms, "disk": cost}, spans=spans)
