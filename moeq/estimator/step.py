"""What a policy is given (layers, work) and what it gives back (a step: seconds and terms of the whole model).

Shapes: D distinct layers, S routing outcomes, E experts, A places for active experts, most loaded first; a place
without tokens is padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from moeq.estimator.devices import Hardware
from moeq.estimator.geometry import ModelGeometry, effective_bits
from moeq.estimator.terms import Bound, Cost
from moeq.estimator.workload import Outcomes

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Distinct layers of a placed model: bits[D, E] (16 = FP16), hot[D, E] (on the GPU), popularity[D, E].

    `repeats`[D] says how many of the model's layers each row stands for.
    """

    geometry: ModelGeometry
    hardware: Hardware
    bits: FloatArray
    hot: BoolArray
    popularity: FloatArray
    repeats: IntArray
    group_size: int | None
    zero_points: bool

    @cached_property
    def stored_bits(self) -> FloatArray:
        """b'[D, E]: bits per weight with scales and zero points."""
        return effective_bits(self.bits, self.group_size, self.zero_points)

    @cached_property
    def popularity_rank(self) -> IntArray:
        """Rank[D, E] of every expert by popularity, 0 the most popular, ties to the lower index."""
        order = np.argsort(-self.popularity, axis=1, kind="stable")
        return np.argsort(order, axis=1, kind="stable")

    @property
    def fp16_expert_bytes(self) -> float:
        """Bytes of one expert in FP16."""
        return self.geometry.expert_bytes(16, None)

    def rows(self, start: int, stop: int) -> Layers:
        """The layers start..stop-1 only."""
        fields = {name: getattr(self, name)[start:stop] for name in ("bits", "hot", "popularity", "repeats")}
        return Layers(
            geometry=self.geometry,
            hardware=self.hardware,
            group_size=self.group_size,
            zero_points=self.zero_points,
            **fields,
        )


@dataclass(frozen=True, kw_only=True)
class Work:
    """One step's tokens: probability[D, S], experts[D, S, A] and the tokens[D, S, A] that reach them.

    `step_tokens` pass through every layer; `dense` is the cost of a layer without its experts.
    """

    step_tokens: int
    probability: FloatArray
    experts: IntArray
    tokens: FloatArray
    dense: Cost

    def pick(self, per_expert: NDArray[np.generic]) -> NDArray[np.generic]:
        """Values[D, S, A] of the active experts from a table [D, E]."""
        return np.asarray(per_expert[np.arange(len(per_expert))[:, None, None], self.experts])

    def tokens_at(self, mask: NDArray[np.bool_]) -> FloatArray:
        """Tokens[D, S] that reach any expert of mask[D, S, A], at most the tokens of the step.

        An upper bound for more than one token: the same token may be counted at several experts.
        """
        reached: FloatArray = np.where(mask, self.tokens, 0.0).sum(axis=-1)
        return np.minimum(reached, float(self.step_tokens))


@dataclass(frozen=True, kw_only=True)
class TermTotal:
    """A term over all layers of a model in one step; `seconds_by_bound` adds up to its time."""

    bytes: float
    macs: float
    seconds_by_bound: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Expected busy time."""
        return sum(self.seconds_by_bound)

    @property
    def bound_by(self) -> str:
        """The bound ("bytes", "macs", "latency", "none") of most of the time."""
        return Bound(int(np.argmax(self.seconds_by_bound))).name.lower()

    def __add__(self, other: TermTotal) -> TermTotal:
        by_bound = zip(self.seconds_by_bound, other.seconds_by_bound, strict=True)
        return TermTotal(
            bytes=self.bytes + other.bytes,
            macs=self.macs + other.macs,
            seconds_by_bound=tuple(mine + its for mine, its in by_bound),
        )


@dataclass(frozen=True, kw_only=True)
class Step:
    """Expected seconds of one step of the whole model, and its terms; terms that overlap add up to more than that."""

    seconds: float
    terms: Mapping[str, TermTotal]

    @property
    def ndp_seconds(self) -> float:
        """Expected time that the NDP computes."""
        return self.terms["ndp_experts"].seconds if "ndp_experts" in self.terms else 0.0

    def __add__(self, other: Step) -> Step:
        terms = {name: total + other.terms[name] for name, total in self.terms.items()}
        return Step(seconds=self.seconds + other.seconds, terms=terms)


def expected_step(layers: Layers, work: Work, moe_seconds: FloatArray, terms: Mapping[str, Cost]) -> Step:
    """The step of which the experts of a layer take moe_seconds[D, S], after the dense part and not beside it.

    `terms` are costs of shape [D, S] or [D, S, A].
    """
    weight = work.probability * layers.repeats[:, None]
    dense = _total(np.full(1, float(layers.repeats.sum())), work.dense)
    totals = {"dense": dense} | {name: _total(weight, cost) for name, cost in terms.items()}
    return Step(seconds=dense.seconds + float((weight * moe_seconds).sum()), terms=totals)


def _total(weight: FloatArray, cost: Cost) -> TermTotal:
    shape = np.broadcast_shapes(weight.shape, cost.seconds.shape[:2])
    weights = weight.reshape(shape + (1,) * (cost.seconds.ndim - 2)) if cost.seconds.ndim > 2 else weight
    seconds, bound, weights = np.broadcast_arrays(cost.seconds, cost.bound, weights)
    by_bound = np.bincount(bound.ravel(), weights=(seconds * weights).ravel(), minlength=len(Bound))
    return TermTotal(
        bytes=float((cost.bytes * weights).sum()),
        macs=float((cost.macs * weights).sum()),
        seconds_by_bound=tuple(float(one) for one in by_bound),
    )


def decode_work(layers: Layers, outcomes: list[Outcomes], row_outcomes: IntArray, *, batch: int, dense: Cost) -> Work:
    """Work of a decode step from the routing outcomes, of which layer d has outcomes[row_outcomes[d]]."""
    first = {index: row for row, index in reversed(list(enumerate(row_outcomes.tolist())))}
    most = max(int((outcomes[index].tokens > 0).sum(axis=1).max()) for index in first)
    sorted_by = {
        index: _most_loaded(outcomes[index].tokens.astype(np.float64), layers.popularity[row], most)
        for index, row in first.items()
    }
    rows = row_outcomes.tolist()
    return Work(
        step_tokens=batch,
        probability=np.stack([outcomes[index].probability for index in rows]),
        experts=np.stack([sorted_by[index][0] for index in rows]),
        tokens=np.stack([sorted_by[index][1] for index in rows]),
        dense=dense,
    )


def expected_work(layers: Layers, tokens: FloatArray, *, step_tokens: int, dense: Cost) -> Work:
    """Work of one outcome in which every expert has its expected (fractional) tokens[D, E], for a prefill."""
    pairs = [
        _most_loaded(row[None, :], popularity, tokens.shape[1])
        for row, popularity in zip(tokens, layers.popularity, strict=True)
    ]
    return Work(
        step_tokens=step_tokens,
        probability=np.ones((len(tokens), 1)),
        experts=np.stack([experts for experts, _ in pairs]),
        tokens=np.stack([loads for _, loads in pairs]),
        dense=dense,
    )


def _most_loaded(tokens: FloatArray, popularity: FloatArray, places: int) -> tuple[IntArray, FloatArray]:
    """The `places` most loaded experts[S, places] of tokens[S, E] and their tokens; ties to the more popular."""
    by_popularity = np.argsort(-popularity, kind="stable")
    loads = tokens[:, by_popularity]
    order = np.argsort(-loads, axis=1, kind="stable")[:, :places]
    return by_popularity[order], np.take_along_axis(loads, order, axis=1)
