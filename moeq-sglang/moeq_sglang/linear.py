"""Packed linears outside of the experts in SGLang, fused ones too, on one device.

A fused module (`qkv_proj`) holds the matrices of several modules of the checkpoint, each in its own width or dense;
they are multiplied one after the other. Letters: T tokens, N output rows, K inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from torch import Tensor, nn

from moeq_kernels.checkpoint import DENSE, Grid
from moeq_kernels.choice import policy, prepared_linear
from moeq_kernels.description import PreparedLinear
from moeq_kernels.parts import ALL_PARTS, GUARD, Parts, drop, placeholder
from moeq_kernels.widths import FULL


class MoeqLinear(LinearMethodBase):  # type: ignore[misc]
    """bits: {module of the checkpoint: width} of those that lie in the layer, in order; 16 for one that is dense."""

    def __init__(self, grid: Grid, bits: Mapping[str, int], prefix: str) -> None:
        self.grid, self.bits, self.prefix = grid, bits, prefix
        self.prepared: tuple[PreparedLinear, ...] = ()

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """ValueError for what is not served."""
        if len(output_partition_sizes) != len(self.bits):
            what = f"{len(output_partition_sizes)} matrices, the checkpoint {len(self.bits)}: {', '.join(self.bits)}"
            raise ValueError(f"moeq: {self.prefix} has {what}; this kind of layer is not served packed")
        if (input_size_per_partition, sum(output_partition_sizes)) != (input_size, output_size):
            raise ValueError(f"moeq: {self.prefix}: packed linears are served on one device in SGLang; set --tp 1")
        self.dtype = params_dtype
        sizes = zip(self.bits.items(), output_partition_sizes, strict=True)
        self.parts = {name: Parts(bits, self.grid, rows, input_size) for (name, bits), rows in sizes}
        for part in (*ALL_PARTS, GUARD):
            self.device = placeholder(layer, part, partial(self.take, part))

    def take(self, part: str, param: Tensor, loaded_weight: Tensor, shard: str | int | None = None) -> None:
        """One tensor; the guard of a packed module is passed over, a module that is dense has its weight under it."""
        place = {"q": 0, "k": 1, "v": 2}.get(shard, 0) if isinstance(shard, str) else shard or 0
        name = list(self.bits)[place]
        if part == GUARD and self.bits[name] != FULL:
            return
        self.parts[name].take(DENSE if part == GUARD else part, loaded_weight.to(param.device), f"{name}.{part}")

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Have a kernel take the matrices; ValueError where a tensor never came."""
        arranged = []
        for name, parts in self.parts.items():
            prepared, why = prepared_linear(parts.matrix(self.dtype, name), None, self.device, policy())
            if prepared is None:
                raise ValueError(f"moeq: {name}: no kernel takes it: {why}")
            arranged.append(prepared)
        self.parts = {}
        drop(layer, *ALL_PARTS, GUARD)
        self.prepared = tuple(arranged)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] -> [..., N]."""
        rows = x.reshape(-1, x.shape[-1])
        found = torch.cat([matrix(rows) for matrix in self.prepared], -1).view(*x.shape[:-1], -1)
        return found if bias is None else found + bias
