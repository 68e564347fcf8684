"""Programs that store what the kernels find inside: numbers of codes, and stretches of work."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moeq_kernels.gpu.codes import joined, loaded
from moeq_kernels.gpu.kernel import TritonLinear
from moeq_kernels.gpu.work import stretch
from moeq_kernels.names import interpreted


@triton.jit
def stored(words, shorts, out, BITS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    flat, two = tl.arange(0, 128), tl.arange(0, 64)
    loads = loaded(words, shorts, 0, flat, flat < 128, 0, two, two < 64, 128, 0, 128, BITS, True)
    made = joined(loads, None, None, 0, 128, BITS, DTYPE, False, ASM)
    made = tl.permute(tl.reshape(made, (1, 8, 4, 2, 2, 8, 2)), (0, 3, 1, 5, 4, 2, 6))
    at = tl.arange(0, 16)[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(out + at, tl.reshape(made, (16, 128)).to(tl.float32))


def numbers(linear: TritonLinear, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers [16, 128] of a matrix of that shape."""
    words, shorts = linear.stack.pointers[:2]
    out = torch.empty((16, 128), device=words.device)
    name = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[dtype]
    stored[(1,)](words, shorts, out, BITS=bits, DTYPE=name, ASM=not interpreted())
    return out


@triton.jit
def stored_stretches(items, costs, out, owners, OWNERS: tl.constexpr):  # type: ignore[no-untyped-def]
    owner = tl.arange(0, OWNERS)
    its_items = tl.load(items + owner, mask=owner < owners, other=0)
    cost = tl.load(costs + owner, mask=owner < owners, other=1).to(tl.int64)
    first, last = stretch(its_items, cost, tl.program_id(0), tl.num_programs(0))
    tl.store(out + 2 * tl.program_id(0), first)
    tl.store(out + 2 * tl.program_id(0) + 1, last)


def stretches(items: torch.Tensor, costs: torch.Tensor, programs: int) -> list[list[int]]:
    """First and last item of each program."""
    out = torch.empty((programs, 2), dtype=torch.int32, device=items.device)
    stored_stretches[(programs,)](items, costs, out, len(items), OWNERS=triton.next_power_of_2(len(items)))
    return out.tolist()
