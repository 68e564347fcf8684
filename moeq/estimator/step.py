"""What a policy is given (layers, work) and what it gives back (a schedule, from which steps of the model are summed).

Shapes: D distinct layers, S routing outcomes, E experts, A places for active experts, most loaded first; a place
without tokens is padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moeq.estimator.devices import Hardware
from moeq.estimator.geometry import ModelGeometry, effective_bits
from moeq.estimator.terms import Bound, Cost

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
Resource = Literal["gpu", "ndp", "to_gpu", "to_ndp", "disk"]  # to_: the directions of the link
Channel = Literal["gpu_memory", "link", "ndp_memory", "disk"]
BLOCK = 8  # samples of one mean, of which the error of a sampled step is taken
CHANNELS: tuple[Channel, ...] = ("gpu_memory", "link", "ndp_memory")
TRAFFIC: Mapping[str, tuple[Channel, ...]] = {
    "dense": ("gpu_memory",),
    "gpu_experts": ("gpu_memory",),
    "ndp_experts": ("ndp_memory",),
    "activations": ("link",),
    "fetch": CHANNELS,
    "copies": CHANNELS,
    "disk": ("disk",),
}
"""What the bytes of a term cross: those of a fetch are read at the NDP, sent, and written on the GPU."""


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Distinct layers of a placed model: bits[D, E] (16 = FP16), hot[D, E] (on the GPU), popularity[D, E].

    `repeats`[D] says how many of the model's layers each row stands for, `visits`[D] how many times a step goes through
    them in all.
    """

    geometry: ModelGeometry
    hardware: Hardware
    bits: FloatArray
    hot: BoolArray
    popularity: FloatArray
    repeats: IntArray
    visits: IntArray
    group_size: int | None
    zero_points: bool
    codebook: str = ""

    @cached_property
    def stored_bits(self) -> FloatArray:
        """b'[D, E]: bits per weight with scales and zero points."""
        return effective_bits(self.bits, self.group_size, self.zero_points, self.codebook)

    @cached_property
    def popularity_rank(self) -> IntArray:
        """Rank[D, E] of every expert by popularity, 0 the most popular, ties to the lower index."""
        order = np.argsort(-self.popularity, axis=1, kind="stable")
        return np.argsort(order, axis=1, kind="stable")

    @property
    def fp16_expert_bytes(self) -> float:
        """Bytes of one expert in FP16."""
        return self.geometry.expert_bytes(16, None)

    def stored(self, bits: float) -> float:
        """b' of a width, with the scales and zero points of this model."""
        return float(effective_bits(bits, self.group_size, self.zero_points, self.codebook))

    def rows(self, start: int, stop: int) -> Layers:
        """The layers start..stop-1 only."""
        kept = {name: getattr(self, name)[start:stop] for name in ("bits", "hot", "popularity", "repeats", "visits")}
        return replace(self, **kept)


@dataclass(frozen=True, kw_only=True)
class Work:
    """One step's tokens: probability[D, S], experts[D, S, A] and the tokens[D, S, A] that reach them.

    `step_tokens` pass through every layer; `dense` is the cost of a layer without its experts. `in_time`: the S
    outcomes are consecutive steps, of equal probability. `hot`, `stored_bits` [D, S, A] are the placement of the
    sequences that decode, where it follows from their prefill (None: that of the layers). `kv_cache_bytes` are there
    beside the experts. `routed` gives the experts [D, S, n] that the step's tokens chose, one by one, and the weights
    that the router gave them, where these were recorded. `drawn_row`[D]: which draw a layer has where outcomes are
    Monte Carlo draws; layers of one draw share its samples.
    """

    step_tokens: int
    probability: FloatArray
    experts: IntArray
    tokens: FloatArray
    dense: Cost
    kv_cache_bytes: float = 0.0
    in_time: bool = False
    hot: BoolArray | None = None
    stored_bits: FloatArray | None = None
    routed: Callable[[], tuple[IntArray, FloatArray]] | None = None
    drawn_row: IntArray | None = None

    def pick(self, per_expert: NDArray[np.generic]) -> NDArray[np.generic]:
        """Values[D, S, A] of the active experts from a table [D, E]."""
        return np.asarray(per_expert[np.arange(len(per_expert))[:, None, None], self.experts])

    def placed(self, layers: Layers) -> tuple[BoolArray, FloatArray]:
        """Whether the active experts [D, S, A] are on the GPU, and at how many stored bits, for these sequences."""
        hot = self.pick(layers.hot) if self.hot is None else self.hot
        bits = self.pick(layers.stored_bits) if self.stored_bits is None else self.stored_bits
        return np.asarray(hot, dtype=np.bool_), np.asarray(bits, dtype=np.float64)

    def tokens_at(self, mask: NDArray[np.bool_]) -> FloatArray:
        """Tokens[D, S] that reach any expert of mask[D, S, A], at most the tokens of the step.

        An upper bound for more than one token: the same token may be counted at several experts.
        """
        reached = np.where(mask, self.tokens, 0.0).sum(axis=-1)
        return np.asarray(np.minimum(reached, float(self.step_tokens)))


@dataclass(frozen=True, kw_only=True)
class Span:
    """When one resource of a layer is busy: start and seconds [D, S, A] (or [D, S, 1]) from the end of the dense part.

    `each`: the A intervals belong to the A active experts. Spans of one resource do not overlap.
    """

    resource: Resource
    name: str
    start: FloatArray
    seconds: FloatArray
    each: bool = True


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Transfers on a copy stream beside the compute of W windows of steps, summed over layers.

    steps[W] in each window; seconds[W] that experts compute; copy_seconds[W] that the link (or the memory behind it)
    takes; gpu_bytes[W] that experts and copies read from and write to GPU memory, at `gpu_bytes_per_second`.
    """

    steps: FloatArray
    seconds: FloatArray
    copy_seconds: FloatArray
    gpu_bytes: FloatArray
    gpu_bytes_per_second: float

    def stall_seconds(self, dense_seconds: float, dense_bytes: float) -> float:
        """Mean seconds of a step that the copies add: what neither their link nor GPU memory hides beside compute."""
        compute = self.steps * dense_seconds + self.seconds
        memory = (self.steps * dense_bytes + self.gpu_bytes) / self.gpu_bytes_per_second
        late = np.maximum(np.maximum(self.copy_seconds, memory) - compute, 0.0)
        return float(late.sum() / self.steps.sum())

    def __add__(self, other: Windows) -> Windows:
        return replace(
            self,
            seconds=self.seconds + other.seconds,
            copy_seconds=self.copy_seconds + other.copy_seconds,
            gpu_bytes=self.gpu_bytes + other.gpu_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How the experts of a layer run, after its dense part and not beside it.

    `seconds`[D, S] until the last of them is done; `terms` are costs of shape [D, S] or [D, S, A]; `spans` tells when
    each resource is busy (worked out when asked for); `windows`: copies that run beside whole steps.
    """

    seconds: FloatArray
    terms: Mapping[str, Cost]
    spans: Callable[[], tuple[Span, ...]]
    windows: Windows | None = None


def schedule(
    layers: Layers, chain_seconds: FloatArray, terms: Mapping[str, Cost], spans: Callable[[], tuple[Span, ...]]
) -> Schedule:
    """The schedule of which the longest chain of dependent work takes chain_seconds[D, S].

    No layer is done before each memory has carried the bytes of all terms: an expert that is fetched is read beside
    those that compute at the NDP, and written beside those that compute on the GPU.
    """
    seconds, hardware = chain_seconds, layers.hardware
    for channel, rate in (("gpu_memory", hardware.all_gpus.memory_rate), ("ndp_memory", hardware.ndp.memory_rate)):
        moved = [cost.bytes for name, cost in terms.items() if channel in TRAFFIC[name]]
        if moved:
            carried = np.add.reduce([size.sum(axis=-1) if size.ndim == 3 else size for size in moved])
            seconds = np.maximum(seconds, carried / rate)
    return Schedule(seconds=seconds, terms=terms, spans=spans)


@dataclass(frozen=True, kw_only=True)
class TermTotal:
    """A term over all layers of a model in one step; `seconds_by_bound` adds up to its time."""

    bytes: float
    macs: float
    seconds_by_bound: tuple[float, ...]

    @classmethod
    def of_bytes(cls, seconds: float) -> TermTotal:
        """Seconds that a memory or link takes for bytes that another term counts."""
        by_bound = tuple(seconds if bound == Bound.BYTES and seconds > 0 else 0.0 for bound in Bound)
        return cls(bytes=0.0, macs=0.0, seconds_by_bound=by_bound)

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
            seconds_by_bound=tuple(seconds + others for seconds, others in by_bound),
        )


NOTHING = TermTotal(bytes=0.0, macs=0.0, seconds_by_bound=(0.0,) * len(Bound))


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of the whole model: expected seconds of its experts, and all terms, the dense part among them.

    Terms that overlap add up to more than `seconds`. `sampled`: seconds[S] that the experts of all layers of one draw
    take in each Monte Carlo sample, by draw; empty where nothing was sampled.
    """

    expert_seconds: float
    terms: Mapping[str, TermTotal]
    windows: Windows | None = None
    sampled: Mapping[int, FloatArray] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Expected seconds: dense part, experts, and what copies add that are not hidden."""
        return self.terms["dense"].seconds + self.expert_seconds + self.stall_seconds

    @property
    def stall_seconds(self) -> float:
        """What copies beside the step add to it."""
        dense = self.terms["dense"]
        return 0.0 if self.windows is None else self.windows.stall_seconds(dense.seconds, dense.bytes)

    @property
    def error_seconds(self) -> float:
        """Standard error of `seconds` by Monte Carlo sampling: draws are independent of each other, 0 without any.

        Consecutive steps are taken in blocks, whose means hardly depend on one another.
        """
        return float(np.sqrt(sum(_squared_error(seconds) for seconds in self.sampled.values())))

    @property
    def ndp_seconds(self) -> float:
        """Expected time that the NDP computes."""
        return self.terms["ndp_experts"].seconds if "ndp_experts" in self.terms else 0.0

    def with_dense(self, dense: TermTotal) -> Step:
        """The same step with another dense part."""
        return replace(self, terms={**self.terms, "dense": dense})

    def __add__(self, other: Step) -> Step:
        return Step(
            expert_seconds=self.expert_seconds + other.expert_seconds,
            terms={name: total + other.terms[name] for name, total in self.terms.items()},
            windows=None if self.windows is None or other.windows is None else self.windows + other.windows,
            sampled={
                draw: sum((each.sampled[draw] for each in (self, other) if draw in each.sampled), start=np.zeros(1))
                for draw in {**self.sampled, **other.sampled}
            },
        )


def _squared_error(seconds: FloatArray) -> float:
    """Of the mean of samples [S], by the means of blocks of them."""
    size = min(BLOCK, len(seconds) // 2)
    if size < 1:
        return 0.0
    means = seconds[: len(seconds) // size * size].reshape(-1, size).mean(axis=1)
    return float(means.var(ddof=1) / len(means))


def expected_step(layers: Layers, work: Work, plan: Schedule) -> Step:
    """The expected step of a schedule over all layers that its rows stand for."""
    weight = work.probability * layers.visits[:, None]
    totals = {"dense": dense_total(work.dense, int(layers.repeats.sum()))}
    totals |= {name: total(weight, cost) for name, cost in plan.terms.items()}
    sampled: dict[int, FloatArray] = {}
    if work.drawn_row is not None:
        of_layers = plan.seconds * layers.visits[:, None]
        sampled = {int(draw): of_layers[work.drawn_row == draw].sum(axis=0) for draw in np.unique(work.drawn_row)}
    seconds = float((weight * plan.seconds).sum())
    return Step(expert_seconds=seconds, terms=totals, windows=plan.windows, sampled=sampled)


def dense_total(dense: Cost, num_layers: int) -> TermTotal:
    """The dense parts of a number of layers, or their mean where the cost is that of several contexts."""
    count = dense.seconds.size
    return total(np.full(count, num_layers / count), replace(dense, **{k: v.ravel() for k, v in vars(dense).items()}))


def total(weight: FloatArray, cost: Cost) -> TermTotal:
    """Sums of a cost [D], [D, S] or [D, S, A] with weight [D] or [D, S]."""
    rest = cost.seconds.ndim - weight.ndim
    axes = "ds"[: weight.ndim], "dsa"[: weight.ndim + rest]

    def weighted(values: FloatArray) -> float:
        return float(np.einsum(f"{axes[0]},{axes[1]}->", weight, values))

    kinds = np.flatnonzero(np.bincount(cost.bound.ravel(), minlength=len(Bound)))
    whole, by_bound = weighted(cost.seconds), [0.0] * len(Bound)
    for kind in kinds[kinds > 0]:
        by_bound[kind] = whole if (kinds > 0).sum() == 1 else weighted(np.where(cost.bound == kind, cost.seconds, 0.0))
    return TermTotal(bytes=weighted(cost.bytes), macs=weighted(cost.macs), seconds_by_bound=tuple(by_bound))
