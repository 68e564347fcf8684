"""The order of codes in the words that the GPU's kernels read, and the way back.

A row's inputs are cut into tiles of 128 (the last as much shorter as K asks for, in steps of 16). A tile has C = 8
columns (the last C = ceil(rest / 16)) of 16 codes, the planes: plane 2j + h of column c is input 128*tile + 2*C*j + 2*c
+ h. The codes of one column lie in the same words, so that a shift and a mask give two planes, 2*C neighbouring inputs,
without a shuffle.

A width is cut into parts of 8, 4, 2 and 1 bits, the high ones first: 3 = 2 + 1. A column takes q/2 words of 32 bits in
a part of q >= 2 bits and one of 16 bits in that of 1 bit: b bits take b/8 bytes a code whatever the width. Of a part,
the words lie as [tile, word, N, C]: the rows of a program are one piece of memory in every tile. In whole tiles, where
N is a multiple of 16, [N, C] lies as [N / 16, r, q, s, t] of row 16*(N/16) + 8*s + r and column 4*t + q: a warp that
loads four words a thread has the numbers of 16 rows where the tensor cores' m16n8k16 takes them, column c of planes 2j
and 2j + 1 being inputs 16j + 2c and the next.

In words the codes are in the interleaved order of paper 002 (section 3.4.3): of 4 bits [e0, e2, e4, e6, e1, e3, e5,
e7], of other parts alike, even ones in the low half, odd ones in the high half. So one AND leaves two neighbours in the
places of two float16. The 16 bits of a column in the part of 1 bit lie so that moved by 14, the odd ones come to the
high half, and both halves have one bit for every second code of 2 bits where that has its lower one: [e0, e2, e1, e3,
e4, e6, e5, e7, ..], so that words of 3 bits are put together eight codes at a time (`codes.merged`).

Letters: N rows, K inputs, C columns of a tile, q bits of a part.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

PLANES = 16
COLUMNS = 8
TILE = PLANES * COLUMNS
FRAGMENT = 16  # rows
PARTS = (8, 4, 2, 1)


def parts_of(bits: int) -> tuple[tuple[int, int], ...]:
    """The parts of a width as (bits, lowest bit in the code), high ones first: 3 is (2, 1), (1, 0)."""
    made, low = [], bits
    for part in PARTS:
        if bits & part:
            low -= part
            made.append((part, low))
    return tuple(made)


def columns_of(inputs: int) -> int:
    """Columns of 16 codes that a row takes."""
    return -(-inputs // PLANES)


def code_bytes(rows: int, inputs: int, bits: int) -> int:
    """Bytes of the words of a matrix."""
    return rows * columns_of(inputs) * PLANES * bits // 8


def place(plane: int, part: int) -> tuple[int, int]:
    """Word of a column and the shift in it of a plane's field of a part of 8, 4, 2 or 1 bits."""
    if part == 1:
        return 0, 4 * (plane // 4) + plane // 2 % 2 + 2 * (plane % 2)
    word, code = divmod(plane, 32 // part)
    return word, part * (code // 2) + 16 * (code % 2)


def _runs(inputs: int) -> Iterator[tuple[int, int, int]]:
    """Runs of tiles of the same shape, first and last input and columns of a tile: all full ones, then the last."""
    full = inputs // TILE * TILE
    if full:
        yield 0, full, COLUMNS
    if full < inputs:
        yield full, inputs, columns_of(inputs - full)


def _planes(codes: Tensor, columns: int) -> Tensor:
    """Codes [N, K of some tiles] as [tiles, planes, N, C]; what is missing in the last tile is 0."""
    missing = -codes.shape[1] % (PLANES * columns)
    padded = torch.nn.functional.pad(codes, (0, missing)) if missing else codes
    pairs: Tensor = padded.unflatten(1, (-1, PLANES // 2, columns, 2))  # [N, tiles, j, C, h]
    return pairs.permute(1, 2, 4, 0, 3).flatten(1, 2)


def _in_fragments(words: Tensor) -> bool:
    """Whether words [tiles, words, N, C] lie in the order of tensor cores."""
    return words.shape[2] % FRAGMENT == 0 and words.shape[3] == COLUMNS


def _laid(words: Tensor) -> Tensor:
    """Words [tiles, words, N, C] in the order of memory."""
    if not _in_fragments(words):
        return words
    parts: Tensor = words.unflatten(2, (-1, 2, 8)).unflatten(5, (2, 4))  # [.., N / 16, s, r, t, q]
    return parts.permute(0, 1, 2, 4, 6, 3, 5)


def _by_row(stored: Tensor, rows: int, columns: int, tiles: int) -> Tensor:
    """The inverse of `_laid`: the words of some tiles, flat, as [tiles, words, N, C]."""
    words = stored.view(tiles, -1, rows, columns)
    if not _in_fragments(words):
        return words
    parts = words.view(tiles, -1, rows // FRAGMENT, 8, 4, 2, 2)  # [.., N / 16, r, q, s, t]
    return parts.permute(0, 1, 2, 5, 3, 6, 4).reshape(words.shape)


def _words(fields: Tensor, part: int) -> Tensor:
    """Fields [tiles, planes, N, C] of a part as words [tiles, words, N, C], int32 or, for 1 bit, int16."""
    tiles, _, rows, columns = fields.shape
    made = torch.zeros((tiles, max(1, part // 2), rows, columns), dtype=torch.int32, device=fields.device)
    for plane in range(PLANES):
        word, shift = place(plane, part)
        made[:, word] |= fields[:, plane].to(torch.int32) << shift
    return made.to(torch.int16) if part == 1 else made


def swizzle(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [N, K] as the bytes that the kernels read, uint8 [code_bytes]: part after part."""
    pieces = []
    for part, low in parts_of(bits):
        for start, stop, columns in _runs(codes.shape[1]):
            fields = (_planes(codes[:, start:stop], columns) >> low) & (2**part - 1)
            pieces.append(_laid(_words(fields, part)).flatten().view(torch.uint8))
    return torch.cat(pieces)


def unswizzle(stored: Tensor, rows: int, inputs: int, bits: int) -> Tensor:
    """The inverse of `swizzle`: uint8 codes [N, K]."""
    codes = torch.zeros((rows, inputs), dtype=torch.uint8, device=stored.device)
    at = 0
    for part, low in parts_of(bits):
        places = [place(plane, part) for plane in range(PLANES)]
        for start, stop, columns in _runs(inputs):
            tiles = -(-(stop - start) // (PLANES * columns))
            size = tiles * columns * rows * PLANES * part // 8
            words = stored[at : at + size].view(torch.int16 if part == 1 else torch.int32)
            words = _by_row(words, rows, columns, tiles)
            at += size
            fields = torch.stack([(words[:, word] >> shift) & (2**part - 1) for word, shift in places], 1)
            pairs = fields.unflatten(1, (PLANES // 2, 2))  # [tiles, j, h, N, C]
            some = pairs.permute(3, 0, 1, 4, 2).reshape(rows, -1)[:, : stop - start]
            codes[:, start:stop] |= some.to(torch.uint8) << low
    return codes


def rows_of(stored: Tensor, rows: int, inputs: int, bits: int, index: Tensor) -> Tensor:
    """The swizzled bytes of some rows [n] of a matrix of `rows`, as those of a matrix of n rows."""
    pieces, at = [], 0
    for part, _ in parts_of(bits):
        for start, stop, columns in _runs(inputs):
            tiles = -(-(stop - start) // (PLANES * columns))
            size = tiles * columns * rows * PLANES * part // 8
            words = stored[at : at + size].view(torch.int16 if part == 1 else torch.int32)
            some = _by_row(words, rows, columns, tiles).index_select(2, index)
            pieces.append(_laid(some).flatten().view(torch.uint8))
            at += size
    return torch.cat(pieces)
