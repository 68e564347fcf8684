"""Scales and zero points of rows as programs load them (`stored`): those of a group lie beside each other, of 16 rows
in the order in which tensor cores take them.

Imported only where Triton is installed. Letters: N rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moeq_kernels.widths import NESTED_BITS

NESTED_TO = NESTED_BITS[-1]


@triton.constexpr_function  # type: ignore[untyped-decorator]
def least(bits: int, nested: bool) -> int:
    """The lowest bit of a mantissa where codes may begin: 2**-least is the unit of zero points.

    A sign's zero point is a half; a nested one has a fraction of one bit more than the codes below its width take.
    """
    return 1 if bits == 1 else (NESTED_TO + 1 - bits if nested and bits < NESTED_TO else 0)


@triton.jit  # type: ignore[untyped-decorator]
def only(mask, condition):  # type: ignore[no-untyped-def]
    """The mask where a condition, one for all of it, holds; no `&`: Triton 3.9's interpreter makes no mask of that."""
    return tl.where(condition, mask, False)


@triton.jit  # type: ignore[untyped-decorator]
def place_of(n, FRAGMENTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a row's scale and zero point lie among those of its group: of 16 rows as the words do, 8 * s + r at
    2 * r + s."""
    return n // 16 * 16 + n % 8 * 2 + n // 8 % 2 if FRAGMENTS else n


@triton.jit  # type: ignore[untyped-decorator]
def scale_of(halves, n, here, group, rows, scales, factor, FRAGMENTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scales of rows n in groups, float32; here: which there are."""
    at = halves + scales + group * rows + place_of(n, FRAGMENTS)
    return tl.load(at, mask=here, other=0.0).to(tl.float32) * factor


@triton.constexpr_function  # type: ignore[untyped-decorator]
def zero_bits_of(bits: int) -> int:
    """Of a stored zero point that is not nested."""
    return 8 if bits > 4 else (4 if bits > 2 else 2)


@triton.jit  # type: ignore[untyped-decorator]
def moved(raw, factor, shift, BITS: tl.constexpr, NESTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stored zero points as those of the codes as they are: float32 where NESTED, else int32 in units of 2**-least."""
    if NESTED:
        return raw.to(tl.float32) * factor + shift
    else:
        return raw + (shift * 2 ** least(BITS, NESTED)).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def zero_of(  # type: ignore[no-untyped-def]
    words, n, here, group, rows, zeros, zero_bits, factor, shift, BITS: tl.constexpr, NESTED: tl.constexpr,
    FRAGMENTS: tl.constexpr,
):  # fmt: skip
    """Zero points of rows n in groups, as `moved`; here: which there are."""
    stored_bits = zero_bits if NESTED else zero_bits_of(BITS)
    bit = place_of(n, FRAGMENTS) * stored_bits
    at = words + zeros + group * ((rows * stored_bits + 31) // 32) + bit // 32
    raw = (tl.load(at, mask=only(here, zero_bits > 0), other=0) >> (bit % 32)) & ((1 << stored_bits) - 1)
    return moved(raw, factor, shift, BITS, NESTED)


@triton.jit  # type: ignore[untyped-decorator]
def half_of(word):  # type: ignore[no-untyped-def]
    """The float16 in the low half of a word, as float32."""
    return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def grid_of(  # type: ignore[no-untyped-def]
    words, pair, here, group, rows, scales, zeros, zero_bits, factor, zero_factor, zero_shift, BITS: tl.constexpr,
    NESTED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Scales [2 N, 2] of the rows r and r + 8 of each thread in a group, and their zero points [2 N] each.

    pair: [2 N], which pair of rows it is; rows are a multiple of 16. A pair's scales are one word, and its zero points
    lie in one. What the product needs only after it, the scales, is bound to what it needs before: the compiler brings
    ahead of a loop what tensor cores are given, and everything else when it is asked for.
    """
    stored_bits = zero_bits if NESTED else zero_bits_of(BITS)
    both = tl.load(words + scales // 2 + group * (rows // 2) + pair, mask=here, other=0)
    bit = 2 * pair * stored_bits
    at = words + zeros + group * ((rows * stored_bits + 31) // 32) + bit // 32
    raw = tl.load(at, mask=only(here, zero_bits > 0), other=0)
    if ASM:
        raw = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [raw, both], tl.int32, True, 1)
    raw = raw >> (bit % 32)
    zero0 = moved(raw & ((1 << stored_bits) - 1), zero_factor, zero_shift, BITS, NESTED)
    zero1 = moved((raw >> stored_bits) & ((1 << stored_bits) - 1), zero_factor, zero_shift, BITS, NESTED)
    return tl.join(half_of(both) * factor, half_of(both >> 16) * factor), zero0, zero1
