"""EXL3's stored form of a weight: tiles of 16 x 16 as closed walks over 2^16 states, between Hadamard transforms.

As exllamav3 has it (turboderp-org/exllamav3, doc/exl3.md and exllamav3_ext/quant): a Linear's x [K] gives y [N] by

    y = ((x * suh) H) V H * svh        H: Hadamard of order 128 along K or N, block by block, over sqrt(128)

with V [K, N] in float16. `trellis` int16 [K/16, N/16, 16*k] holds the tiles of V, each a cyclic stream of 256 steps of
k bits, the most significant first in little-endian words of 32 bits. Step p is the weight `ORDER[p]` of the tile, in
the order in which tensor cores take them; the 16 bits that end with it are the word whose value the codebook computes:

    3inst  word * 89226354 + 64248484      mcg  word * 0xCBAC1FED      in 32 bits, & 0x8FFF8FFF ^ 0x3B603B60, of which
           the two halves are float16 numbers, and are added
    mul1   word * 0x83DCD12D in 32 bits: (1024 + the sum of its four bytes) * 0x1EEE + 0xC931, these two float16

rounded to float16 once. A tensor `mcg` or `mul1` beside the others, int32 of no dimension, holds the multiplier, and
tells the codebook; without one it is 3inst. The same bits are a walk of moeq_kernels/trellis.py with L = 16: there the
newest bit of a state is its highest, here its lowest, so that a word is a state with its bits in reverse.

In moeq's own checkpoints signs are always the same, `signs`, so that none are stored: suh are they, svh they times the
rows' scales. codes uint8 [..., N/16, K/16*32*k] are the bytes of `trellis`, tile by tile along the inputs; scales
float16 [..., N].

Letters: N output rows, K inputs, k bits of a step, R and C tiles along rows and inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from moeq_kernels.packing import pack as packed_stream
from moeq_kernels.packing import unpack as unpacked_stream
from moeq_kernels.trellis import STEPS, TILE, states
from moeq_kernels.widths import EXL3_SIDE, EXL3_STATE_BITS

BLOCK, STATE_BITS = EXL3_SIDE, EXL3_STATE_BITS  # BLOCK: rows and inputs that a Hadamard transform mixes
BITS = (1, 2, 3, 4, 5, 6, 7, 8)
MULTIPLIERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}  # stored beside a weight
CODEBOOKS = ("3inst", *MULTIPLIERS)
MULTIPLIER, ADDEND = 89226354, 64248484  # of 3inst
KEPT, FLIPPED = 0x8FFF8FFF, 0x3B603B60
INVERSE, BIAS = 0x1EEE, 0xC931  # of mul1, bits of float16 numbers
SIGNS = 0x243F6A8885A308D313198A2E03707344  # bits of pi after its point: where bit i is 1, i + 128 j have the sign -1


def _order() -> Tensor:
    """[256]: input * 16 + row of the tile for every step: thread t of 32 has eight, at two rows and four inputs."""
    thread, own = torch.arange(32).unsqueeze(1), torch.arange(8)
    inputs = thread % 4 * 2 + own % 2 + own // 2 % 2 * 8
    return (inputs * TILE + thread // 4 + own // 4 * 8).flatten()


ORDER = _order()
STEP_ORDER = ORDER % TILE * TILE + ORDER // TILE  # [256]: row * 16 + input, as tiles of moeq_kernels/trellis.py lie


@cache
def word_values(codebook: str) -> Tensor:
    """The value of each word of 16 bits, float16 [65536]; ValueError for a codebook that there is not."""
    if codebook not in CODEBOOKS:
        raise ValueError(f"no codebook of EXL3 is called {codebook!r}; there are {', '.join(CODEBOOKS)}")
    words = torch.arange(1 << STATE_BITS, dtype=torch.int64)
    hashed = words * MULTIPLIERS.get(codebook, MULTIPLIER) + (0 if codebook in MULTIPLIERS else ADDEND)
    hashed &= 0xFFFFFFFF
    if codebook == "mul1":
        total = sum((hashed >> shift & 255 for shift in (0, 8, 16, 24)), torch.full_like(hashed, 1024))
        inverse, bias = _halves(torch.tensor([INVERSE, BIAS])).float()
        found: Tensor = (total.float() * inverse + bias).half()  # exact in float32
        return found
    both = hashed & KEPT ^ FLIPPED
    summed: Tensor = (_halves(both & 0xFFFF).float() + _halves(both >> 16).float()).half()  # exact in float32
    return summed


def _halves(bits: Tensor) -> Tensor:
    """The float16 numbers of some bits, integers of 16 bits."""
    return bits.to(torch.int32).to(torch.uint16).view(torch.float16)


@cache
def state_values(codebook: str) -> Tensor:
    """The value of each state of moeq's walks, float32 [65536]: of the word with its bits in reverse."""
    return word_values(codebook).float()[reversed_bits(torch.arange(1 << STATE_BITS), STATE_BITS)]


def reversed_bits(values: Tensor, count: int) -> Tensor:
    """Integers [...] of `count` bits with these in reverse, int64 [...]."""
    found = torch.zeros_like(values, dtype=torch.int64)
    for place in range(count):
        found |= (values.long() >> place & 1) << count - 1 - place
    return found


def packed(steps: Tensor, bits: int) -> Tensor:
    """The tensor `trellis` int16 [..., C, R, 16*k] of the bits of steps, integers [..., R, C, 256].

    They are those of moeq's walks: a step's first bit is its lowest.
    """
    words = packed_stream(steps, bits).view(torch.int32)
    lowest = reversed_bits(words.long() & 0xFFFFFFFF, 32)
    signed = (lowest - (lowest >> 31 << 32)).to(torch.int32)
    return signed.view(torch.int16).transpose(-3, -2).contiguous()


def unpacked(trellis: Tensor, bits: int) -> Tensor:
    """Invert `packed`: int16 [..., C, R, 16*k] -> uint8 [..., R, C, 256]."""
    words = trellis.transpose(-3, -2).contiguous().view(torch.int32)
    lowest = reversed_bits(words.long() & 0xFFFFFFFF, 32)
    signed = (lowest - (lowest >> 31 << 32)).to(torch.int32)
    return unpacked_stream(signed.view(torch.uint8), bits, STEPS)


def transformed(matrix: Tensor) -> Tensor:
    """A matrix [..., K] whose blocks of 128 along the last axis are multiplied by the Hadamard matrix H, unscaled.

    H has 1 where the numbers of row and column have an even number of bits in common, else -1 (Sylvester's); H H is 128
    times one.
    """
    found = matrix.unflatten(-1, (-1, BLOCK))
    width = 1
    while width < BLOCK:
        first, second = found.unflatten(-1, (-1, 2, width)).unbind(-2)
        found = torch.stack([first + second, first - second], -2).flatten(-3)
        width *= 2
    mixed: Tensor = found.flatten(-2)
    return mixed


@dataclass(frozen=True, kw_only=True)
class Exl3Weight:
    """One Linear as EXL3 stores it: trellis int16 [K/16, N/16, 16*k], suh float16 [K], svh float16 [N]."""

    trellis: Tensor
    suh: Tensor
    svh: Tensor
    codebook: str

    @property
    def bits(self) -> int:
        """k."""
        return self.trellis.shape[-1] // TILE

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in (self.trellis, self.suh, self.svh))

    def check(self) -> None:
        """ValueError unless the parts have the types and shapes of a weight whose sides are multiples of 128."""
        word_values(self.codebook)
        if self.suh.dim() != 1 or self.svh.dim() != 1 or self.trellis.dim() != 3:
            raise ValueError("suh and svh have one dimension, trellis has three")
        inputs, rows = len(self.suh), len(self.svh)
        check_sides(rows, inputs)
        wanted = inputs // TILE, rows // TILE, TILE * self.bits
        if tuple(self.trellis.shape) != wanted or self.bits not in BITS:
            raise ValueError(f"trellis is {list(self.trellis.shape)}, not {list(wanted)} of 1 to 8 bits")
        types = self.trellis.dtype, self.suh.dtype, self.svh.dtype
        if types != (torch.int16, torch.float16, torch.float16):
            raise ValueError(f"trellis, suh and svh are {', '.join(map(str, types))}, not int16, float16 and float16")

    def inner(self) -> Tensor:
        """V, what lies between the transforms, float16 [K, N]; ValueError as `check`."""
        self.check()
        value = state_values(self.codebook).to(self.trellis.device)
        found = value[states(unpacked(self.trellis, self.bits), self.bits, STATE_BITS).long()]
        tiles = torch.empty_like(found)
        tiles[..., ORDER.to(found.device)] = found  # [R, C, input, row]
        rows: Tensor = tiles.unflatten(-1, (TILE, TILE)).permute(1, 2, 0, 3)
        return rows.reshape(len(self.suh), len(self.svh)).half()

    def dequantize(self) -> Tensor:
        """The Linear's weight, float32 [N, K].

        Sums are exact in float64, and so is what both transforms are divided by, 128: nothing is rounded before the
        scales, whatever the order of adding. ValueError as `check`.
        """
        both = transformed(transformed(self.inner().double().T).T).T / BLOCK
        return (both * self.suh.double() * self.svh.double().unsqueeze(1)).float()

    def tensors(self, module: str) -> Mapping[str, Tensor]:
        """The tensors of a checkpoint by a module's name: trellis, suh [K], svh [N], and what tells the codebook."""
        parts = {"trellis": self.trellis, "suh": self.suh, "svh": self.svh}
        if self.codebook in MULTIPLIERS:
            multiplier = MULTIPLIERS[self.codebook]
            parts[self.codebook] = torch.tensor(multiplier - (1 << 32), dtype=torch.int64).to(torch.int32)
        return {f"{module}.{part}": tensor for part, tensor in parts.items()}


def signs(length: int) -> Tensor:
    """Of rows or inputs in moeq's own checkpoints, float16 [length]; the same for every 128 of them."""
    one = torch.tensor([1.0 - 2.0 * (SIGNS >> place & 1) for place in range(BLOCK)])
    return one.half().repeat(-(-length // BLOCK))[:length]


def parts_of(weight: Exl3Weight) -> dict[str, Tensor]:
    """codes [N/16, K/16*32*k] and scales [N] of a weight; ValueError for one whose signs are not moeq's."""
    weight.check()
    scales = weight.svh * signs(len(weight.svh)).to(weight.svh)
    if not torch.equal(weight.suh, signs(len(weight.suh)).to(weight.suh)) or not bool((scales >= 0).all()):
        raise ValueError("suh and svh have other signs than moeq's own")
    return {"codes": weight.trellis.transpose(0, 1).contiguous().view(torch.uint8).flatten(1), "scales": scales}


def weight_of(codes: Tensor, scales: Tensor, bits: int, inputs: int, codebook: str) -> Exl3Weight:
    """Invert `parts_of`; ValueError where they are not of a weight [N, K]."""
    rows = len(scales)
    check_sides(rows, inputs)
    tiles = codes.contiguous().view(torch.int16).view(rows // TILE, inputs // TILE, TILE * bits)
    return Exl3Weight(
        trellis=tiles.transpose(0, 1).contiguous(),
        suh=signs(inputs).to(scales.device),
        svh=scales * signs(rows).to(scales),
        codebook=codebook,
    )


def dequantize(
    codes: Tensor, scales: Tensor, bits: int, inputs: int, codebook: str, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Values [..., N, K] in a dtype of codes [..., N/16, K/16*32*k] and scales [..., N], one matrix at a time."""
    every = zip(codes.flatten(0, -3), scales.flatten(0, -2), strict=True) if codes.dim() > 2 else [(codes, scales)]
    found = [weight_of(one, scale, bits, inputs, codebook).dequantize().to(dtype) for one, scale in every]
    return torch.stack(found).view(*scales.shape, inputs) if codes.dim() > 2 else found[0]


def check_sides(rows: int, inputs: int) -> None:
    """ValueError for a weight that has no place in EXL3."""
    if rows % BLOCK or inputs % BLOCK or not rows or not inputs:
        raise ValueError(f"a weight of {rows} x {inputs}; EXL3 takes multiples of {BLOCK}")
