"""The walks of trellis_device.py on a GPU, in Triton: one program finds the walk of one tile, in one launch.

A thread holds all ways to some p, with the values of their states, over all steps; from one step to the next costs pass
through shared memory. A word goes with every cost and is chosen with it: around the seam, the p there of the walk so
far; then the ways of its last steps, which are written out once they fill the word (16 steps of 2 bits). So the way
back reads one word for that many steps. Costs are summed in the order of trellis_device.py, but with products and sums
rounded together.

Imported only where Triton is installed. Values stay in registers, so that it is for 2**14 states at most (EXL3's 2**16
are left to trellis_device.py).

Letters: T tiles, C sets of importances, L bits of a state, k bits of a step, W ways of a step, 2**k, P what two states
in a row share, 2**(L-k), M = P / W: a state is p * W + way, and the p before it is state % P.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeq.numerics.trellis import FAR, SEAM, STEPS
from moeq_kernels.streams import launching_on

MOST_STATES = 1 << 14
BACK_BYTES = 256 << 20  # of the ways back of the tiles of a launch


@triton.jit  # type: ignore[untyped-decorator]
def _nearer(cost, word, other, other_word):  # type: ignore[no-untyped-def]
    return tl.where(other < cost, other, cost), tl.where(other < cost, other_word, word)


@triton.jit  # type: ignore[untyped-decorator]
def _step(  # type: ignore[no-untyped-def]
    cost, word, tile, root, values, K: tl.constexpr, W: tl.constexpr, M: tl.constexpr, SHIFT: tl.constexpr
):
    """Least costs [P] after a step and the words [P] with them; values: [W, P]; SHIFT: of a way in a word, -1: none."""
    both = (cost.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | word.to(tl.uint64)  # one exchange for the two
    both = tl.trans(tl.reshape(both, (M, W)))
    both = tl.reshape(tl.broadcast_to(both[:, None, :], (W, W, M)), (W, W * M))
    before = (both >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
    word = both.to(tl.uint32)
    if SHIFT >= 0:
        word = (word >> K) | (tl.arange(0, W).to(tl.uint32) << SHIFT)[:, None]
    rest = tile * root - root * values
    return tl.reduce((rest * rest + before, word), 0, _nearer)


# table: were it known to begin at a multiple of 16 bytes, threads would load four p each, and share the ways to them
@triton.jit(do_not_specialize=["table", "first", "each"])  # type: ignore[untyped-decorator]
def _walk(  # type: ignore[no-untyped-def]
    tiles,
    roots,
    table,
    back,
    codes,
    nearest,
    first,
    each,
    K: tl.constexpr,
    W: tl.constexpr,
    M: tl.constexpr,
    IN_WORD: tl.constexpr,
    STEPS: tl.constexpr,
    SEAM: tl.constexpr,
    FAR: tl.constexpr,
):
    P: tl.constexpr = W * M
    program = tl.program_id(0).to(tl.int64)
    here = tiles + (first + program) * STEPS
    root_here = roots + (first + program) // each * STEPS
    back += program * (STEPS // IN_WORD * P)
    point = tl.arange(0, P)
    values = tl.load(table + tl.arange(0, W)[:, None] * P + point[None, :])
    cost = tl.full((P,), 0.0, tl.float32)
    word = point.to(tl.uint32)
    tile, root = tl.load(here + STEPS - SEAM), tl.load(root_here + STEPS - SEAM)
    for side in range(2):
        word = point.to(tl.uint32)
        for step in range(SEAM):
            after = (side * SEAM + step + 1 + STEPS - SEAM) % STEPS
            next_tile, next_root = tl.load(here + after), tl.load(root_here + after)
            cost, word = _step(cost, word, tile, root, values, K, W, M, -1)
            tile, root = next_tile, next_root
    best = tl.min(tl.where(cost == tl.min(cost), point, P - 1))
    seam = tl.sum(tl.where(point == best, word.to(tl.int32), 0))
    cost = tl.where(point == seam, 0.0, FAR)
    tile, root = tl.load(here), tl.load(root_here)
    for part in range(STEPS // IN_WORD):
        for step in range(IN_WORD):
            after = (part * IN_WORD + step + 1) % STEPS
            next_tile, next_root = tl.load(here + after), tl.load(root_here + after)
            cost, word = _step(cost, word, tile, root, values, K, W, M, K * (IN_WORD - 1))
            tile, root = next_tile, next_root
        tl.store(back + part * P + point, word.to(tl.int32, bitcast=True))
    tl.debug_barrier()
    place = tl.arange(0, IN_WORD)
    p = seam.to(tl.int64)
    for part in range(STEPS // IN_WORD - 1, -1, -1):
        ways = tl.load(back + part * P + p).to(tl.uint32, bitcast=True)
        stream = (p << (K * IN_WORD)) | ways.to(tl.int64)
        state = (stream >> (K * place)) & (P * W - 1)
        into = (first + program) * STEPS + part * IN_WORD + place
        tl.store(codes + into, (state // P).to(tl.uint8))
        tl.store(nearest + into, tl.load(table + state % W * P + state // W))
        p = stream & (P - 1)


def fits(values: Tensor) -> bool:
    """Whether the kernel is for trellises with as many states as values [2**L]."""
    return len(values) <= MOST_STATES


def warps(states: int, bits: int) -> int:
    """Of a program: 8 to 32 states a thread, or all ways to one p where those are more (half of them if P is 16)."""
    return max(1, min(states >> 8, max(8, states >> 10), states >> bits + 5))


def walks(tiles: Tensor, values: Tensor, bits: int, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes uint8 [T, 256] and values float32 [T, 256] of the walks nearest to tiles [T, 256]; as `trellis.walks`."""
    wanted = tiles.float().contiguous()
    roots = torch.ones_like(wanted[:1]) if importance is None else importance.float().sqrt().contiguous()
    states, ways = len(values), 1 << bits
    points, in_word = states >> bits, 32 >> (bits - 1).bit_length()
    table = values.float().reshape(points, ways).T.contiguous()
    step = max(1, BACK_BYTES // (4 * points * (STEPS // in_word)))
    back = torch.empty(min(step, len(tiles)), STEPS // in_word, points, dtype=torch.int32, device=tiles.device)
    codes, nearest = torch.empty_like(wanted, dtype=torch.uint8), torch.empty_like(wanted)
    for first in range(0, len(tiles), step):
        with launching_on(tiles.device):
            _walk[(min(step, len(tiles) - first),)](
                wanted,
                roots,
                table,
                back,
                codes,
                nearest,
                first,
                len(tiles) // len(roots),
                K=bits,
                W=ways,
                M=points >> bits,
                IN_WORD=in_word,
                STEPS=STEPS,
                SEAM=SEAM,
                FAR=float(FAR),
                num_warps=warps(states, bits),
            )
    return codes, nearest
