"""How a family names its parameters on disk, by transformers' own rules for saving.

Letters: E experts, e one of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, apply_renamings, revert_weight_conversion

from moeq.models.experts import ExpertLayer
from moeq.models.kinds.base import Matrices, with_parameters

Names = dict[tuple[int, str], str]  # {(expert, projection): key}
_ROWS, _INPUTS = 2, 3  # of an expert's first matrices in a sketch of the layer; its down_proj is the other way round


class DiskNames:
    """Names and tensors on disk of a model's parameters, as `save_pretrained` would write them."""

    def __init__(self, model: Any) -> None:
        """model: the structure, which may lie on the meta device."""
        self.model = model
        self._tails: dict[Any, Names | None] = {}
        self._forward = [rule for rule in get_model_conversion_mapping(model) if not isinstance(rule, WeightConverter)]
        self._renamings = [
            rule.reverse_transform()
            for rule in reversed(get_model_conversion_mapping(model, add_legacy=False))
            if not isinstance(rule, WeightConverter | PrefixChange)
        ]

    def renamed(self, name: str) -> str:
        """A parameter's name on disk, where it is stored as it is in memory."""
        return str(apply_renamings(name, self._renamings))

    def in_memory(self, key: str) -> str:
        """What a tensor on disk that is stored as it is in memory is called there."""
        return str(apply_renamings(key, self._forward))

    def experts(self, layer: ExpertLayer) -> Names | None:
        """{(expert, projection): key} of a family that keeps every matrix [rows, inputs] of an expert on its own.

        None where experts, or an expert's matrices, share a tensor on disk, or lie transposed in it. What is found of
        one layer is taken for all that are alike, where all its keys begin with its name.
        """
        if layer.kind.name != "stacked":
            return None
        alike, start = (layer.num_experts, layer.projections, layer.parameters), self.renamed(f"{layer.name}.")
        tails = self._tails.get(alike)
        if tails is not None:
            return {which: start + tail for which, tail in tails.items()}
        keys = self._experts(layer)
        if alike not in self._tails:
            self._tails[alike] = None
            if keys is not None and all(key.startswith(start) for key in keys.values()):
                self._tails[alike] = {which: key.removeprefix(start) for which, key in keys.items()}
        return keys

    def _experts(self, layer: ExpertLayer) -> Names | None:
        sketch = with_parameters(self.model.get_submodule(layer.name), _sketch(layer))
        shapes = {name: (_INPUTS, _ROWS) if name == "down_proj" else (_ROWS, _INPUTS) for name in layer.projections}
        numbers: dict[tuple[int, str], float] = {}
        for expert in range(layer.num_experts):
            for projection, view in layer.kind.views(sketch, expert).items():
                if view.shape != shapes[projection]:
                    return None
                numbers[expert, projection] = float(len(numbers) + 1)
                view.fill_(numbers[expert, projection])
        saved = self._saved(layer, sketch)
        keys = {float(tensor.flatten()[0]): key for key, tensor in saved.items() if tensor.dim() == 2}
        names: Names = {}
        for (expert, projection), number in numbers.items():
            key = keys.get(number)
            if key is None or saved[key].shape != shapes[projection] or not bool((saved[key] == number).all()):
                return None
            names[expert, projection] = key
        return names

    def layer(self, layer: ExpertLayer, experts: Iterable[tuple[Matrices, Matrices]]) -> dict[str, Tensor]:
        """{key: tensor} of one layer's routed experts as on disk, given matrices and biases of each in turn.

        What a parameter holds beyond them, such as LongCat's zero experts, is zero.
        """
        module = self.model.get_submodule(layer.name)
        whole: nn.Module | None = None
        for expert, (weights, biases) in enumerate(experts):
            if whole is None:
                dtype = next(iter(weights.values())).dtype
                empty = {name: torch.zeros(module.get_parameter(name).shape, dtype=dtype) for name in layer.parameters}
                whole = with_parameters(module, empty)
            for projection, view in layer.kind.views(whole, expert).items():
                view.copy_(weights[projection])
            for projection, stack in layer.kind.biases(whole, slice(expert, expert + 1)).items():
                stack[0].copy_(biases[projection])
        assert whole is not None
        return self._saved(layer, whole)

    def _saved(self, layer: ExpertLayer, module: nn.Module) -> dict[str, Tensor]:
        return self.on_disk({f"{layer.name}.{name}": module.get_parameter(name).data for name in layer.parameters})

    def on_disk(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Some parameters as tensors on disk, given all that share one."""
        return dict(revert_weight_conversion(self.model, state))


def _sketch(layer: ExpertLayer) -> dict[str, Tensor]:
    """The layer's parameters with few rows and inputs."""
    experts, first = layer.num_experts, _ROWS * (len(layer.projections) - 1)
    shapes = {"down_proj": (experts, _INPUTS, _ROWS), "down_proj_bias": (experts, _INPUTS)}
    return {
        name: torch.zeros(shapes.get(name, (experts, first) if name.endswith("_bias") else (experts, first, _INPUTS)))
        for name in layer.parameters
    }
