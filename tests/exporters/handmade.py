"""Checkpoints in the layouts of other tools, written by hand: their experts' matrices rounded, the rest as it was."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from packed_layers import any_codes
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny
from torch import Tensor

from moeq.exporters import compressed_tensors
from moeq.numerics.layouts import affine_parts, row_words
from moeq_kernels import exl3
from moeq_kernels.packed import PackedWeight
from moeq_kernels.packing import pack, unpack
from moeq_kernels.widths import Encoding

SIZES = {
    "hidden_size": 64, "vocab_size": 128, "num_attention_heads": 4, "head_dim": 16, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
MIXTRAL = SIZES | {"intermediate_size": 96, "num_local_experts": 3}
QWEN = SIZES | {"moe_intermediate_size": 96, "num_experts": 3, "num_experts_per_tok": 2}
GROUP = 32
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight$")
Widths = Callable[[int, int, str], int]  # layer, expert, projection on disk -> bits


def model(folder: Path, family: str = "mixtral", **changed: int) -> Path:
    """A tiny random model in float32 whose matrices every layout can hold, unless other sizes are asked for."""
    return save_tiny(folder, family, **((MIXTRAL if family == "mixtral" else QWEN) | changed))


def rounded(weight: Tensor, bits: int, *, symmetric: bool = True, group_size: int = GROUP) -> PackedWeight:
    """A matrix [N, K] rounded to a grid a group."""
    rows, inputs = weight.shape
    groups = weight.float().view(rows, -1, inputs if group_size == -1 else group_size)
    top = 2**bits - 1
    if symmetric:
        zero = torch.full_like(groups[..., :1], 2 ** (bits - 1))
        scale = (groups.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 0.5)).half().float()
    else:
        low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True)
        scale = ((high - low) / top).half().float()
        zero = (-low / scale).round().clamp(1, top)
    codes = (groups / scale + zero).round().clamp(0, top).view(rows, inputs).to(torch.uint8)
    return PackedWeight(
        codes=pack(codes, bits),
        scales=scale.squeeze(-1).half(),
        zeros=None if symmetric else pack(zero.squeeze(-1).to(torch.uint8), bits),
        bits=bits,
        group_size=group_size,
        inputs=inputs,
        symmetric=symmetric,
    )


def gptq_parts(packed: PackedWeight, *, second: bool = False, g_idx: bool = True) -> dict[str, Tensor]:
    """qweight, qzeros, scales and g_idx of a packed matrix; second: zero points as they are.

    Words are filled up with zeros, as by GPTQModel."""
    zeros = _zeros(packed) if second else (_zeros(packed).short() - 1).remainder(2**packed.bits).byte()
    parts = {
        "qweight": row_words(packed.codes).mT.contiguous(),
        "qzeros": row_words(pack(zeros.mT.contiguous(), packed.bits)),
        "scales": packed.scales.mT.contiguous(),
    }
    return parts | ({"g_idx": (torch.arange(packed.inputs) // packed.group_size).int()} if g_idx else {})


def _zeros(packed: PackedWeight) -> Tensor:
    if packed.zeros is None:
        return torch.full(packed.scales.shape, 2 ** (packed.bits - 1), dtype=torch.uint8)
    return unpack(packed.zeros, packed.bits, packed.scales.shape[-1])


def awq_parts(packed: PackedWeight) -> dict[str, Tensor]:
    """qweight, qzeros and scales of a packed matrix of 4 bits: code by code."""

    def words(codes: Tensor) -> Tensor:
        """Codes [N, X] as words [X, N/8]."""
        made = torch.zeros(codes.shape[1], len(codes) // 8, dtype=torch.int64)
        for place, row in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            made |= codes[row::8].mT.long() << 4 * place
        return made.to(torch.uint32).view(torch.int32)

    codes = unpack(packed.codes, packed.bits, packed.inputs)
    return {"qweight": words(codes), "qzeros": words(_zeros(packed)), "scales": packed.scales.mT.contiguous()}


def compressed_parts(packed: PackedWeight) -> dict[str, Tensor]:
    """weight_packed, weight_scale, weight_shape and, of asymmetric grids, weight_zero_point."""
    parts = {
        "weight_packed": row_words(packed.codes),
        "weight_scale": packed.scales,
        "weight_shape": torch.tensor([packed.codes.shape[0], packed.inputs]),
    }
    if packed.zeros is not None:
        parts["weight_zero_point"] = row_words(pack(_zeros(packed).mT.contiguous(), packed.bits)).mT.contiguous()
    return parts


def float_parts(packed: PackedWeight) -> dict[str, Tensor]:
    """What compressed-tensors has of any codes of NVFP4, in the place of a packed matrix."""
    return compressed_tensors.float_tensors(any_codes(len(packed.scales), packed.inputs, 4, Encoding.floating("nvfp4")))


def humming_parts(packed: PackedWeight) -> dict[str, Tensor]:
    """weight, weight_scale and, of asymmetric grids, zero_point."""
    parts = {"weight": row_words(packed.codes), "weight_scale": packed.scales}
    if packed.zeros is not None:
        parts["zero_point"] = row_words(pack(_zeros(packed).mT.contiguous(), packed.bits)).mT.contiguous()
    return parts


def mlx_parts(packed: PackedWeight) -> dict[str, Tensor]:
    """weight, scales and biases."""
    return affine_parts(packed, torch.float16)


def exl3_parts(packed: PackedWeight) -> dict[str, Tensor]:
    """trellis, suh, svh and mul1 of any codes of 2 bits of EXL3, in the place of a packed matrix."""
    rows, inputs = len(packed.scales), packed.inputs
    made = any_codes(rows, inputs, 2, Encoding.exl3())
    weight = exl3.weight_of(made.codes, made.scales.squeeze(-1), 2, inputs, "mul1")
    return {key.rpartition(".")[2]: tensor for key, tensor in weight.tensors("").items()}


def write(
    source: Path,
    target: Path,
    declared: dict[str, Any],
    parts: Callable[[PackedWeight], dict[str, Tensor]],
    widths: Widths = lambda *_: 4,
    *,
    rename: Callable[[str], str] = lambda module: module,
    symmetric: bool = True,
    group_size: int = GROUP,
) -> dict[str, Tensor]:
    """Write a checkpoint; returns the experts' values by their keys in the source. 16 bits: the matrix stays."""
    shutil.copytree(source, target)
    tensors, values = {}, {}
    for key, tensor in load_file(source / "model.safetensors").items():
        found = EXPERT.match(key)
        bits = widths(int(re.search(r"layers\.(\d+)", key)[1]), int(found[2]), found[3]) if found else 16
        if bits == 16:
            name = key if found is None else f"{rename(key.removesuffix('.weight'))}.weight"
            tensors[name] = values[key] = tensor
            continue
        packed = rounded(tensor, bits, symmetric=symmetric, group_size=group_size)
        values[key] = packed.dequantize()
        module = rename(key.removesuffix(".weight"))
        tensors |= {f"{module}.{name}": part.contiguous() for name, part in parts(packed).items()}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text("utf-8"))
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": declared}), "utf-8")
    return values


def twin(source: Path, target: Path, values: dict[str, Tensor]) -> Path:
    """The model with these values, plain."""
    shutil.copytree(source, target)
    save_file(values, target / "model.safetensors", {"format": "pt"})
    return target


def gptq_config(dynamic: dict[str, Any] | None = None, **changed: Any) -> dict[str, Any]:
    whole = {
        "quant_method": "gptq", "checkpoint_format": "gptq", "bits": 4, "group_size": GROUP, "sym": True,
        "desc_act": False, "lm_head": False,
    }  # fmt: skip
    rules = {"-:.*\\.mlp\\.gate$": {}, "-:.*self_attn.*": {}, "-:lm_head": {}} | (dynamic or {})
    return whole | {"dynamic": rules} | changed


def auto_round_config(extra: dict[str, Any] | None = None, **changed: Any) -> dict[str, Any]:
    left = {".*\\.mlp\\.gate$": {"bits": 16, "data_type": "float"}, ".*self_attn.*": {"bits": 16, "data_type": "float"}}
    whole = {
        "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": GROUP,
        "sym": True, "data_type": "int", "block_name_to_quantize": "model.layers",
    }  # fmt: skip
    return whole | {"extra_config": left | (extra or {})} | changed


def awq_config(**changed: Any) -> dict[str, Any]:
    whole = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    return whole | {"modules_to_not_convert": ["gate"]} | changed


def compressed_config(bits: int = 4, *, symmetric: bool = True, groups: dict[str, Any] | None = None) -> dict[str, Any]:
    weights = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": GROUP, "strategy": "group",
    }  # fmt: skip
    one = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": groups or one, "ignore": ["lm_head", "re:.*self_attn.*", "re:.*gate$"],
    }  # fmt: skip


def float_config(**changed: Any) -> dict[str, Any]:
    weights = {
        "num_bits": 4, "type": "float", "symmetric": True, "group_size": 16, "strategy": "tensor_group",
    }  # fmt: skip
    one = {"group_0": {"targets": ["Linear"], "weights": weights | changed, "format": "nvfp4-pack-quantized"}}
    return compressed_config(groups=one) | {"format": "nvfp4-pack-quantized"}


def exl3_config() -> dict[str, Any]:
    return {"quant_method": "exl3", "version": "1.4.1", "bits": 2.0, "head_bits": 16, "codebook": "mul1"}


def mlx_config() -> dict[str, Any]:
    return {"quant_method": "mlx", "group_size": GROUP, "bits": 4, "mode": "affine"}


def humming_config(dynamic: dict[str, Any] | None = None, **changed: Any) -> dict[str, Any]:
    whole = {"quant_method": "humming", "b_dtype": "uint4", "weight_scale_group_size": GROUP}
    rules = {"-:.*\\.mlp\\.gate$": {}, "-:.*self_attn.*": {}} | (dynamic or {})
    return whole | {"dynamic": rules, "ignore": ["lm_head"]} | changed
