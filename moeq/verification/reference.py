"""The model with dequantized weights, layer by layer: what a checkpoint's loader is compared with.

It is read from what the checkpoint was made of, or where that is not there from the checkpoint itself, each decoder
layer as it is about to run; one layer lies in memory, and of its experts, which are twice as large in float32 as they
were, a group at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moeq.exporters.packed_source import PackedSource
from moeq.exporters.readers.foreign import Foreign, packed_others
from moeq.exporters.readers.gguf import Gguf
from moeq.models.experts import ExpertLayer, set_expert_biases, set_expert_weights
from moeq.models.streaming import StreamedModel
from moeq_kernels.packed import PackedWeight

CPU = torch.device("cpu")
GROUP_BYTES = 128 << 20  # of experts in float32 that lie in memory at a time


def relative(output: Tensor, wanted: Tensor) -> float:
    """||output - wanted|| / ||wanted||, or ||output|| where nothing is wanted; infinite where one is not finite."""
    size = float(wanted.double().norm())
    error = float((output.double() - wanted.double()).norm()) / (size or 1.0)
    return error if math.isfinite(error) else math.inf


def values(matrix: PackedWeight | Tensor) -> Tensor:
    """A matrix's values in float32."""
    return matrix.dequantize() if isinstance(matrix, PackedWeight) else matrix.float()


def rounded_values(matrix: PackedWeight | Tensor, stored: torch.dtype | None) -> Tensor:
    """A matrix's values in float32 as a checkpoint has them that stores them in a type; None: one that packs them."""
    exact = values(matrix)
    return exact if stored is None or not isinstance(matrix, PackedWeight) else exact.to(stored).float()


def streamed(
    packed: PackedSource, dtype: torch.dtype, trust_remote_code: bool = False, stored: torch.dtype | None = None
) -> StreamedModel:
    """A model of the family whose experts and packed modules are the dequantized ones.

    stored: the type that their values are rounded to, None for none. Raises ModelError when the checkpoint's other
    tensors are not the model's, ArtifactError for damaged experts.
    """
    stacked = [packed.stacked(layer) for layer in packed.layers] if isinstance(packed, Foreign) else []
    whole = {layer.name for layer, keys in zip(packed.layers, stacked, strict=False) if keys}
    keys = [*packed.rest(), *(key for stack in stacked for key in stack)]
    others = packed_others(packed)
    one_more, rounds = (packed.one_more, packed.rounds) if isinstance(packed, Foreign) else ((), None)
    supplied = {
        f"{layer.name}.{part}" for layer in packed.layers for part in layer.parameters if layer.name not in whole
    }
    supplied |= {f"{module}.weight" for module in others}
    supplied |= set(packed.absent) if isinstance(packed, Gguf) else set()  # which texts are computed without
    tensors = {key: packed.source.tensors[key] for key in keys}
    plain = replace(packed.source, config=packed.config, tensors=tensors)
    model = StreamedModel(plain, dtype, CPU, trust_remote_code, frozenset(supplied))

    def fill_some(layer: ExpertLayer, experts: range) -> None:
        for expert in experts:
            matrices, biases = packed.expert(layer, expert)
            exact = {name: rounded_values(matrix, stored) for name, matrix in matrices.items()}
            set_expert_weights(model.model, layer, expert, exact)
            set_expert_biases(model.model, layer, expert, biases)

    grouped = set()
    for layer in packed.layers:
        size = group_size(layer, dtype)
        if layer.name not in whole and size < layer.num_experts:
            grouped.add(layer.name)
            run_in_groups(model.model, layer, size, partial(fill_some, layer))

    def fill(_: nn.Module, layer: ExpertLayer) -> None:
        if layer.name in grouped:
            empty(model.model, layer)
        elif layer.name not in whole:
            fill_some(layer, range(layer.num_experts))

    def fill_others(target: nn.Module, block: str) -> None:
        with torch.no_grad():
            for module, read in others.items():
                if model.block_of(module) == block:
                    target.get_parameter(f"{module}.weight").copy_(rounded_values(read(), stored))
            for name, vector in target.named_parameters() if one_more else ():
                if name.endswith(one_more) and model.block_of(name.rpartition(".")[0]) == block:
                    vector.copy_((vector.to(rounds) + 1.0).to(vector.dtype) - 1.0)

    fill_others(model.model, "")
    model.overlay, model.block_overlay = fill, fill_others
    return model


def group_size(layer: ExpertLayer, dtype: torch.dtype) -> int:
    """How many of a layer's experts are in memory at a time, at most all of them."""
    return min(layer.num_experts, max(1, GROUP_BYTES // (dtype.itemsize * layer.parameters_per_expert)))


def run_in_groups(model: nn.Module, layer: ExpertLayer, size: int, fill: Callable[[range], None]) -> None:
    """Have a layer's experts run `size` at a time, the others being zero meanwhile, and their outputs added up.

    Every expert adds to the output what its own weights make of it, whatever the family: the output is that of zeros
    (a shared bias, tokens that pass through) and, for each group, what changes with it. fill(experts): writes them.
    """
    module = model.get_submodule(layer.name)
    run = module.forward

    def forward(*arguments: Any, **named: Any) -> Tensor:
        nothing: Tensor = run(*arguments, **named)
        total = nothing.clone()
        for start in range(0, layer.num_experts, size):
            fill(range(start, min(start + size, layer.num_experts)))
            total += run(*arguments, **named) - nothing
            empty(model, layer)
        return total

    module.forward = forward


def empty(model: nn.Module, layer: ExpertLayer) -> None:
    """Make a layer's experts zeros, of which only what is written to takes memory."""
    for name in layer.parameters:
        parameter = model.get_parameter(f"{layer.name}.{name}")
        zeros = torch.from_numpy(np.zeros(parameter.numel() * parameter.element_size(), np.uint8))
        parameter.data = zeros.view(parameter.dtype).view(parameter.shape)


def after_experts(model: StreamedModel, layers: list[ExpertLayer], see: Callable[[ExpertLayer], None]) -> None:
    """Have `see(layer)` called once for each layer when its experts have run, while their weights are there."""
    seen: set[str] = set()

    def after(layer: ExpertLayer) -> None:
        if layer.name not in seen:
            seen.add(layer.name)
            see(layer)

    for layer in layers:
        parent = layer.name.rpartition(".")[0]
        for path in {layer.name, parent} - set(model.blocks):
            module = model.model.get_submodule(path)
            module.register_forward_hook(lambda *_, layer=layer: after(layer))


def run_recorded(model: nn.Module, layer: ExpertLayer, recorded: dict[str, Tensor]) -> Tensor:
    """What the reference's experts, or the block around them, give back for what the probe recorded."""
    experts: Any = model.get_submodule(layer.name)
    if "call.0" in recorded:
        output = experts(*(recorded[f"call.{place}"] for place in range(3)))
    elif "self.0" in recorded:
        output = experts(recorded["self.0"])
    else:
        block: Any = model.get_submodule(layer.name.rpartition(".")[0])
        output = block(recorded["block.0"])
    first: Tensor = output[0] if isinstance(output, tuple) else output
    return first


def run_alone(model: nn.Module, layer: ExpertLayer, rows: Tensor, top_k: int) -> Tensor:
    """What every expert gives back for rows [t, H] alone, [E, t, H]; experts that are called with indices [t, k]."""
    experts: Any = model.get_submodule(layer.name)
    number = torch.arange(layer.num_experts).repeat_interleave(len(rows))
    weights = torch.zeros(len(number), top_k)
    weights[:, 0] = 1
    outputs: Tensor = experts(rows.repeat(layer.num_experts, 1), number[:, None].expand(-1, top_k), weights)
    return outputs.view(layer.num_experts, len(rows), -1)
