"""How a program makes values of codes: one source for all widths, which the compiler specialises.

`two_planes` cuts codes out of words and makes floats of them as paper 002 does (section 3.4), two at a time: the code
goes into the mantissa by AND and OR, nothing is converted. Here it goes to the mantissa's top under the exponent of 1:
v = 1 + c/2**b, exact, and of the size of what is summed, so that the 1 need not be taken away of each weight: it leaves
with the zero point, once a group, by the sum of the inputs (`tile`). Where that has too many digits (8 bits in
bfloat16) v is the code.

The grid, (code - zero) * scale, is `grid_of`: what v is less than it should be, and by what factor. Another way to make
values of codes changes `two_planes` and `grid_of` alone.

Imported only where Triton is installed. Letters: N rows, K inputs, C columns of a tile, M tokens, b bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def field(word, CODE: tl.constexpr, PART: tl.constexpr, TO: tl.constexpr, BOTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """One code of a word (`swizzle.place`), moved to bit TO; BOTH: and the next, of the high half, to bit 16 + TO."""
    FROM: tl.constexpr = PART * (CODE // 2) + 16 * (CODE % 2)
    MASK: tl.constexpr = (2**PART - 1) << TO
    KEPT: tl.constexpr = MASK * 65537 if BOTH else MASK
    # a mask with the highest bit is a negative number
    SIGNED: tl.constexpr = KEPT - 4294967296 if KEPT >= 2147483648 else KEPT
    moved = word >> (FROM - TO) if FROM >= TO else word << (TO - FROM)
    return moved & SIGNED


@triton.jit  # type: ignore[untyped-decorator]
def code_at(  # type: ignore[no-untyped-def]
    word80, word81, word82, word83, word40, word41, word20, word10, PLANE: tl.constexpr, BITS: tl.constexpr,
    LOW: tl.constexpr, BOTH: tl.constexpr,
):  # fmt: skip
    """Codes [N, C] of one plane, or of two, from bit LOW on; of the words that the width has."""
    code = 0
    if BITS & 8:
        word = word80 if PLANE < 4 else (word81 if PLANE < 8 else (word82 if PLANE < 12 else word83))
        code = field(word, PLANE % 4, 8, LOW, BOTH)
    if BITS & 4:
        code = field(word40 if PLANE < 8 else word41, PLANE % 8, 4, LOW + (BITS & 3), BOTH)
    if BITS & 2:
        code = code | field(word20, PLANE, 2, LOW + (BITS & 1), BOTH)
    if BITS & 1:
        code = code | field(word10, PLANE, 1, LOW, BOTH)
    return code


@triton.jit  # type: ignore[untyped-decorator]
def two_planes(  # type: ignore[no-untyped-def]
    word80, word81, word82, word83, word40, word41, word20, word10, PLANE: tl.constexpr, BITS: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """An even plane and the next as numbers [N, C]: 1 + c/2**b, or c for 8 bits in bfloat16."""
    if tl.float32 == DTYPE or (tl.bfloat16 == DTYPE and BITS == 8):
        LOW: tl.constexpr = 23 - BITS if tl.float32 == DTYPE else 0
        ONE: tl.constexpr = 0x3F800000 if tl.float32 == DTYPE else 0x4B000000
        even = code_at(
            word80, word81, word82, word83, word40, word41, word20, word10, PLANE, BITS, LOW, False
        )  # fmt: skip
        odd = code_at(
            word80, word81, word82, word83, word40, word41, word20, word10, PLANE + 1, BITS, LOW, False
        )  # fmt: skip
        first = (even | ONE).to(tl.float32, bitcast=True)
        second = (odd | ONE).to(tl.float32, bitcast=True)
        if tl.bfloat16 == DTYPE:
            first = (first - 8388608.0).to(DTYPE)
            second = (second - 8388608.0).to(DTYPE)
    else:
        MANTISSA: tl.constexpr = 10 if tl.float16 == DTYPE else 7
        ONES: tl.constexpr = 0x3C003C00 if tl.float16 == DTYPE else 0x3F803F80
        both = ONES | code_at(
            word80, word81, word82, word83, word40, word41, word20, word10, PLANE, BITS, MANTISSA - BITS, True
        )  # fmt: skip
        first = both.to(tl.int16).to(DTYPE, bitcast=True)
        second = (both >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return first, second


@triton.jit  # type: ignore[untyped-decorator]
def values(words, shorts, base, n, rows, inputs, before, columns, BITS: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers [N, 128] of one tile, in the order of the inputs; each word is loaded once.

    base: the matrix's first word; n: rows; before: columns of the tiles before; columns: of this one.
    """
    c = tl.arange(0, 8)
    at = n[:, None] * columns + c[None, :]
    here = (n < rows)[:, None] & (c < columns)[None, :]
    each = rows * columns  # words of the tile for every word of a column
    done = tl.cast(rows, tl.int64) * before
    every = tl.cast(rows, tl.int64) * ((inputs + 15) // 16)
    word80, word81, word82, word83, word40, word41, word20, word10 = 0, 0, 0, 0, 0, 0, 0, 0
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
        word10 = (word10 & 255) | ((word10 & 65280) << 8)  # the odd codes to the high half
    a0, b0 = two_planes(word80, word81, word82, word83, word40, word41, word20, word10, 0, BITS, DTYPE)
    a1, b1 = two_planes(word80, word81, word82, word83, word40, word41, word20, word10, 2, BITS, DTYPE)
    a2, b2 = two_planes(word80, word81, word82, word83, word40, word41, word20, word10, 4, BITS, DTYPE)
    a3, b3 = two_planes(word80, word81, word82, word83, word40, word41, word20, word10, 6, BITS, DTYPE)
    a4, b4 = two_planes(word80, word81, word82, word83, word40, word41, word20, word10, 8, BITS, DTYPE)
    a5, b5 = two_planes(word80, word81, word82, word83, word40, word41, word20, word10, 10, BITS, DTYPE)
    a6, b6 = two_planes(word80, word81, word82, word83, word40, word41, word20, word10, 12, BITS, DTYPE)
    a7, b7 = two_planes(word80, word81, word82, word83, word40, word41, word20, word10, 14, BITS, DTYPE)
    even = tl.join(tl.join(tl.join(a0, a4), tl.join(a2, a6)), tl.join(tl.join(a1, a5), tl.join(a3, a7)))
    odd = tl.join(tl.join(tl.join(b0, b4), tl.join(b2, b6)), tl.join(tl.join(b1, b5), tl.join(b3, b7)))
    made = tl.permute(tl.join(even, odd), (0, 2, 3, 4, 1, 5))  # [N, 2, 2, 2, C, 2]
    return tl.reshape(made, (n.shape[0], 128))


@triton.jit  # type: ignore[untyped-decorator]
def grid_of(  # type: ignore[no-untyped-def]
    halves, octets, n, here, group, rows, scales, zeros, zero_bits, grid, BITS: tl.constexpr, DTYPE: tl.constexpr
):
    """Offset and factor, float32, of rows n in groups: a weight is (v - offset) * factor; here: which there are."""
    scale = tl.load(halves + scales + group * rows + n, mask=here, other=0.0).to(tl.float32) * tl.load(grid)
    row_bytes = (rows * zero_bits + 7) // 8
    bit = n * zero_bits
    stored = tl.load(octets + zeros + group * row_bytes + bit // 8, mask=here & (zero_bits > 0), other=0).to(tl.int32)
    raw = (stored >> (bit % 8)) & ((1 << zero_bits) - 1)
    zero = raw.to(tl.float32) * tl.load(grid + 1) + tl.load(grid + 2)
    if BITS == 8 and tl.bfloat16 == DTYPE:
        return zero, scale
    return 1.0 + zero * (1.0 / 2**BITS), scale * 2**BITS


@triton.jit  # type: ignore[untyped-decorator]
def multiplied(value, x, k, inside, token, exists, DTYPE: tl.constexpr, DOT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Values [N, K] times inputs k of tokens, float32 [N, M], and the sums of those inputs [M]; without DOT M = 1."""
    if DOT:
        some = tl.load(x + token[None, :] + k[:, None], mask=inside[:, None] & exists[None, :], other=0.0).to(DTYPE)
        product = tl.dot(value.to(DTYPE), some, input_precision="ieee")
        return product, tl.sum(some.to(tl.float32), 0)
    else:
        one = tl.load(x + token + k, mask=inside & exists, other=0.0).to(tl.float32)
        product = tl.sum(value.to(tl.float32) * one[None, :], 1)
        return product[:, None], tl.sum(one, 0)[None]


@triton.jit  # type: ignore[untyped-decorator]
def tile(  # type: ignore[no-untyped-def]
    words, shorts, halves, octets, x, token, exists, n, rows, inputs, number_of_tile, columns, base, scales, zeros,
    zero_bits, group, grid, BITS: tl.constexpr, WHOLE: tl.constexpr, FINE: tl.constexpr, DTYPE: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """The product of one tile, float32 [N, M].

    A tile in one group (not FINE): nothing of a weight is rounded, offset and factor act on float32 sums. Else each
    weight gets its own, and is rounded once. WHOLE: with all 8 columns.
    """
    CODES: tl.constexpr = DTYPE if DOT else tl.float32
    i = tl.arange(0, 128)
    if WHOLE:
        k = 128 * number_of_tile + i
        inside = k < inputs
        value = values(words, shorts, base, n, rows, inputs, 8 * number_of_tile, 8, BITS, CODES)
    else:
        k = 128 * number_of_tile + 2 * columns * (i // 16) + i % 16
        inside = (i % 16 < 2 * columns) & (k < inputs)
        value = values(words, shorts, base, n, rows, inputs, 8 * number_of_tile, columns, BITS, CODES)
    if FINE:
        offset, factor = grid_of(
            halves, octets, n[:, None], (n < rows)[:, None] & inside[None, :], (k // group)[None, :], rows, scales,
            zeros, zero_bits, grid, BITS, CODES,
        )  # fmt: skip
        product, _ = multiplied((value.to(tl.float32) - offset) * factor, x, k, inside, token, exists, DTYPE, DOT)
        return product
    else:
        offset, factor = grid_of(
            halves, octets, n, n < rows, (128 * number_of_tile) // group, rows, scales, zeros, zero_bits, grid, BITS,
            CODES,
        )  # fmt: skip
        product, inputs_sum = multiplied(value, x, k, inside, token, exists, DTYPE, DOT)
        return (product - offset[:, None] * inputs_sum[None, :]) * factor[:, None]
