"""Work of one step, from routing outcomes or from the tokens that every expert is expected to get.

Shapes as in step.py: D distinct layers, S routing outcomes, E experts, A places for active experts.
"""

from __future__ import annotations

import numpy as np

from moeq.estimator.step import FloatArray, IntArray, Layers, Work
from moeq.estimator.terms import Cost
from moeq.estimator.workload import Outcomes


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
