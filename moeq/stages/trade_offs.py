"""What other assignments of a run's measurements come to in size, objective and speed, each with what makes it.

The least objective at some sizes, and within some times that the experts take; the estimator says how fast each decodes
on assign.hardware, else on the hardware that the run's estimate is of. Left are those that no other beats in all three,
and the run's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import partial

import numpy as np

from moeq.artifacts.assignment import DROPPED, Assignment
from moeq.assigners.inputs import AssignInputs
from moeq.assigners.limits import choices
from moeq.assigners.report import is_beaten
from moeq.errors import AssignmentError, BudgetError
from moeq.estimator import load_hardware
from moeq.folders import as_word
from moeq.recipe import BUDGETS
from moeq.recipe.assign import UNLIMITED_BITS
from moeq.reporting.inputs import TradeOff
from moeq.stages.assign import decide, inputs_of
from moeq.stages.assign_speed import NEAR, ON_GPU, Found, SpeedProblem
from moeq.stages.context import Context
from moeq.stages.estimate_sizes import chosen_geometry
from moeq.stages.expert_bytes import bits_per_weight, total_bytes

METHOD = "optimal"
SIZES, TIMES = 5, 5  # of each policy
ALIKE = 0.02
DIGITS = 4  # of a speed in a command
OTHER_LIMITS = ("speed", "ndp_latency_ms")


def trade_offs(context: Context, own: Assignment) -> list[TradeOff]:
    """The fastest first; none for a method that has no least objective, and for images, which decode nothing."""
    config = context.recipe.assign
    if config.method != METHOD or context.model.takes_images:
        return []
    hardware, (geometry, _) = config.hardware or context.recipe.estimate.hardware, chosen_geometry(context)
    free = dict.fromkeys((*BUDGETS, *OTHER_LIMITS))
    unlimited = config.model_copy(update={**free, "bits_per_weight": str(UNLIMITED_BITS)})
    inputs = inputs_of(context, unlimited, context.recipe.name)
    problem = SpeedProblem(
        context=context, decide=decide, inputs=inputs, geometry=geometry, hardware=load_hardware(hardware), speed=0.0
    )
    unset = "".join(f" --set assign.{name}=null" for name in OTHER_LIMITS if getattr(config, name) is not None)
    traded = partial(_trade_off, context, problem.hardware.name)
    found = [traded(each, command + unset) for each, command in _by_size(problem, inputs)]
    for policy in (ON_GPU, NEAR):
        found += [
            traded(each, _speed_command(each.tokens_per_second, hardware, named=config.speed is None))
            for each in problem.at_times(policy, TIMES)
        ]
    rows = [_row(each) for each in found]
    kept = [each for each, row in zip(found, rows, strict=True) if not is_beaten(row, rows)]
    if (mine := problem.fastest(own)) is not None:
        kept.insert(0, traded(mine, None))
    return sorted(_apart(kept), key=lambda each: (-each.tokens_per_second, each.expert_bytes))


def _by_size(problem: SpeedProblem, inputs: AssignInputs) -> list[tuple[Found, str]]:
    """The least objective at some sizes between all experts at the least and at the largest measured width."""
    widths = {*choices(inputs)} - {DROPPED}
    least, most = (
        8 * sum(each[width] for each in inputs.bytes) / sum(inputs.weights) for width in (min(widths), max(widths))
    )
    found = []
    for bits in np.geomspace(least, most, SIZES).tolist():
        budget = str(Fraction(math.ceil(100 * bits), 100))
        with suppress(BudgetError, AssignmentError):
            config = inputs.config.model_copy(update={"bits_per_weight": budget})
            each = problem.fastest(decide(replace(inputs, config=config)))
            if each is not None:
                found.append((each, f"moeq assign RUN --bits {float(Fraction(budget)):g}"))
    return found


def _speed_command(rate: float, hardware: str, *, named: bool) -> str:
    """What finds an assignment at least as fast; a budget that the recipe has is lifted."""
    unit = 10 ** (math.floor(math.log10(rate)) + 1 - DIGITS)
    shown = f"{math.floor(rate / unit) * unit:.{DIGITS}g}"
    on = f" --hardware {as_word(hardware)}" if named else ""
    return f"moeq assign RUN --speed {shown}tok/s{on} --bits {UNLIMITED_BITS}"


def _trade_off(context: Context, hardware: str, found: Found, command: str | None) -> TradeOff:
    return TradeOff(
        bits_per_weight=bits_per_weight(context, found.assignment) or 0.0,
        expert_bytes=total_bytes(context, found.assignment),
        objective=found.objective,
        tokens_per_second=found.tokens_per_second,
        hardware=hardware,
        policy=found.policy,
        command=command,
    )


def _row(each: TradeOff) -> tuple[float, ...]:
    return each.expert_bytes, each.objective, -each.tokens_per_second


def _apart(found: Sequence[TradeOff]) -> list[TradeOff]:
    """Of those that are all but equal in every respect the first."""
    kept: list[TradeOff] = []
    for each in found:
        if not any(np.allclose(_row(each), _row(other), rtol=ALIKE, atol=0) for other in kept):
            kept.append(each)
    return kept
