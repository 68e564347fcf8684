"""Reading single parameters of a model, whatever tensors on disk they are made of; none of them is kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moeq.models.loading import skeleton, tied
from moeq.models.source import ModelSource
from moeq.models.weights import WeightReader, owner


class ParameterReader:
    """Parameters and stored buffers by their names in memory, in float32."""

    def __init__(self, source: ModelSource, trust_remote_code: bool = False) -> None:
        self._model: Any = skeleton(source, torch.float32, trust_remote_code)
        self._reader = WeightReader(source, self._model, torch.float32, torch.device("cpu"))
        self._tied = tied(self._model)

    def made_of(self, keys: set[str]) -> list[str]:
        """Names of what these tensors on disk are a part of."""
        origins = self._reader.origins.items()
        return [name for name, parts in origins if any(origin.key in keys for origin in parts)]

    def keys(self, name: str) -> list[str]:
        """The tensors on disk that a parameter is made of."""
        return self._reader.keys([self._stored(name) or name])

    def read(self, name: str) -> Tensor | None:
        """A parameter, or the one on disk that it is tied to; None where the disk has neither.

        ModelError where what the disk has does not make it.
        """
        stored = self._stored(name)
        if stored is None:
            return None
        missing = self._reader.read([stored])
        value: Tensor = self._model.get_parameter_or_buffer(stored).detach()
        for other in {target for origin in self._reader.origins[stored] for target in origin.targets}:
            self._forget(other)
        return None if stored in missing else value

    def _stored(self, name: str) -> str | None:
        names = (name, *self._tied.get(name, ()))
        return next((one for one in names if one in self._reader.origins), None)

    def _forget(self, name: str) -> None:
        module, leaf = owner(self._model, name)
        if leaf in module._parameters:
            empty = torch.empty_like(module._parameters[leaf], device="meta")
            module._parameters[leaf] = nn.Parameter(empty, requires_grad=False)
