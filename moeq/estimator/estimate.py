"""The estimate: every policy at every grid point, speed-ups, terms, capacity, and what the answer hangs on."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import ArrayLike

from moeq.errors import EstimateError
from moeq.estimator.assumptions import SUBJECT, assumptions, sensitivity
from moeq.estimator.devices import Hardware
from moeq.estimator.geometry import ModelGeometry
from moeq.estimator.placement import Placement
from moeq.estimator.result import Capacity, Estimate, PolicyPoint, Speedup, TermRow
from moeq.estimator.simulation import Simulation, build_simulation
from moeq.estimator.step import Step
from moeq.estimator.workload import Grid

REPLICA_BITS = (1, 2, 3, 4)


def estimate(
    geometry: ModelGeometry,
    hardware: Hardware,
    placement: Placement,
    *,
    group_size: int | None = 128,
    zero_points: bool = False,
    popularity: ArrayLike | None = None,
    grid: Grid | None = None,
    context: int = 1024,
    monte_carlo_samples: int = 256,
    seed: int = 0,
    replica_bits: tuple[int, ...] = REPLICA_BITS,
) -> Estimate:
    """Latency, throughput and memory of a placed model under every policy, and speed-ups of the context-aware one.

    `popularity`[E] or [L', E] weighs the routing of all layers or of each of the placement's (None: uniform); it is
    the weight of a draw without replacement, so that with top_k > 1 the resulting frequencies are flatter. `context`
    tokens of keys and values are read at every decode step. A placement with fewer layers than the model is repeated
    evenly. Raises EstimateError for input that does not fit together. Source: shared/ESTIMATOR.md.
    """
    _check(geometry, placement, popularity, group_size, context, monte_carlo_samples, seed)
    grid = grid or Grid()
    simulation = build_simulation(
        geometry,
        hardware,
        placement,
        group_size=group_size,
        zero_points=zero_points,
        popularity=popularity,
        context=context,
        samples=monte_carlo_samples,
        seed=seed,
    )
    return _assemble(simulation, placement, grid, replica_bits, uniform_routing=popularity is None)


def _assemble(
    simulation: Simulation, placement: Placement, grid: Grid, replica_bits: tuple[int, ...], *, uniform_routing: bool
) -> Estimate:
    layers, first = simulation.layers, grid.batches[0]
    steps = {batch: simulation.decode(batch) for batch in grid.batches}
    points = _points(simulation, grid, steps)
    ndp_speedup = _ndp_speedup(simulation, first, steps[first][SUBJECT])
    return Estimate(
        geometry=layers.geometry.name,
        hardware=layers.hardware.name,
        placement=placement.name,
        num_layers=layers.geometry.num_layers,
        assigned_layers=len(placement.bits),
        group_size=layers.group_size,
        zero_points=layers.zero_points,
        context=simulation.context,
        monte_carlo_samples=simulation.samples,
        seed=simulation.seed,
        routing={batch: simulation.routing_method(batch) for batch in grid.batches},
        ndp_speedup_over_fp16=ndp_speedup,
        points=points,
        speedups=_speedups(points),
        terms=_term_rows(steps),
        capacity=_capacity(simulation, max(grid.batches), replica_bits),
        assumptions=assumptions(
            simulation,
            steps=steps[first],
            ndp_speedup=ndp_speedup,
            assigned_layers=len(placement.bits),
            batches=grid.batches,
            uniform_routing=uniform_routing,
        ),
        sensitivity=sensitivity(simulation, first),
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
    where = f"placement {placement.name}"
    if experts != geometry.num_experts:
        raise EstimateError(
            f"{experts} experts a layer, {geometry.name} has {geometry.num_experts}",
            where=where,
            do="give a placement of this model",
        )
    if layers > geometry.num_layers:
        raise EstimateError(
            f"{layers} layers, {geometry.name} has {geometry.num_layers}",
            where=where,
            do="give a placement of this model",
        )
    shape = np.shape(popularity) if popularity is not None else ()
    if len(shape) > 2 or (len(shape) == 2 and shape[0] != layers):
        raise EstimateError(
            f"popularity has shape {shape} for {layers} layers", where=where, do="give one row, or one for each layer"
        )
    limits = {"group_size": (group_size, 1), "context": (context, 0), "monte_carlo_samples": (samples, 1)}
    for name, (value, least) in {**limits, "seed": (seed, 0)}.items():
        if value is not None and value < least:
            raise EstimateError(f"{name} is {value}", do=f"give {least} or more")


def _points(simulation: Simulation, grid: Grid, steps: dict[int, dict[str, Step]]) -> tuple[PolicyPoint, ...]:
    migration = {key: one.seconds for key, one in simulation.migration().items()}
    num_layers = simulation.layers.geometry.num_layers
    points = []
    for batch, input_tokens in itertools.product(grid.batches, grid.inputs):
        prefill = {key: one.seconds for key, one in simulation.prefill(batch, input_tokens).items()}
        for output_tokens, (policy, step) in itertools.product(grid.outputs, steps[batch].items()):
            before = prefill[policy] + migration[policy]
            points.append(
                PolicyPoint(
                    policy=policy,
                    batch=batch,
                    input_tokens=input_tokens,
                    output_tokens=output_tokens,
                    prefill_seconds=prefill[policy],
                    migration_seconds=migration[policy],
                    decode_seconds_per_token=step.seconds,
                    end_to_end_seconds=before + output_tokens * step.seconds,
                    decode_tokens_per_second=batch / step.seconds,
                    time_to_first_token_seconds=before + step.seconds,
                    ndp_seconds_per_layer=step.ndp_seconds / num_layers,
                )
            )
    return tuple(points)


def _speedups(points: tuple[PolicyPoint, ...]) -> tuple[Speedup, ...]:
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


def _term_rows(steps: dict[int, dict[str, Step]]) -> tuple[TermRow, ...]:
    return tuple(
        TermRow(
            policy=policy,
            batch=batch,
            term=term,
            seconds=total.seconds,
            share=total.seconds / step.seconds,
            bytes=total.bytes,
            macs=total.macs,
            bound_by=total.bound_by,
        )
        for batch, of_batch in steps.items()
        for policy, step in of_batch.items()
        for term, total in step.terms.items()
    )


def _ndp_speedup(simulation: Simulation, batch: int, step: Step) -> float:
    """How much longer the NDP would take with the same experts in FP16; 1 where it has none."""
    if step.ndp_seconds == 0:
        return 1.0
    fp16 = simulation.with_fp16_cold_experts().decode(batch, frozenset({SUBJECT}))[SUBJECT]
    return fp16.ndp_seconds / step.ndp_seconds


def _capacity(simulation: Simulation, batch: int, replica_bits: tuple[int, ...]) -> Capacity:
    layers, geometry, hardware = simulation.layers, simulation.layers.geometry, simulation.layers.hardware
    assigned = geometry.expert_parameters * layers.stored_bits / 8 * layers.repeats[:, None]
    on_gpu, on_ndp = float(assigned[layers.hot].sum()), float(assigned[~layers.hot].sum())
    one = geometry.expert_bytes(16, None) + sum(
        geometry.expert_bytes(bits, layers.group_size, layers.zero_points) for bits in replica_bits
    )
    replicas = geometry.num_layers * geometry.num_experts * one
    rest = 2.0 * geometry.non_expert_parameters
    kv_cache = batch * geometry.num_layers * geometry.kv_bytes_per_layer(simulation.context)
    return Capacity(
        gpu_expert_bytes=on_gpu,
        ndp_expert_bytes=on_ndp,
        replica_bytes=replicas,
        replica_bits=replica_bits,
        gpu_non_expert_bytes=rest,
        gpu_kv_cache_bytes=kv_cache,
        gpu_capacity_bytes=hardware.gpu.memory_capacity_bytes,
        ndp_capacity_bytes=hardware.ndp.memory_capacity_bytes,
        fits_gpu=on_gpu + rest + kv_cache <= hardware.gpu.memory_capacity_bytes,
        fits_ndp=replicas <= hardware.ndp.memory_capacity_bytes,
    )
