"""quantize: the replicas that the assignment names, one file a layer, under the names the checkpoint gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moeq.artifacts.assignment import FULL, Assignment
from moeq.artifacts.files import make_directory, write_tensors
from moeq.exporters.moeq import METADATA, extra_name, layer_name
from moeq.models.experts import ExpertLayer, stacked_biases, stacked_weights
from moeq.models.loading import source_dtype
from moeq.numerics.packed import PackedWeight
from moeq.numerics.slab import Slab
from moeq.quantizers.layer import rtn_batch
from moeq.runtime.packed_experts import GUARD_DTYPE, guard_shapes
from moeq.stages import assign, losses
from moeq.stages.context import Context


def run(context: Context) -> dict[str, Any]:
    """Write one file of placed experts a layer, and one of the other widths where the recipe asks for all replicas."""
    assignment = assign.load(context)
    directory = make_directory(context.directory("quantize"))
    for path in directory.glob("*.safetensors"):
        path.unlink()
    placed = others = 0
    with context.reporter.bar("quantize", len(context.layers)) as advance:
        for layer in context.layers:
            sizes = _write_layer(context, assignment, layer, directory)
            placed, others = placed + sizes[0], others + sizes[1]
            advance()
    return {"placed_expert_bytes": placed, "other_replica_bytes": others}


def _write_layer(context: Context, assignment: Assignment, layer: ExpertLayer, directory: Path) -> tuple[int, int]:
    """Write one layer's files; returns the bytes of its placed experts and of the other replicas."""
    tensors, extra = layer_tensors(context, assignment, layer)
    write_tensors(directory / layer_name(layer.index), tensors | guards(layer), METADATA)
    if extra:
        write_tensors(directory / extra_name(layer.index), extra, METADATA)
    return sum(map(_bytes, tensors.values())), sum(map(_bytes, extra.values()))


def guards(layer: ExpertLayer) -> dict[str, Tensor]:
    """Tensors of an impossible shape under the original names: loading without moeq must fail."""
    shapes = guard_shapes(layer)
    return {f"{layer.name}.{name}": torch.zeros(shape, dtype=GUARD_DTYPE) for name, shape in shapes.items()}


def layer_tensors(
    context: Context, assignment: Assignment, layer: ExpertLayer
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors of one layer: every expert at its placed width, and (recipe: replicas all) at the other widths."""
    replicas = Replicas(context, assignment, layer)
    slab = Slab()

    def made(expert: int, width: int, prefix: str) -> dict[str, Tensor]:
        return {name: slab.keep(tensor) for name, tensor in replicas.tensors(expert, width, prefix).items()}

    placed: dict[str, Tensor] = {}
    extra: dict[str, Tensor] = {}
    for expert, bits in enumerate(assignment.bits()[layer.index].tolist()):
        prefix = f"{layer.name}.{expert}"
        placed |= made(expert, bits, prefix)
        if context.recipe.quantize.replicas == "all":
            for width in (*context.recipe.losses.bits, FULL):
                if width != bits:
                    extra |= made(expert, width, f"{prefix}.bits{width}")
    return placed, extra


class Replicas:
    """Replicas of one layer's experts: from the store (gptq), made now (rtn), or the checkpoint's own weights (16).

    model: where weights are taken from; without it experts are read from the checkpoint one by one.
    """

    def __init__(
        self, context: Context, assignment: Assignment, layer: ExpertLayer, model: nn.Module | None = None
    ) -> None:
        self.context, self.layer, self.model = context, layer, model
        self.quantizer = assignment.parameters.get("quantizer", "gptq")
        self.store = losses.store(context, layer.index) if self.quantizer == "gptq" else None
        self._last: tuple[int, dict[str, Tensor], dict[str, Tensor]] | None = None

    def packed(self, expert: int, bits: int) -> dict[str, PackedWeight]:
        """The matrices of one expert at a width below 16."""
        if self.store is not None:
            return {projection: self.store.expert(projection, bits, expert) for projection in self.layer.projections}
        section = self.context.recipe.losses
        weights, _ = self.original(expert)
        as_computed = {name: weight.to(self.context.dtype).float()[None] for name, weight in weights.items()}
        rounded = rtn_batch(as_computed, section, [bits])
        one = {name: PackedWeight.of(result, bits, section.symmetric) for name, result in rounded.items()}
        return {name: packed.map(lambda part: part[0].cpu()) for name, packed in one.items()}

    def original(self, expert: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Matrices and biases of one expert in the checkpoint's own type."""
        if self.model is not None:
            dtype = source_dtype(self.context.source)
            which = slice(expert, expert + 1)
            weights, biases = (of(self.model, self.layer, which) for of in (stacked_weights, stacked_biases))
            found = [{name: stack[0].to(dtype).cpu() for name, stack in of.items()} for of in (weights, biases)]
            return found[0], found[1]
        if self._last is None or self._last[0] != expert:
            self._last = (expert, *self.context.expert_reader.read(self.layer, expert))
        return self._last[1], self._last[2]

    def tensors(self, expert: int, bits: int, prefix: str) -> dict[str, Tensor]:
        """One replica's tensors under their final names."""
        weights, biases = self.original(expert) if bits == FULL or self.layer.biased else ({}, {})
        found = {f"{prefix}.{name}.bias": bias for name, bias in biases.items()}
        if bits == FULL:
            return found | {f"{prefix}.{name}.dense": weight for name, weight in weights.items()}
        return found | {
            f"{prefix}.{name}.{part}": tensor
            for name, packed in self.packed(expert, bits).items()
            for part, tensor in packed.parts().items()
        }


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))
