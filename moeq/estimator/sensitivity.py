"""What the answer becomes with one assumption changed at a time: constants, policies, routing, batch, context."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from moeq.errors import EstimateError
from moeq.estimator.devices import SECTIONS, Constant, Hardware, file_key
from moeq.estimator.points import BASELINES, BWRULE, OPT, SUBJECT, At
from moeq.estimator.policies import label, parameter
from moeq.estimator.result import SensitivityRow
from moeq.estimator.simulation import Simulation
from moeq.estimator.workload import placed_popularity
from moeq.registry import POLICIES

SENSITIVITY_BATCHES = (4, 16)
CONTEXT_FACTOR = 8
ZIPF_EXPONENT = 1.0
MOST_STEPS = 128  # of a trace
PCIE_GEN4, PCIE_GEN5 = (32e9, "32 GB/s (PCIe Gen4 x16)"), (64e9, "64 GB/s (PCIe Gen5 x16)")
_COMPARED = frozenset({SUBJECT, *BASELINES})
_ASSUMED = re.compile(r"(fitted|assum|ideal)", re.IGNORECASE)
Change = tuple[str, str, Hardware]
Answer = tuple[dict[str, float], dict[str, float]]


def sensitivity(
    simulation: Simulation, at: At, *, kv_growth: bool
) -> tuple[tuple[SensitivityRow, ...], int | None, tuple[str, ...]]:
    """Rows at one point, and how many steps of a trace they are taken from (None: all there are); what is left out.

    Changed are every constant whose source calls it fitted, assumed or ideal, always tau, the link's bandwidth, the
    dataflow and the low-bit rate; parameters of the policies that were neither measured nor printed; routing, batch
    and context. From a trace with many steps some are taken, and the first row says what they give unchanged. A change
    with which keys and values no longer fit is left out, with a line that says so.
    """
    whole, sampled = simulation, None
    simulation = simulation.sampled(MOST_STEPS)
    batch = at[0]
    if simulation.replay is not None and whole.replay is not None:
        taken, there = (len(replay.steps(batch).rows) for replay in (simulation.replay, whole.replay))
        sampled = taken if taken < there else None
    answer, fits = partial(_answer, at, kv_growth), simulation.over_memory(batch) is None
    base = answer(None, simulation, batch)
    rows = [] if sampled is None else [_row("none", f"{sampled} steps of the trace", base)]
    for key, change, hardware in hardware_changes(simulation.layers.hardware):
        rows.append(_row(key, change, answer(_COMPARED, simulation.on(hardware), batch)))
    for key, change, hardware in policy_changes(simulation, batch):
        name = key.split(".")[1]
        affected = frozenset(label(name, variant) for variant in POLICIES.get(name).variants)
        decode, whole_request = answer(affected, simulation.on(hardware), batch)
        rows.append(_row(key, change, (base[0] | decode, base[1] | whole_request), only=affected))
    left_out = []
    for key, change, changed, other_batch in work_changes(simulation, batch, kv_growth=kv_growth):
        if fits and (reason := changed.over_memory(other_batch)) is not None:
            left_out.append(f"sensitivity: {key} {change} is left out, it {reason}")
            continue
        rows.append(_row(key, change, answer(_COMPARED, changed, other_batch)))
    return tuple(rows), sampled, tuple(left_out)


def _answer(at: At, kv_growth: bool, only: frozenset[str] | None, simulation: Simulation, batch: int) -> Answer:
    """Decode seconds a token and seconds of the whole request, by policy label."""
    _, input_tokens, output_tokens = at
    steps = simulation.decode(batch, only)
    if kv_growth:
        steps = {key: simulation.grown(step, batch, input_tokens, output_tokens) for key, step in steps.items()}
    prefill, migration = simulation.prefill(batch, input_tokens, only), simulation.migration()
    decode = {key: step.seconds for key, step in steps.items()}
    whole = {key: prefill[key].seconds + migration[key].seconds + output_tokens * step for key, step in decode.items()}
    return decode, whole


def _row(assumption: str, change: str, answer: Answer, *, only: frozenset[str] | None = None) -> SensitivityRow:
    """`only`: the policy whose parameter changed; all are shown where that is the context-aware placement itself."""
    decode, whole = ({key: time / times[SUBJECT] for key, time in times.items() if key != SUBJECT} for times in answer)
    shown = decode.keys() if only is None or SUBJECT in only else only
    return SensitivityRow(
        assumption=assumption,
        change=change,
        decode_seconds_per_token=answer[0][SUBJECT],
        decode_speedup_over_monde_bwrule=decode[BWRULE],
        decode_speedup_over_monde_opt=decode[OPT],
        decode_speedups={key: ratio for key, ratio in decode.items() if key in shown},
        end_to_end_speedups={key: ratio for key, ratio in whole.items() if key in shown},
    )


def hardware_changes(hardware: Hardware) -> Iterator[Change]:
    """Key, change in words and the changed hardware, for every constant that is worth it."""
    for constant in hardware.constants:
        section, _, key = constant.key.partition(".")
        if section not in SECTIONS:
            continue
        field = next(name for name in SECTIONS[section].model_fields if file_key(name) == key)
        changed = _changed(constant, field, getattr(getattr(hardware, section), field), hardware)
        if changed is not None:
            value, text = changed
            yield constant.key, f"{constant.text} -> {text}", hardware.changed(section, **{field: value})


def _changed(constant: Constant, field: str, old: float | str, hardware: Hardware) -> tuple[float | str, str] | None:
    """The value that a constant is changed to, and its text; None where it is left alone."""
    if constant.key == "gpu.layer_overhead":
        return (0.0, "0 s (tau = 0)") if old else None
    if constant.key == "link.bandwidth":
        return PCIE_GEN5 if math.isclose(float(old), PCIE_GEN4[0], rel_tol=0.1) else PCIE_GEN4
    if isinstance(old, str):
        other = {"scale": "const", "const": "scale", "ws": "os", "os": "ws"}.get(old)
        return None if other is None or not hardware.ndp.computes else (other, other)
    if not _ASSUMED.match(constant.source) or field.endswith("capacity_bytes"):
        return None
    if field.endswith("efficiency"):
        return (1.0, "1.0 (ideal)") if old < 1 else (0.8, "0.8")
    if field.endswith("_seconds"):
        return (0.0, "0 s") if old else (5e-6, "5 us")
    return (max(1, old // 2), "half") if isinstance(old, int) else (old / 2, "half")


def policy_changes(simulation: Simulation, batch: int) -> Iterator[Change]:
    """As `hardware_changes`, for parameters of the policies that have an alternative and were assumed or fitted."""
    hardware = simulation.layers.hardware
    refused = simulation.refusals(batch)
    wanted = {policy.name for key, policy, _ in simulation.wanted() if key not in refused}
    given = {constant.key: constant.source for constant in hardware.constants}
    for policy in POLICIES:
        name = policy.name
        for key, setting in policy.parameters.items() if name in wanted else ():
            dotted, old, new = f"policies.{name}.{key}", parameter(policy, hardware, key), setting.alternative
            if new is not None and new != old and _ASSUMED.match(given.get(dotted, setting.source)):
                policies = {**hardware.policies, name: {**hardware.policies.get(name, {}), key: new}}
                changed = hardware.model_copy(update={"policies": policies})
                yield dotted, f"{_text(old)} -> {_text(new)}", changed


def _text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def work_changes(simulation: Simulation, batch: int, *, kv_growth: bool) -> Iterator[tuple[str, str, Simulation, int]]:
    """Key, change in words, the changed simulation and its batch: other routing, contexts and batches."""
    if simulation.replay is not None:
        yield "routing", "as recorded -> drawn, popularity of the prompts", simulation.without_trace(), batch
    elif len(simulation.distinct_popularity) == 1 and np.ptp(simulation.distinct_popularity) == 0:
        skewed = placed_popularity(simulation.layers.hot, simulation.layers.bits, ZIPF_EXPONENT)
        text = f"uniform -> Zipf {ZIPF_EXPONENT:g}, the placement's best experts the most popular"
        yield "routing", text, simulation.with_popularity(skewed), batch
    else:
        even = np.full_like(simulation.layers.popularity, 1 / simulation.layers.geometry.num_experts)
        yield "routing", "by popularity -> uniform", simulation.with_popularity(even), batch
    if not kv_growth and simulation.context > 0:
        longer = CONTEXT_FACTOR * simulation.context
        changed = replace(simulation, context=longer, kv_tokens=longer)
        yield "context", f"{simulation.context} -> {longer} tokens", changed, batch
    for other in SENSITIVITY_BATCHES:
        if other != batch and _has(simulation, other):
            yield "batch", f"{batch} -> {other}", simulation, other


def _has(simulation: Simulation, batch: int) -> bool:
    """Whether so many sequences decode together, which not every trace has."""
    try:
        return simulation.replay is None or len(simulation.replay.steps(batch).rows) > 0
    except EstimateError:
        return False
