"""Which items of a launch's work a program takes: blocks of the rows of each owner, an expert, a row or one matrix.

Imported only where Triton is installed. Letters: E experts, P rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moeq_kernels.gpu.sums import expert_of


@triton.jit  # type: ignore[untyped-decorator]
def chosen(which, values):  # type: ignore[no-untyped-def]
    """The value of the one that is chosen."""
    return tl.sum(tl.where(which, values, 0), 0)


@triton.jit  # type: ignore[untyped-decorator]
def stretch(items, cost, program, programs):  # type: ignore[no-untyped-def]
    """First and last item of a program; items: of each owner, each at its owner's cost, int64."""
    weight = items * cost
    before = tl.cumsum(weight, 0) - weight
    total = tl.sum(weight, 0)
    low = total * program // programs
    high = total * (program + 1) // programs
    to_low = tl.minimum(tl.maximum((low - before + cost - 1) // cost, 0), items)
    to_high = tl.minimum(tl.maximum((high - before + cost - 1) // cost, 0), items)
    return tl.sum(to_low, 0).to(tl.int32), tl.sum(to_high, 0).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def owners(index, starts, pairs, experts, ROUTING: tl.constexpr, OWNERS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The expert of each owner of work, and its first row and number of rows."""
    owner = tl.arange(0, OWNERS)
    if ROUTING == "sorted":
        begin = tl.load(starts + owner, mask=owner < experts, other=0)
        return owner, begin, tl.load(starts + owner + 1, mask=owner < experts, other=0) - begin
    elif ROUTING == "rows":
        its_expert = expert_of(tl.load(index + owner, mask=owner < pairs, other=-1), experts)
        return its_expert, owner, (its_expert < experts).to(tl.int32)
    else:
        return owner * 0, owner * 0, tl.where(owner == 0, pairs, 0)
