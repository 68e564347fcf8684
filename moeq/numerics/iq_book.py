"""The entries of an i-quant by their halves and levels, as one block of numbers for compiled code.

Every weight of an entry has one of a few levels. A half is a number with a digit a weight, which level it has, the
first weight's the highest; of D = 8 weights it has four digits of 3 levels, of 4 two of 8. Entries stand in the order
of their first halves.

Letters: D weights of an entry, H halves.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from moeq.numerics.iq_blocks import table
from moeq.numerics.vectors import LANES

# places of numbers: D, how many levels and halves there are, and where what follows begins
LENGTH, LEVELS, HALVES, STARTS, FIRSTS, SECONDS, NEAREST, TABLE, DIGITS = range(9)
_HEADER = 16
_SOME = 64  # numbers whose nearest entries are looked for at once


@cache
def book(name: str) -> Tensor:
    """int32, or the bits of float32, one after the other: the header; of each first half, and after the last, its first
    entry's place; of each entry where the costs of its halves begin, LANES numbers each, first halves before second
    ones; for every number of D digits the nearest entry's place; the values of entries, float32 [entries, D].

    The levels stand in the header, from DIGITS on.
    """
    values, places = table(name).T[order(name)], digits(name)[order(name)]
    length, levels = values.shape[1], table(name).unique()
    count = len(levels) ** (length // 2)
    weights = len(levels) ** torch.arange(length // 2 - 1, -1, -1)
    firsts, seconds = ((half * weights).sum(1) for half in places.split(length // 2, 1))
    starts = torch.zeros(count + 1, dtype=torch.int64)
    starts[1:] = torch.bincount(firsts, minlength=count).cumsum(0)
    parts = [starts, firsts * LANES, (count + seconds) * LANES, _nearest(values, levels), values.flatten()]
    begins = [_HEADER]
    for part in parts:
        begins.append(begins[-1] + part.numel())
    header = torch.tensor([length, len(levels), count, *begins[:-1]])
    head = torch.zeros(_HEADER, dtype=torch.int32)
    head[: len(header)] = header
    head[DIGITS : DIGITS + len(levels)] = levels.view(torch.int32)
    return torch.cat([head, *(part.view(torch.int32) if part.is_floating_point() else part.int() for part in parts)])


def digits(name: str) -> Tensor:
    """Which level every weight of every entry has, int64 [entries, D]."""
    return torch.searchsorted(table(name).unique(), table(name).T.contiguous())


@cache
def order(name: str) -> Tensor:
    """Which entry of the table each entry of the book is, int64 [entries]."""
    places = digits(name)
    half = places.shape[1] // 2
    return (places[:, :half] * len(table(name).unique()) ** torch.arange(half - 1, -1, -1)).sum(1).argsort(stable=True)


def _nearest(values: Tensor, levels: Tensor) -> Tensor:
    """The place of the entry [entries, D] that is nearest to what each number of D digits stands for."""
    every = torch.cartesian_prod(*[levels] * values.shape[1])
    return torch.cat([torch.cdist(some, values).argmin(1) for some in every.split(_SOME)])
