"""Figures of every policy at every grid point: times, throughput, bytes that move, busy share, energy."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import numpy as np

from moeq.estimator.devices import Energy
from moeq.estimator.result import PolicyPoint, Speedup, TermRow
from moeq.estimator.simulation import Simulation
from moeq.estimator.step import CHANNELS, TRAFFIC, Channel, Step, TermTotal
from moeq.estimator.workload import Grid

SUBJECT = "context_aware"
BWRULE, OPT, HOBBIT = BASELINES = ("monde_bwrule", "monde_opt", "hobbit")
Steps = Mapping[int, Mapping[str, Step]]
Prefills = Mapping[tuple[int, int], Mapping[str, Step]]


def policy_points(
    simulation: Simulation, grid: Grid, steps: Steps, prefills: Prefills, *, kv_growth: bool
) -> tuple[PolicyPoint, ...]:
    """All points; `steps` by batch and policy, `prefills` by (batch, input) and policy."""
    migration = simulation.migration()
    found = []
    for batch, input_tokens, output_tokens in itertools.product(grid.batches, grid.inputs, grid.outputs):
        for policy, constant in steps[batch].items():
            first = step = constant
            if kv_growth:
                contexts = input_tokens + np.arange(1, output_tokens + 1)
                step = constant.with_dense(simulation.dense(batch, contexts))
                first = constant.with_dense(simulation.dense(batch, input_tokens + 1))
            found.append(
                _point(
                    simulation,
                    policy,
                    (batch, input_tokens, output_tokens),
                    prefill=prefills[batch, input_tokens][policy],
                    migration=migration[policy],
                    step=step,
                    first_seconds=first.seconds,
                )
            )
    return tuple(found)


def _point(
    simulation: Simulation,
    policy: str,
    at: tuple[int, int, int],
    *,
    prefill: Step,
    migration: TermTotal,
    step: Step,
    first_seconds: float,
) -> PolicyPoint:
    batch, input_tokens, output_tokens = at
    before = prefill.seconds + migration.seconds
    whole = before + output_tokens * step.seconds
    terms = [*prefill.terms.items(), ("fetch", migration)]
    parts = [(name, total, 1) for name, total in terms] + [(n, total, output_tokens) for n, total in step.terms.items()]
    busy = prefill.ndp_seconds + output_tokens * step.ndp_seconds
    on_gpu, on_ndp = (step.terms[name].macs if name in step.terms else 0.0 for name in ("gpu_experts", "ndp_experts"))
    return PolicyPoint(
        policy=policy,
        batch=batch,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        prefill_seconds=prefill.seconds,
        migration_seconds=migration.seconds,
        decode_seconds_per_token=step.seconds,
        end_to_end_seconds=whole,
        decode_tokens_per_second=batch / step.seconds,
        prefill_tokens_per_second=batch * input_tokens / prefill.seconds,
        time_to_first_token_seconds=before + first_seconds,
        stall_seconds_per_token=step.stall_seconds,
        ndp_seconds_per_layer=step.ndp_seconds / simulation.layers.geometry.num_layers,
        ndp_busy_share=busy / whole,
        gpu_expert_share=on_gpu / (on_gpu + on_ndp),
        bytes_moved={channel: _carried(parts, channel) for channel in CHANNELS},
        energy_joules=_joules(parts, simulation.layers.hardware.energy),
    )


def _carried(parts: Iterable[tuple[str, TermTotal, int]], channel: Channel) -> float:
    return sum(times * total.bytes for name, total, times in parts if channel in TRAFFIC[name])


def _joules(parts: list[tuple[str, TermTotal, int]], energy: Energy | None) -> float | None:
    if energy is None:
        return None
    moved = (
        _carried(parts, "gpu_memory") * energy.gpu_memory_joules_per_byte
        + _carried(parts, "link") * energy.link_joules_per_byte
        + _carried(parts, "ndp_memory") * energy.ndp_memory_joules_per_byte
    )
    macs = {True: 0.0, False: 0.0}
    for name, total, times in parts:
        macs[name == "ndp_experts"] += times * total.macs
    return moved + macs[True] * energy.ndp_compute_joules_per_mac + macs[False] * energy.gpu_compute_joules_per_mac


def speedups(points: tuple[PolicyPoint, ...]) -> tuple[Speedup, ...]:
    """How much faster the context-aware placement is than every other policy at every point."""
    subject = {(one.batch, one.input_tokens, one.output_tokens): one for one in points if one.policy == SUBJECT}
    rows = []
    for one in points:
        if one.policy == SUBJECT:
            continue
        mine = subject[one.batch, one.input_tokens, one.output_tokens]
        rows.append(
            Speedup(
                baseline=one.policy,
                batch=one.batch,
                input_tokens=one.input_tokens,
                output_tokens=one.output_tokens,
                decode=one.decode_seconds_per_token / mine.decode_seconds_per_token,
                end_to_end=one.end_to_end_seconds / mine.end_to_end_seconds,
            )
        )
    return tuple(rows)


def decode_terms(steps: Steps) -> tuple[TermRow, ...]:
    """The terms of every policy's decode step, and where copies are not hidden what they add."""
    rows: list[TermRow] = []
    for batch, of_batch in steps.items():
        for policy, step in of_batch.items():
            terms = dict(step.terms)
            if step.windows is not None:
                terms["stall"] = TermTotal.of_bytes(step.stall_seconds)
            rows += _rows(policy, batch, terms, step.seconds)
    return tuple(rows)


def earlier_terms(simulation: Simulation, prefills: Prefills) -> tuple[TermRow, ...]:
    """The terms of every policy's prefill, and the migration after it where something moves."""
    migration = simulation.migration()
    rows: list[TermRow] = []
    for (batch, input_tokens), of_input in prefills.items():
        for policy, step in of_input.items():
            made = _rows(policy, batch, step.terms, step.seconds)
            rows += [one.model_copy(update={"phase": "prefill", "input_tokens": input_tokens}) for one in made]
    for batch in dict.fromkeys(batch for batch, _ in prefills):
        for policy, moved in migration.items():
            if moved.seconds > 0:
                made = _rows(policy, batch, {"fetch": moved}, moved.seconds)
                rows += [one.model_copy(update={"phase": "migration"}) for one in made]
    return tuple(rows)


def _rows(policy: str, batch: int, terms: Mapping[str, TermTotal], seconds: float) -> list[TermRow]:
    return [
        TermRow(
            policy=policy,
            batch=batch,
            term=term,
            seconds=total.seconds,
            share=total.seconds / seconds,
            bytes=total.bytes,
            macs=total.macs,
            bound_by=total.bound_by,
        )
        for term, total in terms.items()
    ]
