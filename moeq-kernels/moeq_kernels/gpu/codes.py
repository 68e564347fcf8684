"""How a program makes numbers of codes: one source for all widths, which the compiler specialises.

`two_planes` cuts codes out of words and makes floats of them as paper 002 does (section 3.4), two at a time: one LOP3
puts two codes under an exponent, nothing is converted, and one multiply-add on the pair takes away what the exponent
added and the zero point: what comes is code - zero, exact. Codes stay where they lie in the word where the mantissa
reaches: one of 2 bits in bfloat16 at bits 0, 2 and 4, so that of seven shifts two are left. Scales act on float32 sums,
a group at a time (`tile`). Where a mantissa has too few digits (8 bits in bfloat16) each code goes through float32.

Words come in the order in which tensor cores take the numbers (`swizzle`): between the load and the product nothing
moves from a thread to another. What does not lie so, a last tile and matrices whose rows are no multiple of 16, goes
through `uneven`, where each weight gets its own scale and zero point and is rounded once.

Trellis codes become numbers in `walks`; what loads inputs and multiplies is shared.

Imported only where Triton is installed. Letters: N rows, K inputs, C columns of a tile, M tokens, b bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moeq_kernels.gpu.bits import at_bit, lowest_bit
from moeq_kernels.gpu.grid import grid_of, least, scale_of, zero_of
from moeq_kernels.gpu.parts import nothing, places


@triton.jit  # type: ignore[untyped-decorator]
def field(onto, word, FROM: tl.constexpr, PART: tl.constexpr, TO: tl.constexpr, BOTH: tl.constexpr, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """`onto` with PART bits of a word, from FROM on, at bit TO; BOTH: and those of the high half at 16 + TO."""
    MASK: tl.constexpr = (2**PART - 1) << TO
    KEPT: tl.constexpr = MASK * 65537 if BOTH else MASK
    # a mask with the highest bit is a negative number
    SIGNED: tl.constexpr = KEPT - 4294967296 if KEPT >= 2147483648 else KEPT
    moved = word >> (FROM - TO) if FROM >= TO else word << (TO - FROM)
    if ASM:  # one instruction for AND and OR: the compiler makes two where both have a number written in them
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [moved, SIGNED, onto], tl.int32, True, 1
        )
    else:
        return moved & SIGNED | onto


@triton.jit  # type: ignore[untyped-decorator]
def merged(word20, word10, SECOND: tl.constexpr, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Eight codes of 3 bits, each in 4 bits of which the highest may be anything: planes 0, 1, 4, 5, .., or SECOND: 2,
    3, 6, 7, .."""
    LOWEST: tl.constexpr = 0x11111111
    high = word20 >> 1 if SECOND else word20 << 1
    low = word10 >> 1 if SECOND else word10
    if ASM:  # one instruction: low where the mask has ones
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xD8;", "=r,r,r,r", [high, low, LOWEST], tl.int32, True, 1
        )
    else:
        return (low & LOWEST) | (high & ~LOWEST)


@triton.jit  # type: ignore[untyped-decorator]
def code_at(  # type: ignore[no-untyped-def]
    onto, loads, PLANE: tl.constexpr, BITS: tl.constexpr,
    LOW: tl.constexpr, BOTH: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """`onto` with codes [N, C] of one plane, or of two, from bit LOW on; of the words that the width has."""
    word80, word81, word82, word83, word40, word41, word20, word10 = loads
    code = onto
    if BITS == 3:
        word = merged(word20, word10, PLANE // 2 % 2 == 1, ASM)
        code = field(code, word, at_bit(PLANE // 4 * 2 + PLANE % 2, 4), 3, LOW, BOTH, ASM)
    else:
        if BITS & 8:
            word = word80 if PLANE < 4 else (word81 if PLANE < 8 else (word82 if PLANE < 12 else word83))
            code = field(code, word, at_bit(PLANE % 4, 8), 8, LOW, BOTH, ASM)
        if BITS & 4:
            word = word40 if PLANE < 8 else word41
            code = field(code, word, at_bit(PLANE % 8, 4), 4, LOW + (BITS & 3), BOTH, ASM)
        if BITS & 2:
            code = field(code, word20, at_bit(PLANE, 2), 2, LOW + (BITS & 1), BOTH, ASM)
        if BITS & 1:
            code = field(code, word10, at_bit(PLANE, 1), 1, LOW, BOTH, ASM)
    return code


@triton.jit  # type: ignore[untyped-decorator]
def spread(first, second):  # type: ignore[no-untyped-def]
    """Numbers of the rows r and r + 8 of each thread, [2 N] each, for its four words [8 N]."""
    rows = tl.join(first, second)
    return tl.reshape(tl.join(rows, rows), (4 * first.shape[0],))


@triton.jit  # type: ignore[untyped-decorator]
def subtracted(zero, TO: tl.constexpr, LEAST: tl.constexpr, DTYPE: tl.constexpr, NESTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """-(2**(mantissa - TO) + zero), twice in a word: what turns a code at bit TO of a mantissa into code - zero.

    zero: float32 where NESTED, else int32 in units of 2**-LEAST.
    """
    MANTISSA: tl.constexpr = 10 if tl.float16 == DTYPE else 7
    BIAS: tl.constexpr = 15 if tl.float16 == DTYPE else 127
    if NESTED:
        half = (-(2.0 ** (MANTISSA - TO)) - zero).to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 65535
        return half | (half << 16)
    else:
        SIGNED: tl.constexpr = (32768 | (BIAS + MANTISSA - TO) << MANTISSA) * 65537 - 4294967296
        return zero * (65537 << (TO - LEAST)) + SIGNED


@triton.jit  # type: ignore[untyped-decorator]
def two_planes(  # type: ignore[no-untyped-def]
    loads, zero0, zero1, PLANE: tl.constexpr,
    BITS: tl.constexpr, DTYPE: tl.constexpr, NESTED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """An even plane and the next as numbers, code - zero; zero0 and zero1: of `spread`, or one number, as `subtracted`.

    NESTED: zero points have fractions, down to an eighth, so that codes may not lie in the lowest bits; ASM: by PTX
    instructions, which the interpreter does not have.
    """
    LEAST: tl.constexpr = least(BITS, NESTED)
    ALONE: tl.constexpr = zero0 is None
    if tl.float32 == DTYPE or (tl.bfloat16 == DTYPE and BITS == 8):
        WHOLE: tl.constexpr = 0x4B000000  # 2**23
        even = code_at(WHOLE, loads, PLANE, BITS, 0, False, ASM)
        odd = code_at(WHOLE, loads, PLANE + 1, BITS, 0, False, ASM)
        first = even.to(tl.float32, bitcast=True) - 8388608.0
        second = odd.to(tl.float32, bitcast=True) - 8388608.0
        if not ALONE:
            zero = spread(zero0.to(tl.float32), zero1.to(tl.float32)) * (1.0 if NESTED else 0.5**LEAST)
            first -= zero
            second -= zero
        return first.to(DTYPE), second.to(DTYPE)
    else:
        MANTISSA: tl.constexpr = 10 if tl.float16 == DTYPE else 7
        BIAS: tl.constexpr = 15 if tl.float16 == DTYPE else 127
        TO: tl.constexpr = lowest_bit(PLANE, BITS, LEAST, MANTISSA)
        FACTOR: tl.constexpr = 2.0 ** (MANTISSA - TO)
        ONES: tl.constexpr = (BIAS << MANTISSA) * 65537
        both = code_at(
            ONES, loads, PLANE, BITS, TO, True, ASM
        )  # fmt: skip
        if ALONE:
            added = tl.full(both.shape, (32768 | (BIAS + MANTISSA - TO) << MANTISSA) * 65537 - 4294967296, tl.int32)
        else:
            added = spread(
                subtracted(zero0, TO, LEAST, DTYPE, NESTED), subtracted(zero1, TO, LEAST, DTYPE, NESTED)
            )  # fmt: skip
        if ASM:
            FACTORS: tl.constexpr = ((BIAS + MANTISSA - TO) << MANTISSA) * 65537
            if tl.float16 == DTYPE:
                made = tl.inline_asm_elementwise(
                    "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [both, FACTORS, added], tl.int32, True, 1
                )
            else:
                made = tl.inline_asm_elementwise(
                    "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [both, FACTORS, added], tl.int32, True, 1
                )
        else:
            low = both.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32) * FACTOR
            high = (both >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32) * FACTOR
            low += added.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
            high += (added >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
            return low.to(DTYPE), high.to(DTYPE)
        first = made.to(tl.int16).to(DTYPE, bitcast=True)
        second = (made >> 16).to(tl.int16).to(DTYPE, bitcast=True)
        return first, second


@triton.jit  # type: ignore[untyped-decorator]
def loaded(  # type: ignore[no-untyped-def]
    words,
    shorts,
    base,
    at,
    here,
    further,
    pair_at,
    pair_here,
    each,
    done,
    every,
    BITS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """The words of a tile, each once: 4 of a part of 8 bits, 2 of 4, one of 2 and one of 1; 0 of what a width lacks.

    base: the matrix's first word; at: places in a tile of one word a column; here: which there are; further: words of
    the tiles between the first one and each one's; each: words of such a tile; done: of the tiles before; every: of the
    matrix. PAIRS: the short words of 1 bit two by two, pair_at.
    """
    word80, word81, word82, word83, word40, word41, word20, word10 = 0, 0, 0, 0, 0, 0, 0, 0
    start = base
    if BITS & 8:
        first = words + start + 4 * done + 4 * further
        word80 = tl.load(first + at, mask=here, other=0)
        word81 = tl.load(first + each + at, mask=here, other=0)
        word82 = tl.load(first + 2 * each + at, mask=here, other=0)
        word83 = tl.load(first + 3 * each + at, mask=here, other=0)
        start += 4 * every
    if BITS & 4:
        first = words + start + 2 * done + 2 * further
        word40 = tl.load(first + at, mask=here, other=0)
        word41 = tl.load(first + each + at, mask=here, other=0)
        start += 2 * every
    if BITS & 2:
        word20 = tl.load(words + start + done + (at + further), mask=here, other=0)
        start += every
    if BITS & 1:
        if PAIRS:
            two = tl.load(words + start + done // 2 + pair_at, mask=pair_here, other=0)
            first = (two & 65535) | ((two << 14) & -65536)  # the odd codes to the high half
            second = ((two >> 16) & 65535) | ((two >> 2) & -65536)
            word10 = tl.reshape(tl.join(first, second), at.shape)
        else:
            word10 = tl.load(shorts + 2 * start + done + at, mask=here, other=0).to(tl.int32)
            word10 = (word10 & 65535) | ((word10 << 14) & -65536)
    return (word80, word81, word82, word83, word40, word41, word20, word10)


@triton.jit  # type: ignore[untyped-decorator]
def joined(  # type: ignore[no-untyped-def]
    loads,
    zero0,
    zero1,
    FIRST: tl.constexpr,
    STEP: tl.constexpr,
    BITS: tl.constexpr,
    DTYPE: tl.constexpr,
    NESTED: tl.constexpr,
    ASM: tl.constexpr,
):
    """STEP / 8 planes from plane FIRST on as one tensor [words.., pairs of planes.., even or odd]."""
    a0, b0 = two_planes(loads, zero0, zero1, FIRST, BITS, DTYPE, NESTED, ASM)
    if STEP > 16:
        a1, b1 = two_planes(loads, zero0, zero1, FIRST + 2, BITS, DTYPE, NESTED, ASM)
    if STEP > 32:
        a2, b2 = two_planes(loads, zero0, zero1, FIRST + 4, BITS, DTYPE, NESTED, ASM)
        a3, b3 = two_planes(loads, zero0, zero1, FIRST + 6, BITS, DTYPE, NESTED, ASM)
    if STEP > 64:
        a4, b4 = two_planes(loads, zero0, zero1, FIRST + 8, BITS, DTYPE, NESTED, ASM)
        a5, b5 = two_planes(loads, zero0, zero1, FIRST + 10, BITS, DTYPE, NESTED, ASM)
        a6, b6 = two_planes(loads, zero0, zero1, FIRST + 12, BITS, DTYPE, NESTED, ASM)
        a7, b7 = two_planes(loads, zero0, zero1, FIRST + 14, BITS, DTYPE, NESTED, ASM)
    if STEP == 16:
        return tl.join(a0, b0)
    elif STEP == 32:
        return tl.join(tl.join(a0, a1), tl.join(b0, b1))
    elif STEP == 64:
        even = tl.join(tl.join(a0, a2), tl.join(a1, a3))
        odd = tl.join(tl.join(b0, b2), tl.join(b1, b3))
        return tl.join(even, odd)
    else:
        even = tl.join(tl.join(tl.join(a0, a4), tl.join(a2, a6)), tl.join(tl.join(a1, a5), tl.join(a3, a7)))
        odd = tl.join(tl.join(tl.join(b0, b4), tl.join(b2, b6)), tl.join(tl.join(b1, b5), tl.join(b3, b7)))
        return tl.join(even, odd)


@triton.jit  # type: ignore[untyped-decorator]
def inputs_of(x, k, inside, token, exists, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Inputs k of tokens, [K, M]."""
    return tl.load(x + token[None, :] + k[:, None], mask=inside[:, None] & exists[None, :], other=0.0).to(DTYPE)


@triton.jit  # type: ignore[untyped-decorator]
def together(value, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """The same values, of which the compiler no longer knows that they were joined: it would make other layouts.

    No instruction comes of it.
    """
    if ASM and value.dtype == tl.float16:
        value = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], tl.float16, False, 2)
    elif ASM and value.dtype == tl.bfloat16:
        value = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], tl.bfloat16, False, 2)
    elif ASM and value.dtype == tl.float32:
        value = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], tl.float32, False, 1)
    return value


@triton.jit  # type: ignore[untyped-decorator]
def words_of(  # type: ignore[no-untyped-def]
    words, shorts, start, rows, inputs, number, base, BITS: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr
):
    """The words of PARTS whole tiles of rows from `start` on, as tensor cores hold numbers: thread 4r + q of a warp has
    rows r and r + 8 of 16."""
    part, flat = places(128, BLOCK_N, PARTS)
    part2, two = places(64, BLOCK_N, PARTS)
    flat += start * 8
    two += start * 4
    done = tl.cast(rows, tl.int64) * 8 * number
    every = tl.cast(rows, tl.int64) * ((inputs + 15) // 16)
    return loaded(
        words, shorts, base, flat, flat < rows * 8, part * (rows * 8), two + part2 * (rows * 4), two < rows * 4,
        rows * 8, done, every, BITS, True
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def inputs_at(x, token, exists, first, STEP: tl.constexpr, DTYPE: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """STEP inputs of tokens, which are all there, [STEP, M], or as many of each of PARTS tiles, [PARTS, STEP, M]."""
    k = first + tl.arange(0, STEP)
    if PARTS == 1:
        return tl.load(x + token[None, :] + k[:, None], mask=exists[None, :], other=0.0).to(DTYPE)
    else:
        k = 128 * tl.arange(0, PARTS)[:, None] + k[None, :]
        at = token[None, None, :] + k[:, :, None]
        return tl.load(x + at, mask=exists[None, None, :], other=0.0).to(DTYPE)


@triton.jit  # type: ignore[untyped-decorator]
def tile(  # type: ignore[no-untyped-def]
    words, shorts, x, token, exists, start, rows, inputs, number, given, base, scales, zeros, zero_bits, groups, factor,
    zero_factor, zero_shift,
    BITS: tl.constexpr, STEP: tl.constexpr, DTYPE: tl.constexpr, NESTED: tl.constexpr, ASM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The product of a whole tile with rows from `start` on, float32 [N, M]: nothing of a weight is rounded. Of PARTS
    tiles, [PARTS, N, M].

    STEP: inputs of a product: 128, or 64, 32 or 16 where groups are multiples of no more than that; groups: a step's;
    given: the tokens' inputs [128, M] where a step is a tile and they were loaded before, else None.
    """
    which, pair = places(32, BLOCK_N, PARTS)
    pair = start // 2 + pair // 4
    loads = words_of(words, shorts, start, rows, inputs, number, base, BITS, BLOCK_N, PARTS)
    total = nothing(BLOCK_N, BLOCK_M, PARTS)
    for part in tl.static_range(128 // STEP):
        scale, zero0, zero1 = grid_of(
            words, pair, pair < rows // 2, group_at(number + which, part, groups, STEP), rows, scales, zeros, zero_bits,
            factor, zero_factor, zero_shift, BITS, NESTED, ASM,
        )  # fmt: skip
        made = joined(
            loads, zero0, zero1, STEP // 8 * part, STEP, BITS,
            DTYPE, NESTED, ASM,
        )  # fmt: skip
        value = together(in_rows(made, STEP, BLOCK_N, PARTS), ASM)
        some = given
        if some is None:
            some = inputs_at(x, token, exists, 128 * number + STEP * part, STEP, DTYPE, PARTS)
        made_of = tl.permute(tl.reshape(scale, (BLOCK_N // 16, PARTS, 8, 4, 2)), (1, 0, 4, 2, 3))
        made_of = tl.reshape(made_of, (PARTS * BLOCK_N, 1, 4, 1))
        made_of = tl.broadcast_to(made_of, (PARTS * BLOCK_N, BLOCK_M // 8, 4, 2))
        total += tl.dot(value, some, input_precision="ieee") * tl.reshape(made_of, total.shape)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def group_at(number, part, groups, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The group of a part of a tile; groups: of a step of inputs, float32, exact as far as a matrix reaches."""
    return ((number * (128 // STEP) + part + 0.5) * groups).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def in_rows(made, STEP: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """What `joined` made of `words_of`, as [N, STEP] or [PARTS, N, STEP]."""
    made = tl.reshape(made, (BLOCK_N // 16, PARTS, 8, 4, 2, 2, STEP // 16, 2))
    made = tl.permute(made, (1, 0, 4, 2, 6, 5, 3, 7))  # 16 rows: 2 * 8; 16 inputs: 2 * 4 * 2
    if PARTS == 1:
        return tl.reshape(made, (BLOCK_N, STEP))
    else:
        return tl.reshape(made, (PARTS, BLOCK_N, STEP))


@triton.jit  # type: ignore[untyped-decorator]
def part_of(  # type: ignore[no-untyped-def]
    words, loads, start, rows, number, scales, zeros, zero_bits, groups, factor, zero_factor, zero_shift,
    PART: tl.constexpr, BITS: tl.constexpr, STEP: tl.constexpr, DTYPE: tl.constexpr, NESTED: tl.constexpr,
    ASM: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Weights [N, STEP] of a part of a whole tile, each rounded once."""
    pair = start // 2 + tl.arange(0, BLOCK_N * 2) // 4
    scale, zero0, zero1 = grid_of(
        words, pair, pair < rows // 2, group_at(number, PART, groups, STEP), rows, scales, zeros, zero_bits, factor,
        zero_factor, zero_shift, BITS, NESTED, ASM,
    )  # fmt: skip
    made = joined(loads, zero0, zero1, STEP // 8 * PART, STEP, BITS, DTYPE, NESTED, ASM).to(tl.float32)
    made = tl.reshape(made, (BLOCK_N * 2, 2, STEP // 4)) * tl.reshape(scale, (BLOCK_N * 2, 2, 1))
    return in_rows(made, STEP, BLOCK_N, 1).to(DTYPE)


@triton.jit  # type: ignore[untyped-decorator]
def weights_of(  # type: ignore[no-untyped-def]
    words, shorts, halves, n, rows, inputs, number, base, scales, zeros, zero_bits, group, factor, zero_factor,
    zero_shift, BITS: tl.constexpr,
    DTYPE: tl.constexpr, NESTED: tl.constexpr, ASM: tl.constexpr, FRAGMENTS: tl.constexpr,
):  # fmt: skip
    """Weights [N, 128] of a tile of any number of columns and any groups, the inputs [128] they are of, which exist."""
    c = tl.arange(0, 8)
    i = tl.arange(0, 128)
    columns = tl.minimum((inputs + 15) // 16 - 8 * number, 8)
    here = (n < rows)[:, None] & (c < columns)[None, :]
    done = tl.cast(rows, tl.int64) * 8 * number
    every = tl.cast(rows, tl.int64) * ((inputs + 15) // 16)
    at = n[:, None] * columns + c[None, :]
    if FRAGMENTS:
        whole = (n // 16 * 128 + n % 8 * 16 + n // 8 % 2 * 2)[:, None] + (c % 4 * 4 + c // 4)[None, :]
        at = tl.where(columns == 8, whole, at)
    loads = loaded(words, shorts, base, at, here, 0, at, here, rows * columns, done, every, BITS, False)
    made = joined(
        loads, None, None, 0, 128, BITS, DTYPE, NESTED, ASM
    )  # fmt: skip
    made = tl.permute(made, (0, 2, 3, 4, 1, 5))  # [N, 2, 2, 2, C, 2]
    value = tl.reshape(made, (n.shape[0], 128)).to(tl.float32)
    k = 128 * number + 2 * columns * (i // 16) + i % 16
    inside = (i % 16 < 2 * columns) & (k < inputs)
    there = (n < rows)[:, None] & inside[None, :]
    of = (k // group)[None, :]
    zero = zero_of(
        words, n[:, None], there, of, rows, zeros, zero_bits, zero_factor, zero_shift, BITS, NESTED, FRAGMENTS
    )  # fmt: skip
    zero = zero.to(tl.float32) * (1.0 if NESTED else 0.5 ** least(BITS, NESTED))
    weight = (value - zero) * scale_of(
        halves, n[:, None], there, of, rows, scales, factor, FRAGMENTS
    )  # fmt: skip
    return weight.to(DTYPE), k, inside


@triton.jit  # type: ignore[untyped-decorator]
def uneven(  # type: ignore[no-untyped-def]
    words, shorts, halves, x, token, exists, n, rows, inputs, number, base, scales, zeros, zero_bits, group, factor,
    zero_factor, zero_shift, BITS: tl.constexpr, DTYPE: tl.constexpr, NESTED: tl.constexpr, ASM: tl.constexpr,
    FRAGMENTS: tl.constexpr,
):  # fmt: skip
    """The product of such a tile, float32 [N, M]."""
    weight, k, inside = weights_of(
        words, shorts, halves, n, rows, inputs, number, base, scales, zeros, zero_bits, group, factor, zero_factor,
        zero_shift, BITS, DTYPE, NESTED, ASM, FRAGMENTS,
    )  # fmt: skip
    return tl.dot(weight, inputs_of(x, k, inside, token, exists, DTYPE), input_precision="ieee")


@triton.jit  # type: ignore[untyped-decorator]
def activated(value, NAME: tl.constexpr):  # type: ignore[no-untyped-def]
    """An activation by its name in transformers, of float32; no name: none."""
    if NAME == "":
        return value
    elif NAME == "silu":
        return value * tl.sigmoid(value)
    elif NAME == "gelu":
        return 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    elif NAME == "gelu_tanh":
        return value * tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
    elif NAME == "quick_gelu":
        return value * tl.sigmoid(1.702 * value)
    else:
        tl.static_assert(NAME == "relu" or NAME == "relu2")
        above = tl.where(value < 0.0, 0.0, value)  # a GPU's maximum of 0 and what is no number is 0
        return above * above if NAME == "relu2" else above
