"""assign.speed: the assignment of least objective that decodes so many tokens a second by the estimator.

Where experts compute decides what a width costs: on the GPU (static mixed precision, where all experts fit), or near
their memory and over the link (context-aware placement). For both, the time of every expert at every width is a second
limit of the knapsack, beside the budget; the estimator then times the assignment as a whole, routed as the profile was.
On the GPU times add up and the limit is exact. Near-data work runs beside the GPU's: how much of it fits is found by
bisection, and no assignment whose near-data work alone takes longer than the step can meet the speed, which bounds how
much the objective could still fall (where the knapsack is solved; its own gap comes on top).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from moeq.artifacts.assignment import DROPPED, FULL, Assignment
from moeq.assigners import latency, sensitivity
from moeq.assigners.inputs import AssignInputs
from moeq.assigners.limits import choices
from moeq.errors import AssignmentError, BudgetError, EstimateError
from moeq.estimator import Hardware, ModelGeometry, load_hardware
from moeq.estimator.geometry import codebook_of, effective_bits
from moeq.estimator.placement import assignment_placement, layer_of_assignment, weights_of_a_scale
from moeq.estimator.simulation import Simulation, build_simulation
from moeq.estimator.terms import t_fetch, t_gpu, t_ndp
from moeq.stages.context import Context
from moeq.stages.estimate_sizes import chosen_geometry, profiled_popularity
from moeq_kernels.widths import Encoding

ON_GPU, NEAR = "static_mixed", "context_aware"
ROUNDS = 12  # of the bisection
MILLISECONDS = 1e3
SLACK = 1e-6  # above the shortest time, for rounding


@dataclass(frozen=True, kw_only=True)
class Found:
    """An assignment under a policy, its decode tokens a second and its objective."""

    assignment: Assignment
    policy: str
    tokens_per_second: float
    objective: float

    def as_json(self, speed: float, hardware: str, *, bound: float) -> dict[str, Any]:
        """What the summary says of it; bound: what the objective of none that meets the speed can go below."""
        gap = 0.0 if self.objective <= bound else (self.objective - bound) / self.objective
        return {
            "speed_limit": speed,
            "tokens_per_second": self.tokens_per_second,
            "speed_policy": self.policy,
            "speed_hardware": hardware,
            "objective_gap": gap,
        }


def assign_for_speed(
    context: Context, inputs: AssignInputs, decide: Callable[[AssignInputs], Assignment]
) -> tuple[Assignment, dict[str, Any]]:
    """The assignment and what the summary says of it; BudgetError with the fastest where none is fast enough."""
    speed = inputs.config.speed
    assert speed is not None
    name = context.recipe.hardware_of(inputs.config)
    assert name is not None
    hardware, (geometry, _) = load_hardware(name), chosen_geometry(context)
    free = replace(inputs, config=inputs.config.model_copy(update={"speed": None}))
    problem = SpeedProblem(
        context=context, decide=decide, inputs=free, geometry=geometry, hardware=hardware, speed=speed
    )
    solved = [problem.solve(policy) for policy in (ON_GPU, NEAR)]
    found = [each for each, _ in solved if each is not None]
    if not found:
        raise BudgetError(
            f"{speed:g} tokens a second cannot be met on {hardware.name} within the budget; all experts at their "
            f"narrowest give {problem.narrowest():.4g}",
            where="assign.speed",
            do="ask for less, name narrower widths, lower the budget or keep other gpu_experts",
        )
    best = min(found, key=lambda each: (each.objective, -each.tokens_per_second))
    return best.assignment, best.as_json(speed, hardware.name, bound=min(bound for _, bound in solved))


class SpeedProblem:
    """One model on one hardware."""

    def __init__(
        self,
        *,
        context: Context,
        decide: Callable[[AssignInputs], Assignment],
        inputs: AssignInputs,
        geometry: ModelGeometry,
        hardware: Hardware,
        speed: float,
    ) -> None:
        self.inputs, self.geometry, self.hardware, self.speed = inputs, geometry, hardware, speed
        self.popularity = profiled_popularity(context)
        self.context_tokens = context.recipe.estimate.context
        self.group_size = weights_of_a_scale(inputs.group_size, geometry)
        self.decide = decide

    def narrowest(self) -> float:
        """Decode tokens a second with every expert at the narrowest width; 0 where that cannot run either."""
        fastest = self.fastest(self._narrow())
        return 0.0 if fastest is None else fastest.tokens_per_second

    def _narrow(self) -> Assignment:
        """Every expert at the narrowest width."""
        kept = {*choices(self.inputs)} - {DROPPED}
        least = self.inputs.config.model_copy(update={"widths": [min(kept)], "drop": False})
        return self.decide(replace(self.inputs, config=least, memo={}))

    def fastest(self, assignment: Assignment) -> Found | None:
        """An assignment under the policy that decodes it fastest; None where neither can run it."""
        rates = {policy: self._speed(assignment, policy) for policy in (ON_GPU, NEAR)}
        known = {policy: rate for policy, rate in rates.items() if rate is not None}
        if not known:
            return None
        policy = max(known, key=lambda each: known[each])
        return self._found(assignment, policy, known[policy])

    def at_times(self, policy: str, count: int) -> list[Found]:
        """The least objectives within so many times a token of their experts, in equal ratios from what they take with
        no limit of time down to what the narrowest take; those that the policy can run."""
        inputs = self._within_memory() if policy == ON_GPU else self.inputs
        try:
            free, narrow = self.decide(inputs), self._narrow()
        except BudgetError:
            return []
        if self._speed(narrow, policy) is None:
            return []
        timed = self._timed(inputs, policy, free)
        longest, shortest = (latency.achieved(timed, each) for each in (free, narrow))
        if not longest > shortest > 0:
            return []
        made = [free]
        for seconds in np.geomspace(longest, shortest * (1 + SLACK), count)[1:].tolist():
            with suppress(BudgetError):
                made.append(self._within(timed, seconds))
        found = [self.fastest(assignment) for assignment in made if self._speed(assignment, policy) is not None]
        return [each for each in found if each is not None]

    def solve(self, policy: str) -> tuple[Found | None, float]:
        """The least objective under a policy, None where it cannot run or is never fast enough; and what no assignment
        that meets the speed under it can go below, infinite where there is none."""
        inputs = self._within_memory() if policy == ON_GPU else self.inputs
        try:
            free = self.decide(inputs)
        except BudgetError:
            return None, math.inf
        measured = self._speed(free, policy)
        if measured is not None and measured >= self.speed:
            found = self._found(free, policy, measured)
            return found, found.objective
        step = 1 / self.speed - self._simulation(free).dense(1, self.context_tokens).seconds
        inputs = self._timed(inputs, policy, free)
        most = step - (self._hot_seconds(inputs, free) if policy == ON_GPU else 0.0)
        if most <= 0:
            return None, math.inf
        try:
            bound = self._objective(self._within(inputs, most))
        except BudgetError:
            return None, math.inf
        low, high, limit, best = 0.0, most, most, None
        for _ in range(ROUNDS):
            try:
                made = self._within(inputs, limit)
            except BudgetError:  # nothing takes as little
                low = limit
            else:
                rate = self._speed(made, policy)
                if rate is None or rate < self.speed:
                    high = limit
                else:
                    best, low = self._found(made, policy, rate), limit
                if low == most:
                    break
            limit = (low + high) / 2
        return best, bound

    def _within_memory(self) -> AssignInputs:
        """With a budget of stored bits that all experts have in what is left of the GPU's memory."""
        config, geometry = self.inputs.config, self.geometry
        if config.bits_per_weight is None:
            return self.inputs
        room = self.hardware.all_gpus.memory_capacity_bytes - geometry.non_expert_bytes
        room -= float(geometry.across(self.hardware.count).kv_bytes(self.context_tokens))
        weights = geometry.num_layers * geometry.expert_parameters
        room -= 2.0 * config.gpu_experts * weights
        bits = Fraction(max(0, int(8000 * room / (weights * max(1, geometry.num_experts - config.gpu_experts)))), 1000)
        budget = min(bits, Fraction(config.bits_per_weight))
        return replace(self.inputs, config=config.model_copy(update={"bits_per_weight": str(budget)}))

    def _timed(self, inputs: AssignInputs, policy: str, assignment: Assignment) -> AssignInputs:
        """With the times of experts under a policy, and the tokens that each is given."""
        measured = self._times(policy, sorted({*inputs.measured(), FULL}))
        times = [{DROPPED: 0.0} | widths for widths in measured]
        return replace(inputs, tokens_given=self._tokens_given(assignment), ndp_seconds=tuple(times), memo={})

    def _within(self, inputs: AssignInputs, seconds: float) -> Assignment:
        """The least objective whose experts take at most so many seconds a token, as their times count."""
        config = inputs.config.model_copy(update={"ndp_latency_ms": MILLISECONDS * seconds})
        return self.decide(replace(inputs, config=config))

    def _tokens_given(self, assignment: Assignment) -> tuple[np.ndarray, ...]:
        """Tokens [E] that each expert of an assigned layer is given for one of the model, as the estimator draws."""
        simulation = self._simulation(assignment)
        drawn, assigned = simulation.tokens_per_token(), len(self.inputs.profile.layers)
        rows = layer_of_assignment(self.geometry.num_layers, assigned)
        return tuple(drawn[simulation.layer_row[np.flatnonzero(rows == layer)[0]]] for layer in range(assigned))

    def _times(self, policy: str, widths: Sequence[int]) -> list[dict[int, float]]:
        """Seconds of one token of one expert at every width, times the layers that an assigned one stands for, and how
        many times a token goes through these."""
        assigned, parameters = len(self.inputs.profile.layers), self.geometry.expert_parameters
        stored = np.asarray(effective_bits(widths, self.group_size, not self.inputs.symmetric, self._codebook))
        if policy == ON_GPU:
            seconds = t_gpu(parameters, stored, 1, self.hardware.all_gpus).seconds
        elif self.hardware.ndp.computes:
            seconds = t_ndp(parameters, stored, 1, self.hardware.ndp).seconds
        else:
            seconds = t_fetch(parameters * stored / 8, 1, self.hardware).seconds
        rows = layer_of_assignment(self.geometry.num_layers, assigned)
        visits = [self.geometry.times[np.flatnonzero(rows == layer)[0]] for layer in range(assigned)]
        repeated = self.geometry.num_layers / assigned
        return [dict(zip(widths, (repeated * times * seconds).tolist(), strict=True)) for times in visits]

    def _hot_seconds(self, inputs: AssignInputs, assignment: Assignment) -> float:
        """Expected seconds of experts that stay in full precision on the GPU, which no width decides."""
        full = self._times(ON_GPU, [FULL])
        return float(
            sum(
                (inputs.tokens_given[layer] * np.asarray(hot)).sum() * full[layer][FULL]
                for layer, hot in enumerate(assignment.hot())
            )
        )

    @property
    def _codebook(self) -> str:
        return codebook_of(Encoding.of(self.inputs))

    def _simulation(self, assignment: Assignment) -> Simulation:
        return build_simulation(
            self.geometry,
            self.hardware,
            assignment_placement(assignment, self.group_size),
            group_size=self.group_size,
            zero_points=not self.inputs.symmetric,
            codebook=self._codebook,
            popularity=self.popularity,
            context=self.context_tokens,
            labels=frozenset({ON_GPU, NEAR}),
        )

    def _speed(self, assignment: Assignment, policy: str) -> float | None:
        """Decode tokens a second of one sequence; None where the policy cannot run it."""
        simulation = self._simulation(assignment)
        refused = simulation.refusals(1).get(policy)
        if refused is not None or (policy == NEAR and simulation.over_memory(1) is not None):
            return None
        try:
            rate = 1 / simulation.decode(1, frozenset({policy}))[policy].seconds
        except EstimateError as error:
            raise AssignmentError(error.what, where="assign.speed", do=error.do or "give other hardware") from error
        return rate

    def _objective(self, assignment: Assignment) -> float:
        return sensitivity.objective(self.inputs, assignment)

    def _found(self, assignment: Assignment, policy: str, rate: float) -> Found:
        objective = self._objective(assignment)
        return Found(assignment=assignment, policy=policy, tokens_per_second=rate, objective=objective)
