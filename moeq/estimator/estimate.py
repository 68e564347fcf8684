"""The estimate: every policy at every grid point, speed-ups, terms, capacity, and what the answer hangs on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from moeq.artifacts.trace import RoutingTrace
from moeq.errors import EstimateError
from moeq.estimator.assumptions import assumptions
from moeq.estimator.capacity import REPLICA_BITS
from moeq.estimator.devices import Hardware
from moeq.estimator.geometry import ModelGeometry
from moeq.estimator.placement import Placement
from moeq.estimator.points import BWRULE, OPT, SUBJECT, At, decode_terms, earlier_terms, policy_points, speedups
from moeq.estimator.policies import label
from moeq.estimator.result import Capacity, Estimate, Refusal, Unfit
from moeq.estimator.sensitivity import MOST_STEPS, sensitivity
from moeq.estimator.simulation import Simulation, build_simulation
from moeq.estimator.workload import Grid
from moeq.registry import POLICIES

ALWAYS = (SUBJECT, BWRULE, OPT)


def estimate(
    geometry: ModelGeometry,
    hardware: Hardware,
    placement: Placement,
    *,
    group_size: int | None = 128,
    zero_points: bool = False,
    codebook: str = "",
    popularity: ArrayLike | None = None,
    trace: RoutingTrace | None = None,
    policies: Sequence[str] | None = None,
    grid: Grid | None = None,
    context: int = 1024,
    kv_growth: bool = False,
    monte_carlo_samples: int = 256,
    seed: int = 0,
    replica_bits: tuple[int, ...] = REPLICA_BITS,
    changes: bool = True,
) -> Estimate:
    """Latency, throughput and memory of a placed model under every policy, and speed-ups of the context-aware one.

    `popularity`[E] or [L', E] weighs the routing of all layers or of each of the placement's (None: uniform, or that
    of the trace's prompts); it is the weight of a draw without replacement, so that with top_k > 1 the resulting
    frequencies are flatter. `trace`: decode takes its recorded steps in order; the hot experts of every sequence
    follow from its prompt, as many as the placement has. `policies`: names or labels ("monde", "monde_opt"; None:
    all); the context-aware placement and both MoNDE baselines always are among them. `context` tokens of keys and
    values are read at every decode step, or with `kv_growth` the prompt and what was decoded so far. A placement with
    fewer layers than the model is repeated evenly. `changes`: whether the sensitivity to every assumption is worked
    out, which takes most of the time. A policy that cannot run the model is refused: an error if it was
    asked for by name, else a line of the result.

    Raises EstimateError for input that does not fit together. Source: shared/ESTIMATOR.md.
    """
    _check(geometry, placement, popularity, group_size, context, monte_carlo_samples, seed)
    grid = grid or Grid()
    simulation = build_simulation(
        geometry,
        hardware,
        placement,
        group_size=group_size,
        zero_points=zero_points,
        codebook=codebook,
        popularity=popularity,
        context=context,
        samples=monte_carlo_samples,
        seed=seed,
        trace=trace,
        labels=None if policies is None else chosen_labels(policies),
    )
    every = list(itertools.product(grid.batches, grid.inputs, grid.outputs))
    unfit = tuple(_unfit(simulation, every, kv_growth=kv_growth))
    lacking = {(row.batch, row.input_tokens, row.output_tokens) for row in unfit}
    at = [place for place in every if place not in lacking] or every
    batches = _by_batch(simulation, at, kv_growth=kv_growth)
    refused = _refused(batches, asked=policies is not None)
    settled = partial(_assemble, kv_growth=kv_growth, popularity_given=popularity is not None, changes=changes)
    made = settled(batches, placement, at, refused, replica_bits)
    return made.model_copy(update={"unfit": unfit})


def _by_batch(simulation: Simulation, at: Sequence[At], *, kv_growth: bool) -> dict[int, Simulation]:
    """The simulation of each batch, whose memory holds keys and values of its longest request."""
    longest: dict[int, int] = {}
    for place in at:
        tokens = _kept_tokens(simulation.context, place, kv_growth=kv_growth)
        longest[place[0]] = max(tokens, longest.get(place[0], 0))
    return {batch: replace(simulation, kv_tokens=tokens) for batch, tokens in longest.items()}


def _refused(batches: Mapping[int, Simulation], *, asked: bool) -> tuple[Refusal, ...]:
    """Policies that cannot run at a batch; EstimateError for one that was asked for and can at none."""
    refused = tuple(
        Refusal(policy=policy, batch=batch, reason=reason)
        for batch, simulation in batches.items()
        for policy, reason in simulation.refusals(batch).items()
    )
    for row in refused if asked else ():
        if sum(other.policy == row.policy for other in refused) == len(batches):
            do = "leave the policy out, or give other hardware or bits"
            raise EstimateError(row.reason, where=f"{row.policy} at batch {row.batch}", do=do)
    return refused


def _kept_tokens(context: int, at: At, *, kv_growth: bool) -> int:
    """Tokens of a sequence whose keys and values there must be room for."""
    _, inputs, outputs = at
    return inputs + outputs if kv_growth else max(context, inputs + outputs)


def _unfit(simulation: Simulation, every: Sequence[At], *, kv_growth: bool) -> Iterator[Unfit]:
    """Points whose keys and values do not fit beside the placement."""
    for batch, inputs, outputs in every:
        tokens = _kept_tokens(simulation.context, (batch, inputs, outputs), kv_growth=kv_growth)
        if (reason := simulation.over_memory(batch, tokens)) is not None:
            yield Unfit(batch=batch, input_tokens=inputs, output_tokens=outputs, reason=reason)


def chosen_labels(policies: Sequence[str]) -> frozenset[str]:
    """Labels of policies that are named by name or label, and of those that always are estimated.

    Raises EstimateError with the nearest known name.
    """
    by_name = {policy.name: [label(policy.name, variant) for variant in policy.variants] for policy in POLICIES}
    known = by_name | {key: [key] for labels in by_name.values() for key in labels}
    chosen = set(ALWAYS)
    for name in policies:
        if name not in known:
            raise POLICIES.refused(name, sorted(known), EstimateError)
        chosen.update(known[name])
    return frozenset(chosen)


def _assemble(
    simulations: Mapping[int, Simulation],
    placement: Placement,
    at: Sequence[At],
    refused: tuple[Refusal, ...],
    replica_bits: tuple[int, ...],
    *,
    kv_growth: bool,
    popularity_given: bool,
    changes: bool,
) -> Estimate:
    batches, first = tuple(simulations), at[0][0]
    simulation = simulations[first]
    layers = simulation.layers
    steps = {batch: simulations[batch].decode(batch) for batch in batches}
    prefills = {place: simulations[place[0]].prefill(*place) for place in dict.fromkeys((b, n) for b, n, _ in at)}
    points = tuple(policy_points(simulation, at, steps, prefills, kv_growth=kv_growth))
    if kv_growth:  # terms are those of a batch's first point
        firsts = {place[0]: place for place in reversed(at)}
        steps = {
            batch: {key: simulation.grown(step, *firsts[batch]) for key, step in of_batch.items()}
            for batch, of_batch in steps.items()
        }
    ndp_speedup = _ndp_speedup(simulation.sampled(MOST_STEPS), first)
    of_first = replace(simulation, kv_tokens=_kept_tokens(simulation.context, at[0], kv_growth=kv_growth))
    rows, sampled, left_out = sensitivity(of_first, at[0], kv_growth=kv_growth) if changes else ((), None, ())
    return Estimate(
        geometry=layers.geometry.name,
        hardware=layers.hardware.name,
        placement=placement.name,
        num_layers=layers.geometry.num_layers,
        assigned_layers=len(placement.bits),
        group_size=layers.group_size,
        zero_points=layers.zero_points,
        context=simulation.context,
        kv_growth=kv_growth,
        monte_carlo_samples=simulation.samples,
        seed=simulation.seed,
        routing={batch: simulation.routing_method(batch) for batch in batches},
        ndp_speedup_over_fp16=ndp_speedup,
        points=points,
        speedups=tuple(speedups(points)),
        terms=tuple(decode_terms(steps)),
        earlier_terms=tuple(earlier_terms(simulation, prefills)),
        refused=refused,
        capacity=_capacity(simulations, replica_bits),
        assumptions=assumptions(
            simulation,
            steps=steps[first],
            batches=batches,
            assigned_layers=len(placement.bits),
            popularity_given=popularity_given,
            kv_growth=kv_growth,
            ndp_speedup=ndp_speedup,
            sampled_steps=sampled,
        )
        + left_out,
        sensitivity=rows,
        hardware_constants=layers.hardware.constants,
    )


def _check(
    geometry: ModelGeometry,
    placement: Placement,
    popularity: ArrayLike | None,
    group_size: int | None,
    context: int,
    samples: int,
    seed: int,
) -> None:
    layers, experts = placement.bits.shape
    where, do = f"placement {placement.name}", "give a placement of this model"
    if experts != geometry.num_experts:
        text = f"{experts} experts a layer, {geometry.name} has {geometry.num_experts}"
        raise EstimateError(text, where=where, do=do)
    if layers > geometry.num_layers:
        raise EstimateError(f"{layers} layers, {geometry.name} has {geometry.num_layers}", where=where, do=do)
    shape = np.shape(popularity) if popularity is not None else ()
    if len(shape) > 2 or (len(shape) == 2 and shape[0] != layers):
        text = f"popularity has shape {shape} for {layers} layers"
        raise EstimateError(text, where=where, do="give one row, or one for each layer")
    limits = {"group_size": (group_size, 1), "context": (context, 0), "monte_carlo_samples": (samples, 1)}
    for name, (value, least) in {**limits, "seed": (seed, 0)}.items():
        if value is not None and value < least:
            raise EstimateError(f"{name} is {value}", do=f"give {least} or more")


def _ndp_speedup(simulation: Simulation, batch: int) -> float:
    """How much longer the NDP would take with the same experts in FP16; 1 where it has none."""
    only, in_fp16 = frozenset({SUBJECT}), simulation.with_fp16_cold_experts()
    placed, fp16 = (placed.decode(batch, only)[SUBJECT].ndp_seconds for placed in (simulation, in_fp16))
    return fp16 / placed if placed > 0 else 1.0


def _capacity(simulations: Mapping[int, Simulation], replica_bits: tuple[int, ...]) -> Capacity:
    layers = next(iter(simulations.values())).layers
    geometry, hardware = layers.geometry, layers.hardware
    assigned = geometry.expert_parameters * layers.stored_bits / 8 * layers.repeats[:, None]
    on_gpu, on_ndp = float(assigned[layers.hot].sum()), float(assigned[~layers.hot].sum())
    expert = geometry.expert_bytes(16, None) + sum(
        geometry.expert_bytes(bits, layers.group_size, layers.zero_points, layers.codebook) for bits in replica_bits
    )
    replicas = geometry.num_layers * geometry.num_experts * expert
    rest = geometry.non_expert_bytes
    kv_cache = max(simulation.kv_cache_bytes(batch) for batch, simulation in simulations.items())
    return Capacity(
        gpu_expert_bytes=on_gpu,
        ndp_expert_bytes=on_ndp,
        replica_bytes=replicas,
        replica_bits=replica_bits,
        gpu_non_expert_bytes=rest,
        gpu_kv_cache_bytes=kv_cache,
        gpu_capacity_bytes=hardware.all_gpus.memory_capacity_bytes,
        ndp_capacity_bytes=hardware.near_capacity_bytes,
        fits_gpu=on_gpu + rest + kv_cache <= hardware.all_gpus.memory_capacity_bytes,
        fits_ndp=replicas <= hardware.near_capacity_bytes,
    )
