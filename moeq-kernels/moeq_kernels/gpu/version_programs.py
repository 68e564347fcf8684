"""Programs beside the products of experts whose precision changes: planes of nested codes joined and parted, and what
routers chose.

A word of a part of 2 bits has the codes of 16 planes, two words of a part of 4 bits have 8 each, in the same order and
at the same place (`swizzle.place`): joining is a spread of bits within a word, nothing moves to another column.

Imported only where Triton is installed. Letters: E experts, P rows of routing.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def spread(word):  # type: ignore[no-untyped-def]
    """Codes of 2 bits in the low byte of each half of a word, each at the beginning of 4 bits."""
    word = word & 16711935  # 0x00FF00FF
    word = (word | (word << 4)) & 252645135  # 0x0F0F0F0F
    return (word | (word << 2)) & 858993459  # 0x33333333


@triton.jit  # type: ignore[untyped-decorator]
def gathered(word):  # type: ignore[no-untyped-def]
    """The inverse."""
    word = word & 858993459
    word = (word | (word >> 2)) & 252645135
    return (word | (word >> 4)) & 16711935


@triton.jit(do_not_specialize=["count", "each"])  # type: ignore[untyped-decorator]
def join_planes(high, low, wide, count, each, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Words of 2 bits [count] of the high and the low half of codes as words of 4 bits [2 * count].

    each: words of a tile, of which a tile of `wide` has twice as many, the first planes' before the others'.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < count
    one = tl.load(high + at, mask=here, other=0)
    two = tl.load(low + at, mask=here, other=0)
    to = wide + at // each * (2 * each) + at % each
    tl.store(to, (spread(one) << 2) | spread(two), mask=here)
    tl.store(to + each, (spread(one >> 8) << 2) | spread(two >> 8), mask=here)


@triton.jit(do_not_specialize=["count", "each"])  # type: ignore[untyped-decorator]
def part_planes(wide, high, count, each, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The high half of codes of 4 bits [2 * count] as words of 2 bits [count]."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < count
    given = wide + at // each * (2 * each) + at % each
    first = tl.load(given, mask=here, other=0)
    second = tl.load(given + each, mask=here, other=0)
    tl.store(high + at, gathered(first >> 2) | (gathered(second >> 2) << 8), mask=here)


@triton.jit(do_not_specialize=["pairs"])  # type: ignore[untyped-decorator]
def add_choices(  # type: ignore[no-untyped-def]
    index, weights, held, pairs, experts, share, kept, gain, BLOCK: tl.constexpr, EVERY: tl.constexpr
):
    """One step of hotness: held float32 [2 E + 1], S, Q and the steps so far.

    S <- kept * S + gain * sum of share * weight, Q <- kept^2 * Q + the sum of squares of what each adds to S, over the
    rows [P] of an expert; always in the same order, so that the same routing gives the same bits. A weight that is no
    finite number adds nothing.
    """
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, pairs, EVERY):
        other = first + tl.arange(0, EVERY)
        there = other < pairs
        chosen = tl.load(index + other, mask=there, other=-1).to(tl.int32)
        added = tl.load(weights + other, mask=there, other=0.0).to(tl.float32) * share * gain
        added = tl.where(tl.abs(added) < float("inf"), added, 0.0)
        each = tl.where(chosen[None, :] == mine[:, None], added[None, :], 0.0)
        total += tl.sum(each, 1)
        squares += tl.sum(each * each, 1)
    known = mine < experts
    tl.store(held + mine, tl.load(held + mine, mask=known, other=0.0) * kept + total, mask=known)
    at = held + experts + mine
    tl.store(at, tl.load(at, mask=known, other=0.0) * kept * kept + squares, mask=known)
    if tl.program_id(0) == 0:
        tl.store(held + 2 * experts, tl.load(held + 2 * experts) + 1.0)
