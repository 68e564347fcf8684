"""A program that stores the numbers which the kernels make of codes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moeq_kernels.gpu.codes import values
from moeq_kernels.gpu.kernel import TritonLinear


@triton.jit
def stored(words, shorts, out, rows, inputs, BITS: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    n = tl.arange(0, 16)
    made = values(words, shorts, tl.load(words) * 0, n, rows, inputs, 0, 8, BITS, DTYPE)
    tl.store(out + n[:, None] * 128 + tl.arange(0, 128)[None, :], made.to(tl.float32))


def numbers(linear: TritonLinear, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers [16, 128] of a matrix of that shape."""
    words, shorts = linear.stack.pointers[:2]
    out = torch.empty((16, 128), device=words.device)
    name = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[dtype]
    stored[(1,)](words, shorts, out, 16, 128, BITS=bits, DTYPE=name)
    return out
