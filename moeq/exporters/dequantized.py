"""The values of a packed checkpoint in the model's own type and layout: loads wherever the original does.

A family that keeps every matrix of an expert on its own is written expert by expert, others layer by layer.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from moeq.exporters.foreign import OTHERS_FILE, Draft, WriteOptions, card, drafting, layer_file
from moeq.exporters.packed_source import PackedSource
from moeq.models.experts import ExpertLayer
from moeq.models.loading import source_dtype
from moeq.numerics.packed import PackedWeight

NAME = "dequantized"
LOADING = """from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("THIS_DIRECTORY")"""


def write(source: PackedSource, directory: Path, options: WriteOptions) -> None:
    """Build the checkpoint; values are rounded to the model's type once."""
    with drafting(source, None, directory, options) as draft:
        dtype = plain_dtype(source)
        for layer in source.layers:
            keys = None if layer.biased else draft.names.experts(layer)
            if keys is None:
                experts = (_values(source, layer, expert, dtype) for expert in range(layer.num_experts))
                draft.write(layer_file(layer.index), draft.names.layer(layer, experts))
            else:
                _write_experts(draft, layer, keys, dtype)
        packed = {draft.names.renamed(f"{name}.weight"): weight.dequantize(dtype) for name, weight in source.others()}
        if packed:
            draft.write(OTHERS_FILE, packed)
        draft.finish(None, card(draft, "any runtime that loads the original", LOADING))


def plain_dtype(source: PackedSource) -> torch.dtype:
    """The type of most of what is not packed."""
    plain = {key: source.source.tensors[key] for key in source.rest()}
    return source_dtype(replace(source.source, config=source.config, tensors=plain))


def _values(
    source: PackedSource, layer: ExpertLayer, expert: int, dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One expert's matrices and biases in the model's type."""
    matrices, biases = source.expert(layer, expert)
    return {name: value_of(matrix, dtype) for name, matrix in matrices.items()}, biases


def value_of(matrix: PackedWeight | Tensor, dtype: torch.dtype) -> Tensor:
    """The values of a matrix, packed or not."""
    return matrix.to(dtype) if isinstance(matrix, Tensor) else matrix.dequantize(dtype)


def _write_experts(draft: Draft, layer: ExpertLayer, keys: dict[tuple[int, str], str], dtype: torch.dtype) -> None:
    """Write one layer's file, an expert after the other."""
    with draft.file(layer_file(layer.index), keys.values()) as add:
        for expert in range(layer.num_experts):
            for projection, values in _values(draft.source, layer, expert, dtype)[0].items():
                add(keys[expert, projection], values)
