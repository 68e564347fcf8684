"""quantize: the replicas that the assignment names, one file a layer, under the names the checkpoint gives them.

quantizers.json says which method made each of them, and how far its matrices are from the weights that they were made
of. With quantize.refine the placed ones are trained further, see stages/refine.py. Packed modules outside of the
experts, where the recipe has some, are written likewise.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from moeq.artifacts.assignment import FULL, Assignment
from moeq.artifacts.files import make_directory, write_json
from moeq.artifacts.stage import Frozen, read_model
from moeq.artifacts.tensor_files import safetensors_bytes, write_tensors
from moeq.exporters.native_writer import extra_name, layer_name, others_name
from moeq.exporters.plain import METADATA
from moeq.models.experts import ExpertLayer
from moeq.models.parameters import ParameterReader
from moeq.numerics.matrix_error import recorded, relative_error
from moeq.numerics.slab import Slab
from moeq.quantizers.layer_training import WEIGHT_BYTES
from moeq.quantizers.memory import working_memory
from moeq.quantizers.quantizer import WEIGHT_OPERATIONS, on_demand
from moeq.quantizers.refine import BATCH_ROWS
from moeq.recipe import BEST, RefineSection
from moeq.runtime.packed_experts import GUARD_DTYPE, guard_shapes
from moeq.runtime.packed_modules import GUARD_SHAPE, guard_name
from moeq.stages import assign, refine
from moeq.stages.checkpoint_size import Shapes, replica_shapes, stored_widths
from moeq.stages.context import Context
from moeq.stages.expert_bytes import store_bytes
from moeq.stages.needs import CAPTURED, STATES, Moment, Needs, Rates, Sizes
from moeq.stages.non_experts import Stored
from moeq.stages.replicas import Replicas, load_losses
from moeq_kernels.freed import return_memory
from moeq_kernels.packed import PackedWeight

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
    errors: dict[str, list[dict[str, dict[str, float]]]] = {}
    with context.reporter.bar("quantize", len(context.model.layers)) as advance:
        for replicas in _refined(context, assignment, layers, done):
            sizes = _write_layer(context, replicas, directory, done)
            made[replicas.layer.name] = replicas.made_by()
            errors[replicas.layer.name] = [found for _, found in sorted(replicas.errors.items())]
            placed, others = placed + sizes[0], others + sizes[1]
            refined += len(replicas.refined)
            return_memory()
            advance()
    written, modules = _write_others(context, directory)
    made_by = {"schema_version": SCHEMA_VERSION, "layers": made, "errors": errors, "modules": modules}
    write_json(directory / NAME, made_by)
    experts = {"placed_expert_bytes": placed, "other_replica_bytes": others, "refined_experts": refined}
    return experts | written


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


def _write_others(context: Context, directory: Path) -> tuple[dict[str, int], dict[str, float]]:
    """Write the packed modules outside of the experts, a file a decoder layer; their bytes, nothing where none are, and
    {module: relative error}."""
    stored, errors = Stored(context), dict[str, float]()
    trust = context.recipe.trust_remote_code
    exact = ParameterReader(context.model.source, trust) if stored.modules else None
    size = 0
    for number, modules in stored.by_number().items():
        packed = {module.name: stored.packed(module) for module in modules}
        tensors = {f"{name}.{part}": tensor for name, made in packed.items() for part, tensor in made.parts().items()}
        size += sum(map(_bytes, tensors.values()))
        for name, weight in packed.items():
            wanted = None if exact is None else exact.read(f"{name}.weight")
            if wanted is not None:
                errors[name] = recorded(relative_error(weight.dequantize(), wanted))
        tensors |= {guard_name(name): torch.zeros(GUARD_SHAPE, dtype=GUARD_DTYPE) for name in packed}
        write_tensors(directory / others_name(number), tensors, METADATA)
    return ({"packed_module_bytes": size} if stored.modules else {}), errors


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


class Quantizers(Frozen):
    """quantizers.json. layers: {bits, or MIXED: method} of every expert; errors: {bits, or MIXED: {projection: relative
    error}} of those that were written, and modules: {module outside of the experts: relative error}; empty in files of
    an older moeq."""

    schema_version: int = SCHEMA_VERSION
    layers: dict[str, tuple[dict[int, str], ...]]
    errors: dict[str, tuple[dict[int, dict[str, float]], ...]] = Field({})
    modules: dict[str, float] = Field({})


def read_made(directory: Path) -> Quantizers:
    """Who made the replicas of a quantize directory, and their errors.

    Raises ArtifactError when the file is missing, damaged or of another schema version.
    """
    return read_model(directory / NAME, Quantizers, SCHEMA_VERSION, remedy="run `moeq quantize` again")


def quantizers(directory: Path) -> dict[str, list[dict[int, str]]]:
    """{layer: [{bits, or MIXED: method that made the replica} of every expert]}; ArtifactError as `read_made`."""
    return {name: list(experts) for name, experts in read_made(directory).layers.items()}


JSON, JSON_LAYER, JSON_EXPERT, JSON_REPLICA, JSON_ERROR, JSON_MODULE = (
    70,
    70,
    20,
    34,
    33,
    50,
)  # bytes of quantizers.json
REFINED_FLOATS = 4  # refining: a layer's inputs, what is behind, what is wanted, and one temporary


def needs(sizes: Sizes) -> Needs:
    """A layer's packed experts, one of them as it is read; the walks and the training where placed ones are refined."""
    recipe, layer, section, modules = sizes.recipe, sizes.largest, sizes.recipe.quantize.refine, sizes.others.modules
    every, maker = recipe.quantize.replicas == "all", recipe.assign.quantizer
    made_now = on_demand(recipe.losses.methods if maker == BEST else [maker])  # which one is best is not known yet
    stored, packed = sizes.placed[0], sizes.placed[0] / len(sizes.layers)
    if every:
        stores = [store_bytes(other, recipe.losses.bits, recipe.losses.encoding) for other in sizes.layers]
        stored, packed = sum(stores), max(stores) + layer.num_experts * sizes.expert_bytes(layer, FULL)
    files = packed_files(sizes)
    replicas = len(recipe.losses.bits) if every else 1
    of_expert = JSON_EXPERT + (JSON_REPLICA + JSON_ERROR * len(layer.projections)) * replicas
    files[NAME] = JSON + JSON_LAYER * len(sizes.layers) + sizes.experts * of_expert + JSON_MODULE * len(modules)
    read = sizes.experts_disk
    held = {**sizes.tables(), "packed experts of a layer": packed}
    moments: list[Moment] = [{**sizes.model(), **held, "one expert": 16 * layer.parameters_per_expert}]
    if section is not None:
        files[refine.PROGRESS] = 100 + 100 * len(files)
        moments.append({**held, **_refining(sizes, section)})

    def seconds(rates: Rates) -> float:
        operations = WEIGHT_OPERATIONS if made_now else 0
        taken = sizes.reading(rates, read) + sizes.placed[0] / rates.cached_bytes
        taken += replicas * sizes.expert_parameters / rates.dequantized_weights  # their errors
        if section is not None:  # both runs, the repeated decoder layers, the training
            text = sizes.calibration
            operations += section.iterations * (6 * BATCH_ROWS + WEIGHT_OPERATIONS)
            taken += sizes.walk_seconds(rates) + 2 * sizes.forward(rates, text.batch_tokens, text.batches, head=False)
        return taken + operations * sizes.expert_parameters / rates.losses_flops

    return Needs(
        moments=moments,
        files=files | sizes.others.written(),
        read=read + stored + sizes.others.packed + (sizes.disk if sizes.streams and section is not None else 0),
        seconds=seconds,
    )


def _refining(sizes: Sizes, section: RefineSection) -> Moment:
    """Both runs of all batches stand at the end of a decoder layer, whose experts are trained."""
    text, layer = sizes.calibration, sizes.largest
    return {
        **sizes.held(), **sizes.stopped(2 * STATES, CAPTURED), **sizes.heap(text.batch_tokens),
        "tokens in float32": REFINED_FLOATS * 4 * text.tokens * sizes.geometry.hidden_size,
        "codes of a layer": 2 * layer.num_experts * layer.parameters_per_expert,
        "experts in training": max(working_memory(section.working_memory), WEIGHT_BYTES * layer.parameters_per_expert),
    }  # fmt: skip


def packed_files(sizes: Sizes) -> dict[str, int]:
    """Bytes of the files of experts, exactly where the assignment gives what is foreseen."""
    recipe, dtype, files, known = sizes.recipe, sizes.source_dtype, {}, {}
    every = recipe.quantize.replicas == "all"
    for layer, widths in zip(sizes.layers, sizes.widths[0], strict=True):
        key = (layer.num_experts, layer.hidden_size, layer.intermediate_size, len(layer.name), *widths)
        if key not in known:
            placed = {f"{layer.name}.{name}": (GUARD_DTYPE, shape) for name, shape in guard_shapes(layer).items()}
            extra: Shapes = {}
            for expert, bits in enumerate(widths):
                prefix = f"{layer.name}.{expert}"
                placed |= replica_shapes(recipe, layer, layer.projections, bits, dtype, prefix)
                others = stored_widths(bits, [*recipe.losses.bits, FULL], recipe.losses.nested)[1:]
                for width in others if every else ():
                    extra |= replica_shapes(recipe, layer, layer.projections, width, dtype, f"{prefix}.bits{width}")
            known[key] = [safetensors_bytes(shapes, METADATA) for shapes in (placed, extra)]
        files[layer_name(layer.index)] = known[key][0]
        if every:
            files[extra_name(layer.index)] = known[key][1]
    return files
