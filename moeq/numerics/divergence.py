"""How far one distribution of the next token is from another: Kullback-Leibler divergence, in nats.

Letters: T tokens of a text, V vocabulary, K tokens of it that are kept of the first distribution.

Of a large vocabulary the K likeliest tokens of the first distribution p are kept, and of the rest R its mass r, its
entropy and its largest probability c. With q the second distribution, s its mass of R, and D the sum of p log(p / q)
over the K tokens:

    least = D + r log(r / s)                                   R as one outcome: never above (log-sum inequality)
    most  = D + sum_R p log p + max over x of sum_R x -log q   x in 0..c, of sum r: what p may be in R

The maximum is a fractional knapsack: c for every token that q finds least likely, until r is spent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What is kept of log-probabilities [T, V]: ids and logprobs of the likeliest [T, K], and of the rest its mass,
    entropy and largest probability [T]."""

    ids: Tensor
    logprobs: Tensor
    rest: Tensor
    entropy: Tensor
    largest: Tensor


def kl_divergence(first: Tensor, second: Tensor) -> Tensor:
    """Divergence of the second distributions from the first ones [T], of log-probabilities [T, V] in float64.

    Of some tokens alone it is their share of the sum.
    """
    terms = first.exp().mul_(first - second)
    ruled_out = first == -torch.inf
    return (terms.masked_fill_(ruled_out, 0.0) if bool(ruled_out.any()) else terms).sum(-1)


def keep_likeliest(logprobs: Tensor, count: int) -> Kept:
    """What is kept of log-probabilities [T, V] in float64: `count` of each, fewer than V."""
    values, ids = logprobs.topk(count + 1)
    others = logprobs.exp().scatter(1, ids[:, :count], 0.0)
    return Kept(
        ids=ids[:, :count],
        logprobs=values[:, :count],
        rest=others.sum(1),
        entropy=-(others * logprobs).masked_fill_(others == 0, 0.0).sum(1),
        largest=values[:, count].exp(),
    )


def kl_bounds(first: Kept, second: Tensor) -> tuple[Tensor, Tensor]:
    """What the divergence [T] of log-probabilities [T, V] from those that were kept is at least, and at most.

    Tokens that the second distribution rules out (a logit of minus infinity) are taken as ruled out by the first, too.
    """
    least, top, others = _least(first, second)
    most = top - first.entropy + _costliest(first.rest, first.largest, -others)
    return least, torch.maximum(least, most)


def kl_least(first: Kept, second: Tensor) -> Tensor:
    """The first of `kl_bounds` alone, [T]; gradients pass it."""
    return _least(first, second)[0]


def _least(first: Kept, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the divergence is at least, and what the kept tokens add to it [T]; the second log-probabilities [T, V]
    without theirs."""
    top = kl_divergence(first.logprobs, second.gather(1, first.ids))
    others = second.scatter(1, first.ids, -torch.inf)
    merged = first.rest * (first.rest.log() - others.logsumexp(1))
    return top + merged.masked_fill(first.rest == 0, 0.0), top, others


def _costliest(rest: Tensor, largest: Tensor, costs: Tensor) -> Tensor:
    """Most that a mass [T] costs on tokens of costs [T, V], none of which takes more than `largest` [T].

    At any level l it is at most rest l + largest sum (cost - l)+, and just that at the cost of the last that is taken.
    """
    costs = costs.masked_fill(costs == torch.inf, -torch.inf)
    there = (costs > -torch.inf).sum(1).clamp(min=1)
    taken = torch.minimum((rest / largest.clamp(min=1e-300)).ceil().clamp(min=1).long(), there)
    places = (costs.shape[1] - taken + 1).tolist()
    levels = torch.stack([row.kthvalue(place).values for row, place in zip(costs, places, strict=True)])
    levels = levels.masked_fill(levels == -torch.inf, 0.0)  # nothing is beyond those that are kept
    return rest * levels + largest * (costs - levels[:, None]).clamp(min=0).sum(1)
