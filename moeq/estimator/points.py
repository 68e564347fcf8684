"""Figures of every policy at every grid point: times, throughput, bytes that move, busy share, energy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from moeq.estimator.devices import Energy
from moeq.estimator.result import PolicyPoint, Speedup, TermRow
from moeq.estimator.simulation import Simulation
from moeq.estimator.step import CHANNELS, NOTHING, TRAFFIC, Channel, Step, TermTotal

SUBJECT = "context_aware"
BWRULE, OPT, HOBBIT = BASELINES = ("monde_bwrule", "monde_opt", "hobbit")
Steps = Mapping[int, Mapping[str, Step]]
At = tuple[int, int, int]  # batch, input and output tokens
Prefills = Mapping[tuple[int, int], Mapping[str, Step]]


def policy_points(
    simulation: Simulation, at: Sequence[At], steps: Steps, prefills: Prefills, *, kv_growth: bool
) -> Iterator[PolicyPoint]:
    """All points of places; `steps` by batch and policy, `prefills` by (batch, input) and policy."""
    migration = simulation.migration()
    channels = CHANNELS if simulation.layers.hardware.disk is None else (*CHANNELS, "disk")
    for batch, input_tokens, output_tokens in at:
        for policy, constant in steps[batch].items():
            first = step = constant
            if kv_growth:
                step = simulation.grown(constant, batch, input_tokens, output_tokens)
                first = simulation.grown(constant, batch, input_tokens, 1)
            prefill, moved = prefills[batch, input_tokens][policy], migration[policy]
            before = prefill.seconds + moved.seconds
            whole = before + output_tokens * step.seconds
            parts = [(name, total, 1) for name, total in [*prefill.terms.items(), ("fetch", moved)]]
            parts += [(name, total, output_tokens) for name, total in step.terms.items()]
            busy = prefill.ndp_seconds + output_tokens * step.ndp_seconds
            joules = _joules(parts, whole, simulation.layers.hardware.energy)
            on_gpu, on_ndp = (step.terms.get(name, NOTHING).macs for name in ("gpu_experts", "ndp_experts"))
            yield PolicyPoint(
                policy=policy,
                batch=batch,
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                prefill_seconds=prefill.seconds,
                migration_seconds=moved.seconds,
                decode_seconds_per_token=step.seconds,
                end_to_end_seconds=whole,
                decode_tokens_per_second=batch / step.seconds,
                prefill_tokens_per_second=batch * input_tokens / prefill.seconds,
                time_to_first_token_seconds=before + first.seconds,
                stall_seconds_per_token=step.stall_seconds,
                ndp_seconds_per_layer=step.ndp_seconds / simulation.decode_layers,
                ndp_busy_share=busy / whole,
                gpu_expert_share=on_gpu / (on_gpu + on_ndp) if on_gpu + on_ndp else 0.0,
                bytes_moved={channel: _carried(parts, channel) for channel in channels},
                energy_joules=None if joules is None else sum(joules.values()),
                energy_by_device=joules,
                prefill_error_seconds=prefill.error_seconds,
                decode_error_seconds=step.error_seconds,
                end_to_end_error_seconds=math.hypot(prefill.error_seconds, output_tokens * step.error_seconds),
            )


def _carried(parts: Iterable[tuple[str, TermTotal, int]], channel: Channel) -> float:
    return sum(times * total.bytes for name, total, times in parts if channel in TRAFFIC[name])


def _joules(
    parts: list[tuple[str, TermTotal, int]], seconds: float, energy: Energy | None
) -> dict[Literal["gpu", "link", "ndp"], float] | None:
    """By device, its static power over all the seconds included."""
    if energy is None:
        return None
    macs = {True: 0.0, False: 0.0}
    for name, total, times in parts:
        macs[name == "ndp_experts"] += times * total.macs
    return {
        "gpu": _carried(parts, "gpu_memory") * energy.gpu_memory_joules_per_byte
        + macs[False] * energy.gpu_compute_joules_per_mac
        + seconds * energy.gpu_static_watts,
        "link": _carried(parts, "link") * energy.link_joules_per_byte,
        "ndp": _carried(parts, "ndp_memory") * energy.ndp_memory_joules_per_byte
        + macs[True] * energy.ndp_compute_joules_per_mac
        + seconds * energy.ndp_static_watts,
    }


def step_joules(step: Step, energy: Energy | None) -> float | None:
    """What a decode step takes, static power included; None where the hardware file gives no energies."""
    found = _joules([(name, total, 1) for name, total in step.terms.items()], step.seconds, energy)
    return None if found is None else sum(found.values())


def speedups(points: Sequence[PolicyPoint]) -> Iterator[Speedup]:
    """How much faster the context-aware placement is than every other policy at every point."""
    subject = {point.at: point for point in points if point.policy == SUBJECT}
    for point in points:
        if point.policy != SUBJECT:
            ours = subject[point.at]
            decode = point.decode_seconds_per_token / ours.decode_seconds_per_token
            whole = point.end_to_end_seconds / ours.end_to_end_seconds
            yield Speedup(
                baseline=point.policy,
                batch=point.batch,
                input_tokens=point.input_tokens,
                output_tokens=point.output_tokens,
                decode=decode,
                end_to_end=whole,
                decode_error=decode * math.hypot(_relative(point), _relative(ours)),
                end_to_end_error=whole * math.hypot(_relative(point, "end_to_end"), _relative(ours, "end_to_end")),
            )


def _relative(point: PolicyPoint, what: Literal["decode", "end_to_end"] = "decode") -> float:
    """Standard error of a time as a share of it."""
    if what == "decode":
        return point.decode_error_seconds / point.decode_seconds_per_token
    return point.end_to_end_error_seconds / point.end_to_end_seconds


def decode_terms(steps: Steps) -> Iterator[TermRow]:
    """The terms of every policy's decode step, and where copies are not hidden what they add."""
    for batch, of_batch in steps.items():
        for policy, step in of_batch.items():
            stall = {} if step.windows is None else {"stall": TermTotal.of_bytes(step.stall_seconds)}
            yield from _rows({**step.terms, **stall}, step.seconds, policy=policy, batch=batch)


def earlier_terms(simulation: Simulation, prefills: Prefills) -> Iterator[TermRow]:
    """The terms of every policy's prefill, and the migration after it where something moves."""
    migration = simulation.migration()
    for (batch, tokens), of_input in prefills.items():
        for policy, step in of_input.items():
            where = {"policy": policy, "batch": batch, "phase": "prefill", "input_tokens": tokens}
            yield from _rows(step.terms, step.seconds, **where)
    for batch in dict.fromkeys(batch for batch, _ in prefills):
        for policy, moved in migration.items():
            if moved.seconds > 0:
                yield from _rows({"fetch": moved}, moved.seconds, policy=policy, batch=batch, phase="migration")


def _rows(terms: Mapping[str, TermTotal], seconds: float, **where: Any) -> Iterator[TermRow]:
    """A row a term of what takes some seconds; where: the row's other fields."""
    for term, total in terms.items():
        yield TermRow(
            term=term,
            seconds=total.seconds,
            share=total.seconds / seconds,
            bytes=total.bytes,
            macs=total.macs,
            bound_by=total.bound_by,
            **where,
        )
