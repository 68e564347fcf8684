"""quantize: the replicas that the assignment names, one file a layer, under the names the checkpoint gives them.

quantizers.json says which method made each of them, and how far its matrices are from the weights that they were made
of. With quantize.refine the placed ones are trained further, see stages/refine.py, and with quantize.tune their scales,
see stages/tune.py. Packed modules outside of the
experts, where the recipe has some, are written likewise.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from moeq.artifacts.assignment import FULL, MIXED, Assignment
from moeq.artifacts.files import make_directory, write_json
from moeq.artifacts.stage import Frozen, read_model
from moeq.artifacts.tensor_files import safetensors_bytes, write_tensors
from moeq.artifacts.tuned import Tuned
from moeq.exporters.native_writer import extra_name, layer_name, others_name
from moeq.exporters.plain import METADATA
from moeq.models.experts import ExpertLayer
from moeq.models.parameters import ParameterReader
from moeq.numerics.matrix_error import recorded, relative_error
from moeq.numerics.slab import Slab
from moeq.quantizers.layer_training import WEIGHT_BYTES, experts_at_once
from moeq.quantizers.memory import working_memory
from moeq.quantizers.quantizer import WEIGHT_OPERATIONS, on_demand
from moeq.quantizers.refine import BATCH_ROWS
from moeq.quantizers.tune import Place
from moeq.recipe import BEST, RefineSection
from moeq.runtime.packed_experts import GUARD_DTYPE, guard_shapes
from moeq.runtime.packed_modules import GUARD_SHAPE, guard_name
from moeq.stages import assign, needs_tune, refine, tune
from moeq.stages.checkpoint_size import Shapes, replica_shapes, stored_widths, width_key
from moeq.stages.context import Context
from moeq.stages.expert_bytes import store_bytes
from moeq.stages.needs import CAPTURED, STATES, Moment, Needs, Rates, Sizes
from moeq.stages.non_experts import Stored
from moeq.stages.replicas import REFINED, TUNED, Best, Replicas, load_losses
from moeq_kernels.freed import return_memory
from moeq_kernels.packed import PackedWeight

NAME = "quantizers.json"
SCHEMA_VERSION = 1


def run(context: Context) -> dict[str, Any]:
    """Write one file of placed experts a layer, and one of the other widths where the recipe asks for all replicas."""
    check(context)
    assignment = assign.load(context)
    directory = make_directory(context.directory("quantize"))
    scaled = any(refine.quantized_experts(assignment, layer) for layer in context.model.layers)
    section = None if context.model.streams or not scaled else context.recipe.quantize.tune
    if section is None:  # one that was broken off may have tuned
        shutil.rmtree(directory / tune.STARTS, ignore_errors=True)
    starts = directory if section is None else make_directory(directory / tune.STARTS)
    done = refine.Progress.of(context, starts)
    for path in {*directory.glob("*.safetensors"), *starts.glob("*.safetensors")}:
        if path.parent != starts or path.name not in done.files:
            path.unlink()
    layers = (Replicas(context, assignment, layer, best=_best(context, assignment)) for layer in context.model.layers)
    written = _write_layers(context, _refined(context, assignment, layers, done), starts, done)
    tuned = None
    if section is not None:
        tuned, scales = tune.run(context, assignment, section, starts)
        refined = written.refined
        written = _write_layers(context, _tuned(context, assignment, starts, written.made, scales), directory, None)
        written.refined = refined
        shutil.rmtree(starts)
    others, modules = _write_others(context, directory)
    made_by = {"schema_version": SCHEMA_VERSION, "layers": written.made, "errors": written.errors, "modules": modules}
    write_json(directory / NAME, made_by | ({} if tuned is None else {"tuned": tuned.model_dump(mode="json")}))
    experts = {
        "placed_expert_bytes": written.placed,
        "other_replica_bytes": written.others,
        "refined_experts": written.refined,
    }
    gained = {} if tuned is None else {"tuned": {"gain": tuned.gain, "steps": tuned.chosen, "better": tuned.is_better}}
    return experts | gained | others


def check(context: Context) -> None:
    """RecipeError, CorpusError for what experts cannot be trained with."""
    refine.check(context)
    tune.check(context)


def other_inputs(context: Context) -> int | list[Any] | None:
    """What the result hangs on beside the stage's inputs: how layers are trained, and the text that `tune` draws from,
    of which it may take more than `losses` did."""
    training = refine.revision(context)
    if context.recipe.quantize.tune is None:
        return training
    return [training, context.recipe.seed, context.text.digest("calibration")]


def _best(context: Context, assignment: Assignment) -> Best | None:
    """The best methods of all layers, where every one of them is asked for."""
    several = context.recipe.quantize.replicas == "all" or assignment.is_mixed
    return load_losses(context).best() if several and assignment.parameters.get("quantizer") == BEST else None


@dataclass(kw_only=True)
class _Written:
    """Bytes of placed experts and of other replicas, how many experts were refined, by whom replicas were made, and how
    far they are from the model's weights."""

    placed: int = 0
    others: int = 0
    refined: int = 0
    made: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    errors: dict[str, list[dict[str, dict[str, float]]]] = field(default_factory=dict)


def _write_layers(
    context: Context, layers: Iterator[Replicas], directory: Path, done: refine.Progress | None
) -> _Written:
    """Write the files of every layer; done: which are there already, and are noted."""
    written = _Written()
    with context.reporter.bar("quantize", len(context.model.layers)) as advance:
        for replicas in layers:
            sizes = _write_layer(context, replicas, directory, done)
            written.made[replicas.layer.name] = replicas.made_by()
            written.errors[replicas.layer.name] = [found for _, found in sorted(replicas.errors.items())]
            written.placed, written.others = written.placed + sizes[0], written.others + sizes[1]
            written.refined += len(replicas.refined)
            return_memory()
            advance()
    return written


def _tuned(
    context: Context,
    assignment: Assignment,
    starts: Path,
    made: Mapping[str, Sequence[Mapping[str, str]]],
    scales: dict[Place, Tensor],
) -> Iterator[Replicas]:
    """The layers' replicas, those that are placed with the scales that tuning gave, if it gave any."""
    best = _best(context, assignment)
    for layer in context.model.layers:
        choices = assignment.layers[layer.index].experts
        before = refine.read(starts, layer, assignment, refine.quantized_experts(assignment, layer))
        experts = tune.with_scales(before, layer, scales)
        marks = {}
        for expert, matrices in before.items():
            maker = made[layer.name][expert][str(choices[expert].key)]
            tuned = refine.is_changed(matrices, experts[expert])
            marks[expert] = (REFINED if REFINED in maker else "") + (TUNED if tuned else "")
        yield Replicas(context, assignment, layer, best=best, refined=experts, marks=marks)


def _refined(
    context: Context, assignment: Assignment, layers: Iterator[Replicas], done: refine.Progress
) -> Iterator[Replicas]:
    """The layers' replicas, those that are placed refined where the recipe says so."""
    training = refine.by_layer(context)
    if training is None:
        yield from layers
        return
    here: list[Replicas] = []

    def starts() -> Iterator[dict[int, dict[str, PackedWeight]]]:
        for replicas in layers:
            here[:] = [replicas]
            yield {expert: replicas.placed(expert) for expert in refine.quantized_experts(assignment, replicas.layer)}

    for experts in refine.refined(context, assignment, starts(), training, done):
        here[0].refined, here[0].marks = experts, dict.fromkeys(experts, training.mark)
        yield here[0]


def _write_layer(
    context: Context, replicas: Replicas, directory: Path, done: refine.Progress | None
) -> tuple[int, int]:
    """Write one layer's files; returns the bytes of its placed experts and of the other replicas."""
    layer = replicas.layer
    tensors, extra = layer_tensors(replicas)
    files = {layer_name(layer.index): tensors | guards(layer)}
    if extra:
        files[extra_name(layer.index)] = extra
    for name, contents in files.items():
        if done is None or name not in done.files:
            write_tensors(directory / name, contents, METADATA)
    if done is not None and refine.by_layer(context) is not None:
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
    an older moeq. tuned: what quantize.tune came to."""

    schema_version: int = SCHEMA_VERSION
    layers: dict[str, tuple[dict[int, str], ...]]
    errors: dict[str, tuple[dict[int, dict[str, float]], ...]] = Field({})
    modules: dict[str, float] = Field({})
    tuned: Tuned | None = None


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
TUNED_BYTES = 480  # of quantizers.json
REFINED_FLOATS = 4  # refining: a layer's inputs, what is behind, what is wanted, and one temporary


def needs(sizes: Sizes) -> Needs:
    """A layer's packed experts, one of them as it is read; the walks and the training where placed ones are refined."""
    recipe, layer, modules = sizes.recipe, sizes.largest, sizes.others.modules
    training = refine.ByLayer.of(recipe, streams=sizes.streams)
    section = None if training is None else training.section
    tuning = None if sizes.streams else recipe.quantize.tune
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
    if modules:
        moments.append({**sizes.model(), **sizes.tables(), "one module, compared": sizes.others.compared()})
    if tuning is not None:
        files[NAME] += TUNED_BYTES
        moments.append({**held, **needs_tune.moment(sizes, tuning)})
    if section is not None:
        if tuning is None:
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
        taken += 0.0 if tuning is None else needs_tune.seconds(sizes, tuning, rates)
        return taken + operations * sizes.expert_parameters / rates.losses_flops

    return Needs(
        moments=moments,
        files=files | sizes.others.written(),
        read=read + stored + sizes.others.packed + (sizes.disk if sizes.streams and section is not None else 0),
        temporary=0 if tuning is None else needs_tune.temporary(sizes, tuning) + sum(packed_files(sizes).values()),
        seconds=seconds,
    )


def _refining(sizes: Sizes, section: RefineSection) -> Moment:
    """Both runs of all batches stand at the end of a decoder layer, whose experts are trained."""
    text, layer = sizes.calibration, sizes.largest
    together = experts_at_once(layer.parameters_per_expert, working_memory(section.working_memory))
    rows = min(BATCH_ROWS, sizes.expert_tokens(text.tokens))
    each = WEIGHT_BYTES * layer.parameters_per_expert
    each += rows * 4 * (4 * layer.hidden_size + 6 * layer.intermediate_size)  # of a step, until its gradients are there
    return {
        **sizes.held(), **sizes.stopped(2 * STATES, CAPTURED), **sizes.heap(text.batch_tokens),
        "tokens in float32": REFINED_FLOATS * 4 * text.tokens * sizes.geometry.hidden_size,
        "codes of a layer": 2 * layer.num_experts * layer.parameters_per_expert,
        "experts in training": min(layer.num_experts, together) * each,
    }  # fmt: skip


def packed_files(sizes: Sizes) -> dict[str, int]:
    """Bytes of the files of experts, exactly where the assignment gives what is foreseen."""
    recipe, dtype, files, known = sizes.recipe, sizes.source_dtype, {}, {}
    every = recipe.quantize.replicas == "all"
    for layer, widths in zip(sizes.layers, sizes.widths[0], strict=True):
        key = (layer.num_experts, layer.hidden_size, layer.intermediate_size, len(layer.name), *map(width_key, widths))
        if key not in known:
            placed = {f"{layer.name}.{name}": (GUARD_DTYPE, shape) for name, shape in guard_shapes(layer).items()}
            extra: Shapes = {}
            for expert, bits in enumerate(widths):
                prefix = f"{layer.name}.{expert}"
                placed |= replica_shapes(recipe, layer, layer.projections, bits, dtype, prefix)
                one = bits if isinstance(bits, int) else MIXED
                others = stored_widths(one, [*recipe.losses.bits, FULL], recipe.losses.nested)[1:]
                for width in others if every else ():
                    extra |= replica_shapes(recipe, layer, layer.projections, width, dtype, f"{prefix}.bits{width}")
            known[key] = [safetensors_bytes(shapes, METADATA) for shapes in (placed, extra)]
        files[layer_name(layer.index)] = known[key][0]
        if every:
            files[extra_name(layer.index)] = known[key][1]
    return files
