"""Modules outside of the experts in vLLM: packed linears, fused ones too, embeddings and heads, packed or not.

A fused module (`qkv_proj`) holds the matrices of several modules of the checkpoint, each in its own width or dense;
they are multiplied one after the other. Letters: T tokens, N output rows, K inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearMethodBase, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

from moeq_kernels.description import PreparedLinear
from moeq_kernels.parts import ALL, GUARD, LinearParts, placeholder, products
from moeq_kernels.reference import values
from moeq_kernels.widths import Encoding
from moeq_vllm.operators import looked_up, make_known, product


class MoeqLinear(LinearMethodBase):  # type: ignore[misc]
    """bits: {module of the checkpoint: width} of those that lie in the layer, in order; 16 for one that is dense."""

    def __init__(self, encoding: Encoding, bits: Mapping[str, int]) -> None:
        self.encoding, self.bits = encoding, bits
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
        self.dtype, self.inputs, self.outputs = params_dtype, input_size_per_partition, sum(output_partition_sizes)
        if len(self.bits) == 1 < len(output_partition_sizes):  # the checkpoint has its matrices in one
            if self.outputs != output_size:
                what = "its matrices are one in the checkpoint, which is served packed on one device"
                raise ValueError(f"moeq: {layer.prefix}: {what}; set others to null for it, or take one device")
            output_partition_sizes = [self.outputs]
        first = layer.tp_rank * self.inputs if isinstance(layer, RowParallelLinear) else 0
        self.parts = LinearParts(
            layer.prefix,
            self.encoding,
            self.bits,
            output_partition_sizes,
            input_size,
            params_dtype,
            partial(self.share, layer),
            slice(first, first + self.inputs),
        )
        self.name = make_known(layer.prefix, self)
        self.parts.place(layer)

    def share(self, layer: Any, name: str, own: int) -> tuple[int, slice]:
        """All rows of a matrix of which this device has `own`, and which; heads that are copied are counted once."""
        if isinstance(layer, RowParallelLinear) or _replicated(layer):
            return own, ALL
        rank, of = layer.tp_rank, layer.tp_size
        if isinstance(layer, QKVParallelLinear) and name != next(iter(self.bits)):
            rank, of = rank // layer.num_kv_head_replicas, of // layer.num_kv_head_replicas
        return of * own, slice(rank * own, (rank + 1) * own)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """ValueError where a tensor never came."""
        self.prepared = self.parts.finish(layer)
        empty = torch.empty(0, dtype=self.dtype, device=self.parts.device)
        layer.weight = nn.Parameter(empty, requires_grad=False)  # attention asks its device before it multiplies by 1

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] -> [..., N]."""
        rows = x.reshape(-1, x.shape[-1])
        found = product(rows, self.name, self.outputs) if torch.compiler.is_compiling() else self.compute(rows)
        found = found.view(*x.shape[:-1], self.outputs)
        return found if bias is None else found + bias

    def compute(self, rows: Tensor) -> Tensor:
        """rows [T, K] -> [T, N]."""
        return products(self.prepared, rows)


class MoeqEmbedding(MoeqLinear):
    """An embedding, or a head of its own; of several devices each has some rows of the vocabulary."""

    def create_weights(
        self, layer: Any, inputs: int, output_partition_sizes: Sequence[int], *sizes: Any, **attributes: Any
    ) -> None:
        """output_partition_sizes: the vocabulary as vLLM pads it, which the checkpoint does not.

        ValueError where a device would have none of it.
        """
        at = layer.shard_indices
        if not at.num_org_elements:
            what = f"a vocabulary of {layer.org_vocab_size} is not for {layer.tp_size} devices"
            raise ValueError(f"moeq: {layer.prefix}: {what}; take fewer")
        super().create_weights(layer, inputs, [at.num_org_elements], *sizes, **attributes)
        self.padding = output_partition_sizes[0] - self.outputs if layer.tp_size > 1 else 0
        self.outputs += self.padding  # as wide on every device

    def share(self, layer: Any, name: str, own: int) -> tuple[int, slice]:
        at = layer.shard_indices
        return layer.org_vocab_size, slice(at.org_vocab_start_index, at.org_vocab_end_index)

    def compute(self, rows: Tensor) -> Tensor:
        found = super().compute(rows)
        return nn.functional.pad(found, (0, self.padding)) if self.padding else found

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] -> [..., N]."""
        return with_bias(layer, super().apply(layer, x), bias)

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
        """x [..., K] -> [..., N]."""
        return with_bias(layer, self.embeddings.quant_method.apply(self.embeddings, x), bias)


class DenseTable(UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """Embeddings, or a head, that are not packed.

    On CPUs vLLM (0.32) keeps either twice, as it was loaded and as products want it: here embeddings are kept for
    look-ups alone, and a head for products, unless vLLM casts its weight for them.
    """

    def create_weights(self, layer: nn.Module, *sizes: Any, params_dtype: torch.dtype, **attributes: Any) -> None:
        super().create_weights(layer, *sizes, params_dtype=params_dtype, **attributes)
        self.cast = get_current_vllm_config().model_config.head_dtype != params_dtype

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] -> [..., N]."""
        return with_bias(layer, super().apply(layer, x), bias)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """ValueError where vLLM would leave out a bias."""
        if self.cast and getattr(layer, "bias", None) is not None:
            raise ValueError("moeq: a head with a bias is served in the model's dtype: leave out head_dtype")
        if not current_platform.is_cpu():
            super().process_weights_after_loading(layer)
        elif isinstance(layer, ParallelLMHead) and not self.cast:
            dispatch_cpu_unquantized_gemm(layer, remove_weight=True)  # where it is tied, embeddings keep the weight
        else:
            layer.cpu_linear = nn.functional.linear  # of models whose head is the embeddings' module


def with_bias(layer: nn.Module, output: Tensor, bias: Tensor | None) -> Tensor:
    """output [..., N] of a table with the bias that is given, or its own: some of vLLM's models forget it (Phi-MoE)."""
    bias = getattr(layer, "bias", None) if bias is None else bias
    return output if bias is None else output + bias[: output.shape[-1]]  # without what vLLM pads it by


def _replicated(layer: nn.Module) -> bool:
    return type(layer).__name__ == "ReplicatedLinear"
