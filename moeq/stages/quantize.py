"""quantize: the replicas that the assignment names, one file a layer, under the names the checkpoint gives them.

quantizers.json says which method made each of them. With quantize.refine the placed ones are trained further, see
stages/refine.py. Packed modules outside of the experts, where the recipe has some, are written likewise.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moeq.artifacts.assignment import Assignment
from moeq.artifacts.files import make_directory, read_json, write_json
from moeq.artifacts.stage import check_schema_version
from moeq.artifacts.tensor_files import write_tensors
from moeq.exporters.native_writer import extra_name, layer_name, others_name
from moeq.exporters.plain import METADATA
from moeq.models.experts import ExpertLayer
from moeq.numerics.packed import PackedWeight
from moeq.numerics.slab import Slab, return_memory
from moeq.recipe import BEST
from moeq.runtime.packed_experts import GUARD_DTYPE, guard_shapes
from moeq.runtime.packed_modules import GUARD_SHAPE, guard_name
from moeq.stages import assign, refine
from moeq.stages.checkpoint_size import stored_widths
from moeq.stages.context import Context
from moeq.stages.non_experts import Stored
from moeq.stages.replicas import Replicas, load_losses

NAME = "quantizers.json"
SCHEMA_VERSION = 1


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
    best = load_losses(context).best() if several and assignment.parameters.get("quantizer") == BEST else None
    layers = (Replicas(context, assignment, layer, best=best) for layer in context.model.layers)
    placed = others = refined = 0
    made: dict[str, list[dict[str, str]]] = {}
    with context.reporter.bar("quantize", len(context.model.layers)) as advance:
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

    for experts in refine.refined(context, assignment, starts(), section, done):
        here[0].refined = experts
        yield here[0]


def _write_layer(context: Context, replicas: Replicas, directory: Path, done: refine.Progress) -> tuple[int, int]:
    """Write one layer's files; returns the bytes of its placed experts and of the other replicas."""
    layer = replicas.layer
    tensors, extra = layer_tensors(replicas)
    files = {layer_name(layer.index): tensors | guards(layer)}
    if extra:
        files[extra_name(layer.index)] = extra
    for name, contents in files.items():
        if name not in done.files:
            write_tensors(directory / name, contents, METADATA)
    if context.recipe.quantize.refine is not None:
        done.add([directory / name for name in files])
    return sum(map(_bytes, tensors.values())), sum(map(_bytes, extra.values()))


def _write_others(context: Context, directory: Path) -> dict[str, int]:
    """Write the packed modules outside of the experts, a file a decoder layer; their bytes, nothing where none are."""
    stored = Stored(context)
    size = 0
    for number, modules in stored.by_number().items():
        packed = {module.name: stored.packed(module) for module in modules}
        tensors = {f"{name}.{part}": tensor for name, made in packed.items() for part, tensor in made.parts().items()}
        size += sum(map(_bytes, tensors.values()))
        tensors |= {guard_name(name): torch.zeros(GUARD_SHAPE, dtype=GUARD_DTYPE) for name in packed}
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


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def quantizers(directory: Path) -> dict[str, list[dict[int, str]]]:
    """{layer: [{bits, or MIXED: method that made the replica} of every expert]} of a quantize directory.

    Raises ArtifactError when the file is missing, damaged or of another schema version.
    """
    path, remedy = directory / NAME, "run `moeq quantize` again"
    document = read_json(path, remedy=remedy)
    version = document.get("schema_version") if isinstance(document, dict) else None
    check_schema_version(version, SCHEMA_VERSION, path, remedy=remedy)
    return {
        name: [{int(bits): method for bits, method in made.items()} for made in experts]
        for name, experts in document["layers"].items()
    }
