"""All policies over one placed model: routing is drawn once, and every distinct layer is computed once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moeq.artifacts.trace import RoutingTrace
from moeq.estimator.devices import Hardware
from moeq.estimator.from_disk import with_disk_reads
from moeq.estimator.geometry import ModelGeometry
from moeq.estimator.in_place import placed_by_rank
from moeq.estimator.placement import Placement, layer_of_assignment
from moeq.estimator.policies import Policy, by_label, over_gpu_memory
from moeq.estimator.replay import Replay
from moeq.estimator.step import Layers, Schedule, Step, TermTotal, Work, dense_total, expected_step
from moeq.estimator.terms import Cost, t_dense
from moeq.estimator.trace import check_trace
from moeq.estimator.workload import (
    MAX_EXACT_OUTCOMES,
    Outcomes,
    decode_work,
    expected_work,
    normalize_popularity,
    routing_outcomes,
)
from moeq.tables import human_bytes

CHUNK_ELEMENTS = 250_000
PREFILL_SAMPLES = 2048
MOST_DRAWN, FEWEST_PROMPTS = 1 << 24, 16  # numbers that are drawn for prompts of one length; prompts at least
FEW_TOKENS = 8  # of a mean expert, below which it is drawn which experts a prompt reaches
POPULARITY_FLOOR = 1e-6  # of a layer's share: an expert that the prompts never chose can still be chosen
Routing = Literal["exact", "monte-carlo", "trace"]


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Decode steps, prefills and migrations of every policy for the distinct `layers` of a placed model.

    `distinct_popularity`[R, E] are the popularity rows that occur, `popularity_row`[D] which one a layer has,
    `layer_row`[L] the distinct layer that each of the model's is. A decode step attends to `context` tokens; memory
    holds keys and values of `kv_tokens`. `labels`: policies that are wanted (None: all).
    """

    layers: Layers
    distinct_popularity: NDArray[np.float64]
    popularity_row: NDArray[np.int64]
    layer_row: NDArray[np.int64]
    context: int
    kv_tokens: int
    samples: int
    seed: int
    labels: frozenset[str] | None = None
    replay: Replay | None = None
    drawn: dict[tuple[int, int, bool], list[Outcomes]] = field(default_factory=dict)
    shares: list[NDArray[np.float64]] = field(default_factory=list)

    def on(self, hardware: Hardware) -> Simulation:
        """The same work on other hardware; routing that was drawn is shared."""
        return replace(self, layers=replace(self.layers, hardware=hardware))

    def with_fp16_cold_experts(self) -> Simulation:
        """The same placement with the experts of the NDP in FP16."""
        return replace(self, layers=replace(self.layers, bits=np.where(self.layers.hot, self.layers.bits, 16.0)))

    def with_popularity(self, popularity: NDArray[np.float64]) -> Simulation:
        """The same placed model with routing drawn by other popularity[D, E] of its distinct layers."""
        distinct, row = np.unique(popularity, axis=0, return_inverse=True)
        layers = replace(self.layers, popularity=popularity)
        return replace(
            self, layers=layers, distinct_popularity=distinct, popularity_row=row.ravel(), drawn={}, shares=[]
        )

    def without_trace(self) -> Simulation:
        """The same placed model with decode routing drawn by the popularity of its layers."""
        return replace(self, replay=None, drawn={}, shares=[self.tokens_per_token()])

    def sampled(self, most_steps: int) -> Simulation:
        """With at most so many steps of the trace, if it has one."""
        return self if self.replay is None else replace(self, replay=self.replay.sampled(most_steps))

    def outcomes(self, batch: int, *, in_time: bool = False, samples: int | None = None) -> list[Outcomes]:
        """Routing outcomes of a step of so many tokens for every distinct popularity row; `in_time`: drawn, not
        enumerated; samples: of what is drawn (None: as many as the simulation's)."""
        count = self.samples if samples is None else samples
        if in_time and (batch > 1 or self.outcomes(batch)[0].method == "monte-carlo"):
            in_time = False  # they are drawn anyway
        if (batch, count, in_time) not in self.drawn:
            most, top_k = 0 if in_time else MAX_EXACT_OUTCOMES, self.layers.geometry.top_k
            draw = partial(routing_outcomes, top_k=top_k, batch=batch, samples=count, max_exact_outcomes=most)
            self.drawn[batch, count, in_time] = [
                draw(row, seed=(self.seed, batch, index)) for index, row in enumerate(self.distinct_popularity)
            ]
        return self.drawn[batch, count, in_time]

    def routing_method(self, batch: int) -> Routing:
        """Whether the decode routing of a batch was enumerated, sampled or recorded."""
        return "trace" if self.replay is not None else self.outcomes(batch)[0].method

    def kv_cache_bytes(self, batch: int) -> float:
        """Bytes of the keys and values that a batch needs at most, all layers."""
        return float(self.layers.geometry.kv_bytes(self.kv_tokens, batch))

    def over_memory(self, batch: int, tokens: int | None = None) -> str | None:
        """The sum by which the placement and keys and values of `tokens` a sequence exceed the GPU's memory, or None.

        None for tokens: those that memory holds.
        """
        layers = self.layers
        hot = layers.stored_bits * layers.hot * layers.repeats[:, None]
        tokens = self.kv_tokens if tokens is None else tokens
        kept = float(layers.geometry.kv_bytes(tokens, batch))
        return over_gpu_memory(layers, float(layers.geometry.expert_parameters / 8 * hot.sum()), kept)

    def wanted(self, only: frozenset[str] | None = None) -> Iterator[tuple[str, Policy, str]]:
        """Label, policy and variant of those that are wanted."""
        for key, (policy, variant) in by_label().items():
            if all(names is None or key in names for names in (only, self.labels)):
                yield key, policy, variant

    def lack(self, policy: Policy, kv_cache_bytes: float) -> str | None:
        """Why a policy cannot run the model beside keys and values of a size, by what it holds itself; or None."""
        reason = policy.refusal(self.layers, kv_cache_bytes)
        if reason is not None:
            return reason
        holds, there = policy.holds(self.layers, kv_cache_bytes), self.layers.hardware.near_capacity_bytes
        if holds.near_bytes > there:
            return f"needs {human_bytes(holds.near_bytes)} of near-data memory, which has {human_bytes(there)}"
        return over_gpu_memory(self.layers, holds.gpu_bytes, kv_cache_bytes)

    @property
    def decode_layers(self) -> int:
        """MoE layers that a decode step goes through: all but an encoder's."""
        return self.layers.geometry.num_layers - self.layers.geometry.encoder_layers

    def _in_phase(self, *, prefill: bool) -> Simulation:
        """With the layers that a phase goes through: of an encoder-decoder prompts those of the encoder, decode steps
        those of the decoder."""
        encoder = self.layers.geometry.encoder_layers
        if not encoder:
            return self
        rows = self.layer_row[:encoder] if prefill else self.layer_row[encoder:]
        repeats = np.bincount(rows, minlength=len(self.layers.repeats)).astype(np.int64)
        return replace(self, layers=replace(self.layers, repeats=repeats, visits=repeats))

    def refusals(self, batch: int) -> dict[str, str]:
        """Why a policy cannot run the model, by policy label."""
        kv_cache = self.kv_cache_bytes(batch)
        reasons = {key: policy.refusal(self.layers, kv_cache) for key, policy, _ in self.wanted()}
        return {key: reason for key, reason in reasons.items() if reason is not None}

    def decode(self, batch: int, only: frozenset[str] | None = None) -> dict[str, Step]:
        """A decode step by policy label; `only` names the labels that are wanted. Those that refuse are left out."""
        refused = self.refusals(batch)
        policies = {key: (policy, variant) for key, policy, variant in self.wanted(only) if key not in refused}
        steps: dict[str, Step] = {}
        running = self._in_phase(prefill=False)
        for in_time in (False, True):
            these = [
                key for key, (policy, _) in policies.items() if (policy.in_time and self.replay is None) == in_time
            ]
            for layers, work in running.chunks(batch, in_time=in_time) if these else ():
                for key in these:
                    policy, variant = policies[key]
                    part = expected_step(layers, work, self.scheduled(policy, layers, work, variant))
                    steps[key] = steps[key] + part if key in steps else part
        return {key: steps[key] for key in policies}

    def prefill(self, batch: int, input_tokens: int, only: frozenset[str] | None = None) -> dict[str, Step]:
        """A prefill by policy label; the sequences of a batch go through it together."""
        tokens, refused = batch * input_tokens, self.refusals(batch)
        policies = {key: (policy, variant) for key, policy, variant in self.wanted(only) if key not in refused}
        steps: dict[str, Step] = {}
        for layers, work in self._in_phase(prefill=True)._prompts(batch, input_tokens, tokens):
            if self.replay is not None:  # a mean prompt is as the popularity is
                rank = np.asarray(work.pick(layers.popularity_rank), dtype=np.int64)
                hot, stored_bits = placed_by_rank(layers, rank)
                work = replace(work, hot=hot, stored_bits=stored_bits)
            for key, (policy, variant) in policies.items():
                part = expected_step(layers, work, self.scheduled(policy, layers, work, variant, prefill=True))
                steps[key] = steps[key] + part if key in steps else part
        return steps

    @property
    def drawn_below(self) -> int:
        """Tokens of a prefill below which it is drawn which experts they reach.

        Of more tokens every expert gets its expected share, which takes up to a tenth longer than what is drawn.
        """
        return -(-FEW_TOKENS * self.layers.geometry.num_experts // self.layers.geometry.top_k)

    def _prompts(self, batch: int, input_tokens: int, tokens: int) -> Iterator[tuple[Layers, Work]]:
        """The layers and the work of a prefill: routing that is drawn for few tokens, the expected one for many."""
        dense = self._dense_layer(batch, input_tokens, tokens)
        kv_cache = self.kv_cache_bytes(batch)
        if tokens < self.drawn_below:
            drawn = tokens * self.layers.geometry.num_experts * len(self.distinct_popularity)
            samples = min(self.samples, max(FEWEST_PROMPTS, MOST_DRAWN // drawn))
            yield from self._drawn(tokens, self.outcomes(tokens, samples=samples), dense, kv_cache)
        else:
            expected = tokens * self.tokens_per_token()
            yield (
                self.layers,
                expected_work(self.layers, expected, step_tokens=tokens, dense=dense, kv_cache_bytes=kv_cache),
            )

    def scheduled(self, policy: Policy, layers: Layers, work: Work, variant: str, *, prefill: bool = False) -> Schedule:
        """How a policy runs some of the layers, after what is read from a disk where there is one."""
        plan = (policy.prefill if prefill else policy.decode)(layers, work, variant)
        if self.layers.hardware.disk is None:
            return plan
        return with_disk_reads(layers, work, plan, policy.reads_near(layers, prefill=prefill))

    def migration(self) -> dict[str, TermTotal]:
        """What moves between prefill and decode, by policy label."""
        layers = self._in_phase(prefill=False).layers
        return {key: policy.migration(layers, variant) for key, policy, variant in self.wanted()}

    def dense(self, batch: int, contexts: ArrayLike) -> TermTotal:
        """The dense parts of a decode step, the mean over contexts."""
        return dense_total(self._dense_layer(batch, contexts), self.decode_layers)

    def grown(self, step: Step, batch: int, inputs: int, outputs: int) -> Step:
        """A step with the keys and values of the prompt and what was decoded so far, the mean over a request."""
        return step.with_dense(self.dense(batch, inputs + np.arange(1, outputs + 1)))

    def _dense_layer(self, batch: int, contexts: ArrayLike, tokens: int | None = None) -> Cost:
        """One layer of a batch: a token after each of `contexts` others, or all `tokens` of prompts as long as that."""
        return t_dense(
            self.layers.geometry,
            tokens=batch if tokens is None else tokens,
            sequences=batch,
            context=contexts,
            hardware=self.layers.hardware,
            prompt=tokens is not None,
        )

    def chunks(self, batch: int, *, in_time: bool = False) -> Iterator[tuple[Layers, Work]]:
        """The layers and their work, some at a time; `in_time`: consecutive steps, drawn where none are recorded."""
        dense, kv_cache = self._dense_layer(batch, self.context), self.kv_cache_bytes(batch)
        if self.replay is None:
            yield from self._drawn(batch, self.outcomes(batch, in_time=in_time), dense, kv_cache, in_time=in_time)
            return
        for start, layers in self._parts(batch, len(self.replay.steps(batch).rows)):
            yield layers, self.replay.work(layers, start, batch=batch, dense=dense, kv_cache_bytes=kv_cache)

    def _drawn(
        self, tokens: int, outcomes: list[Outcomes], dense: Cost, kv_cache_bytes: float, *, in_time: bool = False
    ) -> Iterator[tuple[Layers, Work]]:
        """Some layers at a time and their work for the drawn routing of a step of so many tokens."""
        for start, layers in self._parts(tokens, len(outcomes[0].probability)):
            yield (
                layers,
                decode_work(
                    layers,
                    outcomes,
                    self.popularity_row[start : start + len(layers.bits)],
                    batch=tokens,
                    dense=dense,
                    kv_cache_bytes=kv_cache_bytes,
                    in_time=in_time,
                ),
            )

    def _parts(self, tokens: int, outcomes: int) -> Iterator[tuple[int, Layers]]:
        """The first of some layers, and these, so many that arrays stay small."""
        places = min(self.layers.geometry.num_experts, tokens * self.layers.geometry.top_k)
        rows = max(1, CHUNK_ELEMENTS // (outcomes * places))
        for start in range(0, len(self.popularity_row), rows):
            yield start, self.layers.rows(start, start + rows)

    def tokens_per_token(self) -> NDArray[np.float64]:
        """Expected tokens[D, E] that reach every expert for one token; rows add up to top_k at most."""
        if not self.shares:
            self.shares.append(self._drawn_share() if self.replay is None else self.replay.prefill_share())
        return self.shares[0]

    def _drawn_share(self) -> NDArray[np.float64]:
        geometry, share = self.layers.geometry, []
        for index, row in enumerate(self.distinct_popularity):
            if (row == row[0]).all():
                share.append(np.full(geometry.num_experts, geometry.top_k / geometry.num_experts))
                continue
            drawn = self.outcomes(1)[index]
            if drawn.method == "monte-carlo" and self.samples < PREFILL_SAMPLES:
                seed = (self.seed, 0, index)
                drawn = routing_outcomes(row, top_k=geometry.top_k, batch=1, samples=PREFILL_SAMPLES, seed=seed)
            share.append(drawn.probability @ drawn.tokens)
        return np.stack(share)[self.popularity_row]


def build_simulation(
    geometry: ModelGeometry,
    hardware: Hardware,
    placement: Placement,
    *,
    group_size: int | None = 128,
    zero_points: bool = False,
    codebook: str = "",
    popularity: ArrayLike | None = None,
    context: int = 1024,
    samples: int = 256,
    seed: int = 0,
    kv_tokens: int | None = None,
    trace: RoutingTrace | None = None,
    labels: frozenset[str] | None = None,
) -> Simulation:
    """The simulation of a placement whose layers are repeated evenly over the model's; equal layers are merged.

    Of a trace every layer stands alone, and popularity is by default that of its prompts. Raises EstimateError for a
    trace of another model.
    """
    replay = None
    if trace is not None:
        check_trace(trace, geometry, where="trace")
        replay = Replay(trace=trace)
        if popularity is not None and np.ndim(popularity) == 2:
            popularity = np.asarray(popularity)[layer_of_assignment(geometry.num_layers, len(placement.bits))]
        placement = placement.repeated(geometry.num_layers)
    rows = _popularity(geometry, placement, popularity, replay)
    model_layers = layer_of_assignment(geometry.num_layers, len(rows))
    first, row_of = _distinct(placement, rows, apart=trace is not None)
    distinct, row = np.unique(rows[first], axis=0, return_inverse=True)
    layers = Layers(
        geometry=geometry.across(hardware.count),
        hardware=hardware,
        bits=placement.bits[first],
        hot=placement.hot[first],
        popularity=np.asarray(rows[first]),
        repeats=np.bincount(row_of[model_layers], minlength=len(first)).astype(np.int64),
        visits=np.bincount(row_of[model_layers], geometry.times, minlength=len(first)).astype(np.int64),
        group_size=group_size,
        zero_points=zero_points,
        codebook=codebook,
    )
    return Simulation(
        layers=layers,
        distinct_popularity=distinct,
        popularity_row=row.ravel(),
        layer_row=row_of[model_layers],
        context=context,
        kv_tokens=context if kv_tokens is None else kv_tokens,
        samples=samples,
        seed=seed,
        labels=labels,
        replay=replay,
    )


def _popularity(
    geometry: ModelGeometry, placement: Placement, popularity: ArrayLike | None, replay: Replay | None
) -> NDArray[np.float64]:
    """Popularity[L', E] of every layer of a placement: as given, of the trace's prompts, or uniform."""
    num_experts = geometry.num_experts
    if popularity is None:
        even = np.full(num_experts, 1.0 / num_experts)
        popularity = even if replay is None else replay.prefill_share() + POPULARITY_FLOOR
    rows = normalize_popularity(popularity, num_experts=num_experts, top_k=geometry.top_k)
    return np.broadcast_to(rows, placement.bits.shape)


def _distinct(
    placement: Placement, rows: NDArray[np.float64], *, apart: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first of every kind of layer, in order, and which kind each layer is; `apart`: all are of their own."""
    if apart:
        return np.arange(len(rows)), np.arange(len(rows))
    table = np.concatenate([placement.bits, placement.hot, rows], axis=1)
    if (table == table[:1]).all():
        return np.zeros(1, np.int64), np.zeros(len(rows), np.int64)
    _, first, inverse = np.unique(table, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    return first[order], np.argsort(order)[inverse.ravel()]
