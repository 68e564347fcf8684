"""quantize: the replicas that the assignment names, one file a layer, under the names the checkpoint gives them.

quantizers.json says which method made each of them. With quantize.refine the placed ones are trained further, see
stages/refine.py. Packed modules outside of the experts, where the recipe has some, are written likewise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moeq.artifacts.assignment import FULL, MIXED, Assignment, Width, matrix_widths, width_of
from moeq.artifacts.files import digest_of, make_directory, read_json, write_json, write_tensors
from moeq.artifacts.replicas import LayerReplicas, ReplicaIndex
from moeq.artifacts.stage import check_schema_version
from moeq.exporters.moeq import extra_name, layer_name, others_name
from moeq.exporters.plain import METADATA
from moeq.models.experts import ExpertLayer, stacked_biases, stacked_weights
from moeq.models.loading import source_dtype
from moeq.numerics.packed import PackedWeight
from moeq.numerics.slab import Slab, return_memory
from moeq.quantizers.layer import made_on_demand
from moeq.recipe import BEST, DEFAULT_QUANTIZER
from moeq.registry import QUANTIZERS
from moeq.runtime.packed_experts import GUARD_DTYPE, guard_shapes
from moeq.runtime.packed_modules import GUARD_SHAPE, guard_name
from moeq.runtime.swapping import Replacement
from moeq.stages import assign, losses, refine
from moeq.stages.checkpoint_size import stored_widths
from moeq.stages.context import Context
from moeq.stages.others import Stored

NAME = "quantizers.json"
SCHEMA_VERSION = 1
Best = list[dict[int, np.ndarray]]  # of every layer: {bits: name of the best method [E]}


def run(context: Context) -> dict[str, Any]:
    """Write one file of placed experts a layer, and one of the other widths where the recipe asks for all replicas."""
    refine.check(context)
    assignment = assign.load(context)
    directory = make_directory(context.directory("quantize"))
    done = refine.Progress.of(context)
    for path in directory.glob("*.safetensors"):
        if path.name not in done.files:
            path.unlink()
    several = context.recipe.quantize.replicas == "all" or assignment.is_mixed
    best = losses.load(context).best() if several and assignment.parameters.get("quantizer") == BEST else None
    layers = (Replicas(context, assignment, layer, best=best) for layer in context.layers)
    placed = others = refined = 0
    made: dict[str, list[dict[str, str]]] = {}
    with context.reporter.bar("quantize", len(context.layers)) as advance:
        for replicas in _refined(context, assignment, layers, done):
            sizes = _write_layer(context, replicas, directory, done)
            made[replicas.layer.name] = replicas.made_by()
            placed, others = placed + sizes[0], others + sizes[1]
            refined += len(replicas.refined)
            return_memory()
            advance()
    write_json(directory / NAME, {"schema_version": SCHEMA_VERSION, "layers": made})
    experts = {"placed_expert_bytes": placed, "other_replica_bytes": others, "refined_experts": refined}
    return experts | _write_others(context, directory)


def _refined(
    context: Context, assignment: Assignment, layers: Iterator[Replicas], done: refine.Progress
) -> Iterator[Replicas]:
    """The layers' replicas, those that are placed refined where the recipe says so."""
    section = context.recipe.quantize.refine
    if section is None:
        yield from layers
        return
    here: list[Replicas] = []

    def starts() -> Iterator[dict[int, dict[str, PackedWeight]]]:
        for replicas in layers:
            here[:] = [replicas]
            yield {expert: replicas.placed(expert) for expert in refine.quantized_experts(assignment, replicas.layer)}

    for found in refine.refined(context, assignment, starts(), section, done):
        here[0].refined = found
        yield here[0]


def _write_layer(context: Context, replicas: Replicas, directory: Path, done: refine.Progress) -> tuple[int, int]:
    """Write one layer's files; returns the bytes of its placed experts and of the other replicas."""
    layer = replicas.layer
    tensors, extra = layer_tensors(replicas)
    files = {layer_name(layer.index): tensors | guards(layer)}
    if extra:
        files[extra_name(layer.index)] = extra
    for name, mine in files.items():
        if name not in done.files:
            write_tensors(directory / name, mine, METADATA)
    if context.recipe.quantize.refine is not None:
        done.add([directory / name for name in files])
    return sum(map(_bytes, tensors.values())), sum(map(_bytes, extra.values()))


def _write_others(context: Context, directory: Path) -> dict[str, int]:
    """Write the packed modules outside of the experts, a file a decoder layer; their bytes, nothing where none are."""
    stored = Stored(context)
    size = 0
    for number, modules in stored.by_number().items():
        tensors = {f"{one.name}.{part}": t for one in modules for part, t in stored.packed(one).parts().items()}
        size += sum(map(_bytes, tensors.values()))
        tensors |= {guard_name(one.name): torch.zeros(GUARD_SHAPE, dtype=GUARD_DTYPE) for one in modules}
        write_tensors(directory / others_name(number), tensors, METADATA)
    return {"packed_module_bytes": size} if stored.modules else {}


def guards(layer: ExpertLayer) -> dict[str, Tensor]:
    """Tensors of an impossible shape under the original names: loading without moeq must fail."""
    shapes = guard_shapes(layer)
    return {f"{layer.name}.{name}": torch.zeros(shape, dtype=GUARD_DTYPE) for name, shape in shapes.items()}


def layer_tensors(replicas: Replicas) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors of one layer: every expert at its placed width, and (recipe: replicas all) at the other widths."""
    slab = Slab()

    def made(expert: int, width: int, prefix: str) -> dict[str, Tensor]:
        return {name: slab.keep(tensor) for name, tensor in replicas.tensors(expert, width, prefix).items()}

    placed: dict[str, Tensor] = {}
    extra: dict[str, Tensor] = {}
    for expert, (placed_key, *others) in enumerate(replicas.keys()):
        prefix = f"{replicas.layer.name}.{expert}"
        placed |= made(expert, placed_key, prefix)
        section = replicas.context.recipe.losses
        for width in stored_widths(placed_key, others, section.nested, partial(replicas.method, expert))[1:]:
            extra |= made(expert, width, f"{prefix}.bits{width}")
    return placed, extra


class Replicas:
    """Replicas of one layer's experts: from the store, made on demand, or the checkpoint's own weights (16).

    model: where weights are taken from; without it experts are read from the checkpoint one by one. best: the best
    methods of all layers, where the caller has them; they are looked up when they are needed. refined: placed replicas
    that were trained further, which stand in for those of the store.

    A replica goes by its width; one whose matrices differ, which only a placed one does, by MIXED.
    """

    def __init__(
        self,
        context: Context,
        assignment: Assignment,
        layer: ExpertLayer,
        model: nn.Module | None = None,
        best: Best | None = None,
        refined: refine.Experts | None = None,
    ) -> None:
        self.context, self.layer, self.model = context, layer, model
        self.refined: refine.Experts = refined or {}
        self.choices = assignment.layers[layer.index].experts
        self.quantizer = str(assignment.parameters.get("quantizer", DEFAULT_QUANTIZER))
        self._best = best
        self._last: tuple[int, dict[str, Tensor], dict[str, Tensor]] | None = None

    def keys(self) -> list[list[int]]:
        """The replicas that the checkpoint has of each expert, the placed one first."""
        more = (*self.context.recipe.losses.bits, FULL) if self.context.recipe.quantize.replicas == "all" else ()
        return [[one.key, *(width for width in more if width != one.key)] for one in self.choices]

    def widths(self, expert: int, key: int) -> Width:
        """The width of one of an expert's replicas, or those of its matrices."""
        return self.choices[expert].widths if key == MIXED else key

    def method(self, expert: int, bits: int) -> str:
        """Who makes an expert's replica at a width below 16: as the assignment says, or the best method."""
        choice = self.choices[expert]
        if choice.bits == bits and choice.quantizer is not None:
            return choice.quantizer
        if self.quantizer != BEST:
            return self.quantizer
        if self._best is None:
            self._best = losses.load(self.context).best()
        return str(self._best[self.layer.index][bits][expert])

    def made_by(self) -> list[dict[str, str]]:
        """{bits: method} of every expert's replicas that the checkpoint has."""
        return [
            {str(key): self._maker(expert, key) for key in keys if key != FULL}
            for expert, keys in enumerate(self.keys())
        ]

    def _maker(self, expert: int, key: int) -> str:
        """The method that made a replica, or those of its matrices, and whether it was refined."""
        used = [bits for bits in matrix_widths(self.widths(expert, key)) if bits != FULL]
        methods = dict.fromkeys(self.method(expert, bits) for bits in used)
        refined = expert in self.refined and key == self.choices[expert].key
        return ",".join(methods) + (refine.REFINED if refined else "")

    @cached_property
    def index(self) -> ReplicaIndex:
        return losses.load_index(self.context)

    @cached_property
    def store(self) -> LayerReplicas:
        return losses.stored(self.context, self.index, self.layer.index)

    def placed(self, expert: int) -> dict[str, PackedWeight]:
        """The matrices of one expert's placed replica that are below 16 bits."""
        return self.packed(expert, self.choices[expert].key)

    def replacement(self, expert: int, refined_in: str = "") -> Replacement:
        """One expert's placed replica, dequantized when it is needed; refined_in: where it was refined."""

        def make() -> dict[str, Tensor]:
            return {name: packed.dequantize() for name, packed in self.placed(expert).items()}

        return Replacement(key=self.identity(expert, refined_in), make=make)

    def identity(self, expert: int, refined_in: str = "") -> str:
        """What tells an expert's placed replica from others of the same model; refined_in: where it was refined."""
        choice = self.choices[expert]
        methods = {bits: self.method(expert, bits) for bits in matrix_widths(choice.widths) if bits != FULL}
        section = self.context.recipe.losses
        grid = [section.group_size, section.symmetry(), section.nested, section.clip]
        stored = self.index.set if any(QUANTIZERS.get(method).stored for method in methods.values()) else ""
        return digest_of([str(self.context.store), stored, grid, choice.widths, methods, refined_in])

    def packed(self, expert: int, key: int) -> dict[str, PackedWeight]:
        """The matrices of one of an expert's replicas that are below 16 bits."""
        if expert in self.refined and key == self.choices[expert].key:
            return dict(self.refined[expert])
        widths = self.widths(expert, key)
        found: dict[str, PackedWeight] = {}
        for bits in dict.fromkeys(matrix_widths(widths)):
            if bits != FULL:
                names = [name for name in self.layer.projections if width_of(widths, name) == bits]
                found |= self._at(expert, bits, names)
        return {name: found[name] for name in self.layer.projections if name in found}

    def _at(self, expert: int, bits: int, projections: Sequence[str]) -> dict[str, PackedWeight]:
        """Some matrices of an expert's replica of one width."""
        method = self.method(expert, bits)
        if QUANTIZERS.get(method).stored:
            entry = self.index.entry(method, bits)
            return {projection: self.store.expert(entry, projection, expert) for projection in projections}
        section = self.context.recipe.losses
        weights, _ = self.original(expert)
        as_computed = {name: weights[name].to(self.context.dtype).float() for name in projections}
        made = made_on_demand(method, as_computed, section, bits, layer=self.layer, expert=expert)
        return {name: packed.map(Tensor.cpu) for name, packed in made.items()}

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

    def tensors(self, expert: int, key: int, prefix: str) -> dict[str, Tensor]:
        """One replica's tensors under their final names."""
        widths = self.widths(expert, key)
        dense = [name for name in self.layer.projections if width_of(widths, name) == FULL]
        weights, biases = self.original(expert) if dense or self.layer.biased else ({}, {})
        found = {f"{prefix}.{name}.bias": bias for name, bias in biases.items()}
        found |= {f"{prefix}.{name}.dense": weights[name] for name in dense}
        return found | {
            f"{prefix}.{name}.{part}": tensor
            for name, packed in self.packed(expert, key).items()
            for part, tensor in packed.parts().items()
        }


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def quantizers(directory: Path) -> dict[str, list[dict[int, str]]]:
    """{layer: [{bits, or MIXED: method that made the replica} of every expert]} of a quantize directory.

    Raises ArtifactError when the file is missing, damaged or of another schema version.
    """
    path, remedy = directory / NAME, "run `moeq quantize` again"
    found = read_json(path, remedy=remedy)
    version = found.get("schema_version") if isinstance(found, dict) else None
    check_schema_version(version, SCHEMA_VERSION, path, remedy=remedy)
    return {
        name: [{int(bits): method for bits, method in one.items()} for one in experts]
        for name, experts in found["layers"].items()
    }
