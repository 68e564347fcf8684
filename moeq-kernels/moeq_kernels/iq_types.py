"""llama.cpp's i-quants, as far as they are known without any tensor: their blocks, and which widths make a set.

| type | bits a weight | what a block of 256 weights has |
|---|---|---|
| IQ1_S | 1.56 | 32 of 2048 eights of -1, 0, 1; 8 scales of 3 bits, each with 1/8 up or down |
| IQ2_XXS | 2.06 | 32 of 256 eights of 8, 25, 43 with signs, their number even; 8 scales of 4 bits |
| IQ2_XS | 2.31 | 32 of 512 such eights; 16 scales of 4 bits |
| IQ2_S | 2.56 | 32 of 1024 such eights, any signs; 16 scales of 4 bits |
| IQ3_XXS | 3.06 | 64 of 256 fours of 4 to 62 with signs, their number even in eight; 8 scales of 4 bits |
| IQ3_S | 3.44 | 64 of 512 fours of 1 to 15, any signs; 8 scales of 4 bits |
| IQ4_XS | 4.25 | 256 of 16 levels that are not equally far apart; 8 scales of 6 bits |
| Q8_0 | 8.5 | 32 whole numbers |

Scales are whole numbers, counted in one float16 a block. Source: ggml/src/ggml-common.h of llama.cpp.
"""

from __future__ import annotations

SCALE_BYTES = 2  # a block's float16, its first bytes
BLOCK = 256  # inputs that rows are multiples of
BLOCKS = {  # {type: (weights a block, bytes of it)}
    "IQ1_S": (256, 50),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98),
    "IQ3_S": (256, 110),
    "IQ4_XS": (256, 136),
    "Q8_0": (32, 34),
}
_WIDE = {4: "IQ4_XS", 8: "Q8_0"}
SETS: dict[str, dict[int, str]] = {  # {set: {width: its type}}, the finest first
    "iq-s": {1: "IQ1_S", 2: "IQ2_S", 3: "IQ3_S", **_WIDE},
    "iq-xs": {1: "IQ1_S", 2: "IQ2_XS", 3: "IQ3_XXS", **_WIDE},
    "iq-xxs": {1: "IQ1_S", 2: "IQ2_XXS", 3: "IQ3_XXS", **_WIDE},
}
WIDTHS = tuple(SETS["iq-s"])


def type_of(bits: int, codebook: str) -> str:
    """The type of a width in a set; ValueError where there is none."""
    found = SETS.get(codebook, {}).get(bits)
    if found is None:
        raise ValueError(f"{codebook or 'no set of i-quants'} has no codes of {bits} bits")
    return found


def stored_bits(bits: int, codebook: str) -> float:
    """Bits that are stored for a weight, scales and all."""
    length, size = BLOCKS[type_of(bits, codebook)]
    return 8 * size / length


def block_counts(inputs: int, bits: int, codebook: str) -> tuple[int, int]:
    """Blocks of a row, and bytes of one without its float16; ValueError unless they fill the row."""
    name = type_of(bits, codebook)
    length, size = BLOCKS[name]
    if inputs % length or not inputs:
        raise ValueError(f"{inputs} inputs are no multiple of the {length} of {name}")
    return inputs // length, size - SCALE_BYTES
