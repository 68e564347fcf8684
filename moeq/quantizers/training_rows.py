"""The rows that experts are trained on: their own, those lent to them, and what every step draws of both.

Letters: n own rows of one expert, s rows lent to it, R rows of all experts on end, E experts, T rows an expert and
step, C rows of a check, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SEED_STRIDE = 1_000_003  # keeps the draws of one seed's experts apart from those of another's
SEEDS = 1 << 63  # that torch's generators take


def evenly(length: int, count: int) -> Tensor:
    """`count` of `length` indices, evenly spaced, int64 [count]."""
    return torch.arange(count) * length // max(count, 1)


@dataclass(frozen=True, kw_only=True)
class Pool:
    """One expert's own rows followed by the lent ones, [n + s, H], the outputs wanted of them and their weights.

    own: n; own_share: what part of a step's rows, and of the loss, the own ones are; seed: of the draws.
    """

    hidden: Tensor
    target: Tensor
    weights: Tensor  # [n + s]
    own: int
    own_share: float
    seed: int

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in (self.hidden, self.target, self.weights))


class Pools:
    """The pools of several experts on end: hidden and target [R, H], weights [R]."""

    def __init__(self, pools: Sequence[Pool]) -> None:
        self.hidden = torch.cat([pool.hidden for pool in pools])
        self.target = torch.cat([pool.target for pool in pools])
        self.weights = torch.cat([pool.weights for pool in pools])
        self.parts = list(pools)
        sizes = torch.tensor([len(pool.hidden) for pool in pools])
        self.starts: list[int] = (sizes.cumsum(0) - sizes).tolist()

    def check(self, limit: int) -> tuple[Tensor, Tensor]:
        """Rows to measure on, [E, C], and what they count for: up to `limit` own and lent ones each, evenly spaced.

        Every expert's weights sum to 1 where all its rows have weight 1; what fills an expert up to C counts nothing.
        """
        chosen = []
        for pool, start in zip(self.parts, self.starts, strict=True):
            lent = len(pool.hidden) - pool.own
            sides = [(0, pool.own, pool.own_share), (pool.own, lent, 1 - pool.own_share)]
            rows, counts = list[Tensor](), list[Tensor]()
            for first, length, share in sides:
                taken = min(length, limit)
                rows.append(start + first + evenly(length, taken))
                counts.append(torch.full((taken,), share / max(taken, 1)))
            chosen.append((torch.cat(rows), torch.cat(counts)))
        size = max(len(rows) for rows, _ in chosen)
        index = torch.zeros(len(chosen), size, dtype=torch.int64)
        weights = torch.zeros(len(chosen), size)
        for expert, (places, shares) in enumerate(chosen):
            index[expert, : len(places)] = places
            weights[expert, : len(places)] = shares
        index, weights = index.to(self.hidden.device), weights.to(self.hidden.device)
        return index, weights * self.weights[index]

    def draws(self) -> Draws:
        """Random rows from the beginning: two calls give the same ones."""
        return Draws(self)


class Deck:
    """Indices below `length` (at least 1) in a random order, all of them before any comes again."""

    def __init__(self, length: int, seed: int) -> None:
        self._length = length
        self._generator = torch.Generator().manual_seed(seed % SEEDS)
        self._waiting = torch.empty(0, dtype=torch.int64)

    def next(self, count: int) -> Tensor:
        """The next `count` indices, int64 [count]."""
        while len(self._waiting) < count:
            self._waiting = torch.cat([self._waiting, torch.randperm(self._length, generator=self._generator)])
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken


class Draws:
    """Rows of every step: own and lent ones of each expert in proportion, each from a deck of its own."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._decks = [
            (Deck(pool.own, pool.seed), Deck(len(pool.hidden) - pool.own, pool.seed)) for pool in pools.parts
        ]

    def next(self, count: int) -> Tensor:
        """`count` rows of every expert, [E, T] on the pools' device."""
        rows = []
        for pool, start, (own, lent) in zip(self._pools.parts, self._pools.starts, self._decks, strict=True):
            share = round(count * pool.own_share)
            rows.append(start + torch.cat([own.next(share), pool.own + lent.next(count - share)]))
        return torch.stack(rows).to(self._pools.hidden.device)
