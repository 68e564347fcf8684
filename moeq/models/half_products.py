"""Matrix products of 16-bit floats in single precision, on CPUs that have no instructions for them.

There (x86 with AVX2 alone: most desktops) torch multiplies bfloat16 and float16 in plain loops, five to fifty times
slower than float32. Converting blocks of both factors and one product in float32 is that much faster for all but a few
rows, sums as exactly, and rounds once. `use_for` has torch do so from then on, in the whole process, and below
autograd, so that gradients profit too.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

LEAST = 8  # rows and columns of a product from which on it pays
BLOCK_BYTES = 16 << 20  # of what is converted at once
_NAMES = ("mm", "mm.out", "addmm", "bmm")


@cache
def slow_types() -> frozenset[torch.dtype]:
    """Those that torch multiplies in plain loops on this CPU."""
    if platform.machine().lower() not in {"x86_64", "amd64"}:
        return frozenset()
    native = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    asked = {dtype: getattr(torch.ops.mkldnn, name, lambda: True) for dtype, name in native.items()}
    return frozenset(dtype for dtype, supported in asked.items() if not supported())


def use_for(dtype: torch.dtype | None) -> None:
    """From now on, in this process, where a model of this type is slow without."""
    if dtype in slow_types():
        _use()


@cache
def _use() -> torch.library.Library:
    return _installed(slow_types())


@contextmanager
def using(types: frozenset[torch.dtype]) -> Iterator[None]:
    """While the block runs, for some types, whatever this CPU has."""
    library = _installed(types)
    try:
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def _installed(types: frozenset[torch.dtype]) -> torch.library.Library:
    """torch's products on CPUs replaced; the originals are reached by `addmm` and `baddbmm` that are given `out`."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced is what is wanted
        for name in _NAMES:
            library.impl(name, _Products(types).named(name), "CPU")
    return library


class _Products:
    """The replaced operators."""

    def __init__(self, types: frozenset[torch.dtype]) -> None:
        self.types = types

    def named(self, name: str) -> Callable[..., Tensor]:
        found: Callable[..., Tensor] = getattr(self, name.replace(".", "_"))
        return found

    def _pays(self, left: Tensor, right: Tensor) -> bool:
        return left.dtype in self.types and left.dtype == right.dtype and min(left.shape[-2], right.shape[-1]) >= LEAST

    def mm(self, left: Tensor, right: Tensor) -> Tensor:
        return self._into(left.new_empty(left.shape[0], right.shape[-1]), left, right)

    def mm_out(self, left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
        wanted = left.shape[0], right.shape[-1]
        return self._into(out if out.shape == wanted else out.resize_(wanted), left, right)

    def _into(self, out: Tensor, left: Tensor, right: Tensor) -> Tensor:
        if out.dtype != left.dtype or not self._pays(left, right):
            return torch.addmm(out, left, right, beta=0, out=out)
        return _in_blocks(out, left, right, None)

    def addmm(self, added: Tensor, left: Tensor, right: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
        out = left.new_empty(left.shape[0], right.shape[-1])
        if added.dtype != left.dtype or not self._pays(left, right):
            return torch.addmm(added, left, right, beta=beta, alpha=alpha, out=out)
        return _in_blocks(out, left, right, added.expand(out.shape), beta, alpha)

    def bmm(self, left: Tensor, right: Tensor) -> Tensor:
        out = left.new_empty(left.shape[0], left.shape[1], right.shape[-1])
        if not self._pays(left, right):
            return torch.baddbmm(out, left, right, beta=0, out=out)
        each = 4 * max(1, left[0].numel(), right[0].numel(), out[0].numel()) if len(out) else 1
        step = max(1, BLOCK_BYTES // each)
        for at in range(0, len(out), step):
            one, two = left[at : at + step].float(), right[at : at + step].float()
            sums = one.new_empty(out[at : at + step].shape)
            out[at : at + step] = torch.baddbmm(sums, one, two, beta=0, out=sums)
        return out


def _in_blocks(out: Tensor, left: Tensor, right: Tensor, added: Tensor | None, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """left [m, k] times right [k, n] into out [m, n], with what is added to it; in memory for some blocks only."""
    numbers = BLOCK_BYTES // 4 // max(1, left.shape[1])
    tall, wide = max(LEAST, numbers), max(LEAST, min(numbers, BLOCK_BYTES // 4 // max(1, min(len(left), numbers))))
    for top in range(0, out.shape[0], tall):
        rows = left[top : top + tall].float()
        for side in range(0, out.shape[1], wide):
            here = slice(top, top + tall), slice(side, side + wide)
            sums = rows.new_empty(out[here].shape)
            given = sums if added is None else added[here].float()
            factor = 0 if added is None else beta
            torch.addmm(given, rows, right[:, here[1]].float(), beta=factor, alpha=alpha, out=sums)
            out[here] = sums
    return out
