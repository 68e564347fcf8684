"""What a layer launches before and after its products: sorting rows by expert, and the weighted sum of what came.

Imported only where Triton is installed. Letters: E experts, T tokens, k experts a token, P = T*k rows, H hidden size.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moeq_kernels.gpu.grid import only


@triton.jit  # type: ignore[untyped-decorator]
def expert_of(number, experts):  # type: ignore[no-untyped-def]
    """The expert that a row's number says, int32: E for every number that no expert has, also for those below 0."""
    return tl.where((number >= 0) & (number < experts), number, experts).to(tl.int32)


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def sort_rows(index, order, starts, rows, experts, BLOCK: tl.constexpr, EVERY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows by expert, those of one expert in their order: order int32 [P]; starts int32 [E + 1].

    A row's place is the number of rows before it, counted by comparing with all of them. Programs: P / BLOCK for the
    rows, then (E + 1) / BLOCK for the experts' starts.
    """
    program = tl.program_id(0)
    blocks = (rows + BLOCK - 1) // BLOCK
    mine = tl.arange(0, BLOCK) + BLOCK * tl.where(program < blocks, program, program - blocks)
    key = tl.where(program < blocks, expert_of(tl.load(index + mine, mask=mine < rows, other=0), experts), mine)
    place = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, rows, EVERY):
        other = first + tl.arange(0, EVERY)
        keys = expert_of(tl.load(index + other, mask=other < rows, other=0), experts)
        less = (keys[None, :] < key[:, None]) & (other < rows)[None, :]
        if program < blocks:
            same = (keys[None, :] == key[:, None]) & (other[None, :] < mine[:, None])
            less = less | same
        place += tl.sum(less.to(tl.int32), 1)
    if program < blocks:
        tl.store(order + place, mine, mask=mine < rows)
    else:
        tl.store(starts + mine, place, mask=mine <= experts)


@triton.jit(do_not_specialize=["pairs", "splits"])  # type: ignore[untyped-decorator]
def weighted_sum(  # type: ignore[no-untyped-def]
    rows, index, weights, out, pairs, experts, each, width, splits, BLOCK: tl.constexpr
):
    """Rows [splits, P, H] summed over splits and over each token's experts, times their weights [P]: out [T, H].

    Rows without an expert are not read. The order of the sum is that of the experts: always the same.
    """
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for number in range(each):
        pair = token * each + number
        there = only(column < width, expert_of(tl.load(index + pair), experts) < experts)
        one = tl.zeros((BLOCK,), tl.float32)
        for split in range(splits):
            at = (split * pairs + pair).to(tl.int64) * width
            one += tl.load(rows + at + column, mask=there, other=0.0).to(tl.float32)
        total += one * tl.load(weights + pair).to(tl.float32)
    tl.store(out + token.to(tl.int64) * width + column, total.to(out.dtype.element_ty), mask=column < width)
