"""The types of llama.cpp's tensors (ggml): their blocks, and which of them holds a grid of moeq's exactly.

A row is cut into blocks of equally many weights. What a block stands for, with d and m float16 and q a code:

| type | weights a block | bytes | value | holds |
|---|---|---|---|---|
| Q4_0, Q5_0, Q8_0 | 32 | 18, 22, 34 | d * (q - 8), (q - 16), q signed | 4, 5, 8 bits symmetric: d the scale |
| Q1_0 | 128 | 18 | d * (-1 or 1) | 1 bit: d half the scale |
| Q2_K | 256 | 84 | d * s * q - m * t, s and t of 4 bits | 2 bits: d and m the scale, s 1, t the zero point |
| Q4_K, Q5_K | 256 | 144, 176 | d * s * q - m * t, s and t of 6 bits | 4, 5 bits with zero points, likewise |
| Q3_K, Q6_K | 256 | 110, 210 | d * s * (q - 4), (q - 32) | 3, 6 bits symmetric: d the scale, s 1 |

s and t, one for 16 or 32 weights, are whole numbers: a group shorter than a block, whose scale is any float16, fits
only the types of 32. Q4_1 and Q5_1 (d * q + m) would need scale * zero point in float16, which has too few digits for
most of them. TQ1_0 and TQ2_0 hold 1 bit too, in more bytes than Q1_0. 7 bits, and zero points of 3, 6 and 8 bits, have
no type. The i-quants hold no grid; moeq_kernels/iq_types.py says what they have.
"""

from __future__ import annotations

from dataclasses import dataclass

from moeq_kernels.iq_types import BLOCKS


@dataclass(frozen=True, kw_only=True)
class BlockType:
    """A type of tensors. number: as GGUF files have it; length: weights a block; bytes: of a block."""

    name: str
    number: int
    length: int
    bytes: int

    def row_bytes(self, inputs: int) -> int:
        """Bytes of a row; ValueError where it is no whole number of blocks."""
        if inputs % self.length:
            raise ValueError(f"{inputs} inputs are no multiple of the {self.length} of {self.name}")
        return inputs // self.length * self.bytes


IQ_NUMBERS = {"IQ2_XXS": 16, "IQ2_XS": 17, "IQ3_XXS": 18, "IQ1_S": 19, "IQ3_S": 21, "IQ2_S": 22, "IQ4_XS": 23}
TYPES = {
    name: BlockType(name=name, number=number, length=length, bytes=size)
    for name, number, length, size in (
        ("F32", 0, 1, 4),
        ("F16", 1, 1, 2),
        ("BF16", 30, 1, 2),
        ("Q4_0", 2, 32, 18),
        ("Q5_0", 6, 32, 22),
        ("Q8_0", 8, 32, 34),
        ("Q1_0", 41, 128, 18),
        ("Q2_K", 10, 256, 84),
        ("Q3_K", 11, 256, 110),
        ("Q4_K", 12, 256, 144),
        ("Q5_K", 13, 256, 176),
        ("Q6_K", 14, 256, 210),
        *((name, number, *BLOCKS[name]) for name, number in IQ_NUMBERS.items()),
    )
}
BY_NUMBER = {block.number: block for block in TYPES.values()}
FLOATS = ("F32", "F16", "BF16")
HOLDS = {  # (bits, symmetric): the type that holds such a grid exactly
    (1, True): "Q1_0",
    (1, False): "Q1_0",
    (2, True): "Q2_K",
    (2, False): "Q2_K",
    (3, True): "Q3_K",
    (4, True): "Q4_0",
    (4, False): "Q4_K",
    (5, True): "Q5_0",
    (5, False): "Q5_K",
    (6, True): "Q6_K",
    (8, True): "Q8_0",
}
LENGTHS = {grid: TYPES[name].length for grid, name in HOLDS.items()}
RUNS = {  # (bits, symmetric): of what groups must be multiples where scales may be rounded (`ggml_refit`)
    (1, True): 128,
    (1, False): 128,
    (2, True): 16,
    (2, False): 16,
    (3, True): 16,
    (3, False): 16,
    (4, True): 32,
    (4, False): 32,
    (5, True): 32,
    (5, False): 32,
    (6, True): 16,
    (6, False): 16,
    (8, True): 32,
    (8, False): 32,
}
NEAREST = HOLDS | {(3, False): "Q3_K", (6, False): "Q6_K", (8, False): "Q8_0"}  # with scales rounded, or zero points
NEAREST_LENGTHS = {grid: TYPES[name].length for grid, name in NEAREST.items()}
NEAREST_BYTES = {grid: TYPES[name].bytes for grid, name in NEAREST.items()}
