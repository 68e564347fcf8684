"""A model whose decoder layers stay on disk: each is read when it is about to run and dropped after it.

The structure lies on the meta device; what is not in a decoder layer (embeddings, norms, head) is resident. A layer
is read lazily from safetensors through transformers' own conversion code, so that renaming, fusing and transposing stay
the library's. `model.forward` is untouched: rotary embeddings, masks and caches are the family's own, and anything that
calls the model (generate, lm-eval) works on a streamed one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from moeq.errors import ModelError
from moeq.models.experts import ExpertLayer, find_expert_layers
from moeq.models.loading import REMEDY, load_config, quiet_transformers
from moeq.models.source import ModelSource

Overlay = Callable[[nn.Module, ExpertLayer], None]  # changes a layer's experts right after it was read


def _return_memory() -> None:
    """Give what was freed back to the system: glibc keeps it otherwise, and a streamed model would grow too."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def blocks_of(model: nn.Module, layers: Iterable[ExpertLayer]) -> list[str]:
    """Paths of all entries of the module lists that hold the MoE layers, in order of execution."""
    lists: dict[str, None] = {}
    for layer in layers:
        parts = layer.name.split(".")
        for end in range(1, len(parts)):
            if isinstance(model.get_submodule(".".join(parts[:end])), nn.ModuleList):
                lists[".".join(parts[:end])] = None
                break
    return [f"{path}.{index}" for path in lists for index in range(len(model.get_submodule(path)))]  # type: ignore[arg-type]


class StreamedModel:
    """The model, its blocks, and how they are read; `bytes_read` counts what was asked of the disk."""

    def __init__(self, source: ModelSource, dtype: torch.dtype, device: torch.device) -> None:
        """Read what is resident. Raises ModelError when a weight is missing or of another shape."""
        self.source, self.device = source, device
        with quiet_transformers(), init_empty_weights(include_buffers=False):
            self.model: Any = AutoModelForCausalLM.from_config(load_config(source), dtype=dtype).eval()
        self.layers = find_expert_layers(self.model)
        self.blocks = blocks_of(self.model, self.layers)
        self.layer_of = {layer.name: layer for layer in self.layers}
        self.bytes_read = 0
        self.overlay: Overlay | None = None
        self.loaded: set[str] = set()
        self._pause: Callable[[str], None] | None = None
        self._handles = {path: safe_open(path, "pt") for path in source.files}
        mapping = get_model_conversion_mapping(self.model)
        self._config = LoadStateDictConfig(
            dtype=dtype,
            weight_mapping=mapping,
            device_map={"": device},
            dtype_plan=self.model._get_dtype_plan(dtype),
        )
        self._keys = self._keys_by_block(mapping)
        self._read(self._keys[""])
        self.model.tie_weights()
        self._to_device()
        self._check_resident()
        for path in self.blocks:
            block = self.model.get_submodule(path)
            block.register_forward_pre_hook(lambda _, __, at=path: self._enter(at))
            block.register_forward_hook(lambda _, __, ___, at=path: self._leave(at))

    def _keys_by_block(self, mapping: list[Any]) -> dict[str, list[str]]:
        """Keys on disk of every block; those of no block under the empty name."""
        renamings = [rule for rule in mapping if not isinstance(rule, WeightConverter)]
        converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
        names = self.model.state_dict()
        found: dict[str, list[str]] = {"": [], **{path: [] for path in self.blocks}}
        for key in self.source.tensors:
            target = rename_source_key(key, renamings, converters, self.model.base_model_prefix, names)[0]
            if target not in names and key in names:
                target = key
            if target in names:
                block = next((path for path in self.blocks if target.startswith(f"{path}.")), "")
                found[block].append(key)
        return found

    def _read(self, keys: list[str]) -> None:
        lazy = {key: self._handles[self.source.tensors[key].file].get_slice(key) for key in keys}
        self.bytes_read += sum(self.source.tensors[key].bytes for key in keys)
        with quiet_transformers():
            info, _ = convert_and_load_state_dict_in_model(self.model, lazy, self._config)
        for problem in ("mismatched_keys", "conversion_errors", "error_msgs"):
            if getattr(info, problem):
                first = sorted(map(str, getattr(info, problem)))[0]
                raise ModelError(f"{problem.replace('_', ' ')}: {first}", where=str(self.source.path), do=REMEDY)

    def _to_device(self) -> None:
        """Buffers made with the structure (rotary frequencies and the like) go where the weights go."""
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type != "meta":
                    module._buffers[name] = buffer.to(self.device)

    def _check_resident(self) -> None:
        """ModelError when a tensor outside the blocks was not on disk, or a block has none."""
        inside = tuple(f"{path}." for path in self.blocks)
        tensors = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        missing = [n for n, t in tensors.items() if t.device.type == "meta" and not n.startswith(inside)]
        missing += [path for path in self.blocks if not self._keys[path]]
        if missing:
            raise ModelError(
                f"{len(missing)} missing keys, the first: {missing[0]}", where=str(self.source.path), do=REMEDY
            )

    def load(self, block: str) -> None:
        """Read a block's weights; ModelError when one is missing or of another shape."""
        if block in self.loaded:
            return
        self._read(self._keys[block])
        module = self.model.get_submodule(block)
        missing = [name for name, weight in module.named_parameters() if weight.device.type == "meta"]
        if missing:
            where = str(self.source.path)
            raise ModelError(f"{len(missing)} missing keys, the first: {block}.{missing[0]}", where=where, do=REMEDY)
        self.loaded.add(block)
        if self.overlay is not None:
            for name, layer in self.layer_of.items():
                if name.startswith(f"{block}."):
                    self.overlay(self.model, layer)

    def only(self, block: str) -> None:
        """Have this block read and no other."""
        for other in self.loaded - {block}:
            self.drop(other)
        self.load(block)

    def drop(self, block: str) -> None:
        """Put a block's weights back on the meta device."""
        for module in self.model.get_submodule(block).modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    module._parameters[name] = nn.Parameter(
                        torch.empty_like(weight, device="meta"), requires_grad=False
                    )
        self.loaded.discard(block)
        _return_memory()

    @contextmanager
    def having(self, layer: ExpertLayer) -> Iterator[nn.Module]:
        """The model with the block of one MoE layer read."""
        block = next(path for path in self.blocks if layer.name.startswith(f"{path}."))
        here = block in self.loaded
        self.load(block)
        try:
            yield self.model
        finally:
            if not here:
                self.drop(block)

    @contextmanager
    def lockstep(self, pause: Callable[[str], None]) -> Iterator[None]:
        """Within the block, `pause(block)` is called instead of reading and dropping: the caller does both."""
        self._pause = pause
        try:
            yield
        finally:
            self._pause = None
            for block in list(self.loaded):
                self.drop(block)

    def _enter(self, block: str) -> None:
        if self._pause is not None:
            self._pause(block)
        else:
            self.load(block)

    def _leave(self, block: str) -> None:
        if self._pause is None:
            self.drop(block)
