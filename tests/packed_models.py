"""Tiny checkpoints in the two packed formats that are dequantized while loading, each beside its plain twin."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from family_models import save
from safetensors.torch import load_file, save_file
from torch import Tensor

BLOCK = (16, 12)  # divides neither 40 nor 20 nor 56
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def _twins(plain: Path, packed: Path, values: dict[str, Tensor], stored: dict[str, Tensor], declared: object) -> None:
    """Write both checkpoints; `declared` is the packed one's quantization_config."""
    save_file(values, plain / "model.safetensors", {"format": "pt"})
    shutil.copytree(plain, packed)
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text("utf-8"))
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": declared}))


def _blocks_to_fp8(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """FP8 codes [M, N], scales [ceil(M/16), ceil(N/12)], and the values that they stand for, element by element; of a
    stack of matrices, stacks."""
    if weight.dim() > 2:
        codes, scales, values = zip(*map(_blocks_to_fp8, weight), strict=True)
        return torch.stack(codes), torch.stack(scales), torch.stack(values)
    rows, columns = (torch.arange(size) // step for size, step in zip(weight.shape, BLOCK, strict=True))
    scales = torch.zeros(int(rows[-1]) + 1, int(columns[-1]) + 1)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            block = weight[rows == row][:, columns == column]
            scales[row, column] = block.abs().max() / 448 * (1 + 0.1 * row)
    each = scales[rows][:, columns]
    codes = (weight / each).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * each


def _whole_to_fp8(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `_blocks_to_fp8`, with one scale, a tensor without dimensions."""
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return codes, scale, codes.float() * scale


def save_fp8(
    folder: Path, family: str, dtype: torch.dtype, *, blocks: bool = True, **settings: object
) -> tuple[Path, Path]:
    """Plain and packed twins of a family: all matrices of the layers (but the routers') in FP8 with block scales, and
    stacks of them.

    blocks: else each matrix has one scale.
    """
    plain = save(family, folder / "plain", **settings)
    values, stored = {}, {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if (weight.dim() == 2 and "proj" in name) or (weight.dim() == 3 and "conv" not in name):
            to_fp8 = _blocks_to_fp8 if blocks else _whole_to_fp8
            stored[name], stored[f"{name}_scale_inv"], full = to_fp8(weight)
            values[name] = full.to(torch.bfloat16).to(dtype)
        else:
            values[name] = stored[name] = weight if "correction_bias" in name else weight.to(torch.bfloat16).to(dtype)
    block = list(BLOCK) if blocks else None
    declared = {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "dynamic", "fmt": "e4m3"}
    _twins(plain, folder / "packed", values, stored, declared)
    return plain, folder / "packed"


def save_mxfp4(folder: Path, dtype: torch.dtype) -> tuple[Path, Path]:
    """Plain and packed twins of gpt_oss: experts as pairs of FP4 codes, 32 to a power-of-two scale."""
    plain = save("gpt_oss", folder / "plain", hidden_size=64, intermediate_size=96)
    generator = torch.Generator().manual_seed(3)
    values, stored = {}, {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = weight.shape
            codes = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(122, 126, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
            pairs = torch.stack([FP4[(codes & 15).long()], FP4[(codes >> 4).long()]], -1).flatten(-2)
            full = pairs * torch.pow(2.0, scales.float() - 127)[..., None]
            values[name] = full.flatten(-2).transpose(1, 2).contiguous().to(dtype)
            stored |= {f"{name}_blocks": codes, f"{name}_scales": scales}
        else:
            values[name] = stored[name] = weight.to(torch.bfloat16).to(dtype)
    _twins(plain, folder / "packed", values, stored, {"quant_method": "mxfp4", "modules_to_not_convert": []})
    return plain, folder / "packed"
