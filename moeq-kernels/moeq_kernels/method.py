"""The method `moeq` of a runtime, whichever it is: which of a model's modules are packed, and how."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

from moeq_kernels.checkpoint import Stored
from moeq_kernels.widths import FULL, METHOD, Width

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class Method:
    """What configurations of the method in vLLM and SGLang share; a base before the runtime's own.

    stored: what the checkpoint says of its packed weights; bits: {module outside of the experts: width}; experts:
    {layer: the width of every expert}; packed_modules_mapping: the runtime's {fused module: the checkpoint's in it}.
    """

    packed_modules_mapping: Mapping[str, Sequence[str]]

    def __init__(self, stored: Stored) -> None:
        super().__init__()
        self.stored = stored
        self.bits = dict(stored.others.bits) if stored.others is not None else {}
        self.experts: dict[int, Sequence[Width]] = {}
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

    def packed_in(self, prefix: str) -> dict[str, int]:
        """{module of the checkpoint: width} of the matrices of a layer, empty where none is packed."""
        before, _, last = prefix.rpartition(".")
        names = [f"{before}.{name}" for name in self.packed_modules_mapping.get(last, ())] or [prefix]
        return {name: self.bits.get(name, FULL) for name in names} if any(name in self.bits for name in names) else {}


def layer_of(name: str) -> int:
    """The number of the layer that a module lies in, -1 where it lies in none."""
    found = LAYER.search(name)
    return int(found[1]) if found else -1
