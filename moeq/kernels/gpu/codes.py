"""How a program reads codes and makes values of them: one source for all widths, which the compiler specialises.

`tile` loads the words of a tile once, cuts its 16 planes out of them and multiplies; `field` cuts, `number` makes
floats of codes by paper 002's trick (section 3.4.1: a code ORed into the mantissa of a power of two, which is taken away
again: exact, no conversion from integers), `zero_and_scale` is the grid, (code - zero) * scale. Codes less their zero
points are exact in float16 and bfloat16: where every group is a multiple of 128 inputs, the scale multiplies float32
sums and nothing of a weight is rounded; elsewhere (FINE) it multiplies each weight, which is then rounded once.

Imported only where Triton is installed. Letters: N rows, K inputs, C columns of a tile, M tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def number(code, BITS: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes int32 below 2**BITS as numbers of a type, exactly."""
    if DTYPE == tl.float16:
        return (code | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - 1024.0
    elif DTYPE == tl.bfloat16 and BITS < 8:
        return (code | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True) - 128.0
    else:
        return ((code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0).to(DTYPE)


@triton.jit  # type: ignore[untyped-decorator]
def field(word, PLANE: tl.constexpr, PART: tl.constexpr):  # type: ignore[no-untyped-def]
    """One plane's codes of a part of 8, 4 or 2 bits (`swizzle.place`)."""
    CODE: tl.constexpr = PLANE % (32 // PART)
    SHIFT: tl.constexpr = 8 * CODE if PART == 8 else PART * (CODE // 2) + 16 * (CODE % 2)
    return (word >> SHIFT) & (2**PART - 1)


@triton.jit  # type: ignore[untyped-decorator]
def zero_and_scale(halves, octets, n, here, group, rows, scales, zeros, zero_bits, grid):  # type: ignore[no-untyped-def]
    """Zero points and scales, float32, of rows n in groups; `here` says which there are."""
    scale = tl.load(halves + scales + group * rows + n, mask=here, other=0.0).to(tl.float32)
    row_bytes = (rows * zero_bits + 7) // 8
    bit = n * zero_bits
    stored = tl.load(octets + zeros + group * row_bytes + bit // 8, mask=here & (zero_bits > 0), other=0).to(tl.int32)
    raw = (stored >> (bit % 8)) & ((1 << zero_bits) - 1)
    return raw.to(tl.float32) * tl.load(grid + 1) + tl.load(grid + 2), scale * tl.load(grid)


@triton.jit  # type: ignore[untyped-decorator]
def multiplied(value, x, k, inside, token, exists, total, DTYPE: tl.constexpr, DOT: tl.constexpr):  # type: ignore[no-untyped-def]
    """A total plus values [N, C] times inputs k [C] of tokens: [N, M] where DOT, else [N, C] for one token."""
    if DOT:
        some = tl.load(x + token[None, :] + k[:, None], mask=inside[:, None] & exists[None, :], other=0.0)
        return tl.dot(value.to(DTYPE), some.to(DTYPE), total, input_precision="ieee")
    else:
        one = tl.load(x + token + k, mask=inside & exists, other=0.0).to(tl.float32)
        return total + value.to(tl.float32) * one[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def tile(  # type: ignore[no-untyped-def]
    total,
    words,
    shorts,
    halves,
    octets,
    x,
    token,
    exists,
    n,
    rows,
    inputs,
    before,
    columns,
    base,
    scales,
    zeros,
    zero_bits,
    group,
    grid,
    BITS: tl.constexpr,
    FINE: tl.constexpr,
    DTYPE: tl.constexpr,
    DOT: tl.constexpr,
):
    """A total plus the product of one tile.

    before: columns of the tiles before; columns: of this one; base: the matrix's first word; token: where each token's
    row of x begins, exists: whether there is one; n: the program's rows.
    """
    c = tl.arange(0, 16)
    at = n[:, None] * columns + c[None, :]
    here = (n < rows)[:, None] & (c < columns)[None, :]
    each = rows * columns  # words of the tile for every word of a column
    done = (rows * before).to(tl.int64)
    every = (rows * ((inputs + 15) // 16)).to(tl.int64)
    start = base
    if BITS & 8:
        first = words + start + 4 * done + at
        word80 = tl.load(first, mask=here, other=0)
        word81 = tl.load(first + each, mask=here, other=0)
        word82 = tl.load(first + 2 * each, mask=here, other=0)
        word83 = tl.load(first + 3 * each, mask=here, other=0)
        start += 4 * every
    if BITS & 4:
        first = words + start + 2 * done + at
        word40 = tl.load(first, mask=here, other=0)
        word41 = tl.load(first + each, mask=here, other=0)
        start += 2 * every
    if BITS & 2:
        word20 = tl.load(words + start + done + at, mask=here, other=0)
        start += every
    if BITS & 1:
        word10 = tl.load(shorts + 2 * start + done + at, mask=here, other=0).to(tl.int32)
    part = total
    zero = tl.zeros_like(n).to(tl.float32)
    scale = zero
    for PLANE in tl.static_range(16):
        code = tl.zeros_like(at)
        if BITS & 8:
            word8 = word80 if PLANE < 4 else (word81 if PLANE < 8 else (word82 if PLANE < 12 else word83))
            code = field(word8, PLANE, 8)
        if BITS & 4:
            code = field(word40 if PLANE < 8 else word41, PLANE, 4)
        if BITS & 2:
            code = field(word20, PLANE, 2) if BITS < 4 else ((code << 2) | field(word20, PLANE, 2))
        if BITS & 1:
            bit = (word10 >> PLANE) & 1
            code = bit if BITS == 1 else ((code << 1) | bit)
        k = 16 * before + PLANE * columns + c
        inside = (c < columns) & (k < inputs)
        value = number(code, BITS, DTYPE)
        if FINE:
            there = (n < rows)[:, None] & inside[None, :]
            zero2, scale2 = zero_and_scale(
                halves, octets, n[:, None], there, (k // group)[None, :], rows, scales, zeros, zero_bits, grid
            )
            part = multiplied(
                (value.to(tl.float32) - zero2) * scale2, x, k, inside, token, exists, part, DTYPE, DOT
            )
        else:
            if PLANE % 8 == 0:
                which = (16 * before + 16 * PLANE) // group
                zero, scale = zero_and_scale(halves, octets, n, n < rows, which, rows, scales, zeros, zero_bits, grid)
                part = tl.zeros_like(total)
            value = value - zero.to(DTYPE)[:, None]
            part = multiplied(value, x, k, inside, token, exists, part, DTYPE, DOT)
            if PLANE % 8 == 7:
                total += part * scale[:, None]
    if FINE:
        total = part
    return total
