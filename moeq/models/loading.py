"""Loading models and tokenizers through transformers, with every silent failure made an error."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, rename_source_key

from moeq.errors import ModelError
from moeq.models.experts import ExpertLayer, find_expert_layers
from moeq.models.source import VOCABULARIES, ModelSource

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HEADER_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
REMEDY = "check that the directory is a complete transformers checkpoint"


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and advice, which belong on nobody's report; errors still raise."""
    logger = logging.getLogger("transformers")
    level = logger.level
    transformers.utils.logging.disable_progress_bar()
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def resolve_device(device: str) -> torch.device:
    """`auto` is the GPU when there is one; ModelError for a GPU that is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError("no CUDA device here", where=f"device {device}", do="use device: cpu or auto")
    try:
        return torch.device(device)
    except RuntimeError:
        raise ModelError("unknown device", where=f"device {device}", do="use auto, cpu or cuda") from None


def memory_bytes(device: torch.device) -> int:
    """Memory of the machine, or of the GPU."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def source_dtype(source: ModelSource) -> torch.dtype:
    """The dtype of most of the checkpoint's weights (float32, bfloat16 or float16)."""
    bytes_by_dtype: dict[str, int] = {}
    for header in source.tensors.values():
        bytes_by_dtype[header.dtype] = bytes_by_dtype.get(header.dtype, 0) + header.bytes
    main = max(bytes_by_dtype, key=lambda name: bytes_by_dtype[name])
    if main not in HEADER_DTYPES:
        raise ModelError(
            f"weights of type {main} are not supported yet",
            where=str(source.path),
            do="dequantize the checkpoint to bfloat16 first",
        )
    return HEADER_DTYPES[main]


def compute_dtype(source: ModelSource, wanted: str, device: torch.device) -> torch.dtype:
    """`auto` keeps the checkpoint's dtype, except float16 on a CPU, which computes in float32."""
    if wanted != "auto":
        return DTYPES[wanted]
    dtype = source_dtype(source)
    return torch.float32 if dtype == torch.float16 and device.type == "cpu" else dtype


def load_config(source: ModelSource) -> Any:
    """The transformers configuration; ModelError for an unknown or inconsistent one."""
    try:
        return AutoConfig.from_pretrained(source.path)
    except Exception as error:  # transformers raises ValueError, KeyError, OSError and its validators' own types
        raise ModelError(
            f"transformers cannot read the configuration ({_line(error)})", where=str(source.path), do=REMEDY
        ) from error


def skeleton(source: ModelSource) -> nn.Module:
    """The model on the meta device: structure without weights."""
    config = load_config(source)
    if getattr(config, "quantization_config", None) is not None:
        method = config.quantization_config.get("quant_method", "unknown")
        raise ModelError(f"already quantized ({method})", where=str(source.path), do="give the original checkpoint")
    try:
        with quiet_transformers(), init_empty_weights(include_buffers=False):
            return AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]
    except Exception as error:
        raise ModelError(
            f"transformers cannot build it as a causal language model ({_line(error)})",
            where=str(source.path),
            do="see the table of families in the README",
        ) from error


def expert_keys(source: ModelSource, model: nn.Module, layers: list[ExpertLayer]) -> set[str]:
    """The tensors on disk that hold routed experts, through transformers' own renaming rules."""
    mapping = get_model_conversion_mapping(model)
    renamings = [rule for rule in mapping if not isinstance(rule, WeightConverter)]
    converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
    names = model.state_dict()
    wanted = {f"{layer.name}.{part}" for layer in layers for part in layer.parameters}
    prefix = getattr(model, "base_model_prefix", None)
    found = {key for key in source.tensors if rename_source_key(key, renamings, converters, prefix, names)[0] in wanted}
    _check_shapes(source, found)
    elements = sum(_elements(source.tensors[key].shape) for key in found)
    expected = sum(model.get_parameter(name).numel() for name in wanted)
    if elements != expected:
        raise ModelError(
            f"expert tensors hold {elements} weights, the configuration wants {expected}",
            where=str(source.path),
            do=REMEDY,
        )
    return found


def _check_shapes(source: ModelSource, keys: set[str]) -> None:
    """The same matrix of all experts of a layer has one shape; transformers would not say which one has another."""
    alike: dict[str, dict[tuple[int, ...], list[str]]] = {}
    for key in sorted(keys):
        parts = key.split(".")
        last = max((index for index, part in enumerate(parts) if part.isdigit()), default=0)
        of_all = ".".join([*parts[:last], "*", *parts[last + 1 :]])
        alike.setdefault(of_all, {}).setdefault(source.tensors[key].shape, []).append(key)
    for shapes in alike.values():
        if len(shapes) > 1:
            odd, usual = (pick(shapes, key=lambda shape: len(shapes[shape])) for pick in (min, max))
            raise ModelError(
                f"{shapes[odd][0]} is {list(odd)}, the other experts' are {list(usual)}",
                where=str(source.path),
                do=REMEDY,
            )


def load_model(source: ModelSource, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Load for inference; ModelError when any weight is missing, unexpected or of another shape."""
    try:
        with quiet_transformers():
            model, info = AutoModelForCausalLM.from_pretrained(
                source.path, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
            )
    except Exception as error:
        raise ModelError(f"transformers cannot load it ({_line(error)})", where=str(source.path), do=REMEDY) from error
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(problem):
            first = sorted(map(str, info[problem]))[0]
            raise ModelError(
                f"{len(info[problem])} {problem.replace('_', ' ')}, the first: {first}",
                where=str(source.path),
                do=REMEDY,
            )
    return model.eval().to(device)  # type: ignore[no-any-return]


def load_tokenizer(source: ModelSource) -> Any:
    """The model's tokenizer; ModelError when it is missing or broken."""
    if not any((source.path / name).is_file() for name in VOCABULARIES):
        raise ModelError(
            "no tokenizer (tokenizer.json, tokenizer.model or vocab.*)",
            where=str(source.path),
            do="copy the tokenizer files of the model into the directory",
        )
    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(source.path)
    except Exception as error:
        raise ModelError(
            f"the tokenizer cannot be loaded ({_line(error)})",
            where=str(source.path),
            do="copy the tokenizer files of the model again",
        ) from error


def describe(source: ModelSource) -> tuple[nn.Module, list[ExpertLayer]]:
    """Skeleton and expert layers, from the configuration alone."""
    model = skeleton(source)
    return model, find_expert_layers(model)


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
