"""Packed modules outside of the experts in SGLang, on one device: linears, fused ones too, embeddings and heads.

A fused module (`qkv_proj`) holds the matrices of several modules of the checkpoint, each in its own width or dense;
they are multiplied one after the other. Letters: T tokens, N output rows, K inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from torch import Tensor, nn

from moeq_kernels.description import PreparedLinear
from moeq_kernels.parts import GUARD, LinearParts, products
from moeq_kernels.reference import values
from moeq_kernels.widths import Encoding


class MoeqLinear(LinearMethodBase):  # type: ignore[misc]
    """bits: {module of the checkpoint: width} of those that lie in the layer, in order; 16 for one that is dense."""

    def __init__(self, encoding: Encoding, bits: Mapping[str, int], prefix: str) -> None:
        self.encoding, self.bits, self.prefix = encoding, bits, prefix
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
        if (input_size_per_partition, sum(output_partition_sizes)) != (input_size, output_size):
            raise ValueError(f"moeq: {self.prefix}: packed linears are served on one device in SGLang; set --tp 1")
        self.parts = LinearParts(
            self.prefix, self.encoding, self.bits, output_partition_sizes, input_size, params_dtype
        )
        self.dtype, self.inputs = params_dtype, input_size
        self.parts.place(layer)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """ValueError where a tensor never came."""
        self.prepared = self.parts.finish(layer)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] -> [..., N]."""
        rows = x.reshape(-1, x.shape[-1])
        found = products(self.prepared, rows)
        found = found.view(*x.shape[:-1], found.shape[-1])  # also of no rows
        return found if bias is None else found + bias


class MoeqEmbedding(MoeqLinear):
    """An embedding, or a head of its own."""

    def create_weights(
        self,
        layer: Any,
        inputs: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """output_size: the vocabulary as SGLang pads it, which a checkpoint does not; ValueError on several devices."""
        rows = layer.org_vocab_size
        whole = rows if sum(output_partition_sizes) == output_size else -1
        super().create_weights(layer, inputs, [rows], input_size, whole, params_dtype, **attributes)
        layer.get_parameter(GUARD).data = torch.empty(0, dtype=torch.uint8)  # a dense one SGLang arranges itself

    def embedding(self, layer: nn.Module, input_: Tensor) -> Tensor:
        """ids [...] -> [..., K]."""
        found = values(self.prepared[0].some(input_.reshape(-1)), self.dtype)
        return found.view(*input_.shape, self.inputs)
