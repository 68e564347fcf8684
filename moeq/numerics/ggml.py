"""Weights in the blocks of llama.cpp's types, and back to values; see `ggml_types` for what the blocks are.

Letters: N output rows, K inputs, B blocks a row, L bytes of a row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moeq.numerics.ggml_types import HOLDS, IQ_NUMBERS, TYPES
from moeq_kernels import iq
from moeq_kernels.grids import SCALE_DTYPE
from moeq_kernels.packed import PackedWeight
from moeq_kernels.packing import pack, unpack
from moeq_kernels.widths import resolved_group_size

FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ONES_Q3 = (0x11,) * 8 + (0xAA,) * 4  # sixteen scales of 6 bits, each 33, which stands for 1


def type_of(weight: PackedWeight) -> str:
    """The type that holds a weight; ValueError where none does."""
    name = HOLDS.get((weight.bits, weight.zeros is None))
    if weight.encoding.codes != "grid":
        raise ValueError("codes that are no grid's")
    if name is None or (weight.nested and weight.bits < 4):
        zeros = "" if weight.zeros is None else " with zero points"
        raise ValueError(f"no type of ggml holds {'nested ' * weight.nested}{weight.bits} bits{zeros}")
    group = resolved_group_size(weight.inputs, weight.group_size)
    length = TYPES[name].length
    if weight.inputs % length or group % length:
        raise ValueError(f"{weight.inputs} inputs in groups of {group} are no multiples of the {length} of {name}")
    return name


def holds(weight: PackedWeight) -> bool:
    """Whether a type holds a weight's values exactly."""
    try:
        type_of(weight)
    except ValueError:
        return False
    return True


def encode(weight: PackedWeight) -> Tensor:
    """The blocks of one weight [N, K], uint8 [N, L]; `decode` gives its values back, each exactly.

    ValueError where no type holds it (see `type_of`), or for a scale that float16 does not hold.
    """
    name = type_of(weight)
    length = TYPES[name].length
    rows = weight.codes.shape[-2]
    codes = unpack(weight.codes, weight.bits, weight.inputs).view(rows, -1, length)
    group = resolved_group_size(weight.inputs, weight.group_size)
    of_block = torch.arange(weight.inputs // length) * length // group
    scales = _half(weight.scales if weight.bits > 1 else weight.scales.double() / 2)[:, of_block]
    zeros = torch.full(scales.shape, 2 ** (weight.bits - 1), dtype=torch.uint8)
    if weight.zeros is not None:
        zeros = unpack(weight.zeros, weight.bits, weight.scales.shape[-1])[:, of_block]
    parts = _ENCODERS[name](codes, scales.unsqueeze(-1).view(torch.uint8), zeros.unsqueeze(-1))
    return torch.cat(parts, -1).view(rows, -1)


def decode(name: str, data: Tensor, inputs: int) -> Tensor:
    """Values float32 [N, K] of the uint8 [N, L] of a type, whoever wrote it; K = inputs.

    The blocks are those of llama.cpp, ggml/src/ggml-common.h; their values those of its dequantize_row_* functions.
    """
    if name in FLOAT_DTYPES:
        return data.contiguous().view(FLOAT_DTYPES[name]).float()
    if name in IQ_NUMBERS:
        return iq.decoded(data, name)
    blocks = data.contiguous().view(len(data), -1, TYPES[name].bytes)
    sizes, values = _DECODERS[name]
    return values(*blocks.split(sizes, -1)).reshape(len(data), inputs)


def packed(name: str, data: Tensor, inputs: int) -> PackedWeight:
    """The weight [N, K] that the uint8 [N, L] of a type are, whoever wrote them: the same codes and exactly the values.

    Groups that are alike all along are joined, two by two. ValueError where no grid of moeq's holds them: where a
    block's multiplier of a scale makes a number that float16 lacks, or what is taken off is no whole number of steps.
    """
    if name not in _GRIDS:
        raise ValueError("codes that are no grid's")
    blocks = data.contiguous().view(len(data), -1, TYPES[name].bytes)
    parts = blocks.split(_DECODERS[name][0], -1)
    bits, grid = _GRIDS[name]
    codes, steps, least = grid(*parts)
    scales = _half(steps.flatten(1))
    zeros = torch.full(scales.shape, 2.0 ** (bits - 1), dtype=torch.float64)
    if least is not None:
        zeros = _whole_steps(scales.double(), least.flatten(1), bits)
    size = inputs // scales.shape[1]
    while scales.shape[1] > 1 and _alike(scales) and _alike(zeros):
        scales, zeros, size = scales[:, ::2], zeros[:, ::2], size * 2
    symmetric = bits == 1 or bool((zeros == 2 ** (bits - 1)).all())
    return PackedWeight(
        codes=pack(codes.flatten(1), bits),
        scales=scales.contiguous(),
        zeros=None if symmetric else pack(zeros.to(torch.uint8).contiguous(), bits),
        bits=bits,
        group_size=-1 if scales.shape[1] == 1 else size,
        inputs=inputs,
        symmetric=symmetric,
    )


def _whole_steps(scales: Tensor, least: Tensor, bits: int) -> Tensor:
    """Zero points of grids with these scales that begin at -least; ValueError where one is no code."""
    zeros = torch.where(scales == 0, 0.0, (least / scales).round())
    if not torch.equal(zeros * scales, least) or bool(((zeros < 0) | (zeros >= 2**bits)).any()):
        raise ValueError(f"a zero point that is no whole number from 0 to {2**bits - 1}")
    return zeros


def _alike(groups: Tensor) -> bool:
    """Whether every second of the groups [N, G] is as the one before it."""
    return torch.equal(groups[:, : groups.shape[1] // 2 * 2 : 2], groups[:, 1::2])


def _half(scales: Tensor) -> Tensor:
    half = scales.to(SCALE_DTYPE)
    if not torch.equal(half.double(), scales.double()):
        raise ValueError("a scale that float16 does not hold")
    return half


# Encoders: codes uint8 [N, B, length], the bytes of float16 scales [N, B, 2] and zero points uint8 [N, B, 1] become the
# parts of blocks, in order, [N, B, bytes].


def halves(codes: Tensor, run: int) -> Tensor:
    """Codes [..., K] of 4 bits as bytes [..., K/2]: byte i of every 2*run codes holds code i and, above it, i + run."""
    pairs = codes.unflatten(-1, (-1, 2, run))
    joined: Tensor = (pairs[..., 0, :] & 15 | (pairs[..., 1, :] & 15) << 4).flatten(-2)
    return joined


def quarters(codes: Tensor) -> Tensor:
    """Codes [..., K] of 2 bits as bytes [..., K/4]: byte i of every 128 codes holds i, i + 32, i + 64 and i + 96."""
    four = codes.unflatten(-1, (-1, 4, 32)) & 3
    joined: Tensor = (four[..., 0, :] | four[..., 1, :] << 2 | four[..., 2, :] << 4 | four[..., 3, :] << 6).flatten(-2)
    return joined


def _in_a_row(flags: Tensor) -> Tensor:
    """1 bit a code: bit i % 8 of byte i // 8."""
    joined: Tensor = (flags.unflatten(-1, (-1, 8)) << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)
    return joined


def across(flags: Tensor) -> Tensor:
    """Flags [..., 256] as bytes [..., 32]: bit i // 32 of byte i % 32."""
    shifts = torch.arange(8, dtype=torch.uint8).unsqueeze(-1)
    joined: Tensor = (flags.unflatten(-1, (8, 32)) << shifts).sum(-2, dtype=torch.uint8)
    return joined


def _fixed(like: Tensor, values: tuple[int, ...]) -> Tensor:
    """The same bytes in every block."""
    return torch.tensor(values, dtype=torch.uint8).expand(*like.shape[:-1], -1)


def _of_eight(zero: Tensor) -> Tensor:
    """Eight multipliers of 6 bits that are 1, and eight that are the zero point: [N, B, 12]."""
    low, high = zero & 15, (zero >> 4) << 6
    parts = [torch.ones_like(zero), zero | high, low << 4 | 1]
    return torch.cat([part.expand(-1, -1, 4) for part in parts], -1)


_ENCODERS: dict[str, Callable[[Tensor, Tensor, Tensor], list[Tensor]]] = {
    "Q4_0": lambda codes, scale, zero: [scale, halves(codes, 16)],
    "Q5_0": lambda codes, scale, zero: [scale, _in_a_row(codes >> 4), halves(codes, 16)],
    "Q8_0": lambda codes, scale, zero: [scale, codes ^ 128],
    "Q1_0": lambda codes, scale, zero: [scale, _in_a_row(codes)],
    "Q2_K": lambda codes, scale, zero: [(zero << 4 | 1).expand(-1, -1, 16), quarters(codes), scale, scale],
    "Q3_K": lambda codes, scale, zero: [across(codes >> 2), quarters(codes), _fixed(codes, ONES_Q3), scale],
    "Q4_K": lambda codes, scale, zero: [scale, scale, _of_eight(zero), halves(codes, 32)],
    "Q5_K": lambda codes, scale, zero: [scale, scale, _of_eight(zero), across(codes >> 4), halves(codes, 32)],
    "Q6_K": lambda codes, scale, zero: [halves(codes, 64), quarters(codes >> 4), _fixed(codes, (1,) * 16), scale],
}


# Decoders: blocks uint8 [N, B, bytes] become values float32 [N, B, length], split as the encoders join them.


def _scale(part: Tensor) -> Tensor:
    """Two bytes a block as a float32 [N, B, 1]."""
    return part.contiguous().view(torch.float16).float()


def _signed(part: Tensor) -> Tensor:
    """Bytes as whole numbers from -128 to 127, in float32."""
    return part.contiguous().view(torch.int8).float()


def _shifted(part: Tensor, run: int, shifts: tuple[int, ...], mask: int) -> Tensor:
    """The inverse of `halves` and `quarters`."""
    steps = torch.tensor(shifts, dtype=torch.uint8).unsqueeze(-1)
    split: Tensor = ((part.unflatten(-1, (-1, 1, run)) >> steps) & mask).flatten(-3)
    return split


def _nibbles(part: Tensor, run: int) -> Tensor:
    return _shifted(part, run, (0, 4), 15)


def _pairs(part: Tensor) -> Tensor:
    return _shifted(part, 32, (0, 2, 4, 6), 3)


def _bits_across(part: Tensor) -> Tensor:
    return _shifted(part, 32, tuple(range(8)), 1)


def _bits_in_a_row(part: Tensor) -> Tensor:
    split: Tensor = ((part.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2)
    return split


def _spread(scales: Tensor, run: int) -> Tensor:
    """Scales [N, B, s] of `run` weights each, for every weight."""
    return scales.repeat_interleave(run, -1)


def _eight(steps: Tensor) -> tuple[Tensor, Tensor]:
    """The two eights of multipliers [N, B, 12] that a block of Q4_K or Q5_K has."""
    first, second, third = steps.split((4, 4, 4), -1)
    up = torch.cat([first & 63, third & 15 | first >> 6 << 4], -1)
    down = torch.cat([second & 63, third >> 4 | second >> 6 << 4], -1)
    return up.float(), down.float()


def _q2_k(steps: Tensor, codes: Tensor, scale: Tensor, least: Tensor) -> Tensor:
    up, down = _scale(scale) * (steps & 15).float(), _scale(least) * (steps >> 4).float()
    return _spread(up, 16) * _pairs(codes).float() - _spread(down, 16)


def _sixteen(steps: Tensor) -> Tensor:
    """The sixteen multipliers [N, B, 12] that a block of Q3_K has, in float32."""
    lower = _shifted(steps[..., :8], 8, (0, 4), 15)
    upper = _shifted(steps[..., 8:], 4, (0, 2, 4, 6), 3)
    return (lower | upper << 4).float() - 32


def _q3_k(high: Tensor, low: Tensor, steps: Tensor, scale: Tensor) -> Tensor:
    up = _scale(scale) * _sixteen(steps)
    return _spread(up, 16) * ((_pairs(low) | _bits_across(high) << 2).float() - 4)


def _affine(scale: Tensor, least: Tensor, steps: Tensor, codes: Tensor) -> Tensor:
    up, down = _eight(steps)
    return _spread(_scale(scale) * up, 32) * codes.float() - _spread(_scale(least) * down, 32)


def _q6_k(low: Tensor, high: Tensor, steps: Tensor, scale: Tensor) -> Tensor:
    up = _scale(scale) * _signed(steps)
    return _spread(up, 16) * ((_nibbles(low, 64) | _pairs(high) << 4).float() - 32)


_DECODERS: dict[str, tuple[tuple[int, ...], Callable[..., Tensor]]] = {  # bytes of the parts, values of all of them
    "Q4_0": ((2, 16), lambda scale, low: _scale(scale) * (_nibbles(low, 16).float() - 8)),
    "Q5_0": (
        (2, 4, 16),
        lambda scale, high, low: _scale(scale) * ((_nibbles(low, 16) | _bits_in_a_row(high) << 4).float() - 16),
    ),
    "Q8_0": ((2, 32), lambda scale, codes: _scale(scale) * _signed(codes)),
    "Q1_0": ((2, 16), lambda scale, signs: _scale(scale) * (2 * _bits_in_a_row(signs).float() - 1)),
    "Q2_K": ((16, 64, 2, 2), _q2_k),
    "Q3_K": ((32, 64, 12, 2), _q3_k),
    "Q4_K": ((2, 2, 12, 128), lambda scale, least, steps, low: _affine(scale, least, steps, _nibbles(low, 32))),
    "Q5_K": (
        (2, 2, 12, 32, 128),
        lambda scale, least, steps, high, low: _affine(
            scale, least, steps, _nibbles(low, 32) | _bits_across(high) << 4
        ),
    ),
    "Q6_K": ((128, 64, 16, 2), _q6_k),
}


# Grids: blocks, split likewise, become codes uint8 [N, B, length], steps float64 [N, B, s] of as many equal runs of a
# block, and what is taken off each; None: half of the codes.


def _affine_grid(scale: Tensor, least: Tensor, steps: Tensor, codes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    up, down = _eight(steps)
    return codes, (_scale(scale) * up).double(), (_scale(least) * down).double()


def _q2_k_grid(steps: Tensor, codes: Tensor, scale: Tensor, least: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    up, down = _scale(scale) * (steps & 15).float(), _scale(least) * (steps >> 4).float()
    return _pairs(codes), up.double(), down.double()


def _q3_k_grid(high: Tensor, low: Tensor, steps: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, None]:
    return _pairs(low) | _bits_across(high) << 2, (_scale(scale) * _sixteen(steps)).double(), None


_Made = tuple[Tensor, Tensor, Tensor | None]
_GRIDS: dict[str, tuple[int, Callable[..., _Made]]] = {  # bits, and the grid of all parts
    "Q1_0": (1, lambda scale, signs: (_bits_in_a_row(signs), 2 * _scale(scale).double(), None)),
    "Q2_K": (2, _q2_k_grid),
    "Q3_K": (3, _q3_k_grid),
    "Q4_0": (4, lambda scale, low: (_nibbles(low, 16), _scale(scale).double(), None)),
    "Q4_K": (4, lambda scale, least, steps, low: _affine_grid(scale, least, steps, _nibbles(low, 32))),
    "Q5_0": (
        5,
        lambda scale, high, low: (_nibbles(low, 16) | _bits_in_a_row(high) << 4, _scale(scale).double(), None),
    ),
    "Q5_K": (
        5,
        lambda scale, least, steps, high, low: _affine_grid(
            scale, least, steps, _nibbles(low, 32) | _bits_across(high) << 4
        ),
    ),
    "Q6_K": (
        6,
        lambda low, high, steps, scale: (
            _nibbles(low, 64) | _pairs(high) << 4,
            (_scale(scale) * _signed(steps)).double(),
            None,
        ),
    ),
    "Q8_0": (8, lambda scale, codes: (codes ^ 128, _scale(scale).double(), None)),
}
