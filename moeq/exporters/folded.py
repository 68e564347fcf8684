"""A checkpoint in which some parameters have changed: the family's own class, names and types, all else byte for byte.

Changed parameters are written block by block as they become known, everything else is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moeq.artifacts.files import write_json, write_text
from moeq.artifacts.tensor_files import write_tensors
from moeq.exporters.front_matter import CARD, folded_card
from moeq.exporters.plain import METADATA, write_index, write_plain
from moeq.models.declared import FLOATS, is_dequantized, scale_keys
from moeq.models.disk_names import DiskNames
from moeq.models.loading import DTYPES
from moeq.models.side_files import find_side_files
from moeq.models.source import ModelSource
from moeq.models.weights import WeightReader

MAX_SHARD_BYTES = 5 * 10**9
CONFIG_DTYPES = ("dtype", "torch_dtype")


class ChangedCheckpoint:
    """An unfinished checkpoint beside its source.

    Tensors on disk that hold a changed parameter are written anew, with all other parameters in them. Of a checkpoint
    that is dequantized while loading, and where everything is stored as float32, that is all of them.
    """

    def __init__(
        self,
        source: ModelSource,
        reader: WeightReader,
        structure: nn.Module,
        directory: Path,
        changed: Iterable[str],
        *,
        float32: bool,
        gained: Iterable[str] = (),
        settings: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """reader: of the source, into the model that the changed parameters lie in; structure: the model on meta.

        gained: parameters that the source lacks; settings: keys of config.json that are other ones; trust_remote_code:
        whether code of the source's own goes along.
        """
        self._source, self._reader, self._directory, self._float32 = source, reader, directory, float32
        self._names = DiskNames(structure)
        self._sides = find_side_files(source.path, source.config, trust_remote_code)
        everything = float32 or is_dequantized(source)
        self._settings, self._gained = dict(settings or {}), set(gained)
        self._parameters = self._with_partners(reader.origins if everything else changed) | self._gained
        self._where: dict[str, str] = {}
        self._files = 0

    def _with_partners(self, parameters: Iterable[str]) -> set[str]:
        """Parameters of the disk with those that share a tensor there, directly or by way of others."""
        partners: set[str] = set()
        ahead = [name for name in parameters if name in self._reader.origins]
        while ahead:
            name = ahead.pop()
            if name not in partners:
                partners.add(name)
                ahead += [other for origin in self._reader.origins[name] for other in origin.targets]
        return partners

    def add(self, names: Iterable[str]) -> None:
        """Write those of these parameters and buffers that are to be written; they lie in memory as they became."""
        tensors = self._tensors(sorted(set(names) & self._parameters))
        if tensors:
            self._files += 1
            file = f"model-folded-{self._files:05d}.safetensors"
            whole = {key: tensor.contiguous() for key, tensor in tensors.items()}
            write_tensors(self._directory / file, whole, METADATA)
            self._where |= dict.fromkeys(tensors, file)

    def _tensors(self, changed: Iterable[str]) -> dict[str, Tensor]:
        """Some parameters of the model as they lie on disk."""
        model: Any = self._reader.model
        state = {name: self._stored(name, model.get_parameter_or_buffer(name).detach()) for name in changed}
        return self._names.on_disk(state) if state else {}

    def _stored(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.to("cpu", self.dtype_of(name)) if tensor.is_floating_point() else tensor.cpu()

    def dtype_of(self, name: str) -> torch.dtype:
        """What a parameter that has changed is stored in."""
        beside = f"{name.rpartition('.')[0]}.weight" if name in self._gained else name
        header = self._source.tensors[self._reader.origins[beside][0].key]
        return torch.float32 if self._float32 else _float_of(header.dtype)

    def finish(self) -> None:
        """Copy what has not changed; write the index, config.json and the side files."""
        gone = set(self._reader.keys(self._parameters)) | scale_keys(self._source)
        rest = set(self._source.tensors) - gone - set(self._where)
        if rest:
            self._where |= write_plain(self._source, rest, self._directory, MAX_SHARD_BYTES)
        write_index(self._directory, self._where)
        write_json(self._directory / "config.json", self._config())
        self._sides.copy(self._directory)
        write_text(self._directory / CARD, self._card())

    def _card(self) -> str:
        return folded_card(self._source)

    def _config(self) -> dict[str, Any]:
        config = {name: value for name, value in self._source.config.items() if name != "quantization_config"}
        config = self._sides.config(config) | self._settings
        if self._float32:
            config |= {name: "float32" for name in CONFIG_DTYPES if name in config}
        if isinstance(config.get("text_config"), dict):
            text = config["text_config"].items()
            config["text_config"] = {name: value for name, value in text if name != "quantization_config"}
        return config


def _float_of(name: str) -> torch.dtype:
    """The type of a tensor as headers name it; bfloat16 of FP8."""
    return DTYPES[FLOATS[name]] if name in FLOATS else torch.bfloat16
