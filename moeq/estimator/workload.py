"""The work that a model is given: which experts its tokens reach, and the grid of prompt, output and batch sizes.

Shapes: S routing outcomes, E experts, B tokens of a step, k experts a token; D, A as in step.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moeq.errors import EstimateError
from moeq.estimator.step import FloatArray, IntArray, Layers, Work
from moeq.estimator.terms import Cost

MAX_EXACT_OUTCOMES = 20_000
LARGEST_DRAW = 1 << 22  # numbers at a time
Seed = int | tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Prompt lengths, output lengths and batch sizes; every combination is estimated."""

    inputs: tuple[int, ...] = (128, 512, 2048)
    outputs: tuple[int, ...] = (512, 2048)
    batches: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        for axis, values in vars(self).items():
            if not values or any(value < 1 for value in values):
                raise EstimateError(f"grid {axis} are {values}", do="give one or more positive sizes")
            object.__setattr__(self, axis, tuple(int(value) for value in values))


@dataclass(frozen=True, kw_only=True)
class Outcomes:
    """Routing outcomes of one layer and step: probability[S], and tokens[S, E] that reach every expert."""

    probability: FloatArray
    tokens: IntArray
    method: Literal["exact", "monte-carlo"]


def zipf_popularity(num_experts: int, exponent: float) -> FloatArray:
    """Popularity[E] of experts in order of their use: that of rank r is 1/r^exponent of the first's.

    Raises EstimateError for a negative exponent.
    """
    if not 0 <= exponent < math.inf:
        raise EstimateError(f"a Zipf exponent of {exponent:g}", do="give 0 (uniform) or more")
    weights = np.arange(1, num_experts + 1, dtype=np.float64) ** -exponent
    return np.asarray(weights / weights.sum(), dtype=np.float64)


def placed_popularity(hot: NDArray[np.bool_], bits: FloatArray, exponent: float) -> FloatArray:
    """Zipf popularity[D, E] by place and width: experts on the GPU first, then those with more bits, then by index."""
    order = np.lexsort((-bits, ~hot), axis=1)
    rows = np.broadcast_to(zipf_popularity(hot.shape[1], exponent), hot.shape)
    placed = np.empty(hot.shape)
    np.put_along_axis(placed, order, rows, axis=1)
    return placed


def normalize_popularity(popularity: ArrayLike, *, num_experts: int, top_k: int) -> FloatArray:
    """Popularity[..., E] with every row divided by its sum.

    Raises EstimateError for a wrong number of experts, a negative or non-finite entry, or a row in which fewer than
    top_k experts can be reached.
    """
    rows = np.asarray(popularity, dtype=np.float64)
    do = "give activation counts or frequencies per expert"
    if rows.ndim == 0 or rows.shape[-1] != num_experts:
        raise EstimateError(f"popularity has shape {rows.shape} for {num_experts} experts", do=do)
    if not np.isfinite(rows).all() or (rows < 0).any():
        raise EstimateError("popularity has negative or non-finite entries", do=do)
    if ((rows > 0).sum(axis=-1) < top_k).any():
        raise EstimateError(f"popularity leaves a layer with fewer than top_k = {top_k} experts", do=do)
    return np.asarray(rows / rows.sum(axis=-1, keepdims=True), dtype=np.float64)


def routing_outcomes(
    popularity: FloatArray,
    *,
    top_k: int,
    batch: int,
    samples: int = 256,
    seed: Seed = 0,
    max_exact_outcomes: int = MAX_EXACT_OUTCOMES,
) -> Outcomes:
    """Outcomes of one step of `batch` tokens that each draw top_k experts without replacement by popularity[E].

    The draw is that of Plackett and Luce, tokens independent. One token is enumerated exactly unless there are more
    than `max_exact_outcomes` sets of top_k (or fewer) experts; otherwise these are `samples` seeded Monte Carlo draws
    of equal probability, and `method` says so.
    """
    num_experts = popularity.shape[-1]
    largest = max(math.comb(num_experts, size) for size in range(1, top_k + 1))
    if batch == 1 and largest <= max_exact_outcomes:
        members, probability = top_k_sets(popularity, top_k)
        tokens = np.zeros((len(members), num_experts), dtype=np.int64)
        np.put_along_axis(tokens, members, 1, axis=1)
        return Outcomes(probability=probability, tokens=tokens, method="exact")
    return _sampled_outcomes(popularity, top_k=top_k, batch=batch, samples=samples, seed=seed)


def top_k_sets(popularity: FloatArray, top_k: int) -> tuple[IntArray, FloatArray]:
    """All sets members[S, k] (ascending) of top_k experts, and the probability[S] that a token draws each.

    Recursion over the set sizes: a set arises by drawing any one member last, with probability p_e / (what the other
    members leave over). Costs O(sets * k) instead of the k! orders of every set.
    """
    members = np.zeros((1, 0), dtype=np.int64)
    probability = np.ones(1)
    for size in range(1, top_k + 1):
        previous, members = probability, _combinations(len(popularity), size)
        probability = np.zeros(len(members))
        for last in range(size):
            others = np.delete(members, last, axis=1)
            drawn = popularity[members[:, last]]
            unchosen = np.ones((len(members), len(popularity)), dtype=np.bool_)
            np.put_along_axis(unchosen, others, False, axis=1)
            left = unchosen @ popularity  # not 1 less the others', of which nothing would be left under extreme skew
            share = np.divide(drawn, left, out=np.zeros_like(drawn), where=left > 0)
            probability += previous[_rank(others)] * share
    return members, probability / probability.sum()


@lru_cache(maxsize=32)
def _combinations(num_experts: int, size: int) -> IntArray:
    flat = itertools.chain.from_iterable(itertools.combinations(range(num_experts), size))
    members = np.fromiter(flat, dtype=np.int64).reshape(-1, size)
    ordered = members[np.argsort(_rank(members))]
    ordered.flags.writeable = False
    return ordered


def _rank(members: IntArray) -> IntArray:
    """Place of ascending sets [S, k] in colexicographic order: the sum of binomials C(member_i, i+1)."""
    rank = np.zeros(len(members), dtype=np.int64)
    for position in range(members.shape[1]):
        column = members[:, position]
        binomial = np.ones(len(members), dtype=np.int64)
        for step in range(position + 1):
            binomial = binomial * (column - step) // (step + 1)
        rank += binomial
    return rank


def _sampled_outcomes(popularity: FloatArray, *, top_k: int, batch: int, samples: int, seed: Seed) -> Outcomes:
    if samples < 1:
        raise EstimateError(f"{samples} Monte Carlo samples", do="give at least 1")
    num_experts = len(popularity)
    with np.errstate(divide="ignore"):
        weights = np.log(popularity)
    tokens = np.zeros((samples, num_experts), dtype=np.int64)
    for start, noise in _noise((samples, batch, num_experts), seed):
        count = len(noise)
        chosen = np.argpartition(-weights - noise, top_k - 1, axis=2)[:, :, :top_k]
        flat = chosen.reshape(count, -1) + num_experts * np.arange(count)[:, None]
        tokens[start : start + count] = np.bincount(flat.ravel(), minlength=count * num_experts).reshape(count, -1)
    return Outcomes(probability=np.full(samples, 1.0 / samples), tokens=tokens, method="monte-carlo")


def _noise(shape: tuple[int, int, int], seed: Seed) -> Iterator[tuple[int, FloatArray]]:
    """Gumbel noise [S, B, E] of a draw, some samples at a time: the first's number and theirs."""
    samples, batch, num_experts = shape
    rows = max(1, LARGEST_DRAW // (batch * num_experts))
    if samples <= rows:
        yield 0, _noise_at_once(shape, seed)
        return
    generator = np.random.default_rng(seed)
    for start in range(0, samples, rows):
        yield start, generator.gumbel(size=(min(rows, samples - start), batch, num_experts))


@lru_cache(maxsize=2)
def _noise_at_once(shape: tuple[int, int, int], seed: Seed) -> FloatArray:
    """What an interval's draws, which differ by the popularity alone, have in common: most of their time."""
    noise = np.random.default_rng(seed).gumbel(size=shape)
    noise.flags.writeable = False
    return noise


def decode_work(
    layers: Layers,
    outcomes: list[Outcomes],
    row_outcomes: IntArray,
    *,
    batch: int,
    dense: Cost,
    kv_cache_bytes: float = 0.0,
    in_time: bool = False,
) -> Work:
    """Work of a decode step from the routing outcomes, of which layer d has outcomes[row_outcomes[d]].

    `in_time`: they count as consecutive steps.
    """
    rows = row_outcomes.tolist()
    loads = {index: outcomes[index].tokens.astype(np.float64) for index in dict.fromkeys(rows)}
    most = max(int((tokens > 0).sum(axis=1).max()) for tokens in loads.values())
    active = {index: _most_loaded(loads[index], layers.popularity[rows.index(index)], most) for index in loads}
    return Work(
        step_tokens=batch,
        probability=np.stack([outcomes[index].probability for index in rows]),
        experts=np.stack([active[index][0] for index in rows]),
        tokens=np.stack([active[index][1] for index in rows]),
        dense=dense,
        kv_cache_bytes=kv_cache_bytes,
        in_time=in_time,
        drawn_row=row_outcomes if any(drawn.method == "monte-carlo" for drawn in outcomes) else None,
    )


def expected_work(
    layers: Layers, tokens: FloatArray, *, step_tokens: int, dense: Cost, kv_cache_bytes: float = 0.0
) -> Work:
    """Work of one outcome in which every expert has its expected (fractional) tokens[D, E], for a prefill."""
    rows = zip(tokens[:, None, :], layers.popularity, strict=True)
    active = [_most_loaded(row, popularity, tokens.shape[1]) for row, popularity in rows]
    return Work(
        step_tokens=step_tokens,
        probability=np.ones((len(tokens), 1)),
        experts=np.stack([experts for experts, _ in active]),
        tokens=np.stack([loads for _, loads in active]),
        dense=dense,
        kv_cache_bytes=kv_cache_bytes,
    )


def _most_loaded(tokens: FloatArray, popularity: FloatArray, places: int) -> tuple[IntArray, FloatArray]:
    """The `places` most loaded experts[S, places] of tokens[S, E] and their tokens; ties to the more popular."""
    by_popularity = np.argsort(-popularity, kind="stable")
    loads = tokens[:, by_popularity]
    order = np.argsort(-loads, axis=1, kind="stable")[:, :places]
    return by_popularity[order], np.take_along_axis(loads, order, axis=1)
