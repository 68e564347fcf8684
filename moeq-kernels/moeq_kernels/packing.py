"""Bit packing: codes of 1 to 8 bits as one contiguous little-endian bit stream a row.

Code k of a row occupies bits [k*b, (k+1)*b) of the row's stream, least significant bit first; bit i of the stream is
bit i % 8 of byte i // 8. A row ends on a whole byte, its unused high bits are zero. Example, 3 bits, codes a b c:

    byte 0: c1 c0 b2 b1 b0 a2 a1 a0      byte 1: .. .. .. .. .. .. .. c2

Letters: R rows, K codes of a row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moeq_kernels.widths import SUPPORTED_BITS

# of a matrix at a time on a CPU, so that what comes between, 8 bytes a value, stays in its cache
BLOCK_VALUES = 1 << 18


def packed_row_bytes(length: int, bits: int) -> int:
    """Bytes that one packed row of `length` codes takes."""
    return (length * bits + 7) // 8


def _check_bits(bits: int) -> None:
    if bits not in SUPPORTED_BITS:
        raise ValueError(f"cannot pack {bits} bits; supported are {SUPPORTED_BITS}")


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes along the last axis.

    codes: integer tensor [..., K] with values in [0, 2**bits). Returns uint8 [..., ceil(K*bits/8)].
    Raises ValueError for an unsupported width or a code out of range.
    """
    _check_bits(bits)
    if codes.numel() and (int(codes.min()) < 0 or int(codes.max()) >= 2**bits):
        raise ValueError(f"codes must lie in [0, {2**bits})")
    return repacked(codes, bits)


def repacked(codes: Tensor, bits: int) -> Tensor:
    """As `pack`, of codes that were packed before: none is looked at, and so no device is waited for."""
    if bits == 8:
        return codes.to(torch.uint8).contiguous()
    length, rows = codes.shape[-1], math.prod(codes.shape[:-1])
    stream = torch.empty((rows, packed_row_bytes(length, bits)), dtype=torch.uint8, device=codes.device)
    step = max(1, BLOCK_VALUES // max(1, length)) if stream.device.type == "cpu" else max(1, rows)
    for start, block in enumerate(codes.reshape(rows, length).split(step)):
        stream[start * step : start * step + step] = _packed(block, bits)
    return stream.view(*codes.shape[:-1], stream.shape[-1])


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Rows of codes [R, K] as bytes [R, ceil(K*bits/8)], through 64-bit words."""
    length = codes.shape[-1]
    groups = (length + 7) // 8  # 8 codes fill `bits` whole bytes
    padded = torch.zeros((*codes.shape[:-1], groups * 8), dtype=torch.int64, device=codes.device)
    padded[..., :length] = codes
    shifts = torch.arange(8, device=codes.device) * bits
    words = (padded.view(*codes.shape[:-1], groups, 8) << shifts).sum(-1)
    byte_shifts = torch.arange(bits, device=codes.device) * 8
    stream = (words.unsqueeze(-1) >> byte_shifts) & 255
    return stream.flatten(-2)[..., : packed_row_bytes(length, bits)].to(torch.uint8)


def unpack(packed: Tensor, bits: int, length: int) -> Tensor:
    """Invert `pack`: uint8 [..., ceil(K*bits/8)] -> uint8 codes [..., K] with K = length.

    Raises ValueError when the last axis does not have the bytes that `length` codes need, or holds no bytes.
    """
    _check_bits(bits)
    if packed.dtype != torch.uint8 or not packed.dim() or length < 0:
        raise ValueError(f"{length} codes in {packed.dtype} {list(packed.shape)}: packed codes are rows of uint8")
    if packed.shape[-1] != packed_row_bytes(length, bits):
        raise ValueError(
            f"{length} codes of {bits} bits take {packed_row_bytes(length, bits)} bytes, not {packed.shape[-1]}"
        )
    if bits == 8:
        return packed
    if 8 % bits == 0:  # a code never crosses a byte: stay in uint8
        per = 8 // bits
        parts = torch.stack([(packed >> (bits * i)) & (2**bits - 1) for i in range(per)], -1)
        return parts.flatten(-2)[..., :length].contiguous()
    groups = (length + 7) // 8
    missing = groups * bits - packed.shape[-1]
    whole = torch.nn.functional.pad(packed, (0, missing)) if missing else packed
    planes = [plane.contiguous() for plane in whole.unflatten(-1, (groups, bits)).unbind(-1)]
    codes = []
    for place in range(8):
        byte, shift = divmod(place * bits, 8)
        code = planes[byte] >> shift
        codes.append(code | planes[byte + 1] << (8 - shift) if shift + bits > 8 else code)
    values: Tensor = (torch.stack(codes, -1) & (2**bits - 1)).flatten(-2)[..., :length].contiguous()
    return values
