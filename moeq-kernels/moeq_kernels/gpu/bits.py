"""Where codes lie in words (`swizzle.place`), and where they go in a mantissa: numbers that a program is compiled for.

Imported only where Triton is installed.
"""

from __future__ import annotations

import triton


@triton.constexpr_function  # type: ignore[untyped-decorator]
def at_bit(code: int, part: int) -> int:
    """The lowest bit of a code of a word as `codes.loaded` has it; odd codes are in the high half."""
    return (4 * (code // 4) + code // 2 % 2 if part == 1 else part * (code // 2)) + 16 * (code % 2)


@triton.constexpr_function  # type: ignore[untyped-decorator]
def lowest_bit(plane: int, bits: int, least: int, mantissa: int) -> int:
    """Where the code of an even plane goes in a mantissa of so many bits, from bit `least` on.

    Of a width of one part, and of 3 bits as `codes.merged` has them, as many codes as the mantissa has room for stay
    where they are in a word that is moved for all of them."""
    if bits == 1:
        return least + int(at_bit(plane, 1)) % 8
    if bits in (2, 4, 8):
        return least + bits * (plane // 2 % (16 // bits) % ((mantissa - bits - least) // bits + 1))
    if bits == 3 and not least:
        return 4 * (plane // 4 % 2)
    return mantissa - bits
