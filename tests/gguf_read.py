"""What others read in a GGUF file: gguf's own reader, and llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peers
import torch
from made_sources import IDS, MadeSource
from safetensors.torch import save_file
from torch import Tensor

from moeq.exporters.gguf import FILE
from moeq.exporters.gguf_families import stack_name
from moeq.verification.logits import compare_logits
from moeq_kernels.packed import PackedWeight

ROUNDED = 0.05  # of the median position, where activations are rounded to 8 bits


def tensors_of(out: Path) -> dict[str, Tensor]:
    """Every tensor of a file, as gguf's own reader and dequantization have it."""
    gguf = peers.module("gguf")
    found = {}
    for tensor in gguf.GGUFReader(out / FILE).tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        found[tensor.name] = torch.from_numpy(values.copy()).view(*reversed(tensor.shape.tolist()))
    return found


def typical(logits: Tensor, wanted: Tensor) -> float:
    """The median of the positions' relative errors [B, S, V]: what is loaded wrongly changes all."""
    return compare_logits(logits, wanted, None, 1.0).error


def values(matrix: PackedWeight | Tensor) -> Tensor:
    return matrix.dequantize() if isinstance(matrix, PackedWeight) else matrix.float()


def check_stacks(source: MadeSource, tensors: dict[str, Tensor]) -> None:
    for layer in source.layers:
        experts = [source.expert(layer, expert)[0] for expert in range(layer.num_experts)]
        for projection in layer.projections:
            wanted = torch.stack([values(expert[projection]) for expert in experts])
            assert torch.equal(tensors[stack_name(layer, projection)], wanted), (layer.name, projection)


def llama_logits(path: Path, folder: Path) -> Any:
    """llama.cpp's logits for IDS, or the error's last line."""
    save_file({"ids": IDS}, folder / "ids.safetensors")
    return peers.load("llama-cpp-python", "llama.cpp", [path], folder / "ids.safetensors")[0]
