"""How a program makes numbers of trellis codes: states cut out of the bits of a row, values looked up by state.

A tile of 16 x 16 weights (`moeq_kernels.trellis`) is what a tensor core's m16n8k16 takes: thread 4r + q of a warp has
rows r and r + 8 and of each the columns 2q, 2q + 1, 2q + 8 and 2q + 9. It loads the pieces (`strips`) of its rows and
of those before them, four tiles at a time; a window of b + L bits that ends at column 2q + 1 holds the states of two
columns, and where it begins is the same in every tile. What comes is a number of 8 bits, exact in every dtype: values
that were trained come from a table in memory, int16 patterns of float16 and then of bfloat16 by state, or, where it is
small enough, from one in shared memory, of the pairs of two columns where that is small enough (`near_values`): threads
that look up at random wait for each other's banks there, for each other's lines in memory; those that are computed
(`trellis.computed_values`) are computed here, and a code of 8 bits is its value. Scales, one a row, act on float32
sums.

Imported only where Triton is installed. Letters: N rows, M tokens, b bits of a step, L bits of a state.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moeq_kernels import trellis
from moeq_kernels.gpu.codes import inputs_at, inputs_of, together
from moeq_kernels.gpu.strips import FIRST_KIND
from moeq_kernels.widths import TRELLIS_BITS

MULTIPLIER: tl.constexpr = tl.constexpr(trellis.MULTIPLIER - (1 << 32))  # as numbers with a sign
ADDEND: tl.constexpr = tl.constexpr(trellis.ADDEND - (1 << 32))
MOST_PAIRED = 12  # bits: 16 KB of shared memory
KINDS: tl.constexpr = tl.constexpr(FIRST_KIND)
LAST_KIND: tl.constexpr = tl.constexpr(FIRST_KIND + len(TRELLIS_BITS))


@triton.constexpr_function  # type: ignore[untyped-decorator]
def bits_of(kind: int) -> int:
    """The bits of a kind of trellis codes in the table."""
    return TRELLIS_BITS[kind - FIRST_KIND]


@triton.jit  # type: ignore[untyped-decorator]
def piece(words, shorts, base, at, here, every, PIECE: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A piece of 32 bits of rows of tiles, or of 16 (1 and 3 bits: the last); every: rows of tiles in the matrix."""
    if BITS == 2 * PIECE + 1:
        return tl.load(shorts + 2 * (base + PIECE * every) + at, mask=here, other=0).to(tl.int32) & 65535
    else:
        return tl.load(words + base + PIECE * every + at, mask=here, other=0)


@triton.jit  # type: ignore[untyped-decorator]
def cut(low, high, begin):  # type: ignore[no-untyped-def]
    """32 of 64 bits, from bit `begin` on, below 64."""
    both = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 4294967295)
    return (both >> begin.to(tl.int64)).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def windows(  # type: ignore[no-untyped-def]
    words, shorts, base, at, before, here, every, q, state_bits, BITS: tl.constexpr
):
    """The bits of the states of columns 2q and 2q + 1, from bit 0 and from bit b on, and those of 2q + 8 and 2q + 9.

    at: rows of tiles; before: those before them, whose last bits the first states begin in.
    """
    if BITS == 8:  # no state: two columns' bytes
        where = at + (q // 2) * every
        first = tl.load(words + base + where, mask=here, other=0) >> (q % 2 * 16)
        second = tl.load(words + base + 2 * every + where, mask=here, other=0) >> (q % 2 * 16)
    elif BITS == 4:
        middle = piece(words, shorts, base, at, here, every, 0, BITS)
        begin = 36 + 8 * q - state_bits
        first = cut(piece(words, shorts, base, before, here, every, 1, BITS), middle, begin)
        second = cut(middle, piece(words, shorts, base, at, here, every, 1, BITS), begin)
    elif BITS == 3:
        middle = piece(words, shorts, base, at, here, every, 0, BITS)
        low = piece(words, shorts, base, before, here, every, 1, BITS) | (middle << 16)
        high = ((middle >> 16) & 65535) | (piece(words, shorts, base, at, here, every, 1, BITS) << 16)
        first = cut(low, high, 19 + 6 * q - state_bits)
        second = cut(low, high, 43 + 6 * q - state_bits)
    elif BITS == 2:
        high = piece(words, shorts, base, at, here, every, 0, BITS)
        low = ((piece(words, shorts, base, before, here, every, 0, BITS) >> 16) & 65535) | (high << 16)
        first = low >> (18 + 4 * q - state_bits)
        second = high >> (18 + 4 * q - state_bits)
    else:
        both = piece(words, shorts, base, before, here, every, 0, BITS) | (
            piece(words, shorts, base, at, here, every, 0, BITS) << 16
        )
        first = both >> (17 + 2 * q - state_bits)
        second = both >> (25 + 2 * q - state_bits)
    return first, second


@triton.jit  # type: ignore[untyped-decorator]
def onto(bits, MASK: tl.constexpr, ONES: tl.constexpr, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """bits & MASK | ONES: one instruction, of which the compiler makes two."""
    if ASM:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [bits, MASK, ONES], tl.int32, True, 1
        )
    else:
        return bits & MASK | ONES


@triton.jit  # type: ignore[untyped-decorator]
def number(  # type: ignore[no-untyped-def]
    window, shorts, values, state_bits, BITS: tl.constexpr, VALUES: tl.constexpr, AHEAD: tl.constexpr,
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """The value, in units of 1/32, of the state in the lowest bits of a window: float32 where it is computed.

    values: where the table begins; VALUES: -1 where they are computed, 0 where they are looked up in memory, else as in
    `near_values`; AHEAD: the windows of the next tiles are brought through shared memory, which pays where so few
    programs run that it is large enough for all, and else leaves room for fewer.
    """
    state = window & (((1 << state_bits) - 1) & 65535)  # which tells the compiler that it has no sign
    if BITS == 8:
        return (state ^ 0x4B000080).to(tl.float32, bitcast=True) - 8388736.0  # 2**23 + 128
    elif VALUES < 0:
        hashed = state * MULTIPLIER + ADDEND
        if ASM:  # the sum of four bytes and 2
            total = tl.inline_asm_elementwise("dp4a.u32.u32 $0, $1, 16843009, 2;", "=r,r", [hashed], tl.int32, True, 1)
        else:
            total = (hashed & 255) + ((hashed >> 8) & 255) + ((hashed >> 16) & 255) + ((hashed >> 24) & 255) + 2
        quarters = onto(total, 1020, 0x4A000000, ASM)
        return quarters.to(tl.float32, bitcast=True) - 2097280.0  # 2**21 + 128
    else:
        pattern = tl.load(shorts + values + ((1 << state_bits) if tl.bfloat16 == DTYPE else 0) + state)
        if ASM and AHEAD:  # no instruction: what comes ahead of the loop is what the product needs as it is
            pattern = tl.inline_asm_elementwise("mov.b16 $0, $1;", "=h,h,r", [pattern, window], tl.int16, True, 1)
        return pattern.to(tl.bfloat16 if tl.bfloat16 == DTYPE else tl.float16, bitcast=True)


@triton.constexpr_function  # type: ignore[untyped-decorator]
def are_near(values: int, bits: int) -> bool:
    """Whether values come from a table in shared memory; codes of 8 bits are values themselves."""
    return values > 0 and bits != 8


@triton.constexpr_function  # type: ignore[untyped-decorator]
def in_pairs(values: int, bits: int) -> bool:
    """Whether a table of two columns' values by the bits of both states is small enough to be stored for every tile."""
    return values + bits <= MOST_PAIRED


@triton.jit  # type: ignore[untyped-decorator]
def near_values(shorts, values, state_bits, VALUES: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Patterns by the VALUES lowest bits of a window, of which a state has no more: int16 [2**VALUES], or, `in_pairs`,
    those of two columns by the bits of both, int32 [2**(VALUES + b)]."""
    table = shorts + values + ((1 << state_bits) if tl.bfloat16 == DTYPE else 0)
    state = (1 << state_bits) - 1
    PAIRED: tl.constexpr = in_pairs(VALUES, BITS)
    if PAIRED:
        window = tl.arange(0, 1 << (VALUES + BITS))
        low = tl.load(table + (window & state)).to(tl.int32) & 65535
        return low | (tl.load(table + ((window >> BITS) & state)).to(tl.int32) << 16)
    else:
        return tl.load(table + (tl.arange(0, 1 << VALUES) & state))


@triton.jit  # type: ignore[untyped-decorator]
def values_for(shorts, values, state_bits, VALUES: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """What `walked` asks for values, once a matrix: where their table begins, or the table itself (`near_values`)."""
    if are_near(VALUES, BITS):
        return near_values(shorts, values, state_bits, VALUES, BITS, DTYPE)
    else:
        return values


@triton.jit  # type: ignore[untyped-decorator]
def looked_up(near, window, VALUES: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Values of two columns each, [.., 2], by windows; near: as `near_values`, which threads find in shared memory."""
    PAIRED: tl.constexpr = in_pairs(VALUES, BITS)
    flat = tl.reshape(window, (window.numel,))
    if PAIRED:
        both = tl.gather(near, flat & ((1 << (VALUES + BITS)) - 1), 0)
        first, second = both.to(tl.int16), (both >> 16).to(tl.int16)
    else:
        first = tl.gather(near, flat & ((1 << VALUES) - 1), 0)
        second = tl.gather(near, (flat >> BITS) & ((1 << VALUES) - 1), 0)
    made = tl.reshape(tl.join(first, second), window.shape + [2])  # noqa: RUF005  what the compiler takes
    return made.to(tl.bfloat16 if tl.bfloat16 == DTYPE else tl.float16, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def four_tiles(  # type: ignore[no-untyped-def]
    words, shorts, base, at, before, here, every, q, values, state_bits, BITS: tl.constexpr, VALUES: tl.constexpr,
    AHEAD: tl.constexpr,
    DTYPE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The numbers of a row of tiles as [.., columns 2q or 2q + 8, the first or the second of two], or, where they are
    looked up near by, their windows as [.., columns 2q or 2q + 8]."""
    first, second = windows(words, shorts, base, at, before, here, every, q, state_bits, BITS)
    if are_near(VALUES, BITS):
        return tl.join(first, second)
    else:
        a0 = number(first, shorts, values, state_bits, BITS, VALUES, AHEAD, DTYPE, ASM)
        a1 = number(first >> BITS, shorts, values, state_bits, BITS, VALUES, AHEAD, DTYPE, ASM)
        b0 = number(second, shorts, values, state_bits, BITS, VALUES, AHEAD, DTYPE, ASM)
        b1 = number(second >> BITS, shorts, values, state_bits, BITS, VALUES, AHEAD, DTYPE, ASM)
        return tl.join(tl.join(a0, b0), tl.join(a1, b1))


@triton.jit  # type: ignore[untyped-decorator]
def walked(  # type: ignore[no-untyped-def]
    words, shorts, start, rows, inputs, block, base, values, state_bits, BITS: tl.constexpr, VALUES: tl.constexpr,
    AHEAD: tl.constexpr,
    WHOLE: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Values [N, 128] of a block of tiles in units of 1/32, or [PARTS, N, 128] of so many, rows from `start` on; WHOLE:
    it has 8 tiles; values: of `values_for`.

    float32 where they are computed: what rounds them, exactly, comes after they were brought into their places.
    """
    lane = tl.arange(0, BLOCK_N * 8 * PARTS)  # a thread has four tiles: [N / 16, part, r, q, tile]
    strip = start // 16 + lane // (128 * PARTS)
    r, q, tile = lane // 16 % 8, lane // 4 % 4, lane % 4
    along = (inputs + 15) // 16
    strips = (rows + 15) // 16
    every = tl.cast(strips, tl.int64) * along * 16
    columns = 8 if WHOLE else tl.minimum(along - 8 * block, 8)
    at = tl.cast(strip, tl.int64) * (along * 16) + 128 * (block + lane // 128 % PARTS)
    here = strip < strips
    there = here if WHOLE else here & (tile < columns)
    then = here if WHOLE else here & (tile + 4 < columns)
    upper = at + r * columns + tile
    lower = at + (r + 8) * columns + tile
    last = at + (r + 15) % 16 * columns + tile
    middle = at + (r + 7) * columns + tile
    a = four_tiles(
        words, shorts, base, upper, last, there, every, q, values, state_bits, BITS, VALUES, AHEAD, DTYPE, ASM
    )  # fmt: skip
    b = four_tiles(
        words, shorts, base, upper + 4, last + 4, then, every, q, values, state_bits, BITS, VALUES, AHEAD, DTYPE, ASM
    )  # fmt: skip
    c = four_tiles(
        words, shorts, base, lower, middle, there, every, q, values, state_bits, BITS, VALUES, AHEAD, DTYPE, ASM
    )  # fmt: skip
    d = four_tiles(
        words, shorts, base, lower + 4, middle + 4, then, every, q, values, state_bits, BITS, VALUES, AHEAD, DTYPE,
        ASM
    )  # fmt: skip
    made = tl.join(tl.join(a, b), tl.join(c, d))  # [.., 2, 2, half of the tiles, rows r or r + 8]
    # 16 rows: 2 * 8; 128 inputs: 2 * 4 tiles, 2 * 4 * 2
    if are_near(VALUES, BITS):
        made = looked_up(values, made, VALUES, BITS, DTYPE)
        made = tl.permute(tl.reshape(made, (BLOCK_N // 16, PARTS, 8, 4, 4, 2, 2, 2, 2)), (1, 0, 7, 2, 6, 4, 5, 3, 8))
    else:
        made = tl.permute(tl.reshape(made, (BLOCK_N // 16, PARTS, 8, 4, 4, 2, 2, 2, 2)), (1, 0, 8, 2, 7, 4, 5, 3, 6))
    if PARTS == 1:
        return tl.reshape(made, (BLOCK_N, 128))
    else:
        return tl.reshape(made, (PARTS, BLOCK_N, 128))


@triton.jit  # type: ignore[untyped-decorator]
def walked_product(  # type: ignore[no-untyped-def]
    words, shorts, x, token, exists, start, rows, inputs, block, base, values, state_bits, BITS: tl.constexpr,
    VALUES: tl.constexpr, AHEAD: tl.constexpr, WHOLE: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr,
    BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The product of a block of tiles before its rows' scales, float32 [N, M]; of PARTS blocks, [PARTS, N, M]."""
    value = walked(
        words, shorts, start, rows, inputs, block, base, values, state_bits, BITS, VALUES, AHEAD, WHOLE, DTYPE, ASM,
        BLOCK_N, PARTS
    )  # fmt: skip
    if WHOLE:
        some = inputs_at(x, token, exists, 128 * block, 128, DTYPE, PARTS)
    else:
        k = 128 * block + tl.arange(0, 128)
        some = inputs_of(x, k, k < inputs, token, exists, DTYPE)
    return tl.dot(together(value, ASM).to(DTYPE), some, input_precision="ieee")
