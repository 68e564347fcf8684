"""Reading tensors of a checkpoint into a model's parameters through transformers' own conversion code.

Which tensors on disk a parameter is made of, renaming, fusing, stacking and transposing are the library's rules; this
module indexes them by parameter, so that any part of a model can be read alone, and dequantizes FP8-block and MXFP4
checkpoints on the way.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    convert_and_load_state_dict_in_model,
    dot_natural_key,
    rename_source_key,
)
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.modeling_utils import LoadStateDictConfig
from transformers.quantizers.auto import AutoQuantizationConfig
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

from moeq.artifacts.tensor_files import stored_chunks
from moeq.errors import ModelError
from moeq.models.declared import is_dequantized, quantization_of, scale_keys, scales_names
from moeq.models.messages import asking_transformers, damaged, quiet_transformers, wrong_keys
from moeq.models.remote_source import RemoteTensor, prefetch, remote_of, tensor_of
from moeq.models.source import CONFIG, ModelSource


class BlockDequantize(Fp8Dequantize):  # type: ignore[misc]
    """FP8 weights times the scales of their blocks, in float32, rounded to bfloat16 and cast to the parameter's dtype.

    Always to bfloat16 first, so that a model computes the same in float32 as its unpacked (or exported) checkpoint.

    The library's own operation takes the block to be the shape divided by the scales' shape, which for a matrix that is
    no multiple of the block is an error or, where it happens to divide, the wrong block; here the last blocks are cut.
    """

    def _dequantize_one(self, quantized: Tensor, scales: Tensor, output_dtype: torch.dtype | None = None) -> Tensor:
        return self.dequantize(quantized, scales).to(output_dtype or torch.bfloat16)

    def dequantize(self, quantized: Tensor, scales: Tensor) -> Tensor:
        """The values of codes [M, N] (or stacks of them) with scales [ceil(M/m), ceil(N/n)], in bfloat16."""
        block = self.hf_quantizer.quantization_config.weight_block_size
        rows, columns = quantized.shape[-2:]
        regular = quantized.dtype == torch.float8_e4m3fn and block is not None and scales.dim() >= 2
        if not regular or tuple(scales.shape[-2:]) != (-(-rows // block[0]), -(-columns // block[1])):
            return super()._dequantize_one(quantized, scales, torch.bfloat16)  # type: ignore[no-any-return]
        exponents = scales.dtype == torch.uint8
        grid = (scales.float() - 127).exp2() if exponents else scales.float()
        full = grid.repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(block[1], -1)[..., :columns]
        return (quantized.float() * full).bfloat16()

    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """As the library's, and tensors without scales are cast to the parameter's dtype too."""
        dtype = self._get_target_dtype(kwargs.get("model"), kwargs.get("full_layer_name"))
        return {name: _cast(value, dtype) for name, value in super().convert(input_dict, **kwargs).items()}


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(value, list):
        return [_cast(tensor, dtype) for tensor in value]
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value


class _Fp8Quantizer(FineGrainedFP8HfQuantizer):  # type: ignore[misc]
    def get_load_operations(self) -> dict[str, Any]:
        return {"dequantize": BlockDequantize}


_QUANTIZERS = {"fp8": _Fp8Quantizer, "mxfp4": Mxfp4HfQuantizer}  # of every method in DEQUANTIZED
INTEGERS = ("I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64")  # types of which no weight is


def _quantizer(source: ModelSource) -> Any:
    if not is_dequantized(source):
        return None
    declared = quantization_of(source.config)
    with asking_transformers("read it", f"{source.path / CONFIG}: quantization_config"):
        config = AutoQuantizationConfig.from_dict(declared | {"dequantize": True})
        return _QUANTIZERS[declared["quant_method"]](config, pre_quantized=True)


def plain_header(source: ModelSource, key: str) -> tuple[str, tuple[int, ...], int]:
    """dtype, shape and bytes of a tensor as an unpacked checkpoint has it: FP8 becomes bfloat16."""
    header = source.tensors[key]
    if _scales_key(source, key) is None:
        return header.dtype, header.shape, header.bytes
    return "BF16", header.shape, 2 * header.bytes


def plain_chunks(source: ModelSource, key: str) -> Iterator[bytes]:
    """The bytes of a tensor as an unpacked checkpoint has it."""
    if source.read is not None:
        yield source.read(key).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return
    if _scales_key(source, key) is None:
        yield from stored_chunks(source.tensors[key])
    else:
        yield _plain(source, key).contiguous().view(torch.uint8).numpy().tobytes()


def plain_tensor(source: ModelSource, key: str) -> Tensor:
    """A whole tensor as an unpacked checkpoint has it."""
    return _plain(source, key) if source.read is None else source.read(key)


def _plain(source: ModelSource, key: str) -> Tensor:
    """A tensor of a file as an unpacked checkpoint has it."""
    names = [key, scales] if (scales := _scales_key(source, key)) is not None else [key]
    tensors = [tensor_of(source.tensors[name], name) for name in names]
    return BlockDequantize(_quantizer(source)).dequantize(*tensors) if len(tensors) > 1 else tensors[0]


def _plain_tensors(source: ModelSource) -> Iterator[tuple[str, Tensor]]:
    """The floating-point tensors of a checkpoint, as they are unpacked, in natural order, one read at a time."""
    for key in sorted(set(source.tensors) - scale_keys(source), key=dot_natural_key):
        tensor = _plain(source, key)
        if tensor.is_floating_point():  # in a type in which torch knows what is finite
            yield key, tensor.float() if tensor.element_size() == 1 else tensor


def first_not_finite(source: ModelSource) -> str | None:
    """The first tensor of a checkpoint, in natural order, with a value that is not finite; None when there is none.

    All of it is read, one tensor at a time.
    """
    return next((key for key, tensor in _plain_tensors(source) if not bool(torch.isfinite(tensor).all())), None)


def first_all_zero(source: ModelSource) -> str | None:
    """The first matrix of a checkpoint, in natural order, without a weight other than 0; None when there is none."""
    return next((key for key, tensor in _plain_tensors(source) if tensor.dim() > 1 and not bool(tensor.any())), None)


def largest(source: ModelSource) -> tuple[str, float]:
    """The tensor of a checkpoint with the weight of the largest magnitude, and this magnitude; all of it is read."""
    magnitudes = ((float(tensor.abs().max()), key) for key, tensor in _plain_tensors(source) if tensor.numel())
    magnitude, key = max(magnitudes, default=(0.0, ""))
    return key, magnitude


def _scales_key(source: ModelSource, key: str) -> str | None:
    """The scales of an FP8 tensor of a checkpoint that is dequantized while loading, None for every other tensor."""
    if source.tensors[key].dtype != "F8_E4M3" or not is_dequantized(source):
        return None
    return next((name for name in scales_names(key) if name in source.tensors), None)


class _Scaled:
    """A tensor of FP8 codes that is dequantized when it is indexed, as safetensors' own slices are read; of a stack
    [E, M, N] the experts that are asked for."""

    def __init__(self, codes: Any, scales: Any, operation: BlockDequantize) -> None:
        self._codes, self._scales, self._operation = codes, scales, operation

    def get_shape(self) -> list[int]:
        return list(self._codes.get_shape())

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, index: Any) -> Tensor:
        shapes = self.get_shape(), self._scales.get_shape()
        if isinstance(index, slice) and len(shapes[0]) == 3 and shapes[1][:1] == shapes[0][:1]:
            return self._operation.dequantize(self._codes[index], self._scales[index])
        return self._operation.dequantize(self._codes[...], self._scales[...])[index]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A tensor on disk, the parameters that it is part of, and the converter's pattern that it matched (if any)."""

    key: str
    targets: tuple[str, ...]
    pattern: str | None


class WeightReader:
    """Index of a checkpoint by the parameters of a model, and the reading of any part; `bytes_read` counts."""

    def __init__(self, source: ModelSource, model: Any, dtype: torch.dtype, device: torch.device) -> None:
        """model: the structure, with meta parameters where nothing was read yet; it is filled in place by `read`."""
        self.source, self.model = source, model
        self.bytes_read = 0
        self.quantizer = _quantizer(source)
        self.mapping = get_model_conversion_mapping(model, hf_quantizer=self.quantizer)
        self.converters = {
            pattern: rule
            for rule in self.mapping
            if isinstance(rule, WeightConverter)
            for pattern in rule.source_patterns
        }
        self._config = LoadStateDictConfig(
            dtype=dtype,
            weight_mapping=self.mapping,
            hf_quantizer=self.quantizer,
            device_map={"": device},
            dtype_plan=model._get_dtype_plan(dtype),
        )
        self._files: dict[Any, Any] = {}
        self.names = set(model.state_dict())
        self.origins: dict[str, list[Origin]] = {}
        self.unexpected: list[str] = []
        self.scales: dict[str, str] = {}  # {codes: their scales} where the library's rules have no place for these
        self._index()
        self._take_scales()
        self._check_scales()

    def _check_scales(self) -> None:
        """ModelError for codes without scales, which the library would take for the weights themselves.

        Codes are FP8, and integers that a parameter in floating point is made of; those of a checkpoint whose
        config.json declares no quantization that is dequantized here have none, whatever lies beside them.
        """
        dequantized, scales = is_dequantized(self.source), scale_keys(self.source)
        state = self.model.state_dict()
        floating = {
            origin.key
            for name, origins in self.origins.items()
            if state[name].is_floating_point()
            for origin in origins
        }
        for key, header in self.source.tensors.items():
            scaled = any(name in self.source.tensors for name in scales_names(key))
            codes = header.dtype in INTEGERS and key in floating and key not in scales
            if (header.dtype == "F8_E4M3" and not scaled) or (codes and not (scaled and dequantized)):
                what = f"{key} has no scales that config.json declares, only {header.dtype} codes"
                raise ModelError(what, where=str(header.file), do="use a checkpoint in bfloat16, float16 or float32")

    def _index(self) -> None:
        """Ask the library's rules for the parameter of every key, in the order in which it would load them."""
        renamings = [rule for rule in self.mapping if not isinstance(rule, WeightConverter)]
        converters = [rule for rule in self.mapping if isinstance(rule, WeightConverter)]
        prefix, names = self.model.base_model_prefix, self.model.state_dict()
        for key in sorted(self.source.tensors, key=dot_natural_key):
            target, pattern = rename_source_key(key, renamings, converters, prefix, names)
            if target not in names and key in names:
                target, pattern = rename_source_key(key, [], [], prefix, names)
            if target not in names:
                self.unexpected.append(key)
                continue
            targets = [target]
            if pattern is not None:
                first, *others = self.converters[pattern].target_patterns
                targets += [target.replace(first, other) for other in others]
            origin = Origin(key=key, targets=tuple(targets), pattern=pattern)
            for name in targets:
                self.origins.setdefault(name, []).append(origin)

    def _take_scales(self) -> None:
        """Let FP8 codes of parameters that are no `weight` of a module, such as stacks of experts, have their scales:
        the library would take the codes for the weights."""
        if not self.unexpected:
            return
        packed = {name: key for key in self.source.tensors if (name := _scales_key(self.source, key)) is not None}
        self.scales = {packed[name]: name for name in self.unexpected if name in packed}
        self.unexpected = [key for key in self.unexpected if key not in packed]
        for origins in self.origins.values():
            more = [replace(origin, key=self.scales[origin.key]) for origin in origins if origin.key in self.scales]
            origins += more

    def keys(self, parameters: Iterable[str]) -> list[str]:
        """The tensors on disk that these parameters are made of, scales included, each once."""
        return list(dict.fromkeys(origin.key for name in parameters for origin in self.origins.get(name, ())))

    def bytes(self, parameters: Iterable[str]) -> int:
        """Bytes on disk of these parameters."""
        return sum(self.source.tensors[key].bytes for key in self.keys(parameters))

    def handle(self, key: str) -> Any:
        """A lazy view of one tensor on disk; indexing it reads, and dequantizes what the library would not. Of a source
        with a reader of its own, the tensor."""
        if key in self.scales:
            return _Scaled(self._stored(key), self._stored(self.scales[key]), BlockDequantize(self.quantizer))
        return self._stored(key)

    def _stored(self, key: str) -> Any:
        """A lazy view of one tensor as it lies on disk."""
        if self.source.read is not None:
            return self.source.read(key)
        path = self.source.tensors[key].file
        if remote_of(self.source.tensors[key]) is not None:
            return RemoteTensor(self.source.tensors[key])
        if path not in self._files:
            self._files[path] = safe_open(path, "pt")
        return self._files[path].get_slice(key)

    def converter(self, pattern: str) -> Any:
        """A fresh copy of the converter that owns a pattern."""
        return deepcopy(self.converters[pattern])

    def read(self, parameters: Iterable[str]) -> set[str]:
        """Read these parameters (and buffers) into the model; returns those for which the disk has nothing.

        Raises ModelError when one is of another shape or cannot be converted.
        """
        wanted = set(parameters)
        keys = self.keys(wanted)
        self.bytes_read += sum(self.source.tensors[key].bytes for key in keys)
        self.prefetch(keys)
        taken = set(self.scales.values())
        with quiet_transformers():
            info, _ = convert_and_load_state_dict_in_model(
                self.model, {key: self.handle(key) for key in keys if key not in taken}, self._config
            )
        for problem in ("mismatched_keys", "conversion_errors", "error_msgs"):
            if getattr(info, problem):
                raise damaged(self.source.path, f"{problem.replace('_', ' ')}: {min(map(str, getattr(info, problem)))}")
        return wanted & set(info.missing_keys)

    def prefetch(self, keys: Iterable[str]) -> None:
        """Begin to fetch tensors that lie in an object store, in the order in which the library reads them."""
        prefetch(self.source.tensors[key] for key in sorted(keys, key=dot_natural_key))

    def check_unexpected(self, but: Collection[str] = ()) -> None:
        """ModelError when the disk has tensors that are no part of the model (and that its family does not ignore)."""
        left = [key for key in self.unexpected if key not in but and not is_ignored(self.model, key)]
        if left:
            raise wrong_keys(self.source.path, "unexpected keys", left)

    def check_missing(self, missing: Iterable[str]) -> None:
        """ModelError for parameters and buffers without values, and for those that the family wants on every disk."""
        patterns = self.model._keys_to_ignore_on_load_missing or ()
        lacking = [
            name
            for name in sorted(missing)
            if self.model.get_parameter_or_buffer(name).device.type == "meta"
            or not any(re.search(pattern, name) for pattern in patterns)
        ]
        if lacking:
            raise wrong_keys(self.source.path, "missing keys", lacking)


def is_ignored(model: Any, key: str) -> bool:
    """Whether transformers passes over a tensor on disk that is no part of the model."""
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"position_ids$"]
    return any(re.search(pattern, key) for pattern in patterns)


def owner(model: nn.Module, name: str) -> tuple[Any, str]:
    """The module that holds a parameter or buffer, and its name there."""
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf
