"""The values of a packed checkpoint in the model's own type and layout: loads wherever the original does.

A family that keeps every matrix of an expert on its own is written expert by expert, others layer by layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moeq.errors import FormatError
from moeq.exporters.exporter import Exporter

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from moeq.exporters.foreign import Draft
    from moeq.exporters.packed_source import PackedSource
    from moeq.models.experts import ExpertLayer
    from moeq_kernels.packed import PackedWeight


def write(draft: Draft) -> None:
    """Values are rounded to the model's type once."""
    from moeq.exporters.foreign import OTHERS_FILE
    from moeq.exporters.readers.foreign import packed_others

    source, dtype = draft.source, plain_dtype(draft.source)
    for layer in source.layers:
        _write_layer(draft, layer, dtype)
    others = packed_others(source)
    packed = {draft.names.renamed(f"{name}.weight"): value_of(name, read(), dtype) for name, read in others.items()}
    if packed:
        draft.write(OTHERS_FILE, packed)
    draft.finish(None)


def plain_dtype(source: PackedSource) -> torch.dtype:
    """The type of most of what is not packed."""
    from moeq.models.loading import source_dtype

    plain = {key: source.source.tensors[key] for key in source.rest()}
    return source_dtype(replace(source.source, config=source.config, tensors=plain))


def _write_layer(draft: Draft, layer: ExpertLayer, dtype: torch.dtype) -> None:
    """Write one layer's file, an expert after the other where the family keeps their matrices apart."""
    from moeq.exporters.foreign import layer_file

    file = layer_file(layer.index)
    experts = (_values(draft, layer, expert, dtype) for expert in range(layer.num_experts))
    whole = layer.biased or layer.kind.identity_beyond(draft.model.get_submodule(layer.name))  # stored with more
    keys = None if whole else draft.names.experts(layer)
    if keys is None:
        draft.write(file, draft.names.layer(layer, experts))
        return
    with draft.file(file, keys.values()) as add:
        for expert, (matrices, _) in enumerate(experts):
            for projection, values in matrices.items():
                add(keys[expert, projection], values)


def _values(
    draft: Draft, layer: ExpertLayer, expert: int, dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One expert's matrices and biases in the model's type."""
    matrices, biases = draft.expert(layer, expert)
    stem = f"{layer.name}.{expert}"
    return {name: value_of(f"{stem}.{name}", matrix, dtype) for name, matrix in matrices.items()}, biases


def value_of(name: str, matrix: PackedWeight | Tensor, dtype: torch.dtype) -> Tensor:
    """The values of a matrix, packed or not; FormatError naming one with values that the type does not hold."""
    import torch

    from moeq_kernels.packed import PackedWeight

    values = matrix.dequantize(dtype) if isinstance(matrix, PackedWeight) else matrix.to(dtype)
    if dtype == torch.float16 and not bool(torch.isfinite(values).all()):  # the others reach as far as float32
        raise FormatError("values beyond float16", where=f"for dequantized: {name}", do="write it for native")
    return values


EXPORTER = Exporter(
    name="dequantized",
    label="dequantized",
    help="the values in the model's own type and layout, nothing packed",
    write=write,
    runtime="any runtime that loads the original",
    snippet="""from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("THIS_DIRECTORY")""",
    size=lambda sizes: sizes.plain,
)
