"""Trellis codes: tiles of 16 x 16 weights as cyclic streams of bits, a weight's value named by the last L bits.

The bitshift trellis of QTIP (arXiv 2406.11235, 3.1) in tiles that close on themselves (tail-biting, as EXL3 has them).
The 256 weights of a tile, row after row, are the steps of one walk; step i has the bits [i*k, (i+1)*k) of the tile's
stream, least significant bit first as in packing.py. Its state is the L bits that end there, the newest highest; those
of the first steps begin at the end of the stream, so a tile of k bits takes exactly 32*k bytes. A weight is
value(state) / 32 * scale of its row, the value an integer of 8 bits: from trained tables where trellis_tables.py has
them, else computed (`computed_values`). A step of 8 bits is its value: a two's complement byte, whatever came before.

codes uint8 [..., ceil(N/16), ceil(K/16)*32*k], tile by tile along the inputs; scales float16 [..., N]. Rows and inputs
that fill up the last tiles have codes like the others and no scale; their values are left out.

Letters: N output rows, K inputs, k bits of a step, L bits of a state, R and C tiles along rows and inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moeq_kernels.grids import SCALE_DTYPE
from moeq_kernels.packing import pack as packed_stream
from moeq_kernels.packing import unpack as unpacked_stream
from moeq_kernels.trellis_tables import table
from moeq_kernels.widths import STATE_BITS
from moeq_kernels.widths import TRELLIS_BITS as BITS

TILE = 16
STEPS = TILE * TILE
UNIT = 1 / 32  # of a value; a row's scale is the rest
WALKED = tuple(bits for bits in BITS if bits < 8)  # widths at which a value hangs on the steps before, too
MULTIPLIER, ADDEND = 3229014335, 2605480817  # the best of 24 pairs drawn at random, see benchmarks/trellis.py
BLOCK_WEIGHTS = 1 << 18  # that are decoded at a time on a CPU


def tiles_along(length: int) -> int:
    """Tiles that hold `length` rows or inputs; the last one may be filled up."""
    return -(-length // TILE)


def packed_shapes(rows: int, inputs: int, bits: int) -> dict[str, Any]:
    """Shape and dtype of each stored part of one weight [rows, inputs]."""
    codes = tiles_along(rows), tiles_along(inputs) * (STEPS // 8) * bits
    return {"codes": (codes, torch.uint8), "scales": ((rows,), SCALE_DTYPE)}


def computed_values(state_bits: int) -> Tensor:
    """Values int8 [2**L] in units of 1/32: about normal, of standard deviation 37.

    A state is multiplied and added to in 32 bits and the sum of the four bytes, 0 to 1020, is taken (1MAD of QTIP,
    arXiv 2406.11235, Algorithm 1, with other constants and the sum rounded to a multiple of 4).
    """
    hashed = (torch.arange(1 << state_bits, dtype=torch.int64) * MULTIPLIER + ADDEND) & 0xFFFFFFFF
    total = sum(((hashed >> shift) & 255 for shift in (0, 8, 16, 24)), torch.zeros_like(hashed))
    return (((total + 2) >> 2) - 128).to(torch.int8)


@cache
def integer_values(bits: int, state_bits: int) -> Tensor:
    """Value of each state in units of 1/32, int8 [2**L], on the CPU; ValueError for a code that there is not."""
    if bits not in BITS or state_bits not in STATE_BITS:
        raise ValueError(f"no trellis code has {bits} bits a weight and 2**{state_bits} states")
    if bits not in WALKED:
        return (torch.arange(1 << state_bits) >> state_bits - bits).to(torch.uint8).view(torch.int8)
    trained = table(bits, state_bits)
    return computed_values(state_bits) if trained is None else trained


def values(bits: int, state_bits: int) -> Tensor:
    """Value of each state before a row's scale, float32 [2**L], on the CPU."""
    return integer_values(bits, state_bits).float() * UNIT


def states(codes: Tensor, bits: int, state_bits: int) -> Tensor:
    """States int32 [..., 256] of walks, from the bits of their steps, integers [..., 256] below 2**k."""
    newest = codes.to(torch.int32)
    found = torch.zeros_like(newest)
    for back in range(-(-state_bits // bits)):
        place = state_bits - bits * (back + 1)
        older = newest.roll(back, -1)
        found |= older << place if place >= 0 else older >> -place
    return found


def from_tiles(steps: Tensor, rows: int, inputs: int) -> Tensor:
    """The matrix [..., N, K] of the steps of its tiles [..., R, C, 256], without what fills up the last ones."""
    whole: Tensor = steps.unflatten(-1, (TILE, TILE)).transpose(-3, -2).flatten(-2).flatten(-3, -2)
    return whole[..., :rows, :inputs]


def pack(codes: Tensor, bits: int) -> Tensor:
    """Bits of the steps, integers [..., R, C, 256], as streams uint8 [..., R, C*32*k]; ValueError out of range."""
    _check_bits(bits)
    if codes.dim() < 3 or codes.shape[-1] != STEPS:
        raise ValueError(f"steps of tiles are [..., R, C, {STEPS}], not {list(codes.shape)}")
    return packed_stream(codes, bits).flatten(-2)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Invert `pack`: uint8 [..., R, C*32*k] -> uint8 [..., R, C, 256]; ValueError for other bytes."""
    _check_bits(bits)
    size = STEPS // 8 * bits
    if packed.dtype != torch.uint8 or packed.dim() < 2 or packed.shape[-1] % size:
        raise ValueError(f"{packed.dtype} {list(packed.shape)} are not rows of tiles of {size} bytes")
    return unpacked_stream(packed.unflatten(-1, (-1, size)), bits, STEPS)


def _check_bits(bits: int) -> None:
    if bits not in BITS:
        raise ValueError(f"no trellis code has {bits} bits a weight; there are {BITS}")


@dataclass(frozen=True, kw_only=True)
class TrellisWeight:
    """One weight, or a stack of weights of the same code, in its stored form: codes uint8 [..., R, C*32*k], scales
    float16 [..., N]."""

    codes: Tensor
    scales: Tensor
    bits: int
    state_bits: int
    inputs: int

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in (self.codes, self.scales))

    def check(self) -> None:
        """ValueError unless there is such a code and the parts have the types and shapes that it implies."""
        integer_values(self.bits, self.state_bits)
        if self.scales.dim() < 1 or self.inputs < 1:
            raise ValueError(f"scales {list(self.scales.shape)} of {self.inputs} inputs are no weight's")
        *before, rows = self.scales.shape
        given = {"codes": self.codes, "scales": self.scales}
        for part, (shape, dtype) in packed_shapes(rows, self.inputs, self.bits).items():
            wanted, found = (tuple(before) + shape, dtype), (tuple(given[part].shape), given[part].dtype)
            if wanted != found:
                raise ValueError(f"{part} of a trellis weight are {found}, not {wanted}")

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values [..., N, K]: value / 32 * scale in float32, then rounded to `dtype`; ValueError as `check`."""
        self.check()
        return dequantize(self.codes, self.scales, self.bits, self.state_bits, self.inputs, dtype)


def dequantize(
    codes: Tensor, scales: Tensor, bits: int, state_bits: int, inputs: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Values [..., N, K] of codes uint8 [..., R, C*32*k] with scales [..., N]."""
    rows, along = scales.shape[-1], tiles_along(inputs)
    value = values(bits, state_bits).to(codes.device)
    lines = codes.reshape(-1, codes.shape[-1])
    decoded = torch.empty((len(lines) * TILE, along * TILE), device=codes.device)
    step = max(1, BLOCK_WEIGHTS // (along * STEPS)) if decoded.device.type == "cpu" else max(1, len(lines))
    for start in range(0, len(lines), step):
        found = states(unpack(lines[start : start + step], bits), bits, state_bits)
        block = from_tiles(value[found.long()].unsqueeze(1), TILE, along * TILE).flatten(0, 1)
        decoded[start * TILE : start * TILE + len(block)] = block
    whole = decoded.view(*scales.shape[:-1], -1, along * TILE)[..., :rows, :inputs]
    return (whole * scales.float().unsqueeze(-1)).to(dtype)
