"""What config.json and the headers say of a quantized checkpoint, without torch: method, scales, the type of most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moeq.errors import ModelError
from moeq.models.source import CONFIG, ModelSource
from moeq.runtimes import to_convert
from moeq_kernels.widths import METHOD, PARTS

DEQUANTIZED = ("fp8", "mxfp4")  # quant_method of what is dequantized while it is loaded
PACKED = {"F8_E4M3": 1, "I8": 2, "U8": 2}  # weights in a byte, by the dtype that headers name
FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # types of weights, as headers name them and torch


def quantization_of(config: dict[str, Any]) -> dict[str, Any]:
    """The quantization that a config.json declares, for the whole or for its language model; empty when none."""
    found = dict(
        config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config") or {}
    )
    if found and "quant_method" not in found and found == config.get("quantization"):
        found["quant_method"] = "mlx"  # whose own checkpoints say it twice, and nothing of who wrote them
    return found


def refuse_quantized(config: dict[str, Any], path: object) -> None:
    """ModelError for the config.json of a model that is quantized already, but in a format that is dequantized while
    it is loaded."""
    declared = quantization_of(config)
    method = declared.get("quant_method", "unknown")
    if declared and method not in DEQUANTIZED:
        do = f"give the original checkpoint; {to_convert(path, declared, 'dequantized', 'a plain one')}"
        raise ModelError(f"already quantized ({method})", where=str(Path(str(path)) / CONFIG), do=do)


def is_native(config: dict[str, Any]) -> bool:
    """Whether a config.json is of a checkpoint in moeq's own format."""
    return quantization_of(config).get("quant_method") == METHOD


def is_dequantized(source: ModelSource) -> bool:
    """Whether the checkpoint is quantized in a format that is dequantized while it is loaded."""
    return quantization_of(source.config).get("quant_method") in DEQUANTIZED


def scales_names(key: str) -> tuple[str, ...]:
    """The names under which the scales of a packed tensor may lie."""
    if key.endswith("_blocks"):
        return (f"{key.removesuffix('blocks')}scales",)
    stem = key.removesuffix("weight")
    return (f"{key}_scale_inv", *(f"{stem}{name}" for name in ("scale", "qscale_weight") if stem != key))


def scale_keys(source: ModelSource) -> set[str]:
    """The tensors on disk that are scales of packed ones (or of activations); none of a plain checkpoint."""
    if not is_dequantized(source):
        return set()
    return scales_of(source, source.tensors) | {key for key in source.tensors if key.endswith(".activation_scale")}


def scales_of(source: ModelSource, keys: Iterable[str]) -> set[str]:
    """The tensors on disk that are scales of those among some tensors that are packed."""
    packed = [key for key in keys if source.tensors[key].dtype in PACKED]
    return {scales for key in packed for scales in scales_names(key)} & set(source.tensors)


def main_dtype(source: ModelSource) -> str:
    """The type of most of the checkpoint's weights (float32, bfloat16 or float16); bfloat16 of FP8 and MXFP4 ones.

    Of a checkpoint that is packed, of those that are not; whether it can be loaded is for who loads it to say.
    """
    if is_dequantized(source):
        return "bfloat16"
    packed = bool(quantization_of(source.config))
    bytes_by_dtype: Counter[str] = Counter()
    for key, header in source.tensors.items():
        if not packed or (key.rpartition(".")[2] not in PARTS and header.dtype in FLOATS):
            bytes_by_dtype[header.dtype] += header.bytes
    main = max(bytes_by_dtype, key=lambda name: bytes_by_dtype[name], default="packed codes")
    if main not in FLOATS:
        what = f"weights of type {main} are not supported yet"
        raise ModelError(what, where=str(source.path), do="dequantize the checkpoint to bfloat16 first")
    return FLOATS[main]
