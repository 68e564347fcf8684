"""A loaded model whose weights are overwritten by those of one assignment after the other; only what differs is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moeq.models.experts import ExpertLayer, set_expert_weights, stacked_weights

ExpertPlace = tuple[str, int]  # module of experts, expert
Place = ExpertPlace | str  # the name of another module
Weights = dict[str, Tensor]  # [rows, inputs] each, by projection; `weight` of another module


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """Weights that stand in for a model's own: what identifies them, and how they are made when they are needed."""

    key: str
    make: Callable[[], Weights]


@dataclass
class Swapped:
    """A model with replacements in it; `originals` keeps, in the machine's memory, what was ever overwritten."""

    model: nn.Module
    layers: Sequence[ExpertLayer]
    present: dict[Place, str] = field(default_factory=dict)
    originals: dict[Place, Weights] = field(default_factory=dict)
    written: int = 0  # matrices of an expert, or modules, that were overwritten or given back

    def set(self, wanted: Mapping[Place, Replacement]) -> None:
        """Exactly these replacements: those that are there stay, others are overwritten or given back."""
        for place in [place for place in self.present if place not in wanted]:
            self._write(place, self.originals[place])
            del self.present[place]
        for place, replacement in wanted.items():
            if self.present.get(place) == replacement.key:
                continue
            if place not in self.originals:
                self.originals[place] = {k: weight.detach().cpu().clone() for k, weight in self._read(place).items()}
            own = self.originals[place]
            self._write(place, own | replacement.make())  # matrices that are not replaced are the model's own
            self.present[place] = replacement.key

    def _layer(self, name: str) -> ExpertLayer:
        return next(layer for layer in self.layers if layer.name == name)

    def _read(self, place: Place) -> Weights:
        if isinstance(place, str):
            return {"weight": self.model.get_submodule(place).get_parameter("weight").data}
        layer, expert = self._layer(place[0]), place[1]
        return {name: stack[0] for name, stack in stacked_weights(self.model, layer, slice(expert, expert + 1)).items()}

    def _write(self, place: Place, values: Weights) -> None:
        self.written += 1
        if isinstance(place, str):
            weight: Any = self.model.get_submodule(place).get_parameter("weight")
            with torch.no_grad():
                weight.copy_(values["weight"])
            return
        set_expert_weights(self.model, self._layer(place[0]), place[1], values)


def overwrite(model: nn.Module, layer: ExpertLayer, replacements: Mapping[ExpertPlace, Replacement]) -> None:
    """Put one layer's replacements into weights that nobody gives back, such as those of a layer that was just read."""
    for (_, expert), replacement in replacements.items():
        set_expert_weights(model, layer, expert, replacement.make())
