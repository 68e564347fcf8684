"""Parts of the inputs within a program (`Settings.parts`): a tile of each at a time, in warps of its own, so that few
programs have enough warps for a GPU's schedulers; their sums meet at the end.

Imported only where Triton is installed. Letters: N rows, M tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def places(EACH: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of what lies in PARTS tiles of BLOCK_N rows, EACH in 16 rows: its tile and where in it. Warps hold 16 rows of one
    tile each, so that a part of K has warps of its own."""
    if PARTS == 1:
        return 0, tl.arange(0, BLOCK_N // 16 * EACH)
    else:
        every = tl.arange(0, BLOCK_N // 16 * EACH * PARTS)
        return every // EACH % PARTS, every // (EACH * PARTS) * EACH + every % EACH


@triton.jit  # type: ignore[untyped-decorator]
def nothing(BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A total to begin with, float32 [N, M] or [PARTS, N, M]."""
    if PARTS == 1:
        return tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        return tl.zeros((PARTS, BLOCK_N, BLOCK_M), tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def summed(total, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of the parts' totals."""
    if PARTS == 1:
        return total
    else:
        return tl.sum(total, 0)
