"""Packed modules outside of the experts in vLLM: linears, fused ones too, embeddings and heads.

A fused module (`qkv_proj`) holds the matrices of several modules of the checkpoint, each in its own width or dense;
they are multiplied one after the other. Letters: T tokens, N output rows, K inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearMethodBase, QKVParallelLinear, RowParallelLinear

from moeq_kernels.checkpoint import DENSE, Grid
from moeq_kernels.choice import policy, prepared_linear
from moeq_kernels.description import PreparedLinear
from moeq_kernels.parts import ALL_PARTS, GUARD, Parts, drop, placeholder, sliced
from moeq_kernels.reference import values
from moeq_kernels.widths import FULL
from moeq_vllm.operators import looked_up, make_known, product


class MoeqLinear(LinearMethodBase):  # type: ignore[misc]
    """bits: {module of the checkpoint: width} of those that lie in the layer, in order; 16 for one that is dense."""

    def __init__(self, grid: Grid, bits: Mapping[str, int]) -> None:
        self.grid, self.bits = grid, bits
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
        if len(output_partition_sizes) != len(self.bits):
            what = f"{len(output_partition_sizes)} matrices, the checkpoint {len(self.bits)}: {', '.join(self.bits)}"
            raise ValueError(f"moeq: {layer.prefix} has {what}; this kind of layer is not served packed")
        self.name = make_known(layer.prefix, self)
        self.dtype, self.outputs = params_dtype, sum(output_partition_sizes)
        self.rows = dict(zip(self.bits, output_partition_sizes, strict=True))
        self.inputs = input_size_per_partition
        self.parts: dict[str, Parts] = {}
        for name, bits in self.bits.items():
            whole = self.rows[name] * self._ranks(layer, name)[1]
            self.parts[name] = Parts(bits, self.grid, whole, input_size)
        for part in (*ALL_PARTS, GUARD):
            self.device = placeholder(layer, part, partial(self.take, part))

    def _ranks(self, layer: Any, name: str) -> tuple[int, int]:
        """Which part of a matrix's rows this device has, and of how many; heads that are copied are counted once."""
        if isinstance(layer, RowParallelLinear):
            return 0, 1
        rank, of = layer.tp_rank, layer.tp_size
        if isinstance(layer, QKVParallelLinear) and name != next(iter(self.bits)):
            return rank // layer.num_kv_head_replicas, of // layer.num_kv_head_replicas
        return (rank, of) if not _replicated(layer) else (0, 1)

    def take(self, part: str, param: Tensor, loaded_weight: Tensor, shard: str | int | None = None) -> None:
        """One tensor; the guard of a packed module is passed over, a module that is dense has its weight under it."""
        names = list(self.bits)
        place = {"q": 0, "k": 1, "v": 2}.get(shard, shard) if isinstance(shard, str) else shard or 0
        name = names[place]  # type: ignore[index]
        if part == GUARD and self.bits[name] != FULL:
            return
        self.parts[name].take(DENSE if part == GUARD else part, loaded_weight.to(param.device), f"{name}.{part}")

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Have a kernel take the matrices; ValueError where a tensor never came."""
        arranged = []
        for name, parts in self.parts.items():
            rank, _ = self._ranks(layer, name)
            rows = slice(rank * self.rows[name], (rank + 1) * self.rows[name])
            first = layer.tp_rank * self.inputs if isinstance(layer, RowParallelLinear) else 0
            matrix = sliced(parts.matrix(self.dtype, name), rows, slice(first, first + self.inputs), name)
            prepared, why = prepared_linear(matrix, None, self.device, policy())
            if prepared is None:
                raise ValueError(f"moeq: {name}: no kernel takes it: {why}")
            arranged.append(prepared)
        self.parts = {}
        drop(layer, *ALL_PARTS, GUARD)
        self.prepared = tuple(arranged)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] -> [..., N]."""
        rows = x.reshape(-1, x.shape[-1])
        found = product(rows, self.name, self.outputs) if torch.compiler.is_compiling() else self.compute(rows)
        found = found.view(*x.shape[:-1], self.outputs)
        return found if bias is None else found + bias

    def compute(self, rows: Tensor) -> Tensor:
        """rows [T, K] -> [T, N]."""
        found = [matrix(rows) for matrix in self.prepared]
        return found[0] if len(found) == 1 else torch.cat(found, -1)


class MoeqEmbedding(MoeqLinear):
    """An embedding, or a head of its own; on several devices each would have some rows of the vocabulary: not yet."""

    def create_weights(
        self, layer: Any, inputs: int, output_partition_sizes: Sequence[int], *sizes: Any, **attributes: Any
    ) -> None:
        """output_partition_sizes: the vocabulary as vLLM pads it, which the checkpoint does not."""
        if layer.tp_size > 1:
            raise ValueError(f"moeq: {layer.prefix}: packed embeddings are served on one device")
        super().create_weights(layer, inputs, [layer.org_vocab_size], *sizes, **attributes)

    def embedding(self, layer: nn.Module, input_: Tensor) -> Tensor:
        """ids [...] -> [..., K]."""
        ids = input_.reshape(-1)
        compiling = torch.compiler.is_compiling()
        found = looked_up(ids, self.name, self.inputs, self.dtype) if compiling else self.look_up(ids)
        return found.view(*input_.shape, self.inputs)

    def look_up(self, ids: Tensor) -> Tensor:
        """ids [T] -> [T, K]."""
        return values(self.prepared[0].some(ids), self.dtype)


class MoeqTiedHead(LinearMethodBase):  # type: ignore[misc]
    """A head that uses the embeddings' packed tensor: it has none of its own."""

    def create_weights(self, layer: nn.Module, *sizes: Any, **attributes: Any) -> None:
        placeholder(layer, GUARD, lambda *_: None)

    def tie_weights(self, layer: nn.Module, embed_tokens: Any) -> nn.Module:
        self.embeddings = embed_tokens
        return layer

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        output: Tensor = self.embeddings.quant_method.apply(self.embeddings, x, bias)
        return output


def _replicated(layer: nn.Module) -> bool:
    return type(layer).__name__ == "ReplicatedLinear"
