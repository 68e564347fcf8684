"""Refining: the experts of every layer trained together on the layer's output, at the widths that were assigned.

Layer after layer, from the replicas that were chosen: a layer's inputs are what the layers before it, already refined,
leave, and what these lost of the residual stream is asked of it as well. All calibration sequences are used, those that
losses measured on too. Which layers are done is noted, so that a killed run goes on with the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from moeq.artifacts.assignment import DROPPED, FULL, Assignment, ExpertChoice, matrix_widths, width_of
from moeq.artifacts.digests import digest_of_file
from moeq.artifacts.files import digest_of, read_json, write_json
from moeq.artifacts.reading import plain_name
from moeq.artifacts.run import EDITABLE
from moeq.artifacts.stage import current_digest
from moeq.errors import ArtifactError, AssignmentError
from moeq.exporters.native_writer import layer_name
from moeq.models.beside import Beside, walk_beside
from moeq.models.experts import (
    ExpertLayer,
    expert_math,
    refuse_loops,
    set_expert_weights,
    stacked_biases,
    stacked_weights,
)
from moeq.quantizers.layer_training import Widths
from moeq.quantizers.refine import Change, LayerJob, link_of, refine_layer
from moeq.recipe import Recipe, RefineSection
from moeq.stages.context import Context
from moeq.stages.replicas import REFINED, TUNED, Experts, is_trained, load_index, nothing, planned
from moeq_kernels.packed import PackedWeight
from moeq_kernels.widths import PARTS

REVISION = 2  # when the same inputs give other replicas, raise it
PROGRESS = ".refined.json"  # not part of the artifact


@dataclass(frozen=True, kw_only=True)
class ByLayer:
    """Training layer by layer: quantize.refine, or quantize.tune of a streamed model, of which scales alone are
    trained."""

    section: RefineSection
    scales_alone: bool = False

    @classmethod
    def of(cls, recipe: Recipe, *, streams: bool) -> ByLayer | None:
        """What the recipe asks for; None for nothing."""
        refine, tune = recipe.quantize.refine, recipe.quantize.tune
        if refine is not None:
            return cls(section=refine)
        if tune is None or not streams:
            return None
        section = RefineSection(iterations=tune.steps, working_memory=tune.working_memory)
        return cls(section=section, scales_alone=True)

    @property
    def mark(self) -> str:
        """After the method that made a replica's start."""
        return TUNED if self.scales_alone else REFINED


def by_layer(context: Context) -> ByLayer | None:
    """How a run trains its layers; the model is opened only where the recipe does not say it by itself."""
    quantize = context.recipe.quantize
    return ByLayer.of(context.recipe, streams=quantize.trains and quantize.refine is None and context.model.streams)


def check(context: Context) -> None:
    """CorpusError when there is no text to refine on, RecipeError for a looped model, whose layers are not done one by
    one."""
    training = by_layer(context)
    if training is None:
        return
    name = "quantize.tune" if training.scales_alone else "quantize.refine"
    do = f"leave it out: --set {name}=null" + (", or stream: never" if training.scales_alone else "")
    refuse_loops(context.model.layers, "it is not trained layer by layer", where=name, do=do)
    _ = context.text.calibration


def revision(context: Context) -> int | list[int] | None:
    """What the stage's result hangs on beside its inputs; None where no layer is trained for itself."""
    if by_layer(context) is None:
        return None
    return [REVISION, context.recipe.seed] if context.recipe.seed else REVISION


def progress(context: Context) -> tuple[str, ...]:
    """Files that the stage goes on with when it was broken off; none where the recipe does not train."""
    return (PROGRESS, "*.safetensors") if context.recipe.quantize.trains else ()


@dataclass(kw_only=True)
class Progress:
    """The layers whose files are finished, {file: SHA-256}, of one set of inputs."""

    path: Path
    key: str
    files: dict[str, str]

    @classmethod
    def of(cls, context: Context, directory: Path) -> Progress:
        """What a run with the same inputs has finished in a directory; files that are damaged or were made of others do
        not count.

        Nothing where the recipe does not refine.
        """
        trained = by_layer(context)
        if trained is None:
            (directory / PROGRESS).unlink(missing_ok=True)
            return cls(path=directory / PROGRESS, key="", files={})
        editable = {"losses": frozenset[str](), **EDITABLE}
        before = [current_digest(context.directory(stage), stage, names) for stage, names in editable.items()]
        asked = context.recipe.quantize.model_dump(mode="json", exclude={"tune"})
        asked |= {"tune": trained.section.model_dump(mode="json")} if trained.scales_alone else {}
        given = [context.model.stamp.digest, *before, asked, context.model.compute()]
        key = digest_of([revision(context), *given])
        return cls(path=directory / PROGRESS, key=key, files=finished(directory / PROGRESS, key))

    def add(self, paths: list[Path]) -> None:
        """Note a layer's files."""
        self.files |= {path.name: digest_of_file(path, cached=True) for path in paths}
        write_json(self.path, {"key": self.key, "files": self.files})


def finished(path: Path, key: str) -> dict[str, str]:
    """{file: digest} of what progress with this key names, and of what lies there as it was written."""
    try:
        noted = read_json(path)
        files = {plain_name(name): digest for name, digest in noted["files"].items()} if noted["key"] == key else {}
    except (ArtifactError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    there = {name: digest for name, digest in files.items() if (path.parent / name).is_file()}
    return {name: digest for name, digest in there.items() if digest_of_file(path.parent / name) == digest}


def refined(
    context: Context, assignment: Assignment, starts: Iterator[Experts], training: ByLayer, done: Progress
) -> Iterator[Experts]:
    """The experts that training has changed, of every layer in turn, before the next one is trained.

    starts: the replicas that training begins with, layer by layer, of all experts below 16 bits. Layers that are done
    are read from the stage's files. Raises ArtifactError when the losses are of other text.
    """
    _refuse_dense_matrices(assignment)
    sequences = context.text.grown_calibration
    if load_index(context).set != planned(context, sequences.digest()).set:
        where = str(context.directory("losses"))
        raise ArtifactError("made of other text or settings", where=where, do="run `moeq losses` again")
    batches = sequences.batches(context.recipe.corpus.batch_size)
    link: float | None = None
    changed: Tensor | None = None
    model = context.model
    with model.changeable():
        for beside in walk_beside(model.module, model.layers, batches, model.device, streamed=model.streamed):
            layer = beside.inputs.layer
            if beside.moved is not None and changed is not None and bool(changed.any()):
                link = link_of(beside.moved, changed)
            job = _job(context, assignment, beside, link)
            start = next(starts)
            if layer_name(layer.index) in done.files:
                trained = read(done.path.parent, layer, assignment, list(start))
            else:
                trained = refine_layer(
                    job, start, training.section, scales_alone=training.scales_alone, seed=context.recipe.seed
                )
            change = Change(job)
            dropped = dict.fromkeys(dropped_experts(assignment, layer), nothing(layer))
            for expert, packed in (*trained.items(), *dropped.items()):
                values = {name: matrix.dequantize() for name, matrix in packed.items()}
                change.add(expert, values)
                set_expert_weights(model.module, layer, expert, values)
            changed = change.total
            trained = {expert: packed for expert, packed in trained.items() if is_changed(start[expert], packed)}
            del beside, job, start, change
            yield trained


def _refuse_dense_matrices(assignment: Assignment) -> None:
    """AssignmentError for an expert of which only some matrices stay as they are: it cannot be trained."""
    for layer in assignment.layers:
        for expert, choice in enumerate(layer.experts):
            if choice.projections is not None and FULL in matrix_widths(choice.widths):
                raise AssignmentError(
                    "some of its matrices have 16 bits, quantize.refine trains all or none",
                    where=f"{layer.name}, expert {expert}",
                    do="give them a width of losses.bits, or leave quantize.refine out",
                )


def _job(context: Context, assignment: Assignment, beside: Beside, link: float | None) -> LayerJob:
    inputs, device = beside.inputs, beside.inputs.hidden.device
    layer = inputs.layer
    return LayerJob(
        inputs=inputs,
        behind=None if link is None or beside.behind is None else beside.behind.to(device) / link,
        weights=stacked_weights(context.model.module, layer, slice(None)),
        biases=stacked_biases(context.model.module, layer, slice(None)),
        math=expert_math(context.model.module, layer),
        bits=tuple(_widths(choice, layer) for choice in assignment.layers[layer.index].experts),
        group_size=assignment.group_size,
        symmetric=assignment.symmetric,
    )


def _widths(choice: ExpertChoice, layer: ExpertLayer) -> Widths:
    """An expert's width, or those of its matrices in the layer's order."""
    if choice.projections is None:
        return choice.bits
    return tuple(choice.projections[name] for name in layer.projections)


def read(directory: Path, layer: ExpertLayer, assignment: Assignment, experts: list[int]) -> Experts:
    """The matrices below 16 bits of some of a layer's placed replicas, as the quantize stage wrote them."""
    path = directory / layer_name(layer.index)
    replicas: dict[int, dict[str, PackedWeight]] = {}
    with safe_open(path, "pt") as file:
        there = set(file.keys())
        for expert in experts:
            widths = assignment.layers[layer.index].experts[expert].widths
            replicas[expert] = {}
            for name in layer.projections:
                if width_of(widths, name) == FULL:
                    continue
                keys = {part: f"{layer.name}.{expert}.{name}.{part}" for part in PARTS}
                parts = {part: file.get_tensor(key) for part, key in keys.items() if key in there}
                if not {"codes", "scales"} <= parts.keys():
                    raise ArtifactError(f"no {keys['codes']}", where=str(path), do="run `moeq quantize` again")
                bits, inputs = width_of(widths, name), layer.shape(name)[1]
                replicas[expert][name] = PackedWeight.of(parts, bits, inputs, assignment.encoding)
    return replicas


def quantized_experts(assignment: Assignment, layer: ExpertLayer) -> list[int]:
    """The experts of a layer that are neither left as they are nor dropped."""
    choices = assignment.layers[layer.index].experts
    return [expert for expert, choice in enumerate(choices) if choice.key not in (DROPPED, FULL)]


def dropped_experts(assignment: Assignment, layer: ExpertLayer) -> list[int]:
    """The experts of a layer of which nothing is left."""
    return [expert for expert, choice in enumerate(assignment.layers[layer.index].experts) if choice.is_dropped]


def read_trained(directory: Path, layer: ExpertLayer, assignment: Assignment, made: list[dict[int, str]]) -> Experts:
    """A layer's refined or tuned experts; made: {bits, or MIXED: method} of every expert, as quantizers.json says."""
    choices = assignment.layers[layer.index].experts
    experts = [
        expert
        for expert, (choice, methods) in enumerate(zip(choices, made, strict=True))
        if is_trained(methods.get(choice.key, ""))
    ]
    return read(directory, layer, assignment, experts)


def is_changed(start: Mapping[str, PackedWeight], trained: Mapping[str, PackedWeight]) -> bool:
    """Whether any code or grid of an expert is another one."""
    return any(
        not torch.equal(before, after)
        for name in start
        for before, after in zip(start[name].parts().values(), trained[name].parts().values(), strict=True)
    )
