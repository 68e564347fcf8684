"""The method `moeq` of a runtime, whichever it is: which of a model's modules are packed, and how."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from moeq_kernels.checkpoint import Stored
from moeq_kernels.parts import LayerParts
from moeq_kernels.widths import FULL, METHOD, Width

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
HEAD = "lm_head"  # what heads are called, as modules
EXPERT = re.compile(r"(?:^|\.)layers\.(\d+\..+)\.(\d+)\.(\w+)\.(\w+)$")  # where, expert, projection, part
GUARDS = re.compile(r"\.experts\.(?:gate_up_proj|gate_proj|up_proj|down_proj)(?:_bias)?$")  # of stacks of experts


class Experts(Protocol):
    """The experts of a layer as a runtime has them."""

    parts: LayerParts


class Method:
    """What configurations of the method in vLLM and SGLang share; a base before the runtime's own.

    stored: what the checkpoint says of its packed weights; bits: {module outside of the experts: width}; tied: heads
    that have the tensors of embeddings; experts: {layer: the width of every expert}; packed_modules_mapping: the
    runtime's {fused module: the checkpoint's in it}; tables: names of the vocabulary tables that the runtime's model
    has; asked: layers of experts, and modules beside them, that it has asked a method for; places: {where a layer's
    experts lie, from its number on: the number}; layers: the experts that the runtime has built, by layer.
    """

    runtime: str
    packed_modules_mapping: Mapping[str, Sequence[str]]

    def __init__(self, stored: Stored) -> None:
        super().__init__()
        self.stored = stored
        self.bits = dict(stored.others.bits) if stored.others is not None else {}
        self.tied = set(stored.others.tied.values()) if stored.others is not None else set()
        self.experts: dict[int, Sequence[Width]] = {}
        self.tables: set[str] = set()
        self.asked: set[int | str] = set()
        self.places = {
            name[found.start(1) :]: int(found[1]) for name in stored.experts if (found := LAYER.search(name))
        }
        self.layers: dict[int, Experts] = {}
        for name, widths in stored.experts.items():
            layer = layer_of(name)
            if layer < 0 or layer in self.experts:
                raise ValueError(f"moeq: {name}: experts outside of a row of layers are not served")
            self.experts[layer] = widths

    @classmethod
    def get_name(cls) -> str:
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80  # of NVIDIA GPUs: what Triton's programs are compiled for

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # config.json says it

    def known(self, prefix: str) -> str:
        """What `bits` call a module of the runtime's."""
        return prefix

    def build_table(
        self, build: Callable[..., None], layer: torch.nn.Module, head: bool, *given: Any, **named: Any
    ) -> None:
        """Have a runtime build a vocabulary table with this method where its model gives it none, or no name.

        build: the constructor of the table's class. Not where the model has a table of that name already: another
        model's then, which drafts for it. ValueError where a table without a name could be one of several.
        """
        found = inspect.signature(build).bind(layer, *given, **named)
        name, method = found.arguments.get("prefix", "") or self._unnamed(head), found.arguments.get("quant_config")
        if (method is None and self.known(name) not in self.tables) or method is self:
            found.arguments |= {"quant_config": self, "prefix": name}
            self.tables.add(self.known(name))
        build(*found.args, **found.kwargs)

    def _unnamed(self, head: bool) -> str:
        """The packed head, or the packed table that is none; empty where neither is packed."""
        found = [name for name in self.bits if layer_of(name) < 0 and (name.rpartition(".")[2] == HEAD) == head]
        if len(found) > 1:
            raise ValueError(f"moeq: the runtime's model does not say which of {', '.join(found)} it builds")
        return found[0] if found else ""

    def packed_in(self, prefix: str) -> dict[str, int]:
        """{module of the checkpoint: width} of the matrices of a layer, empty where none is packed."""
        before, _, last = self.known(prefix).rpartition(".")
        names = [f"{before}.{name}" for name in self.packed_modules_mapping.get(last, ())] or [self.known(prefix)]
        if not any(name in self.bits for name in names):
            return {}
        self.asked.update(names)
        return {name: self.bits.get(name, FULL) for name in names}

    def widths_in(self, prefix: str) -> Sequence[Width] | None:
        """The widths of the experts of the layer that a module lies in; None where they are not packed."""
        number = layer_of(prefix)
        self.asked.add(number)
        return self.experts.get(number)

    def take(self, name: str, tensor: Tensor) -> bool:
        """A tensor of the checkpoint; whether it is of experts in a layer that the runtime has built here.

        The runtimes' models have names of their own for those, each family others, and loaders that know no packed
        ones; so they are not asked.
        """
        found = EXPERT.search(name)
        layer = self.layers.get(self.places.get(found[1], -1)) if found else None
        if found is None or layer is None:
            return False
        layer.parts.take(int(found[2]), found[3], found[4], tensor)
        return True

    def check(self) -> None:
        """ValueError where a model that is built has passed over what is packed: it would not load it."""
        lost = [f"the experts of layer {layer}" for layer in self.experts if layer not in self.asked]
        lost += [name for name in self.bits if name not in self.asked]
        if lost:
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            do = "quantize with --set others.CLASS=null for what is not of experts"
            raise ValueError(f"moeq: {self.runtime}'s model does not take {lost[0]}{more} packed; {do}")


def layer_of(name: str) -> int:
    """The number of the layer that a module lies in, -1 where it lies in none."""
    found = LAYER.search(name)
    return int(found[1]) if found else -1
