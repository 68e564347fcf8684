"""The layouts of other runtimes, from and to the bit streams of `packing`.

GPTQ: `qweight` int32 [K*b/32, N], a column's codes as one little-endian bit stream; `qzeros` int32 [G, N*b/32], a
group's zero points likewise: less one modulo 2**b in AutoGPTQ's first format, as they are in the second and in
auto-round's own. compressed-tensors: int32 [N, ceil(K*b/32)], a row's codes as one bit stream. N output rows, K inputs,
G groups, b bits, B bytes of a
row's stream, W words of 32 bits. MLX: `weight` uint32 [N, K*b/32] as compressed-tensors', and a code q stands for
scale * q + bias.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moeq_kernels.packed import PackedWeight
from moeq_kernels.packing import pack, packed_row_bytes, unpack
from moeq_kernels.widths import SUPPORTED_BITS, WORD


def row_words(codes: Tensor) -> Tensor:
    """Bit streams uint8 [..., N, B] as int32 words [..., N, ceil(B/4)], the last filled up with zeros."""
    missing = -codes.shape[-1] % 4
    whole = torch.nn.functional.pad(codes, (0, missing)) if missing else codes
    words = whole.contiguous().reshape(-1).view(torch.int32)  # one row may be contiguous with a stride of no whole word
    return words.view(*whole.shape[:-1], whole.shape[-1] // 4)


def row_stream(words: Tensor, bits: int, length: int) -> Tensor:
    """Invert `row_words`: int32 [..., N, W] as the bit streams uint8 [..., N, B] of `length` codes.

    ValueError for other than W = ceil(B/4) words, or for what cannot be rows of words.
    """
    if bits not in SUPPORTED_BITS or length < 0 or not words.dim():
        raise ValueError(f"{length} codes of {bits} bits in words {list(words.shape)}: no rows of codes")
    size = packed_row_bytes(length, bits)
    if words.dtype != torch.int32 or words.shape[-1] != -(-size // 4):
        raise ValueError(f"{length} codes of {bits} bits take {-(-size // 4)} words of 32 bits, not {words.shape[-1]}")
    whole = words.clone(memory_format=torch.contiguous_format)  # `contiguous` leaves a single word a row as it lies
    return whole.view(torch.uint8)[..., :size]


def column_words(codes: Tensor, bits: int, length: int) -> Tensor:
    """Bit streams uint8 [..., N, B] of `length` codes as `qweight` int32 [..., K*b/32, N], a transposed view.

    Raises ValueError where a stream does not end on a word, which the layout cannot hold.
    """
    if length * bits % WORD:
        raise ValueError(f"{length} codes of {bits} bits are no whole number of {WORD}-bit words")
    return row_words(codes).mT


def column_stream(words: Tensor, bits: int, length: int) -> Tensor:
    """Invert `column_words`: int32 [..., ceil(K*b/32), N] as bit streams uint8 [..., N, B]; the last word of a column
    may be filled up, as GPTQModel does it. ValueError as `row_stream`, and for a single row of words."""
    if words.dim() < 2:
        raise ValueError(f"words of codes are {list(words.shape)}, not [..., K*b/32, N]")
    return row_stream(words.mT, bits, length)


def zero_words(zeros: Tensor, bits: int, *, less_one: bool = True) -> Tensor:
    """Zero points [..., N, G] as `qzeros` int32 [..., G, N*b/32]; ValueError where N*b is no multiple of 32."""
    rows = zeros.shape[-2]
    if rows * bits % WORD:
        raise ValueError(f"{rows} zero points of {bits} bits are no whole number of {WORD}-bit words")
    stored = (zeros.to(torch.int64) - 1) % 2**bits if less_one else zeros
    return row_words(pack(stored.mT, bits))


def zeros_of(words: Tensor, bits: int, rows: int, *, less_one: bool = True) -> Tensor:
    """Invert `zero_words`: uint8 zero points [..., N, G]; the last word of a group may be filled up. ValueError as
    `column_stream`."""
    if words.dim() < 2:
        raise ValueError(f"words of zero points are {list(words.shape)}, not [..., G, N*b/32]")
    stored = unpack(row_stream(words, bits, rows), bits, rows)
    zeros: Tensor = ((stored.to(torch.int64) + 1) % 2**bits).to(torch.uint8) if less_one else stored
    return zeros.mT.contiguous()


def affine_parts(weight: PackedWeight, dtype: torch.dtype) -> dict[str, Tensor]:
    """A packed weight as MLX has it: `weight` uint32 [N, K*b/32], `scales` and `biases` [N, G] in a type."""
    scales = weight.scales.to(dtype)
    zeros: Tensor | float = 2.0 ** (weight.bits - 1)
    if weight.zeros is not None:
        zeros = unpack(weight.zeros, weight.bits, scales.shape[-1]).double()
    words = row_words(weight.codes).view(torch.uint32)
    return {"weight": words, "scales": scales, "biases": (-scales.double() * zeros).to(dtype)}


def affine_values(parts: Mapping[str, Tensor], bits: int, inputs: int) -> Tensor:
    """Values float32 [N, K] of what `affine_parts` gives, for K inputs."""
    codes = unpack(row_stream(parts["weight"].view(torch.int32), bits, inputs), bits, inputs).float()
    scales, biases = (parts[name].float()[..., None] for name in ("scales", "biases"))
    values: Tensor = (codes.unflatten(-1, (scales.shape[-2], -1)) * scales + biases).flatten(-2)
    return values
