"""All policies over one placed model: routing is drawn once, and every distinct layer is computed once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moeq.estimator.devices import Hardware
from moeq.estimator.geometry import ModelGeometry
from moeq.estimator.placement import Placement, layer_of_assignment
from moeq.estimator.policies import known_policies, label
from moeq.estimator.step import Layers, Step, Work, decode_work, expected_work
from moeq.estimator.terms import t_dense
from moeq.estimator.workload import Outcomes, normalize_popularity, routing_outcomes, uniform_popularity

CHUNK_ELEMENTS = 500_000
PREFILL_SAMPLES = 2048


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Decode steps, prefills and migrations of every policy for the distinct `layers` of a placed model.

    `distinct_popularity`[R, E] are the popularity rows that occur, `popularity_row`[D] which one a layer has.
    """

    layers: Layers
    distinct_popularity: NDArray[np.float64]
    popularity_row: NDArray[np.int64]
    context: int
    samples: int
    seed: int
    drawn: dict[int, list[Outcomes]] = field(default_factory=dict)

    def on(self, hardware: Hardware) -> Simulation:
        """The same work on other hardware; routing that was drawn is shared."""
        return replace(self, layers=replace(self.layers, hardware=hardware))

    def with_fp16_cold_experts(self) -> Simulation:
        """The same placement with the experts of the NDP in FP16."""
        return replace(self, layers=replace(self.layers, bits=np.where(self.layers.hot, self.layers.bits, 16.0)))

    def outcomes(self, batch: int) -> list[Outcomes]:
        """Routing outcomes of a decode step for every distinct popularity row."""
        if batch not in self.drawn:
            self.drawn[batch] = [
                routing_outcomes(
                    row,
                    top_k=self.layers.geometry.top_k,
                    batch=batch,
                    samples=self.samples,
                    seed=(self.seed, batch, index),
                )
                for index, row in enumerate(self.distinct_popularity)
            ]
        return self.drawn[batch]

    def routing_method(self, batch: int) -> Literal["exact", "monte-carlo"]:
        """Whether the decode routing of a batch was enumerated or sampled."""
        return self.outcomes(batch)[0].method

    def decode(self, batch: int, only: frozenset[str] | None = None) -> dict[str, Step]:
        """A decode step by policy label; `only` names the labels that are wanted."""
        steps: dict[str, Step] = {}
        for layers, work in self._decode_chunks(batch):
            for name, policy in known_policies().items():
                for variant in policy.variants:
                    key = label(name, variant)
                    if only is None or key in only:
                        part = policy.decode(layers, work, variant)
                        steps[key] = steps[key] + part if key in steps else part
        return steps

    def prefill_seconds(self, batch: int, input_tokens: int) -> dict[str, float]:
        """Seconds of a prefill by policy label; the sequences of a batch go through it together."""
        tokens = batch * input_tokens
        dense = t_dense(
            self.layers.geometry,
            tokens=tokens,
            sequences=batch,
            context=input_tokens / 2,  # causal: a token attends to half of the prompt on average
            gpu=self.layers.hardware.gpu,
        )
        expected = tokens * self._tokens_per_token()
        work = expected_work(self.layers, expected, step_tokens=tokens, dense=dense)
        return {
            label(name, variant): policy.prefill(self.layers, work, variant).seconds
            for name, policy in known_policies().items()
            for variant in policy.variants
        }

    def migration_seconds(self) -> dict[str, float]:
        """Seconds between prefill and decode by policy label."""
        return {
            label(name, variant): policy.migration_seconds(self.layers, variant)
            for name, policy in known_policies().items()
            for variant in policy.variants
        }

    def _decode_chunks(self, batch: int) -> Iterator[tuple[Layers, Work]]:
        outcomes = self.outcomes(batch)
        dense = t_dense(
            self.layers.geometry, tokens=batch, sequences=batch, context=self.context, gpu=self.layers.hardware.gpu
        )
        places = min(self.layers.geometry.num_experts, batch * self.layers.geometry.top_k)
        rows = max(1, CHUNK_ELEMENTS // (len(outcomes[0].probability) * places))
        for start in range(0, len(self.popularity_row), rows):
            layers = self.layers.rows(start, start + rows)
            row_outcomes = self.popularity_row[start : start + rows]
            yield layers, decode_work(layers, outcomes, row_outcomes, batch=batch, dense=dense)

    def _tokens_per_token(self) -> NDArray[np.float64]:
        """Expected tokens[D, E] that reach every expert for one token; rows add up to top_k."""
        geometry, share = self.layers.geometry, []
        for index, row in enumerate(self.distinct_popularity):
            if (row == row[0]).all():
                share.append(np.full(geometry.num_experts, geometry.top_k / geometry.num_experts))
                continue
            one = self.outcomes(1)[index]
            if one.method == "monte-carlo" and self.samples < PREFILL_SAMPLES:
                one = routing_outcomes(
                    row, top_k=geometry.top_k, batch=1, samples=PREFILL_SAMPLES, seed=(self.seed, 0, index)
                )
            share.append(one.probability @ one.tokens)
        return np.stack(share)[self.popularity_row]


def build_simulation(
    geometry: ModelGeometry,
    hardware: Hardware,
    placement: Placement,
    *,
    group_size: int | None,
    zero_points: bool,
    popularity: ArrayLike | None,
    context: int,
    samples: int,
    seed: int,
) -> Simulation:
    """The simulation of a placement whose layers are repeated evenly over the model's; equal layers are merged."""
    num_experts = geometry.num_experts
    given = uniform_popularity(num_experts) if popularity is None else popularity
    rows = normalize_popularity(given, num_experts=num_experts, top_k=geometry.top_k)
    rows = np.broadcast_to(rows, placement.bits.shape)
    counts = np.bincount(layer_of_assignment(geometry.num_layers, len(rows)), minlength=len(rows))
    table = np.concatenate([placement.bits, placement.hot, rows], axis=1)
    _, first, inverse = np.unique(table, axis=0, return_index=True, return_inverse=True)
    repeats = np.bincount(inverse.ravel(), weights=counts).astype(np.int64)
    order = np.argsort(first)
    first, repeats = first[order], repeats[order]
    distinct, row = np.unique(rows[first], axis=0, return_inverse=True)
    layers = Layers(
        geometry=geometry,
        hardware=hardware,
        bits=placement.bits[first],
        hot=placement.hot[first],
        popularity=np.asarray(rows[first]),
        repeats=repeats,
        group_size=group_size,
        zero_points=zero_points,
    )
    return Simulation(
        layers=layers,
        distinct_popularity=distinct,
        popularity_row=row.ravel(),
        context=context,
        samples=samples,
        seed=seed,
    )
