"""Codes that are llama.cpp's i-quants: blocks as its files have them, but for their float16, which lie apart.

codes uint8 [..., N, B*L], a block's bytes after its float16; scales float16 [..., N, B]: value = scale * what the block
stands for with a float16 of 1. What that is, the package gguf knows, of llama.cpp's own makers, and its tables are
nowhere else here. See iq_types.py.

Letters: N output rows, K inputs, B blocks of a row, L bytes of a block.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from moeq_kernels.errors import ModelError
from moeq_kernels.iq_types import SCALE_BYTES, block_counts, type_of


def package() -> Any:
    """The package gguf; ModelError where it is not installed."""
    try:
        return importlib.import_module("gguf")
    except ImportError:
        what = "the package gguf is not installed, which has the tables of i-quants"
        raise ModelError(what, where="experts", do="pip install gguf") from None


def packed_shapes(rows: int, inputs: int, bits: int, codebook: str) -> dict[str, tuple[tuple[int, int], torch.dtype]]:
    """Shape and dtype of each stored part of one weight; ValueError for what there is not."""
    blocks, size = block_counts(inputs, bits, codebook)
    return {"codes": ((rows, blocks * size), torch.uint8), "scales": ((rows, blocks), torch.float16)}


def joined(codes: Tensor, scales: Tensor) -> Tensor:
    """Blocks as llama.cpp's files have them, uint8 [..., N, B*(L+2)]."""
    blocks = codes.unflatten(-1, (scales.shape[-1], -1))
    return torch.cat([scales.contiguous().view(torch.uint8).unflatten(-1, (-1, SCALE_BYTES)), blocks], -1).flatten(-2)


def decoded(data: Tensor, name: str) -> Tensor:
    """Values float32 [..., N, K] of blocks as llama.cpp's files have them, uint8 [..., N, B*(L+2)]."""
    gguf = package()
    values = gguf.quants.dequantize(data.cpu().contiguous().numpy(), gguf.GGMLQuantizationType[name])
    return torch.from_numpy(values).to(data.device)


def dequantize(
    codes: Tensor, scales: Tensor, bits: int, codebook: str, dtype: torch.dtype = torch.float32
) -> Tensor:  # fmt: skip
    """Values [..., N, K], computed in float32, in a dtype."""
    return decoded(joined(codes, scales), type_of(bits, codebook)).to(dtype)
